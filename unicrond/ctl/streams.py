"""The commands of `unicronctl` that read on and on, or a part of what is long: events, logs, stacks, the live views."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from unicrond.core.faults.severity import kind_of, severity_of
from unicrond.core.state.state import ClusterState
from unicrond.ctl.client import RETRY_S, ApiError, ApiRefused, Client, Unreachable
from unicrond.ctl.client_options import client_of, print_json
from unicrond.ctl.past_state import end_of, last_of, seq_at
from unicrond.display.event_lines import EventLine
from unicrond.display.flight import behind, collectives_table, ranks_table
from unicrond.display.tables import interactive, show
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.events.wire.selection import Selection

if TYPE_CHECKING:
    import argparse
import contextlib
import threading
from collections.abc import AsyncIterator

#: How long a follower bears a coordinator that is away, and how often it asks anew.
AWAY_MAX_S = 60.0
LOG_POLL_S = 0.5
#: The last events of what is described, and among how many entries they are looked for.
EVENTS_SHOWN = 8
EVENTS_LOOKED_AT = 20_000


async def follow(client: Client, after: int = 0) -> AsyncIterator[EventLine]:
    """Yield every event after sequence number `after`, then each as it comes, across restarts of the coordinator."""
    import asyncio  # `unicronctl` alone pays for it where it waits for something

    loop, queue = asyncio.get_running_loop(), asyncio.Queue[EventLine]()

    def read() -> None:
        last = after
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while True:
                with contextlib.suppress(ApiError):  # ask again, from after the last event that came well
                    for event in client.events(last, follow=True):
                        loop.call_soon_threadsafe(queue.put_nowait, event)
                        last = event.seq
                if loop.is_closed():
                    return
                time.sleep(RETRY_S)

    threading.Thread(target=read, name="events", daemon=True).start()
    while True:
        yield await queue.get()


def events(options: argparse.Namespace) -> None:
    """Show the event log, or the part of it that the flags select, as sentences or JSON lines."""
    client = client_of(options)
    takes = _event_filter(client, options)

    def tell(event: EventLine) -> None:
        """Print an event that the flags select."""
        if not takes(event):
            return
        if options.json:
            print_json({name: getattr(event, name) for name in event.__struct_fields__}, indent=None)
        else:
            print(f"{event.seq:>7}  {event.clock('milliseconds')}  {event.type:<19}  {event.text}")
        if options.follow:
            sys.stdout.flush()

    after, until = 0, None
    if options.since is not None or options.until is not None or options.limit is not None:
        end = end_of(client)
        after = seq_at(client, options.since, end) if options.since is not None else 0
        until = seq_at(client, options.until, end) if options.until is not None else end
    if options.limit is not None and until is not None:
        for event in last_of(client, options.limit, after, until, takes):
            tell(event)
        after = max(after, until)
    elif not options.follow:
        for event in client.events(after, until=until):
            tell(event)
    if options.follow:
        _follow(client, after, tell)


def _event_filter(client: Client, options: argparse.Namespace) -> Callable[[EventLine], bool]:
    """Return a test for the events that the flags select; all flags have to hold."""
    if not (options.type or options.task or options.node or options.severity or options.kind):
        return lambda _: True
    selection = Selection(task=options.task or "", node=options.node or "")
    severities = client.state()[0].severity if options.severity else {}

    def takes(line: EventLine) -> bool:
        """Say whether the flags select the event."""
        if options.type and line.type not in options.type:
            return False
        if not (options.task or options.node or options.severity or options.kind):
            return True
        entry = client.entry_of(line)
        if not selection.takes(entry):
            return False
        if not (options.severity or options.kind):
            return True
        kind = kind_of(entry.envelope.event) if isinstance(entry, RecordedEvent) else ""
        if not kind or (options.kind and kind not in options.kind):
            return False
        return not options.severity or severity_of(kind, severities).name in options.severity

    return takes


def last_events_about(
    options: argparse.Namespace, state: ClusterState, kind: str, name: str, count: int = EVENTS_SHOWN
) -> list[EventLine]:
    """Return the last events that name the task or node, up to the state's point, without steps and
    acknowledgements; none where the token may not read the log."""
    if kind == "incident" or name not in (state.tasks if kind == "task" else state.nodes):
        return []
    selection = Selection(task=name if kind == "task" else "", node=name if kind == "node" else "")
    client = client_of(options)

    def takes(line: EventLine) -> bool:
        """Say whether the event names the task or node."""
        return line.noteworthy and selection.takes(client.entry_of(line))

    try:
        return last_of(client, count, max(0, state.seq - EVENTS_LOOKED_AT), state.seq, takes)
    except ApiRefused as refusal:
        if refusal.status != 403:
            raise
        return []


def _follow(client: Client, after: int, tell: Callable[[EventLine], None]) -> None:
    """Print the events after `after` as they come, over interruptions; ends only by an exception."""
    outage = CoordinatorOutage()
    while True:
        try:
            for event in client.events(after, follow=True):
                outage.end()
                tell(event)
                after = event.seq
        except Unreachable as error:
            outage.wait_after(error)
        else:
            outage.wait_after(Unreachable("the coordinator closed the stream"))


class CoordinatorOutage:
    """Waits for a coordinator that was there, or may just be starting: warns once, gives up after AWAY_MAX_S."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._has_answered = False

    def end(self) -> None:
        """Note that the coordinator answers."""
        self._since_s, self._has_answered = 0.0, True

    def wait_after(self, error: ApiError) -> None:
        """Wait a little; raise `error` where the outage has lasted too long, or the coordinator never answered."""
        now_s = time.monotonic()
        if not self._has_answered or (self._since_s and now_s - self._since_s > AWAY_MAX_S):
            raise error
        if not self._since_s:
            self._since_s = now_s
            print(f"unicronctl: {error}; trying again", file=sys.stderr)
        time.sleep(RETRY_S)


def states(client: Client, every_s: float) -> Iterator[ClusterState]:
    """Yield the cluster's state, again and again, every `every_s`. Raises Unreachable as `CoordinatorOutage` does."""
    outage = CoordinatorOutage()
    while True:
        try:
            state, _ = client.state()
            outage.end()
        except Unreachable as error:
            outage.wait_after(error)
            continue
        yield state
        time.sleep(every_s)


def logs(options: argparse.Namespace) -> None:
    """Show a worker's output; following continues with the worker that takes its place."""
    client = client_of(options)
    target = {"worker": options.worker} if options.worker else {"rank": options.rank}
    piece = client.logs(options.task, **target, tail_bytes=options.tail_bytes)
    if options.json and not options.follow:
        print_json(piece)
        return
    _write_piece(options, piece)
    outage = CoordinatorOutage()
    outage.end()
    while options.follow:
        try:
            following = client.logs(options.task, **target, offset=piece["offset"])
            if following["worker"] != piece["worker"]:
                print(f"--- {following['worker']} on {following['node']}", file=sys.stderr)
                following = client.logs(options.task, **target, offset=0)
            outage.end()
        except (Unreachable, ApiRefused) as error:
            outage.wait_after(error)  # between two lives of a worker the rank is empty
            continue
        piece = following
        _write_piece(options, piece)
        if not piece["text"]:
            time.sleep(LOG_POLL_S)


def _write_piece(options: argparse.Namespace, piece: dict[str, Any]) -> None:
    missing = [name for name in ("worker", "node", "offset", "text") if name not in piece]
    if missing:
        raise Unreachable(f"the answer lacks {missing[0]}; is it another version of unicrond?")
    if options.json:
        print_json(piece, indent=None)
    else:
        sys.stdout.write(piece["text"])
    sys.stdout.flush()


def stacks(options: argparse.Namespace) -> None:
    """Show what the threads of a task's workers do, and their last collectives; of all ranks where none is given."""
    client = client_of(options)
    ranks = [options.rank]
    if options.rank is None:
        task = client.state()[0].tasks.get(options.task)
        ranks = list(range(len(task.membership.members))) if task is not None and task.membership else [0]
    answers, failed = [], None
    for rank in ranks:
        try:
            answer = client.stacks(options.task, rank)
        except ApiRefused as error:
            if len(ranks) == 1:
                raise
            print(f"unicronctl: rank {rank}: {error}", file=sys.stderr)
            failed = error
            continue
        answers.append({"rank": rank, **answer})
        if not options.json:
            _show_stacks(rank, answer)
    if failed is not None and not answers:
        raise failed
    if options.json:
        print_json(answers)
        return
    marks = client.marks(options.task)["marks"]
    print("\nranks side by side")
    show(ranks_table(answers, marks))
    if late := behind(answers, marks):
        print(late)


def _show_stacks(rank: int, answer: dict[str, Any]) -> None:
    print(f"--- rank {rank}, worker {answer['worker']} on {answer['node']}, process {answer['pid']}")
    print(answer["text"].rstrip() or f"(no stacks: {answer['no_stacks']})")
    if answer["collectives"]:
        print("\nflight recorder: what has not ended, and the last that have")
        show(collectives_table(answer["collectives"]))
    else:
        print(f"(flight recorder: {answer['no_flight'] or 'empty'})")


def watch(options: argparse.Namespace) -> None:
    """Show the live view, until Ctrl-C."""
    from unicrond.ctl import live_view as view

    _live(options, view.render)


def top(options: argparse.Namespace) -> None:
    """Show the live table of tasks and workers, until Ctrl-C; once, where the output is no terminal."""
    from unicrond.ctl import live_view as view

    if options.once or not interactive(sys.stdout):
        state = client_of(options).snapshot().state
        for title, table in view.top_tables(state).items():
            show(table, title)
        return
    _live(options, view.render_top)


def _live(options: argparse.Namespace, render: Callable[..., Any]) -> None:
    import asyncio

    from unicrond.ctl import live_view as view

    client = client_of(options)
    client.health()  # say now that nothing answers

    async def get_state() -> tuple[ClusterState, str]:
        return await asyncio.to_thread(client.state)

    async def until_interrupted() -> None:
        await view.watch(get_state, asyncio.Event(), follow(client), draw=render)

    asyncio.run(until_interrupted())
