"""The commands of `unicronctl` that talk to a coordinator, one function each.

What was asked for goes to stdout, what went wrong to stderr, in one line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from events.command_line import UsageError
from events.guess import guess
from events.vocabulary import AnyEvent
from unicrond.core.state import ClusterState, TaskStatus
from unicrond.core.work import achieved_waf
from unicrond.ctl.asking import client_of, print_json
from unicrond.ctl.client import RETRY_S, ApiError, Client, Refused, Unreachable, follow
from unicrond.display.cluster_tables import (
    incidents_table,
    node_status,
    nodes_table,
    planned_waf,
    si,
    stragglers,
    stragglers_table,
    tasks_table,
)
from unicrond.display.event_lines import EventLine
from unicrond.display.tables import Table, show

if TYPE_CHECKING:
    import argparse

#: How long a follower bears a coordinator that is away, and how often it asks anew.
AWAY_MAX_S = 60.0
LOG_POLL_S = 0.5


# --- looking -------------------------------------------------------------------------------------


def status(options: argparse.Namespace) -> None:
    """The cluster at a glance."""
    client = client_of(options)
    health, snapshot = client.health(), client.snapshot()
    state = snapshot.state
    if options.json:
        print_json({"health": health, **snapshot.body})
        return
    workers = sum(assignment.workers for assignment in state.plan.assignments.values())
    planned = planned_waf(state, state.plan.waf, state.plan.workers)
    achieved = si(sum(achieved_waf(task, state.now_us) for task in _active(state)), "FLOP/s")
    lines = {
        "coordinator": f"{health.get('status')}, term {state.term}, sequence {state.seq}, at {client.url}",
        **({"TROUBLE": str(health["trouble"])} if health.get("trouble") else {}),
        **{f"ALARM {number}": str(alarm) for number, alarm in enumerate(health.get("alarms") or (), start=1)},
        "plan": f"epoch {state.plan.epoch}, {workers} workers, WAF {planned} planned, {achieved} achieved",
        "because of": f"{state.plan.trigger}; {state.plan.reason}" if state.plan.epoch else "no plan yet",
        "costs": costs_line(snapshot.body.get("costs")),
        "nodes": _tally([node_status(node) for node in state.nodes.values()]),
        "tasks": _tally([task.status.value for task in state.tasks.values()]),
        "incidents": f"{len(state.incidents)} open, {state.incidents_total - len(state.incidents)} closed",
        "digest": str(snapshot.body.get("digest")),
    }
    if state.quarantined:
        lines["quarantined"] = f"{state.quarantined} messages in the log are not valid events"
    for name, text in lines.items():
        print(f"{name:<12} {text}")
    if state.incidents:
        print()
        show(incidents_table(state, time.time_ns() // 1000, last=0))
    if stragglers(state):
        print()
        show(stragglers_table(state))


def _active(state: ClusterState) -> list[Any]:
    return [task for task in state.tasks.values() if task.status is TaskStatus.ACTIVE]


def costs_line(costs: dict[str, float] | None) -> str:
    """What the failure-free work has become."""
    if not costs or not costs["failure_free_flop"]:
        return "no plan yet"
    free = costs["failure_free_flop"]
    parts = [("delivered", "delivered"), ("detection", "detection"), ("transition", "transition")]
    parts.append(("sub_health", "sub-health"))
    shares = ", ".join(f"{100 * costs[f'{name}_flop'] / free:.1f} % {text}" for name, text in parts)
    return f"{shares} of {si(free, 'FLOP')}"


def _tally(words: list[str]) -> str:
    counts = {word: words.count(word) for word in dict.fromkeys(words)}
    return ", ".join(f"{count} {word}" for word, count in counts.items()) or "none"


def nodes(options: argparse.Namespace) -> None:
    """The nodes, and what runs on them."""
    snapshot = client_of(options).snapshot()
    table = nodes_table(snapshot.state, kept_back=snapshot.body.get("kept_back"))
    show_or_json(options, snapshot.body["state"]["nodes"], table)


def tasks(options: argparse.Namespace) -> None:
    """The tasks and their progress; JSON adds what the coordinator derives ("waf", "delivered_flop")."""
    snapshot = client_of(options).snapshot()
    derived = snapshot.body.get("derived", {})
    data = {
        name: task | {key: values.get(name) for key, values in derived.items()}
        for name, task in snapshot.body["state"]["tasks"].items()
    }
    show_or_json(options, data, tasks_table(snapshot.state))


def plan(options: argparse.Namespace) -> None:
    """The adopted plan, the foreseen ones, and those of other clusters: see plan.py."""
    from unicrond.ctl import plan as ctl_plan

    ctl_plan.COMMANDS[options.plan_command](options)


def show_or_json(options: argparse.Namespace, data: Any, table: Table) -> None:
    """The answer, the way the flags ask for."""
    if options.json:
        print_json(data)
    else:
        show(table)


# --- asking for something ------------------------------------------------------------------------


def submit(options: argparse.Namespace) -> None:
    """Check a task file here, then hand the task to the coordinator, which checks it again."""
    import msgspec

    from unicrond.intake.task_file import TaskFileError, load, loads

    try:
        spec = loads(sys.stdin.read(), where="stdin") if options.file == "-" else load(Path(options.file))
    except TaskFileError as error:
        raise UsageError(str(error)) from None
    except UnicodeDecodeError:
        raise UsageError("stdin: is not UTF-8 text; give a YAML file") from None
    if options.check:
        _say(options, {"task": spec.name, "ok": True}, f"{options.file}: task {spec.name} is valid")
        return
    answer = client_of(options).submit(msgspec.to_builtins(spec))
    for warning in answer.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    _say(options, answer, f"task {spec.name} submitted, at sequence {answer.get('seq')}")


def cancel(options: argparse.Namespace) -> None:
    """End a task."""
    answer = client_of(options).cancel(options.task, options.reason)
    _say(options, answer, f"task {options.task} cancelled, at sequence {answer.get('seq')}; its checkpoints stay")


def reshape(options: argparse.Namespace) -> None:
    """Another layout for a task."""
    fields = ("tp", "pp", "min_workers", "max_workers", "reason")
    order = {name: value for name in fields if (value := getattr(options, name)) is not None}
    answer = client_of(options).reshape(options.task, order)
    form = f"tp {answer.get('tp')}, pp {answer.get('pp')}"
    workers = f"{answer.get('min_workers')} to {answer.get('max_workers')} workers"
    _say(options, answer, f"task {options.task} changes to {form} and {workers}, from sequence {answer.get('seq')} on")


def cordon(options: argparse.Namespace) -> None:
    """No new workers for a node."""
    answer = client_of(options).cordon(options.node, drain=False, reason=options.reason)
    _say(options, answer, f"node {options.node} gets no new workers, from sequence {answer.get('seq')} on")


def drain(options: argparse.Namespace) -> None:
    """No workers at all for a node."""
    answer = client_of(options).cordon(options.node, drain=True, reason=options.reason)
    text = f"node {options.node} is being emptied, from sequence {answer.get('seq')} on; see `unicronctl nodes`"
    _say(options, answer, text)


def uncordon(options: argparse.Namespace) -> None:
    """Workers again for a node."""
    answer = client_of(options).uncordon(options.node, options.reason)
    _say(options, answer, f"node {options.node} may have workers again, from sequence {answer.get('seq')} on")


def inject(options: argparse.Namespace) -> None:
    """Order a fault."""
    fields = ("task", "rank", "node", "at_iteration", "phase", "seconds", "xid", "counts")
    order = {"kind": options.kind.replace("-", "_")} | {name: getattr(options, name) for name in fields}
    answer = client_of(options).inject(order)
    whom = f"{answer.get('worker')} on {answer.get('node')}" if answer.get("worker") else f"node {answer.get('node')}"
    _say(options, answer, f"ordered {options.kind} for {whom}, at sequence {answer.get('seq')}")


def _say(options: argparse.Namespace, data: Any, text: str) -> None:
    if options.json:
        print_json(data)
    else:
        print(text)


# --- reading on and on ---------------------------------------------------------------------------


def events(options: argparse.Namespace) -> None:
    """The event log from a sequence number on, as sentences or JSON lines."""
    known = [kind.__name__ for kind in get_args(AnyEvent)] + ["Quarantined"]
    for name in options.type:
        if name not in known:
            raise UsageError(f"--type: no event type {name!r}; {guess(name, known)}")

    def tell(event: EventLine) -> None:
        if options.type and event.type not in options.type:
            return
        if options.json:
            print_json({name: getattr(event, name) for name in event.__struct_fields__}, indent=None)
        else:
            print(f"{event.seq:>7}  {event.clock('milliseconds')}  {event.type:<19}  {event.text}")
        if options.follow:
            sys.stdout.flush()

    client = client_of(options)
    if not options.follow:
        for event in client.events(options.after):
            tell(event)
        return
    _follow(client, options.after, tell)


def _follow(client: Client, after: int, tell: Callable[[EventLine], None]) -> None:
    """Tell the events after `after` as they come, over interruptions; ends only by an exception."""
    away = Away()
    while True:
        try:
            for event in client.events(after, follow=True):
                away.over()
                tell(event)
                after = event.seq
        except Unreachable as error:
            away.bear(error)
        else:
            away.bear(Unreachable("the coordinator closed the stream"))


class Away:
    """Patience with a coordinator that was there, or may just be starting: say so once, give up after AWAY_MAX_S."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._seen = False

    def over(self) -> None:
        """It answers."""
        self._since_s, self._seen = 0.0, True

    def bear(self, error: ApiError) -> None:
        """Wait a little; raises `error` where that has lasted too long, or where it never answered."""
        now_s = time.monotonic()
        if not self._seen or (self._since_s and now_s - self._since_s > AWAY_MAX_S):
            raise error
        if not self._since_s:
            self._since_s = now_s
            print(f"unicronctl: {error}; trying again", file=sys.stderr)
        time.sleep(RETRY_S)


def logs(options: argparse.Namespace) -> None:
    """A worker's output; following it goes on with the worker that takes its place."""
    client = client_of(options)
    piece = client.logs(options.task, rank=options.rank, tail_bytes=options.tail_bytes)
    if options.json and not options.follow:
        print_json(piece)
        return
    _write_piece(options, piece)
    away = Away()
    away.over()
    while options.follow:
        try:
            following = client.logs(options.task, rank=options.rank, offset=piece["offset"])
            if following["worker"] != piece["worker"]:
                print(f"--- {following['worker']} on {following['node']}", file=sys.stderr)
                following = client.logs(options.task, rank=options.rank, offset=0)
            away.over()
        except (Unreachable, Refused) as error:
            away.bear(error)  # between two lives of a worker the rank is empty
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


def watch(options: argparse.Namespace) -> None:
    """The live view, until Ctrl-C."""
    import asyncio

    from unicrond.ctl import view

    client = client_of(options)
    client.health()  # say now that nothing answers

    async def get_state() -> tuple[ClusterState, str]:
        return await asyncio.to_thread(client.state)

    async def until_interrupted() -> None:
        await view.watch(get_state, asyncio.Event(), follow(client))

    asyncio.run(until_interrupted())


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "status": status,
    "nodes": nodes,
    "tasks": tasks,
    "plan": plan,
    "submit": submit,
    "cancel": cancel,
    "reshape": reshape,
    "cordon": cordon,
    "drain": drain,
    "uncordon": uncordon,
    "inject": inject,
    "events": events,
    "logs": logs,
    "watch": watch,
}
