"""What the trainer uses of Megatron-core: the table is the trainer's own, and the installed release has all of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.versions import core_seams
from tests.versions.core_seams import OPTIONAL, STAND_INS, TRAINER, USES, installed, lost, uses
from unicrond.agents.trainer.megatron.checkpointed import CheckpointedOptimizer


def test_table_is_what_trainer_uses() -> None:
    """A use that is new here stands in USES, with its keywords, in the same commit: `make canary` looks for it."""
    assert uses() == dict(sorted({**USES, **dict.fromkeys(OPTIONAL, ())}.items()))


def test_attributes_are_read_by_trainer() -> None:
    text = "".join(path.read_text() for path in sorted(TRAINER.rglob("*.py")))
    tables = (*core_seams.ATTRIBUTES.values(), *core_seams.PASSED.values())
    listed = {attribute for attributes in tables for attribute in attributes}
    assert [attribute for attribute in sorted(listed) if attribute not in text] == []


def test_installed_release_has_every_seam() -> None:
    assert list(lost(installed())) == []


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A copy of the installed release's Python files, to be changed."""
    shutil.copytree(
        installed() / "megatron" / "core",
        tmp_path / "megatron" / "core",
        ignore=shutil.ignore_patterns("*.so", "*.pyc"),
    )
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "line"),
    [
        ("optimizer/__init__.py", "def _get_param_groups(", "def _groups(", "optimizer._get_param_groups is not there"),
        (
            "parallel_state.py",
            "    with_context_parallel",
            "    with_context",
            "parallel_state.get_data_parallel_group does not take with_context_parallel",
        ),
        (
            "parallel_state.py",
            "def get_context_parallel_world_size(",
            "def get_context_world_size(",
            "parallel_state.get_context_parallel_world_size is not there",
        ),
        (
            "distributed/finalize_model_grads.py",
            "force_all_reduce",
            "reduce_all",
            "distributed.finalize_model_grads does not take force_all_reduce",
        ),
        (
            "distributed/param_and_grad_buffer.py",
            "gradient_scaling_factor",
            "scaling_factor",
            "distributed.param_and_grad_buffer has no object with .gradient_scaling_factor",
        ),
        (
            "transformer/moe/router.py",
            "local_tokens_per_expert",
            "tokens_by_expert",
            "transformer.moe.router has no object with .local_tokens_per_expert",
        ),
        (
            "optimizer/distrib_optimizer.py",
            "param_and_grad_buffer.buckets",
            "param_and_grad_buffer.pieces",
            "optimizer.distrib_optimizer._build_model_gbuf_range asks for param_and_grad_buffer.pieces, which our"
            " _Buffer lacks",
        ),
    ],
)
def test_lost_seam_is_named(release: Path, file: str, old: str, new: str, line: str) -> None:
    path = release / "megatron" / "core" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new).replace("def get_data_parallel_group(with_context_parallel",
                                                   "def get_data_parallel_group(with_context"))  # fmt: skip
    core_seams._tree.cache_clear()
    assert f"megatron.core.{line}" in list(lost(release))


def test_stand_ins_answer_what_releases_ask(tmp_path: Path) -> None:
    """Of 0.17 and of 0.19, beside what the installed one asks."""
    asked = ("get_unpacked_index_map", "num_optimizer_shards", "data_parallel_group")
    path = tmp_path / "megatron" / "core" / "optimizer" / "distrib_optimizer.py"
    path.parent.mkdir(parents=True)
    lines = "".join(f"    param_and_grad_buffer.{name}\n" for name in asked)
    path.write_text(f"def _build_model_gbuf_range():\n{lines}")
    assert set(STAND_INS.values()) == {"_Buffer", "_Bucket"}
    assert [line for line in lost(tmp_path) if "asks for" in line] == []


def test_buffer_of_one_rank_has_one_shard() -> None:
    """From 0.19 on the ranks are compared with the shards that a layout was made for: two, where two workers share
    sequences."""
    optimizer = CheckpointedOptimizer.__new__(CheckpointedOptimizer)
    optimizer._groups = ("alone", "alone")
    buffer = SimpleNamespace(data_parallel_group="both", data_parallel_world_size=2, num_optimizer_shards=2)
    alone = optimizer._of_one(buffer)
    assert (alone.data_parallel_group, alone.data_parallel_world_size, alone.num_optimizer_shards) == ("alone", 1, 1)
    assert buffer.num_optimizer_shards == 2, "that of training stays"
