"""Feed a view from a log, with a progress bar on stderr where that takes a while and stderr is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from unicrond.core.state.state import ClusterState
from unicrond.events.log.point import Point
from unicrond.replay.reading.source import LogChunk, Source, read
from unicrond.views.view import View, feed_all

SHOW_AFTER_S = 0.4


async def show(source: Source, view: View, label: str, *, until: Point | None = None) -> ClusterState:
    """Fold the log up to `until`, and feed each step to the view; return the last state. Raises LogError, and what the
    view raises: nobody waits for anything else here."""
    state = ClusterState()
    async with aclosing(with_bar(read(source, until=until), label)) as chunks:
        async for chunk in chunks:
            state = feed_all(view, chunk.entries, state)
    return state


async def with_bar(
    chunks: AsyncGenerator[LogChunk, None],
    label: str,
    *,
    console: Console | None = None,
    show_after_s: float = SHOW_AFTER_S,
) -> AsyncGenerator[LogChunk, None]:
    """Yield the same chunks; a bar appears after `show_after_s` and goes away at the end."""
    console = console or Console(file=sys.stderr)
    began_s = time.monotonic()
    bar: tuple[Progress, TaskID] | None = None
    entries = 0
    with ExitStack() as stack:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
                entries += len(chunk.entries)
                if bar is None and console.is_terminal and time.monotonic() - began_s >= show_after_s:
                    progress = stack.enter_context(_progress(console))
                    bar = progress, progress.add_task(label, total=1.0, entries=0)
                if bar is not None:
                    bar[0].update(bar[1], completed=chunk.fraction, entries=entries)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[entries]:,} events"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
