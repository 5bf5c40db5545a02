"""What sharded optimizer state costs and saves, beside the plain optimizer under the same hook, interleaved.

    python -m tests.benchmarks.sharded_optimizer --replicas 3 --windows 10

Two jobs train the same GPT; both stay alive, and in turns the one is stopped while the other runs for a window
(`trainer_overhead.py`). Then each in turn loses its last replica in the middle of an iteration, and is refilled:
milliseconds from the SIGKILL to the next commit, from the refill's membership to the commit in which it takes part.
Memory is what a worker has to itself (USS).
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
from msgspec.structs import replace

from tests.benchmarks.trainer_overhead import INTEGRATION, Job, interval, warm
from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.agents.trainer.loop import corpus
from unicrond.events.vocabulary import CheckpointSpec, ModelSpec, TaskSpec


def start(rig: Rig, name: str, replicas: int, traces: Path) -> Job:
    workers = [f"{name}.{number}" for number in range(1, replicas + 1)]
    rig.start(*workers)
    rig.until(lambda: rig.ready(*workers), 60)
    rig.tell(1, workers)
    rig.until(lambda: warm(traces, workers), 120)
    return Job(rig, workers, traces)


def memory_mib(job: Job) -> float:
    return (
        statistics.median(psutil.Process(job.rig.pids[worker]).memory_full_info().uss for worker in job.workers) / 2**20
    )


def committed_in(rig: Rig, generation: int) -> bool:
    return any(commit.generation == generation for commit in rig.committed)


def lose_and_refill(job: Job, generation: int, number: int) -> tuple[float, float]:
    """Milliseconds from the kill, and from the refill's membership, to a commit in the new generation."""
    rig, lost = job.rig, job.workers[-1]
    joiner = f"{lost.split('.')[0]}.{number}"
    rig.start(joiner)
    rig.until(lambda: rig.ready(joiner), 60)
    rig.signal(lost, signal.SIGKILL)
    killed = time.monotonic()
    rig.until(lambda: lost in rig.exits)
    job.workers.pop()
    rig.tell(generation, job.workers, urgent=True)
    rig.until(lambda: committed_in(rig, generation))
    healed = time.monotonic()
    job.workers.append(joiner)
    rig.tell(generation + 1, job.workers, joiners=[joiner])
    rig.until(lambda: committed_in(rig, generation + 1))
    return (healed - killed) * 1e3, (time.monotonic() - healed) * 1e3


def compare(replicas: int, windows: int, window_s: float, losses: int, spec: TaskSpec, scratch: Path) -> None:
    with ForkServer() as server, ExitStack() as stack:
        jobs = []
        for name, distributed in (("plain", False), ("sharded", True)):
            (scratch / name).mkdir()
            started = replace(
                spec,
                name=name,
                entry=str(INTEGRATION / "traced_gpt.py"),
                args=(str(scratch / name), "--untraced"),
                optimizer=replace(spec.optimizer, distributed=distributed),
            )
            rig = stack.enter_context(Rig(server, scratch, started))
            jobs.append(start(rig, name, replicas, scratch / name))
            jobs[-1].signal(signal.SIGSTOP)
        for number in range(windows):
            for job in jobs if number % 2 == 0 else reversed(jobs):
                job.window(window_s)
        plain, sharded = jobs
        mean, half = interval([mine / theirs for mine, theirs in zip(sharded.wall_s, plain.wall_s, strict=True)])
        for job, name in ((plain, "plain"), (sharded, "sharded")):
            told = f"{statistics.median(job.wall_s) * 1e3:.1f} ms an iteration, {memory_mib(job):.0f} MiB"
            job.signal(signal.SIGCONT)
            times = [lose_and_refill(job, 2 + 2 * number, replicas + 1 + number) for number in range(losses)]
            job.signal(signal.SIGSTOP)
            healed, refilled = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"{replicas} replicas, {name}: {told}; {healed:.0f} ms from a kill, {refilled:.0f} ms to take one in")
        print(f"ratio of iterations {mean:.3f} +- {half:.3f} (95 %, {windows} pairs), {losses} losses")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--window-s", type=float, default=3.0)
    parser.add_argument("--losses", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "stdlib"
        corpus.build(data)
        spec = TaskSpec(
            name="sharded",
            model=ModelSpec(layers=chosen.layers, hidden=chosen.hidden, heads=4, seq=64),
            data=str(data),
            global_batch=12,
            iterations=10**6,
            checkpoint=CheckpointSpec(interval=0),
        )
        compare(chosen.replicas, chosen.windows, chosen.window_s, chosen.losses, spec, Path(scratch))


if __name__ == "__main__":
    main()
