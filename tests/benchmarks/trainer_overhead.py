"""What unicrond costs where nothing fails: iteration times beside plain Megatron-core's, interleaved.

    python -m tests.benchmarks.trainer_overhead --windows 20 --replicas 2

Four jobs train the same GPT on the same micro-batches, data parallel over so many processes: Megatron-core with its own
DistributedDataParallel at the best flags found here (`plain_gpt.py`), and the same under the hook: with a sum that
follows the deal, with a fixed one of as many lanes as replicas, and of twice as many. All stay alive; in turns all but
one are stopped while that one runs for a window, so that all meet the same machine. Compared are the medians of
neighbouring windows; the interval is Student's, at 95 %, over the pairs. CPU time is that of all threads of a job's
processes, per iteration.

A round of windows counts where nobody else took the machine's cores: what all processes together used, by /proc/stat,
beyond the job's own, is below FOREIGN_CORES in each. How many were left out is told.
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

from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.agents.trainer.loop import corpus
from unicrond.events.vocabulary import LANES, CheckpointSpec, ModelSpec, TaskSpec

HERE = Path(__file__).parent
INTEGRATION = HERE.parent / "integration"
#: Student's t at 97.5 % for 1, 2, ... degrees of freedom; 1.96 and a bit beyond.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)


#: Cores that others may use in a window that counts; the measuring process is one of them.
FOREIGN_CORES = 0.4


@dataclass
class Job:
    """One of them: its rig, its workers, and per window the seconds and CPU seconds of an iteration, and the cores
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


def compare(
    windows: int, window_s: float, spec: TaskSpec, replicas: int, flags: tuple[str, ...], scratch: Path
) -> None:
    fixed = {"accumulation": "exact"}
    wanted: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
        "plain": ("plain_gpt.py", {"tp": replicas}, ("--lanes", *flags)),
        "follow": ("traced_gpt.py", {}, ()),
        "fixed": ("traced_gpt.py", {**fixed, "env": {LANES: str(replicas)}}, ()),
        "fixed, two lanes each": ("traced_gpt.py", {**fixed, "env": {LANES: str(2 * replicas)}}, ()),
    }
    with ForkServer() as server, ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for name, (script, changes, arguments) in wanted.items():
            traces = scratch / name.replace(" ", "-").replace(",", "")
            traces.mkdir()
            args = (str(traces), "--untraced", *arguments)
            started = replace(spec, name=traces.name, entry=str(INTEGRATION / script), args=args, **changes)
            rig = stack.enter_context(Rig(server, scratch, started))
            workers = [f"{traces.name}.{number}" for number in range(1, replicas + 1)]
            rig.start(*workers)
            if name != "plain":
                rig.until(lambda rig=rig, workers=workers: rig.ready(*workers))  # type: ignore[misc]
                rig.tell(1, workers)
            rig.until(lambda traces=traces, workers=workers: warm(traces, workers), 120)  # type: ignore[misc]
            jobs[name] = Job(rig, workers, traces)
            jobs[name].signal(signal.SIGSTOP)
        for number in range(windows):
            turns = list(jobs.values())
            for job in turns if number % 2 == 0 else reversed(turns):
                job.window(window_s)
    for name, job in jobs.items():
        told = zip(job.wall_s, job.foreign_cores, strict=True)
        print(f"{name}, ms (others' cores): {' '.join(f'{took * 1e3:.0f} ({cores:.2f})' for took, cores in told)}")
    quiet = [max(cores) < FOREIGN_CORES for cores in zip(*(job.foreign_cores for job in jobs.values()), strict=True)]
    print(f"{replicas} replicas: {sum(quiet)} of {windows} windows count")
    if sum(quiet) < 2:
        return
    for ours, theirs in (
        ("follow", "plain"),
        ("fixed", "plain"),
        ("fixed", "follow"),
        ("fixed, two lanes each", "follow"),
    ):
        for what in ("wall", "CPU"):
            mine, others = (
                list(compress(jobs[name].wall_s if what == "wall" else jobs[name].cpu_s, quiet))
                for name in (ours, theirs)
            )
            mean, half = interval([a / b for a, b in zip(mine, others, strict=True)])
            print(
                f"{what}: {theirs} {statistics.median(others) * 1e3:.1f} ms, {ours}"
                f" {statistics.median(mine) * 1e3:.1f} ms an iteration; ratio {mean:.4f} +- {half:.4f} (95 %)"
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
    parser.add_argument("--replicas", type=int, default=2, help="2, 3, 4 or 6 (2)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "stdlib"
        corpus.build(data)
        spec = TaskSpec(
            name="overhead",
            model=ModelSpec(layers=chosen.layers, hidden=chosen.hidden, heads=4, seq=64),
            data=str(data),
            global_batch=4 * chosen.replicas,
            iterations=10**6,
            checkpoint=CheckpointSpec(interval=0),
        )
        flags = ("--no-overlap",) if chosen.no_overlap else ()
        compare(chosen.windows, chosen.window_s, spec, chosen.replicas, flags, Path(scratch))


if __name__ == "__main__":
    main()
