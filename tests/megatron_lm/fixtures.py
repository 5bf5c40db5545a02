"""Upstream files of Megatron-LM, for these tests alone: where they are, and the smallest task that trains with them.

MEGATRON_LM_FIXTURES: the directory of the archives (default: ../shared/data/megatron_lm beside the clone).
MEGATRON_LM: a checkout, in place of what the archives have.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

from unicrond.events.megatron.command_line import BadFlags, CommandLine
from unicrond.events.megatron.command_line import read_training_flags as flags_understood
from unicrond.events.vocabulary import CheckpointSpec, TaskSpec
from unicrond.intake.task_file import parse_task

TRAINING, SEAMS = "megatron-lm-core_v0.16.1-training.tar.xz", "megatron-lm-seams-0.15-0.19.tar.xz"
#: The scripts of younger releases, by release; wheels of 0.18 and younger have `megatron.training`.
SCRIPTS = "megatron-lm-scripts-0.17-0.19.tar.xz"
SCRIPT_FOLDERS = {"0.17": "v0.17.1", "0.18": "v0.18.2", "0.19": "r0.19.0"}
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    " --micro-batch-size 1 --global-batch-size 6 --train-iters 5 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --split 99,1,0 --eval-iters 0 --eval-interval 1000"
    " --log-interval 1 --seed 1234 --attention-dropout 0 --hidden-dropout 0 --num-workers 0"
)
#: What torchrun needs on a machine without GPUs; the adapter sets it by itself.
CPU = (
    "--distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion"
    " --no-persist-layer-norm --no-bias-dropout-fusion --no-bias-gelu-fusion --no-masked-softmax-fusion"
    " --no-bias-swiglu-fusion --no-rope-fusion --attention-backend unfused"
)


def archives() -> Path | None:
    """The directory of the archives; None where it is not here."""
    named = os.environ.get("MEGATRON_LM_FIXTURES", "")
    beside = Path(__file__).parents[3] / "shared" / "data" / "megatron_lm"
    found = [Path(named)] if named else [beside, *(parent / "shared/data/megatron_lm" for parent in beside.parents)]
    return next((directory for directory in found if (directory / TRAINING).is_file()), None)


def unpacked(name: str) -> Path:
    """The archive's files, once per process. Skips the test where there is none, or fails it (`make megatron-lm`)."""
    directory = archives()
    if directory is None:
        reason = "no upstream files: set MEGATRON_LM_FIXTURES to the directory of megatron-lm-*.tar.xz"
        if os.environ.get("MEGATRON_LM_MUST"):
            pytest.fail(reason)
        pytest.skip(reason)
    return _unpack(directory / name)


def _remove(directory: Path, owner_pid: int) -> None:
    """Remove the directory, unless this is a fork of the process that made it."""
    if os.getpid() == owner_pid:
        shutil.rmtree(directory, ignore_errors=True)


@cache
def _unpack(archive: Path) -> Path:
    target = Path(tempfile.mkdtemp(prefix="megatron-lm-"))
    atexit.register(_remove, target, os.getpid())
    with tarfile.open(archive) as files:
        files.extractall(target, filter="data")
    return target


def checkout() -> Path:
    """A Megatron-LM that trains here: of the release of the installed Megatron-core."""
    named = os.environ.get("MEGATRON_LM", "")
    if named:
        return Path(named)
    folder = SCRIPT_FOLDERS.get(version("megatron-core").rpartition(".")[0])
    return unpacked(SCRIPTS) / folder if folder else unpacked(TRAINING)


def task(
    flags: str | Sequence[str] = "",
    *,
    model: str = MODEL,
    replicas: int = 3,
    numerics: str = "fixed",
    script: str = "pretrain_gpt.py",
) -> TaskSpec:
    """As a task file of name, entry, cwd, args, min_workers and max_workers says it. Raises BadFlags for flags that are
    refused."""
    args = [script, *model.split(), *(flags.split() if isinstance(flags, str) else flags)]
    data = {"name": "t", "entry": "megatron-lm", "cwd": str(checkout()), "args": args, "numerics": numerics}
    told = flags_understood(CommandLine.parse(args))
    size = told.shape.workers
    spec, faults = parse_task({**data, "min_workers": size, "max_workers": size * replicas})
    if spec is None:
        raise BadFlags(" ".join(map(str, faults)))
    env = {**spec.env, "OMP_NUM_THREADS": "1"}
    return msgspec.structs.replace(spec, env=env, checkpoint=CheckpointSpec(interval=0, memory_interval=0))
