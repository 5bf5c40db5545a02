"""`unicron-replay compare`: two runs of a task, bit by bit."""

from __future__ import annotations

import argparse
from contextlib import aclosing
from typing import Any

from events.command_line import UsageError
from replay.reading.opening import as_json, file_source, open_source, say
from replay.reading.source import Source, entries_of
from replay.views.courses import Course, Parting, between, follow, parting
from replay.views.report import entry_line


async def compare_command(options: argparse.Namespace) -> int:
    """Whether the two runs have the same bits. Exit code 1 if not."""
    async with open_source(options) as source:
        one = await _course(source, options.a)
        other = await _course(file_source(options.other) if options.other else source, options.b)
    found = parting(one, other)
    if not found.compared:
        raise UsageError(
            f"{options.a} and {options.b}: the logs name no iteration of both; checksums are those of every"
            " UNICRON_CHECKSUM_EVERY-th: give both tasks the same"
        )
    if options.json:
        say(as_json({**found._asdict(), "a": _told(one, found), "b": _told(other, found)}))
    else:
        _say(found, options, one, other)
    return 1 if found.differs else 0


async def _course(source: Source, task: str) -> Course:
    found = Course()
    async with aclosing(entries_of(source)) as entries:
        async for entry in entries:
            follow(found, entry, task)
    if not found.losses:
        raise UsageError(f"{task}: the log has no committed iteration of such a task; `unicron-replay state` names all")
    return found


def _say(found: Parting, options: argparse.Namespace, one: Course, other: Course) -> None:
    if not found.differs:
        say(f"the same bits: {found.compared} losses and checksums of both are equal, up to iteration {found.same}")
        return
    mine, theirs = found.values
    say(f"iteration {found.differs} differs: {found.what} {mine!r} in A, {theirs!r} in B")
    say(f"up to iteration {found.same} all that both logs name is equal" if found.same else "nothing before is equal")
    for name, task, run in (("A", options.a, one), ("B", options.b, other)):
        say(f"{name}: {task} in between")
        for line in _told(run, found) or ["nothing but steps"]:
            say(f"  {line}")


def _told(run: Course, found: Parting) -> list[Any]:
    return [entry_line(entry) for entry in between(run, found)] if found.differs else []
