"""A recovery in which no replica is left, with and without encryption: all ranks are new, and the state comes from
another node's memory. Real workers, the real exchange; from the order to start them until all train.

    python -m tests.benchmarks.sealed_recovery --mebibytes 1024 --ranks 3 --repetitions 6

Both ways take turns, each first as often as the other. Everything is on one machine, so that giver and takers share its
cores: where they do not, encryption costs less.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.events.certified import Certified, now
from tests.integration import regroup_rig
from tests.integration.memory_nodes import OtherNode
from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.agents.memory.peer_tokens import Credentials
from unicrond.agents.trainer.loop import corpus
from unicrond.events.vocabulary import (
    CheckpointSpec,
    ModelSpec,
    OptimizerSpec,
    StateLoaded,
    TaskSpec,
    WorkerJoinedGroup,
)

WAYS = ("clear", "tls")
#: Parameter and two moments of Adam, in float32.
_BYTES_PER_PARAMETER = 12
_LAYERS = 12
STAGES = ("processes are ready", "the state is taken", "all train", "CPU time of all, in all")


def model(mebibytes: int) -> ModelSpec:
    """One whose training state has about this size: a layer has 12 * hidden**2 parameters."""
    hidden = (mebibytes * 2**20 / _BYTES_PER_PARAMETER / _LAYERS / 12) ** 0.5
    return ModelSpec(layers=_LAYERS, hidden=max(64, round(hidden / 64) * 64), heads=8, seq=16)


def first_state(run: Rig) -> int:
    """One worker trains, and dies with its process; the state that n1 keeps, in bytes."""
    run.start("t.1", fault="stop@iteration=3,micro_batch=1", memory=True)
    run.until(lambda: run.ready("t.1"), 300)
    run.tell(1, ["t.1"])
    run.until(lambda: run.memory("n1").newest() is not None and run.reached(2), 300)
    run.signal("t.1", signal.SIGKILL)
    run.until(lambda: "t.1" in run.exits)
    newest = run.memory("n1").newest()
    assert newest is not None
    return newest.size_bytes


def recovery(
    run: Rig, generation: int, ranks: int, way: str, certified: Certified, keys: dict[str, Credentials]
) -> Iterator[float]:
    """Seconds from the order until each of STAGES, and the CPU time of the new ranks and of the node that gives. The
    first of the ranks asks that, the others take from it."""
    workers = [f"t.{generation * 100 + rank}" for rank in range(ranks)]
    nodes = [f"n{rank + 2}" for rank in range(ranks)]
    sealed = way == "tls"
    with OtherNode("n1", {0: run.memory("n1")}, keys["n1"] if sealed else None) as service:
        started, before_s = time.monotonic(), time.process_time()
        for worker, node in zip(workers, nodes, strict=True):
            run.start(worker, node=node)
        run.until(lambda: run.ready(*workers), 300)
        yield time.monotonic() - started
        warrant = certified.warrant(nodes[0], run.task, generation, nodes)
        passes = keys[nodes[0]].passes(("n1",), run.task, warrant, now()) if sealed else None
        run.tell(generation, workers, joiners=workers, urgent=True, peers=[service], passes=passes)
        run.until(lambda: run.of(StateLoaded, workers[0]), 300)
        yield time.monotonic() - started
        run.until(lambda: all(run.of(WorkerJoinedGroup, worker) for worker in workers), 300)
        yield time.monotonic() - started
        spent = [psutil.Process(run.pids[worker]).cpu_times() for worker in workers]
        yield sum(times.user + times.system for times in spent) + time.process_time() - before_s
    (taken,) = run.of(StateLoaded, workers[0])
    assert isinstance(taken, StateLoaded) and taken.source == "peer"
    for worker in workers:
        run.signal(worker, signal.SIGKILL)
    run.until(lambda: all(worker in run.exits for worker in workers))


def measure(mebibytes: int, ranks: int, repetitions: int, directory: Path) -> dict[str, list[list[float]]]:
    """By way, for each recovery the seconds until each of STAGES."""
    certified = Certified(directory / "tls")
    keys = {node: Credentials(key, path) for node in ("n1", "n2") for path, key in [certified.key(f"agent-{node}")]}
    corpus.build(directory / "corpus")
    spec = TaskSpec(
        name="t",
        model=model(mebibytes),
        optimizer=OptimizerSpec(lr=1e-3),
        data=str(directory / "corpus"),
        global_batch=ranks,
        micro_batch=1,
        iterations=10**6,
        checkpoint=CheckpointSpec(dir="(the rig says)", interval=0, memory_interval=1),
    )
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    with ForkServer() as server, Rig(server, directory, spec) as run:
        print(f"state: {first_state(run) / 2**20:.0f} MiB", flush=True)
        for turn in range(2 * repetitions):
            way = WAYS[(turn + turn // 2) % 2]  # clear, tls, tls, clear, ...
            spent = list(recovery(run, turn + 2, ranks, way, certified, keys))
            found[way].append(spent)
            stages = ", ".join(f"{stage} {s:.2f} s" for stage, s in zip(STAGES, spent, strict=True))
            print(f"{way:5} {stages}", flush=True)
    return found


def report(found: dict[str, list[list[float]]]) -> str:
    """Medians, and the ratio."""
    lines = []
    for number, stage in enumerate((*STAGES, "from the membership until all train")):
        times = {way: [[*each, each[2] - each[0]][number] for each in found[way]] for way in WAYS}
        clear, tls = (statistics.median(times[way]) for way in WAYS)
        ranges = ", ".join(f"{way} {min(times[way]):.2f} to {max(times[way]):.2f}" for way in WAYS)
        lines.append(f"{stage:36} clear {clear:6.2f} s  tls {tls:6.2f} s  {tls / clear - 1:+6.1%}  ({ranges})")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024, help="of the training state (1024)")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=6, help="of each way (6)")
    chosen = parser.parse_args()
    regroup_rig.MEMORY_MAX_BYTES = chosen.mebibytes * 4 << 20
    with tempfile.TemporaryDirectory() as scratch:
        print(report(measure(chosen.mebibytes, chosen.ranks, chosen.repetitions, Path(scratch))))


if __name__ == "__main__":
    main()
