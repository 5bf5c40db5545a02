"""`unicron-replay fuzz`: many seeds; the first failure is shrunk and printed with the command that repeats it."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from unicrond import VERSION
from unicrond.events.cli.command_line import UsageError
from unicrond.replay.reading.opening import PROGRAM, as_json, say
from unicrond.replay.simulation.run import RunOutcome, cores, history, outcomes, simulate

#: Failures after which it goes on no longer: they have most likely one cause.
_ENOUGH = 20


class FuzzReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of all seeds, which `--json` prints. `failure`: the first one, shrunk; `repeat`: the command that
    plays it again."""

    first_seed: int
    seeds: int
    commit: str
    seconds: float
    entries: int
    steps: int
    incidents: int
    faults: dict[str, int]
    slowest_rest_s: float
    slowest_rest_seed: int
    failed: dict[int, str]
    failure: RunOutcome | None
    repeat: str


async def fuzz_command(options: argparse.Namespace) -> int:
    """Play seeds and print the report. Exit code 1 if a rule is broken."""
    stop = threading.Event()
    processes = options.processes or cores()
    if not options.seeds:
        raise UsageError("--seeds: give at least 1 seed")
    try:
        # In a thread: a simulation has an event loop of its own.
        report = await asyncio.to_thread(fuzz, options.first_seed, options.seeds, processes, options.faults, stop)
    except asyncio.CancelledError:
        stop.set()
        raise
    say(as_json(report) if options.json else _page(report))
    if report.seeds < options.seeds:
        text = f"stopped after {report.seeds} of {options.seeds} seeds: {len(report.failed)} failures suffice"
        print(f"{PROGRAM}: {text}", file=sys.stderr)
    return 1 if report.failed else 0


def fuzz(
    first_seed: int, count: int, processes: int, only: list[int] | None = None, stop: threading.Event | None = None
) -> FuzzReport:
    """Play `count` (>= 1) seeds. `only`: of each seed's faults those at these places; None: all. Raises UsageError.

    `stop`: set it to end early."""
    began_s = time.monotonic()
    results: list[RunOutcome] = []
    failures: list[RunOutcome] = []
    if only is not None:
        results = [_part(seed, only) for seed in range(first_seed, first_seed + count)]
        failures = [outcome for outcome in results if outcome.rule]
    else:
        with _bar(count) as bar:
            for outcome in outcomes(range(first_seed, first_seed + count), min(processes, count)):
                results.append(outcome)
                failures += [outcome] if outcome.rule else []
                bar.update(bar.task_ids[0], advance=1, failed=len(failures))
                if len(failures) >= _ENOUGH or (stop is not None and stop.is_set()):
                    break
    first = min(failures, key=lambda outcome: outcome.seed, default=None)
    smallest = first
    if first is not None and only is None:
        smallest = shrink(first)
    slowest = max(results, key=lambda outcome: (outcome.rest_s, -outcome.seed))
    return FuzzReport(
        first_seed=first_seed,
        seeds=len(results),
        commit=_commit(),
        seconds=round(time.monotonic() - began_s, 1),
        entries=sum(outcome.entries for outcome in results),
        steps=sum(outcome.steps for outcome in results),
        incidents=sum(outcome.incidents for outcome in results),
        faults=dict(Counter(fault.kind for outcome in results for fault in outcome.faults).most_common()),
        slowest_rest_s=slowest.rest_s,
        slowest_rest_seed=slowest.seed,
        failed={outcome.seed: outcome.rule for outcome in sorted(failures, key=lambda outcome: outcome.seed)},
        failure=smallest,
        repeat=_repeat(first, smallest, only) if first is not None and smallest is not None else "",
    )


def _part(seed: int, only: list[int]) -> RunOutcome:
    faults = history(seed)
    if any(place >= len(faults) for place in only):
        raise UsageError(f"--faults: seed {seed} has faults 0 to {len(faults) - 1}; name some of these")
    return simulate(seed, [faults[place] for place in sorted(set(only))])


def _repeat(first: RunOutcome, smallest: RunOutcome, only: list[int] | None) -> str:
    places = only if only is not None else remaining_places(smallest, first)
    part = f" --faults={','.join(map(str, places))}" if only is not None or len(places) < len(first.faults) else ""
    return f"{PROGRAM} fuzz --first-seed {first.seed} --seeds 1{part}"


def _commit() -> str:
    """Return the commit that the code is from, with "+" where it was changed since; the version outside a checkout."""
    folder = Path(__file__).parent
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=folder, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return VERSION
    return git.stdout.strip()


def _page(report: FuzzReport) -> str:
    lines = [
        f"{report.seeds} seeds from {report.first_seed} at {report.commit}: "
        f"{sum(report.faults.values())} faults, {report.incidents} incidents, {report.steps} steps, "
        f"{report.entries} log entries in {report.seconds:g} s",
    ]
    if not report.failed:
        lines.append(
            f"every rule held; the slowest came to rest {report.slowest_rest_s:.1f} s after the last fault "
            f"(seed {report.slowest_rest_seed})"
        )
        return "\n".join(lines)
    failure = report.failure
    assert failure is not None
    lines += [f"{len(report.failed)} failed: " + ", ".join(f"{seed} {rule}" for seed, rule in report.failed.items())]
    lines += ["", f"seed {failure.seed} after {failure.at_s:.2f} s: {failure.rule}", f"  {failure.story}"]
    lines += ["history (shrunk: each of these faults is needed):", *(f"  {fault}" for fault in failure.faults)]
    lines += ["repeat it with", f"  git checkout {report.commit.removesuffix('+')}", f"  {report.repeat}"]
    if report.commit.endswith("+"):
        lines.append("  (and the changes that are not committed)")
    return "\n".join(lines)


def _bar(count: int) -> Progress:
    """Build a progress bar on stderr, shown only where that is a terminal."""
    console = Console(file=sys.stderr)
    progress = Progress(
        TextColumn("fuzzing"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} seeds, {task.fields[failed]} failed"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    progress.add_task("fuzzing", total=count, failed=0)
    return progress


def shrink(failure: RunOutcome) -> RunOutcome:
    """Return the last failing outcome of the same rule; none of its faults can be left out alone."""
    smallest, shrunk = failure, True
    while shrunk:  # once a fault is left out, others may be needed no longer
        shrunk = False
        # Later faults go first: what comes early decides more of what follows.
        for at in reversed(range(len(smallest.faults))):
            fewer = simulate(failure.seed, smallest.faults[:at] + smallest.faults[at + 1 :])
            if fewer.rule == failure.rule:
                smallest, shrunk = fewer, True
    return smallest


def remaining_places(smallest: RunOutcome, failure: RunOutcome) -> list[int]:
    """Return the places, in the whole history, of the faults that are left."""
    return [place for place, fault in enumerate(failure.faults) if fault in smallest.faults]
