"""What unicrond costs where nothing fails: iteration times beside plain Megatron-core's, interleaved.

    python -m tests.benchmarks.trainer_overhead --windows 20

Two jobs train the same GPT on the same micro-batches, data parallel over two processes: Megatron-core alone with its
DistributedDataParallel at the best flags found here (`plain_gpt.py`), and the same under the hook. Both stay alive;
in turns the one is stopped while the other runs for a window, so that both meet the same machine. Compared are the
medians of neighbouring windows; the interval is Student's, at 95 %, over the pairs. CPU time is that of all threads
of both processes, per iteration.

A pair of windows counts where nobody else took the machine's cores: what all processes together used, by /proc/stat,
beyond the job's own, is below FOREIGN_CORES in both. How many were left out is told.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

import psutil
from msgspec.structs import replace

from agents.trainer import corpus
from events.vocabulary import CheckpointSpec, ModelSpec, TaskSpec
from tests.integration.regroup_rig import ForkServer, Rig

HERE = Path(__file__).parent
INTEGRATION = HERE.parent / "integration"
#: Student's t at 97.5 % for 1, 2, ... degrees of freedom; 1.96 and a bit beyond.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)


#: Cores that others may use in a window that counts; the measuring process is one of them.
FOREIGN_CORES = 0.4


@dataclass
class Job:
    """One of the two: its rig, its workers, and per window the seconds and CPU seconds of an iteration, and the cores
    that others used."""

    rig: Rig
    workers: list[str]
    traces: Path
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    foreign_cores: list[float] = field(default_factory=list)

    def signal(self, number: int) -> None:
        for worker in self.workers:
            self.rig.signal(worker, number)

    def window(self, length_s: float) -> None:
        """Run for so long, then stop, and measure the iterations that lie wholly in between."""
        foreign_s = busy_s() - self.used_s()
        begun = time.monotonic()
        self.signal(signal.SIGCONT)
        self.rig.until(lambda: time.monotonic() > begun + length_s)
        ended = time.monotonic()
        self.signal(signal.SIGSTOP)
        self.foreign_cores.append((busy_s() - self.used_s() - foreign_s) / (ended - begun))
        cpu_s = 0.0
        for worker in self.workers:
            lines = [line.split() for line in (self.traces / f"{worker}.trace").read_text().splitlines()]
            told = [(float(words[-2]), float(words[-1])) for words in lines if words[0] == "stepped"]
            told = [(at, cpu) for at, cpu in told if begun < at < ended]
            steps = [after - before for (before, _), (after, _) in itertools.pairwise(told)]
            cpu_s += (told[-1][1] - told[0][1]) / (len(told) - 1)
        self.wall_s.append(statistics.median(steps))
        self.cpu_s.append(cpu_s)

    def used_s(self) -> float:
        """CPU seconds of the workers so far."""
        times = [psutil.Process(self.rig.pids[worker]).cpu_times() for worker in self.workers]
        return sum(own.user + own.system for own in times)


def busy_s() -> float:
    """CPU seconds that this machine's cores have not been idle, theft by its host included."""
    now = psutil.cpu_times()
    return float(sum(now) - now.idle - now.iowait - now.guest - now.guest_nice)


def interval(ratios: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval."""
    freedom = len(ratios) - 1
    t = _T[freedom - 1] if freedom <= len(_T) else 2.05
    return statistics.mean(ratios), t * statistics.stdev(ratios) / len(ratios) ** 0.5


def compare(windows: int, window_s: float, spec: TaskSpec, plain_flags: tuple[str, ...], scratch: Path) -> None:
    with ForkServer() as server, ExitStack() as stack:
        jobs = {}
        for name, script, changes, flags in (
            ("plain", "plain_gpt.py", {"tp": 2}, plain_flags),
            ("unicrond", "traced_gpt.py", {}, ()),
        ):
            traces = scratch / name
            traces.mkdir()
            args = (str(traces), "--untraced", *flags)
            started = replace(spec, name=name, entry=str(INTEGRATION / script), args=args, **changes)
            rig = stack.enter_context(Rig(server, scratch, started))
            workers = [f"{name}.1", f"{name}.2"]
            rig.start(*workers)
            if name == "unicrond":
                rig.until(lambda rig=rig, workers=workers: rig.ready(*workers))  # type: ignore[misc]
                rig.tell(1, workers)
            rig.until(lambda traces=traces, workers=workers: warm(traces, workers), 120)  # type: ignore[misc]
            jobs[name] = Job(rig, workers, traces)
            jobs[name].signal(signal.SIGSTOP)
        pair = [jobs["plain"], jobs["unicrond"]]
        for number in range(windows):
            for job in pair if number % 2 == 0 else reversed(pair):
                job.window(window_s)
    plain, ours = pair
    for name, job in jobs.items():
        told = zip(job.wall_s, job.foreign_cores, strict=True)
        print(f"{name}, ms (others' cores): {' '.join(f'{took * 1e3:.0f} ({cores:.2f})' for took, cores in told)}")
    quiet = [max(cores) < FOREIGN_CORES for cores in zip(plain.foreign_cores, ours.foreign_cores, strict=True)]
    print(f"{sum(quiet)} of {windows} pairs count")
    if sum(quiet) < 2:
        return
    for what, mine, theirs in (("wall", ours.wall_s, plain.wall_s), ("CPU", ours.cpu_s, plain.cpu_s)):
        mine, theirs = list(compress(mine, quiet)), list(compress(theirs, quiet))
        mean, half = interval([a / b for a, b in zip(mine, theirs, strict=True)])
        print(
            f"{what}: plain {statistics.median(theirs) * 1e3:.1f} ms, unicrond {statistics.median(mine) * 1e3:.1f} ms"
            f" an iteration; ratio {mean:.4f} +- {half:.4f} (95 %, {sum(quiet)} pairs)"
        )


def warm(traces: Path, workers: list[str]) -> bool:
    paths = [traces / f"{worker}.trace" for worker in workers]
    return all(path.exists() and len(path.read_text().splitlines()) > 3 for path in paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=20, help="windows of each job (20)")
    parser.add_argument("--window-s", type=float, default=2.0, help="seconds of a window (2)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--no-overlap", action="store_true", help="plain Megatron-core reduces after the backward")
    parser.add_argument("--exact", action="store_true", help="unicrond sums exactly")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "stdlib"
        corpus.build(data)
        spec = TaskSpec(
            name="overhead",
            model=ModelSpec(layers=chosen.layers, hidden=chosen.hidden, heads=4, seq=64),
            data=str(data),
            global_batch=8,
            iterations=10**6,
            accumulation="exact" if chosen.exact else "float",
            checkpoint=CheckpointSpec(interval=0),
        )
        flags = ("--no-overlap",) if chosen.no_overlap else ()
        compare(chosen.windows, chosen.window_s, spec, flags, Path(scratch))


if __name__ == "__main__":
    main()
