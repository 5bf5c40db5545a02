"""Runs of a task in the trainer's rig, and of Megatron-LM alone, and what came of them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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
#: Of a run of either, without its iterations; tests' own limits are shorter.
LONGEST_S = 280.0


_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
#: The last line of an exception, or of flags that argparse or the adapter refuses.
_REASON = re.compile(r"([\w.]*(Error|Exception|Exit)\b|\S+: error: |args: ).*")


class RunFailed(AssertionError):
    """A run has ended with an error. `log`: what it has printed."""

    def __init__(self, log: str) -> None:
        super().__init__(log[-8000:])
        self.log = log

    @property
    def reason(self) -> str:
        """The line that says why; of an assertion without a text, what was asserted."""
        lines = [line.strip() for line in _RANK.sub("", self.log).splitlines() if line.strip(" ^~")]
        reasons = [n for n, line in enumerate(lines) if _REASON.match(line) and "ChildFailedError" not in line]
        if not reasons:
            return lines[-1] if lines else "it has printed nothing"
        last = reasons[-1]
        return lines[last] if lines[last] != "AssertionError" else f"AssertionError: {lines[last - 1]}"


class FaultMissed(AssertionError):
    """Training has ended before the fault that was ordered."""


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


def unbroken(
    server: ForkServer, directory: Path, spec: TaskSpec, replicas: int, timeout_s: float = LONGEST_S
) -> Outcome:
    """So many replicas, from the first iteration to the last."""
    with Rig(server, _made(directory), spec) as rig:
        workers = names(spec, range(replicas))
        rig.start(*workers)
        _prepare(rig, timeout_s)
        rig.tell(1, workers)
        return ended(rig, timeout_s=timeout_s)


def broken(
    server: ForkServer,
    directory: Path,
    spec: TaskSpec,
    fault: str,
    *,
    replicas: int = 3,
    rank: int | None = None,
    joins: bool = True,
    timeout_s: float = LONGEST_S,
) -> Outcome:
    """So many replicas; a fault ends the worker of that rank (the second replica's first) and with it its replica, the
    others go on, and a new one joins."""
    with Rig(server, _made(directory), spec) as rig:
        workers, newcomers = names(spec, range(replicas)), names(spec, range(replicas, replicas + 1)) if joins else []
        size = spec.replica_workers
        victim = workers[size if rank is None else rank]
        lost = next(workers[first : first + size] for first in range(0, len(workers), size)
                    if victim in workers[first : first + size])  # fmt: skip
        survivors = [worker for worker in workers if worker not in lost]
        for worker in workers:
            rig.start(worker, fault=fault if worker == victim else "")
        rig.start(*newcomers)
        _prepare(rig, timeout_s)
        rig.tell(1, workers)
        rig.until(lambda: victim in rig.exits or rig.completed, timeout_s)
        if not rig.exits.get(victim):
            raise FaultMissed(f"training ended before the fault {fault}")
        at = max(rig.iterations(), default=0)
        for worker in lost:
            if worker != victim:
                rig.signal(worker, 9)
        rig.tell(2, survivors, urgent=True)
        if joins:
            rig.until(lambda: rig.reached(at + 1))
            rig.tell(3, [*survivors, *newcomers], joiners=newcomers)
        return ended(rig, lost=lost, timeout_s=timeout_s)


def healed_to_same_bits(server: ForkServer, directory: Path, spec: TaskSpec) -> Outcome:
    """The task on two replicas, unbroken, and healed where a worker of the second dies; equal to the last bit, and no
    micro-batch is computed again but the lost replica's."""
    whole = unbroken(server, directory / "whole", spec, 2)
    place = "micro_batch=1" if spec.pp == 1 else "at=backward"  # a pipeline takes all its micro-batches at once
    last = 2 * spec.replica_workers - 1
    healed = broken(server, directory / "healed", spec, f"kill@iteration=3,{place}", replicas=2, rank=last, joins=False)
    assert 0 < healed.iterations[3].micro_batches_repeated <= spec.micro_batches // 2
    assert healed.losses == whole.losses
    assert same_bits(healed.shards, whole.shards)
    assert healed.completed.params_digest == whole.completed.params_digest
    return healed


def _prepare(rig: Rig, timeout_s: float) -> None:
    """Wait until all workers that were started are ready to train."""
    rig.until(lambda: rig.ready(*rig.places) or rig.exits, timeout_s)
    if rig.exits:
        raise RunFailed(_logs(rig.directory)[next(iter(rig.exits))])


def ended(rig: Rig, lost: Sequence[str] = (), timeout_s: float = LONGEST_S) -> Outcome:
    """Wait for the end of training."""

    def wrong() -> dict[str, int]:
        return {worker: status for worker, status in rig.exits.items() if status and worker not in lost}

    rig.until(
        lambda: wrong() or (rig.completed and len(rig.exits) == len(rig.places)), timeout_s + 0.5 * rig.spec.iterations
    )
    logs = _logs(rig.directory)
    if wrong():
        raise RunFailed(logs[next(iter(wrong()))])
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


def words(flags: str | Sequence[str]) -> list[str]:
    """Return the words of a command line."""
    return shlex.split(flags) if isinstance(flags, str) else list(flags)


def stock(
    directory: Path,
    flags: str | Sequence[str],
    workers: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    data: int = 1,
    script: str = "pretrain_gpt.py",
    timeout_s: float = LONGEST_S,
) -> list[Parameters]:
    """Megatron-LM alone, started by torchrun; the first replica's last parameters, by shard. `data`: its data-parallel
    ranks. What it logs is in `directory`/log meanwhile, its errors in `directory`/errors. Raises RunFailed,
    subprocess.TimeoutExpired."""
    dump = _made(directory) / "stock"
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}", "--standalone",
        "--local-addr=127.0.0.1", str(_ROOT / "tests/megatron_lm/stock.py"), str(dump),
        str(checkout() / script), *CPU.split(), *words(flags),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": f"{_ROOT}:{checkout()}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    with (directory / "log").open("w") as log, (directory / "errors").open("w") as errors:
        ran = subprocess.run(command, env=environment, stdout=log, stderr=errors, timeout=timeout_s, check=False)
    if ran.returncode:
        raise RunFailed((directory / "log").read_text() + (directory / "errors").read_text())
    # A replica's ranks are numbered tp first.
    places = product(range(pp), range(data), range(cp), range(tp))
    return [torch.load(f"{dump}.{t}.{c}.{d}.{p}") for p, d, c, t in places]


def logged(log: str) -> list[float]:
    """The losses of the iterations that Megatron-LM has logged."""
    return [float(loss) for loss in re.findall(r" iteration .* lm loss: (\S+) ", log)]


def validated(log: str) -> dict[int, float]:
    """The losses of evaluations that Megatron-LM has logged, by iteration; of several at one the first."""
    losses: dict[int, float] = {}
    for iteration, loss in re.findall(r"validation loss at iteration (\d+) .* lm loss value: (\S+) ", log):
        losses.setdefault(int(iteration), float(loss))
    return losses


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
