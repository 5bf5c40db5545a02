"""How long a regroup takes: from the new membership's arrival to the first collective's end in the new group, at each
survivor, with standby groups and without, side by side.

    python -m tests.benchmarks.test_regroup --replicas 3 5 --repetitions 10
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.agents.trainer.loop import corpus
from unicrond.events.vocabulary import CheckpointSpec, ModelSpec, TaskSpec, WorkerJoinedGroup


def one_loss(server: ForkServer, scratch: Path, data: Path, replicas: int, standby_max: int) -> list[float]:
    """The last of so many replicas is killed; milliseconds of the regroup at each survivor."""
    spec = TaskSpec(
        name="regroup",
        model=ModelSpec(layers=1, hidden=32, heads=2, seq=16),
        data=str(data),
        global_batch=2 * replicas,
        iterations=10**6,
        env={"UNICRON_STANDBY_MAX": str(standby_max)},
        checkpoint=CheckpointSpec(interval=0),
    )
    workers = [f"t.{number}" for number in range(1, replicas + 1)]
    with Rig(server, scratch, spec) as rig:
        rig.start(*workers)
        rig.until(lambda: rig.ready(*workers))
        rig.tell(1, workers)
        rig.until(lambda: rig.reached(10), 60)  # standby groups are built after the first
        rig.signal(workers[-1], signal.SIGKILL)
        rig.until(lambda: workers[-1] in rig.exits)
        rig.tell(2, workers[:-1], urgent=True)

        def seats() -> list[float]:
            return [
                m.duration_us / 1e3
                for m in rig.of(WorkerJoinedGroup)
                if isinstance(m, WorkerJoinedGroup) and m.generation == 2
            ]

        rig.until(lambda: len(seats()) == replicas - 1)
        return seats()


def compare(replicas: int, repetitions: int) -> dict[int, list[float]]:
    """Milliseconds of the slowest survivor's regroup, by `standby_max` (0: without)."""
    found: dict[int, list[float]] = {0: [], 8: []}
    with ForkServer() as server, tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "stdlib"
        corpus.build(data)
        for _ in range(repetitions):
            for standby_max, slowest_ms in found.items():
                slowest_ms.append(max(one_loss(server, Path(scratch), data, replicas, standby_max)))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicas", [3, 5])
def test_regroup_time(replicas: int) -> None:
    report(replicas, 5)


def report(replicas: int, repetitions: int) -> None:
    found = compare(replicas, repetitions)
    for standby_max, slowest_ms in found.items():
        low, middle, high = min(slowest_ms), statistics.median(slowest_ms), max(slowest_ms)
        way = "with" if standby_max else "without"
        print(
            f"{replicas} replicas, {way} standby groups: {middle:.1f} ms ({low:.1f} to {high:.1f}, {repetitions} runs)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--repetitions", type=int, default=10)
    chosen = parser.parse_args()
    for replicas in chosen.replicas:
        report(replicas, chosen.repetitions)


if __name__ == "__main__":
    main()
