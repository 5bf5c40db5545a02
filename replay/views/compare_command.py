"""`unicron-replay compare`: two runs of a task, bit by bit."""

from __future__ import annotations

import argparse
from contextlib import aclosing
from typing import Any

from unicrond.events.cli.command_line import UsageError
from unicrond.replay.reading.opening import as_json, file_source, open_source, say
from unicrond.replay.reading.source import Source, entries_of
from unicrond.replay.views.report import entry_line
from unicrond.replay.views.run_comparison import RunComparison, RunHistory, compare_runs, entries_between, follow


async def compare_command(options: argparse.Namespace) -> int:
    """Print whether the two runs have the same bits. Exit code 1 if not."""
    async with open_source(options) as source:
        first = await _history(source, options.a)
        second = await _history(file_source(options.other_log) if options.other_log else source, options.b)
    comparison = compare_runs(first, second)
    if not comparison.compared:
        raise UsageError(
            f"{options.a} and {options.b}: the logs name no iteration of both; checksums are those of every"
            " UNICRON_CHECKSUM_EVERY-th: give both tasks the same"
        )
    if options.json:
        say(
            as_json(
                {**comparison._asdict(), "a": _event_lines(first, comparison), "b": _event_lines(second, comparison)}
            )
        )
    else:
        _say(comparison, options, first, second)
    return 1 if comparison.differs else 0


async def _history(source: Source, task: str) -> RunHistory:
    run = RunHistory()
    async with aclosing(entries_of(source)) as entries:
        async for entry in entries:
            follow(run, entry, task)
    if not run.losses:
        raise UsageError(f"{task}: the log has no committed iteration of such a task; `unicron-replay state` names all")
    return run


def _say(comparison: RunComparison, options: argparse.Namespace, first: RunHistory, second: RunHistory) -> None:
    if not comparison.differs:
        say(
            f"the same bits: {comparison.compared} losses and checksums of both are equal, "
            f"up to iteration {comparison.same}"
        )
        return
    value_a, value_b = comparison.values
    say(f"iteration {comparison.differs} differs: {comparison.what} {value_a!r} in A, {value_b!r} in B")
    say(
        f"up to iteration {comparison.same} all that both logs name is equal"
        if comparison.same
        else "nothing before is equal"
    )
    for name, task, run in (("A", options.a, first), ("B", options.b, second)):
        say(f"{name}: {task} in between")
        for line in _event_lines(run, comparison) or ["nothing but steps"]:
            say(f"  {line}")


def _event_lines(run: RunHistory, comparison: RunComparison) -> list[Any]:
    return [entry_line(entry) for entry in entries_between(run, comparison)] if comparison.differs else []
