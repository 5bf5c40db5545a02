"""Runs of a task in the trainer's rig, and of Megatron-LM alone, and what came of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.integration.regroup_rig import ForkServer, Rig
from tests.megatron_lm.fixtures import CPU, checkout
from unicrond.agents.protocol.messages import IterationCommitted
from unicrond.agents.trainer.states import checkpoint
from unicrond.events.vocabulary import TaskCompleted, TaskSpec

Parameters = Mapping[str, torch.Tensor]
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """`shards`: the last parameters, by shard. `logs`: of all workers, by worker."""

    completed: TaskCompleted
    iterations: Mapping[int, IterationCommitted]
    shards: Sequence[Parameters]
    logs: Mapping[str, str]

    @property
    def losses(self) -> list[float]:
        return [message.loss for message in self.iterations.values()]


def names(spec: TaskSpec, replicas: range) -> list[str]:
    """The workers of these replicas, counted from 1."""
    size = spec.replica_workers
    return [f"t.{replica * size + shard + 1}" for replica in replicas for shard in range(size)]


def unbroken(server: ForkServer, directory: Path, spec: TaskSpec, replicas: int) -> Outcome:
    """So many replicas, from the first iteration to the last."""
    with Rig(server, _made(directory), spec) as rig:
        workers = names(spec, range(replicas))
        rig.start(*workers)
        rig.until(lambda: rig.ready(*workers) or rig.exits)
        assert not rig.exits, _logs(directory)
        rig.tell(1, workers)
        return ended(rig)


def broken(server: ForkServer, directory: Path, spec: TaskSpec, fault: str, *, joins: bool = True) -> Outcome:
    """Three replicas; a fault ends the second, the others go on, and a new one joins."""
    with Rig(server, _made(directory), spec) as rig:
        first, second, third, fourth = (names(spec, range(one, one + 1)) for one in range(4))
        rig.start(*first)
        rig.start(second[0], fault=fault)
        rig.start(*second[1:], *third, *(fourth if joins else []))
        rig.until(lambda: rig.ready(*rig.places) or rig.exits)
        assert not rig.exits, _logs(directory)
        rig.tell(1, [*first, *second, *third])
        rig.until(lambda: second[0] in rig.exits)
        at = max(rig.iterations(), default=0)
        for worker in second[1:]:
            rig.signal(worker, 9)
        rig.tell(2, [*first, *third], urgent=True)
        rig.until(lambda: rig.reached(at + 1))
        if joins:
            rig.tell(3, [*first, *third, *fourth], joiners=fourth)
        return ended(rig, lost=second)


def ended(rig: Rig, lost: Sequence[str] = ()) -> Outcome:
    """Wait for the end of training."""

    def wrong() -> dict[str, int]:
        return {worker: status for worker, status in rig.exits.items() if status and worker not in lost}

    rig.until(
        lambda: wrong() or (rig.completed and len(rig.exits) == len(rig.places)), 240.0 + 0.5 * rig.spec.iterations
    )
    logs = _logs(rig.directory)
    assert not wrong(), {worker: logs[worker][-3000:] for worker in wrong()}
    assert rig.completed is not None
    spec = rig.spec
    shards = [
        checkpoint.load(rig.checkpoints, rig.task, rig.completed.iteration, shard)[0]["tensors"]
        for shard in range(spec.replica_workers)
    ]
    return Outcome(rig.completed, rig.iterations(), shards, logs)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _logs(directory: Path) -> dict[str, str]:
    return {log.stem: log.read_text() for log in sorted(directory.glob("*.log"))}


def stock(
    directory: Path, flags: str, workers: int, *, tp: int = 1, pp: int = 1, script: str = "pretrain_gpt.py"
) -> list[Parameters]:
    """Megatron-LM alone, started by torchrun; the first replica's last parameters, by shard. What it has logged is left
    in `directory`/log."""
    dump = _made(directory) / "stock"
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}", "--standalone",
        "--local-addr=127.0.0.1", str(_ROOT / "tests/megatron_lm/stock.py"), str(dump),
        str(checkout() / script), *CPU.split(), *flags.split(),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": f"{_ROOT}:{checkout()}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-8000:]
    (directory / "log").write_text(ran.stdout)
    # A replica's ranks are numbered tp first.
    return [torch.load(f"{dump}.{t}.{p}") for p in range(pp) for t in range(tp)]


def logged(log: str) -> list[float]:
    """The losses of the iterations that Megatron-LM has logged."""
    return [float(loss) for loss in re.findall(r" iteration .* lm loss: (\S+) ", log)]


def furthest(one: Sequence[Parameters], other: Sequence[Parameters]) -> float:
    """The largest difference of any parameter that both have."""
    assert len(one) == len(other)
    worst = 0.0
    for mine, theirs in zip(one, other, strict=True):
        both = mine.keys() & theirs.keys()
        assert len(both) >= min(len(mine), len(theirs)) > 0, mine.keys() ^ theirs.keys()
        worst = max(worst, *(float((mine[name].double() - theirs[name].double()).abs().max()) for name in both))
    return worst


def same_bits(one: Sequence[Parameters], other: Sequence[Parameters]) -> bool:
    """Whether all tensors are equal to the last bit."""
    return len(one) == len(other) and all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(one, other, strict=True)
    )


def told(*values: Any) -> None:
    """For the figures of a report (`pytest -s`)."""
    print(*values, flush=True)
