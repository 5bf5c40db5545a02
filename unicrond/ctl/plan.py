"""`unicronctl plan show|table|whatif|spares`: the plan that is, those that would follow, and those of other clusters.

The coordinator answers, or `plan_past.py` for a moment of the past. `plan solve` needs no coordinator and lives in
`solve.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from unicrond.core.nodes.brakes import hold_lines, mode_text
from unicrond.core.nodes.gpu_types import of_assignment
from unicrond.core.worth.gradient_memory import gradients
from unicrond.ctl.client import ApiRefused, Client
from unicrond.ctl.client_options import client_of, print_json, snapshot_of
from unicrond.ctl.parsing import changes_json
from unicrond.display.cluster_tables import costs_table, departures, gradients_table, layout_words, plan_table, turns
from unicrond.display.plan_explanation import explain_layouts, explain_plan, gap_text
from unicrond.display.queue import pending_tasks
from unicrond.display.tables import Table, show
from unicrond.display.worth import healthy_waf, planned_wafs, si, waf_in, waf_text
from unicrond.events.cli.command_line import UsageError
from unicrond.events.vocabulary.shape import Shape

if TYPE_CHECKING:
    import argparse

    from unicrond.core.state.state import ClusterState
    from unicrond.ctl.plan_past import PastPlans

#: Averages over less of the time than this say so.
_NEARLY_ALL = 0.9995


def plan_show(options: argparse.Namespace) -> None:
    """Show each task's slots, WAF and gradients, the reason, how the plan was obtained, and what everything has
    cost."""
    snapshot = snapshot_of(options)
    plan, costs = snapshot.state.plan, snapshot.body.get("costs")
    if options.json:
        proof = {"proven": not plan.gap_ppm, "gap_ppm": plan.gap_ppm}
        print_json({**snapshot.body["state"]["plan"], **proof, "gradients": _gradients(snapshot.state), "costs": costs})
        return
    if not plan.epoch:
        print("no plan yet")
        return
    for name, text in summary(snapshot.state).items():
        print(f"{name:<12} {text}")
    print()
    show(plan_table(snapshot.state))
    print()
    show(gradients_table(snapshot.state))
    if costs:
        print()
        show(costs_table(costs))


def summary(state: ClusterState) -> dict[str, str]:
    """Return the lines that describe the plan, by title."""
    plan = state.plan
    planned, healthy = waf_in(state, sum(planned_wafs(state).values())), waf_in(state, healthy_waf(state))
    reused = f", {plan.rows_reused} rows reused" if plan.rows_reused else ""
    methods = {"table": "looked up in the table", "incremental": "solved on rows that stood", "fresh": "solved afresh"}
    return {
        "plan": f"epoch {plan.epoch}, WAF {planned} planned, {healthy} in health",
        **({"mode": modes} if (modes := mode_text(state)) else {}),
        "because of": plan.trigger,
        "reason": plan.reason,
        "optimum": gap_text(plan.gap_ppm),
        **({"why": explain_plan(state)} if explain_plan(state) else {}),
        **({"layouts": layouts} if (layouts := explain_layouts(state)) else {}),
        "answered": f"{methods.get(plan.method, plan.method)} in {_microseconds(plan.duration_us)}{reused}",
        **({"waiting": "; ".join(pending)} if (pending := pending_tasks(state)) else {}),
        **({"turns": "; ".join(waiting)} if (waiting := turns(state)) else {}),
        **({"held": "; ".join(holds)} if (holds := hold_lines(state)) else {}),
        **({"departures": "; ".join(leaving)} if (leaving := departures(state)) else {}),
        "cost": f"{si(plan.transition_flop, 'FLOP')} expected for the change",
    }


def _gradients(state: ClusterState) -> dict[str, dict[str, int]]:
    """Return what a worker of each planned task holds."""
    planned = {
        name: len(assignment.replicas) for name, assignment in state.plan.assignments.items() if assignment.replicas
    }
    return {
        name: asdict(gradients(state.tasks[name].spec, replicas))
        for name, replicas in planned.items()
        if name in state.tasks
    }


def _microseconds(took_us: int) -> str:
    return f"{took_us} us" if took_us < 10_000 else f"{took_us / 1000:.0f} ms"


def plan_foreseen(options: argparse.Namespace) -> None:
    """Show the plan for each event that may come next."""
    planner = _planner(options)
    body = planner.plan_table()
    if options.json:
        print_json(body)
        return
    state = _state(planner)
    now = state.plan.workers
    rows = []
    for row in body["rows"]:
        alike = f" and {len(row['nodes'])} alike" if row["nodes"] else ""
        changes = [
            f"{task} {now.get(task, 0)} -> {n}{in_layout}"
            for task, n in row["workers"].items()
            if (in_layout := _new_choice(state, task, row)) or n != now.get(task, 0)
        ]
        waf = waf_in(state, row["waf"])
        rows.append((row["event"], f"{row['subject']}{alike}", waf, ", ".join(changes) or "no change"))
    print(f"after plan {body['epoch']}, should this come next:")
    empty = "no plan is made yet" if body.get("unforeseen") else "no event is possible"
    show(Table(("event", "of", "WAF then", "workers"), tuple(rows), frozenset({"WAF then"}), empty))
    if count := body.get("unforeseen"):
        print(f"\n{count} more event{'s' * (count > 1)} may come; with several types of GPU some plans are made later")


def plan_whatif(options: argparse.Namespace) -> None:
    """Show the plan that a changed cluster would have; nothing changes."""
    planner = _planner(options)
    try:
        body = planner.plan_whatif(changes_json(options))
    except ApiRefused as refusal:
        if refusal.status == 400:
            raise UsageError(f"--{refusal}") from None
        raise
    if options.json:
        print_json(body)
        return
    state, then, waf_now = _state(planner), body["then"], body["waf_now"]
    now, shares = state.plan.workers, then.get("assignments", {})
    rows = []
    for name, share in shares.items():
        layout = Shape(**{field: share[field] for field in Shape._fields if field in share})
        in_layout = _new_layout(state, name, {name: str(layout)} if share.get("tp") else {})
        in_layout += _new_gpu(state, name, _gpu_of(state, share, options.gpu_type))
        mark = f"*{in_layout}" if in_layout or now.get(name, 0) != share["workers"] else ""
        worth_now = waf_text(waf_now[name], body["unit"]) if name in waf_now else "-"
        worth_then = waf_text(share["waf"], body["unit"])
        rows.append((name, str(now.get(name, 0)), f"{share['workers']}{mark}", worth_now, worth_then))
    headers = ("task", "workers", "would have", "WAF now", "WAF then")
    show(Table(headers, tuple(rows), frozenset(headers[1:]), "no task is active"))
    was = waf_text(sum(waf_now.values()), body["unit"])
    would = waf_text(then.get("waf", 0), body["unit"])
    when = "now" if options.at is None else f"at entry {state.seq}"
    under = ", both under the changed settings" if options.set else ""
    cost = si(then.get("transition_flop", 0.0), "FLOP")
    print(f"\nWAF {was} {when}, {would} then{under}; the change would cost {cost}")
    print(f"reason: {then.get('reason', '')}")
    print("at once: " + (", ".join(f"{count} {name}" for name, count in body["decisions"].items()) or "nothing else"))


def plan_spares(options: argparse.Namespace) -> None:
    """Show what the cluster would achieve with some of its nodes kept back, and how many spares pay."""
    planner = _planner(options)
    try:
        spares = planner.plan_spares(options.repair_s, options.mtbf_s)
    except ApiRefused as refusal:
        if refusal.status == 400:
            raise UsageError(f"--{refusal}".replace("_", "-") if "mtbf_s" in str(refusal) else str(refusal)) from None
        raise
    if options.json:
        print_json(spares)
        return
    for n, report in enumerate(spares["types"]):
        if n:
            print()
        if len(spares["types"]) > 1:
            print(f"nodes of {report['gpu']}:" if report["gpu"] else "nodes that tell no type of GPU:")
        _show_spares(report, spares["repair_s"])


def _show_spares(report: Mapping[str, Any], repair_s: float) -> None:
    """Show the spares for one type of GPU."""
    full, rows = report["rows"][0]["waf"], []
    for row in report["rows"]:
        mark = "*" if row["kept"] == report["pay"] else ""
        shares = (_share(row["waf"], full), _share(row["expected_waf"], full), f"{100 * row['covered']:.1f} %")
        rows.append((f"{row['kept']}{mark}", *shares))
    headers = ("kept back", "WAF while none is away", "WAF on average", "time with a spare for each that is away")
    show(Table(headers, tuple(rows), frozenset(headers), "there are no nodes"))
    away = f"{report['away']:.2g} of {report['nodes']} nodes are away on average"
    rates = f"each fails once in {report['node_mtbf_s'] / 3600:.4g} h and is repaired in {repair_s / 3600:.4g} h"
    print(f"\n{away}: {rates}; WAF in percent of that of all nodes")
    if report["counted"] < _NEARLY_ALL:
        print(f"the averages are over {100 * report['counted']:.1f} % of the time, the likeliest numbers of nodes away")
    print(_advice(report, full))


def _advice(report: Mapping[str, Any], full: int) -> str:
    pay, more = report["pay"], f"one more node would add {_share(report['next_node_waf'], full)}"
    if not pay:
        return f"no spare pays: a node that waits would achieve more by training; {more}"
    gain = report["rows"][pay]["expected_waf"] - report["rows"][0]["expected_waf"]
    brings = f"brings {_share(gain, full)}" if gain else "costs nothing: they would add nothing by training"
    return f"to keep back {pay} node{'s' * (pay > 1)} {brings}; {more}"


def _share(waf: int, of: int) -> str:
    return f"{100 * waf / of:.1f} %" if of else "0.0 %"


def _planner(options: argparse.Namespace) -> Client | PastPlans:
    """Return who answers: the coordinator, or with --at its own code on the past state. Raises UsageError."""
    client = client_of(options)
    if options.at is None:
        return client
    from unicrond.ctl.plan_past import PastPlans  # brings numpy with it, which the base install has not

    return PastPlans.at(client, options.at)


def _state(planner: Client | PastPlans) -> ClusterState:
    return planner.snapshot().state if isinstance(planner, Client) else planner.state


def _new_layout(state: ClusterState, task: str, then: dict[str, str]) -> str:
    """Describe the layout that the task would have, where that is another than now."""
    assignment = state.plan.assignments.get(task)
    now = layout_words(assignment) if assignment is not None else ""
    return f" in {then[task]}" if then.get(task, now) != now else ""


def _new_choice(state: ClusterState, task: str, row: dict[str, Any]) -> str:
    """Describe another layout and another type of GPU in a row of the table."""
    return _new_layout(state, task, row.get("layouts", {})) + _new_gpu(state, task, row.get("gpus", {}))


def _new_gpu(state: ClusterState, task: str, then: dict[str, str]) -> str:
    """Name the type of GPU that the task would be on, where that is another than now."""
    now = of_assignment(state.nodes, state.plan.assignments.get(task)) or ""
    return f" on {then[task]}" if then.get(task, now) != now else ""


def _gpu_of(state: ClusterState, share: dict[str, Any], added: str) -> dict[str, str]:
    """Return the type of GPU that a task would be on; `added`: that of nodes that do not exist yet."""
    nodes = [name for replica in share["replicas"] for name in replica]
    gpu = next((state.nodes[name].gpu if name in state.nodes else added for name in nodes), "")
    return {share["task"]: gpu} if gpu else {}


COMMANDS: dict[str, Callable[[Any], None]] = {
    "show": plan_show,
    "table": plan_foreseen,
    "whatif": plan_whatif,
    "spares": plan_spares,
}
