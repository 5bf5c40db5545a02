"""The live view: a cluster that trains, breaks and heals, on the screen.

On a terminal a screen that is drawn anew four times a second; elsewhere plain lines, one per noteworthy
event and now and then one per task. `render` is pure: a state in, something that rich can print out.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TextIO, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.core.worth.waf import waf_unit
from unicrond.ctl.client import ApiError
from unicrond.display.cluster_tables import (
    NODES_SHOWN,
    incidents_table,
    loss,
    milliseconds,
    node_status,
    nodes_table,
    stragglers,
    stragglers_table,
    task_workers,
    tasks_table,
    workers_table,
)
from unicrond.display.event_lines import EventLine
from unicrond.display.tables import STYLES, Table, console, for_terminal, interactive, show
from unicrond.display.worth import achieved_now, planned_wafs, waf_in, waf_text
from unicrond.events.vocabulary.phrases import clean

#: Gives the state and its digest; raises ApiError while the coordinator is away.
GetState: TypeAlias = Callable[[], Awaitable[tuple[ClusterState, str]]]

#: See `render`.
Render: TypeAlias = Callable[[ClusterState, int, Sequence[EventLine], float], RenderableType]

REFRESH_S = 0.25
PROGRESS_S = 10.0
EVENTS_SHOWN = 8
INCIDENTS_SHOWN = 4


async def watch(
    get_state: GetState,
    stop: asyncio.Event,
    events: AsyncIterator[EventLine] | None = None,
    *,
    stream: TextIO | None = None,
    draw: Render | None = None,
) -> None:
    """Show the cluster on `stream` (default: stdout) until `stop` is set.

    `events`: see client.follow. `draw`: what a terminal shows; default: `render`.
    """
    stream = stream or sys.stdout
    lines: deque[EventLine] = deque(maxlen=EVENTS_SHOWN)
    tell = lines.append if interactive(stream) else _teller(stream)
    reader = None if events is None else asyncio.create_task(_read(events, tell), name="events")
    try:
        if interactive(stream):
            await _draw(get_state, stop, lines, console(stream), draw or render)
        else:
            await _print_progress(get_state, stop, stream)
    finally:
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def _read(events: AsyncIterator[EventLine], tell: Callable[[EventLine], None]) -> None:
    async for event in events:
        if event.noteworthy:
            tell(event)


async def _wait(stop: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), timeout_s)


# --- on a terminal -------------------------------------------------------------------------------


async def _draw(
    get_state: GetState, stop: asyncio.Event, lines: Sequence[EventLine], console: Console, draw: Render
) -> None:
    state = ClusterState()
    seen_s = time.monotonic()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while not stop.is_set():
            try:
                state, _ = await get_state()
                seen_s = time.monotonic()
            except (ApiError, OSError):
                pass  # the view says for how long it has heard nothing
            live.update(draw(state, time.time_ns() // 1000, tuple(lines), time.monotonic() - seen_s), refresh=True)
            await _wait(stop, REFRESH_S)


def render(state: ClusterState, now_us: int, events: Sequence[EventLine] = (), away_s: float = 0.0) -> RenderableType:
    """Render the whole view. `now_us`: wall clock; `events`: the last ones; `away_s`: how old the state is."""
    parts: list[RenderableType] = [_headline(state, away_s), "", _tasks(state), ""]
    parts += [for_terminal(nodes_table(state, NODES_SHOWN), "nodes"), "", _plan(state)]
    if stragglers(state):
        parts += ["", for_terminal(stragglers_table(state), "stragglers")]
    if state.incidents or state.closed_incidents:
        parts += ["", for_terminal(incidents_table(state, now_us, INCIDENTS_SHOWN), "incidents")]
    if events:
        parts += ["", Text("events", style="bold")]
        parts += [
            Text.assemble((event.clock(), "dim"), "  ", event.text, no_wrap=True, overflow="ellipsis")
            for event in events
        ]
    return Group(*parts)


def render_top(
    state: ClusterState, now_us: int, events: Sequence[EventLine] = (), away_s: float = 0.0
) -> RenderableType:
    """Render the tasks and every worker, in place of the nodes, the plan and the past; see `render`."""
    parts: list[RenderableType] = [_headline(state, away_s)]
    for title, table in top_tables(state).items():
        parts += ["", for_terminal(table, title)]
    return Group(*parts)


def top_tables(state: ClusterState) -> dict[str, Table]:
    """Return the tables that `top` shows, by title."""
    return {"tasks": tasks_table(state), "workers": workers_table(state)}


def _headline(state: ClusterState, away_s: float) -> Text:
    statuses = [node_status(node) for node in state.nodes.values()]
    tally = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)) or "none yet"
    waf = sum(achieved_now(state, t) for t in state.tasks.values() if t.status is TaskStatus.ACTIVE)
    line = Text.assemble(
        ("unicrond", "bold"),
        f"  term {state.term}  sequence {state.seq}  nodes: {tally}  WAF {waf_in(state, waf)}",
    )
    if away_s > 2.0:
        line.append(f"  no answer from the coordinator for {away_s:.0f} s", "bold red")
    return line


def _tasks(state: ClusterState) -> RichTable:
    """Render the tasks within 80 columns: a task that has ended shows its status in place of the bar."""
    headers = ("task", "workers", "progress", "iteration", "loss", "ms/iter", "WAF")
    right = ("iteration", "loss", "ms/iter", "WAF")
    unit = waf_unit(state)
    table = RichTable(title=f"tasks, WAF in {unit}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", no_wrap=True, header_style="dim")
    for task in state.tasks.values():
        status = task.status.value
        active = task.status is TaskStatus.ACTIVE
        bar = ProgressBar(total=task.spec.iterations, completed=task.progress.iteration, width=10)
        table.add_row(
            task.name,
            task_workers(task),
            bar if active else Text(status, style=STYLES.get(status, "")),
            f"{task.progress.iteration}/{task.spec.iterations}",
            loss(task.progress.loss),
            milliseconds(task.pace.iteration_us) if task.pace.iteration_us else "-",
            waf_text(achieved_now(state, task), unit).removesuffix(unit).rstrip(),
        )
    return table


def _plan(state: ClusterState) -> Text:
    plan = state.plan
    if not plan.epoch:
        return Text.assemble(("plan", "bold"), "  none yet")
    shares = (
        ", ".join(f"{name} {assignment.workers}" for name, assignment in plan.assignments.items()) or "nothing runs"
    )
    return Text.assemble(
        (f"plan {plan.epoch}", "bold"),
        f"  {shares}  WAF {waf_in(state, sum(planned_wafs(state).values()))}\n",
        (clean(f"{plan.trigger}; {plan.reason}"), "dim"),
    )


# --- elsewhere -----------------------------------------------------------------------------------


def _teller(stream: TextIO) -> Callable[[EventLine], None]:
    return lambda event: print(f"{event.clock()}  {event.text}", file=stream, flush=True)


async def _print_progress(get_state: GetState, stop: asyncio.Event, stream: TextIO) -> None:
    iterations: dict[str, int] = {}
    while not stop.is_set():
        await _wait(stop, PROGRESS_S)
        try:
            state, _ = await get_state()
        except (ApiError, OSError):
            continue
        for task in state.tasks.values():
            if task.progress.iteration != iterations.get(task.name, 0):
                iterations[task.name] = task.progress.iteration
                print(progress_line(task, state.now_us), file=stream, flush=True)


def progress_line(task: Task, now_us: int) -> str:
    """Describe a task's progress on one line. `now_us`: the log's clock."""
    clock = time.strftime("%H:%M:%S", time.localtime(now_us / 1e6))
    return (
        f"{clock}  task {task.name} at iteration {task.progress.iteration} of {task.spec.iterations},"
        f" loss {loss(task.progress.loss)},"
        f" {task_workers(task)} workers, {milliseconds(task.pace.iteration_us)} ms/iteration"
    )


def incident_table(state: ClusterState, stream: TextIO | None = None) -> None:
    """Print every incident that the state remembers: cause, response, and what it cost."""
    show(incidents_table(state, state.now_us), "incidents", stream)
