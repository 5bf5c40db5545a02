"""`unicronctl plan show|table|whatif`: the plan that is, those that would follow, and those of other clusters.

`plan solve` needs no coordinator and lives in `solve.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from events.command_line import UsageError
from unicrond.ctl.asking import client_of, print_json
from unicrond.ctl.client import Refused
from unicrond.display.cluster_tables import costs_table, plan_table, planned_waf, si
from unicrond.display.tables import Table, show

if TYPE_CHECKING:
    import argparse

    from unicrond.core.state import ClusterState

_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def plan_show(options: argparse.Namespace) -> None:
    """Each task's slots and WAF, the reason, how the plan was obtained, and what everything has cost."""
    snapshot = client_of(options).snapshot()
    plan, costs = snapshot.state.plan, snapshot.body.get("costs")
    if options.json:
        print_json({**snapshot.body["state"]["plan"], "costs": costs})
        return
    if not plan.epoch:
        print("no plan yet")
        return
    for name, text in _told(snapshot.state).items():
        print(f"{name:<12} {text}")
    print()
    show(plan_table(snapshot.state))
    if costs:
        print()
        show(costs_table(costs))


def _told(state: ClusterState) -> dict[str, str]:
    plan = state.plan
    healthy = planned_waf(state, plan.healthy_waf, plan.healthy)
    reused = f", {plan.rows_reused} rows reused" if plan.rows_reused else ""
    ways = {"table": "looked up in the table", "incremental": "solved on rows that stood", "fresh": "solved afresh"}
    return {
        "plan": f"epoch {plan.epoch}, WAF {planned_waf(state, plan.waf, plan.workers)} of {healthy} in health",
        "because of": plan.trigger,
        "reason": plan.reason,
        "answered": f"{ways.get(plan.way, plan.way)} in {_microseconds(plan.took_us)}{reused}",
        "cost": f"{si(plan.transition_flop, 'FLOP')} expected for the change",
    }


def _microseconds(took_us: int) -> str:
    return f"{took_us} us" if took_us < 10_000 else f"{took_us / 1000:.0f} ms"


def plan_foreseen(options: argparse.Namespace) -> None:
    """What would happen if: the plan for each event that may come next."""
    client = client_of(options)
    body = client.plan_table()
    if options.json:
        print_json(body)
        return
    state = client.snapshot().state
    now = state.plan.workers
    rows = []
    for row in body["rows"]:
        others = f" and {len(row['nodes'])} alike" if row["nodes"] else ""
        changes = [f"{task} {now.get(task, 0)} -> {n}" for task, n in row["workers"].items() if n != now.get(task, 0)]
        waf = planned_waf(state, row["waf"], row["workers"]) if row["workers"] else "0"
        rows.append((row["event"], f"{row['subject']}{others}", waf, ", ".join(changes) or "no change"))
    print(f"after plan {body['epoch']}, should this come next:")
    show(Table(("event", "of", "WAF then", "workers"), tuple(rows), frozenset({"WAF then"}), "no event is possible"))


def plan_whatif(options: argparse.Namespace) -> None:
    """The plan that would be adopted, were the cluster otherwise; nothing changes."""
    changes = {
        "lose": options.lose,
        "add_nodes": options.add_nodes,
        "slots": options.slots,
        "tasks": _task_changes(options.task),
    }
    client = client_of(options)
    try:
        body = client.plan_whatif(changes)
    except Refused as refusal:
        if refusal.status == 400:
            raise UsageError(f"--{refusal}") from None
        raise
    if options.json:
        print_json(body)
        return
    state, then = client.snapshot().state, body["then"]
    now = state.plan.assignments
    rows = []
    for share in then["assignments"]:
        name = share["task"]
        had = now[name].workers if name in now else 0
        mark = "" if had == share["workers"] else "*"
        waf_now = planned_waf(state, now[name].waf, {name: had}) if name in now else "-"
        waf_then = planned_waf(state, share["waf"], {name: share["workers"]})
        rows.append((name, str(had), f"{share['workers']}{mark}", waf_now, waf_then))
    headers = ("task", "workers", "would have", "WAF now", "WAF then")
    show(Table(headers, tuple(rows), frozenset(headers[1:]), "no task is active"))
    was = planned_waf(state, state.plan.waf, state.plan.workers)
    would = planned_waf(state, then["waf"], {share["task"]: share["workers"] for share in then["assignments"]})
    print(f"\nWAF {was} now, {would} then; the change would cost {si(then['transition_flop'], 'FLOP')}")
    print(f"reason: {then['reason']}")


def _task_changes(given: list[str]) -> dict[str, dict[str, float]]:
    """NAME:FIELD=NUMBER, several times."""
    changes: dict[str, dict[str, float]] = {}
    for text in given:
        name, colon, setting = text.partition(":")
        field, equals, number = setting.partition("=")
        if not (name and colon and equals and field in ("weight", "min_workers", "max_workers")):
            raise UsageError(f"--task: {text!r}; give NAME:weight=3, or min_workers, max_workers")
        if not _NUMBER.fullmatch(number):
            raise UsageError(f"--task: {text!r}: {number!r} is not a number; give one like 3 or 0.5")
        value: float = float(number)
        changes.setdefault(name, {})[field] = int(value) if value.is_integer() and field != "weight" else value
    return changes


COMMANDS: dict[str, Callable[[Any], None]] = {
    "show": plan_show,
    "table": plan_foreseen,
    "whatif": plan_whatif,
}
