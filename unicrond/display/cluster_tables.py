"""The state of a cluster as tables for people: nodes, tasks, the plan, incidents. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from unicrond.core.faults.program_faults import trouble_text
from unicrond.core.faults.severity import RESPONSE
from unicrond.core.nodes.brakes import isolation_hold, observes
from unicrond.core.nodes.drains import departure_text
from unicrond.core.nodes.gpu_types import node_types, of_assignment
from unicrond.core.nodes.isolation import waits_for
from unicrond.core.rules.healing_proofs import proof_text
from unicrond.core.state.state import ClusterState, Incident, Node, NodeStatus, Task, TaskStatus, WorkerStatus
from unicrond.core.state.task_parts import Straggler
from unicrond.core.state.work import achieved_waf, delivered_flop
from unicrond.core.tasks.task_rules import BUILT_IN
from unicrond.core.worth.costs import costs_at
from unicrond.core.worth.gradient_memory import ELEMENT_BYTES, gradients, parameters
from unicrond.display.queue import pending_reason
from unicrond.display.tables import Table
from unicrond.display.worth import achieved_now, planned_wafs, si, waf_in
from unicrond.events.vocabulary import TaskAssignment
from unicrond.events.vocabulary.phrases import to_the_second

#: Rows of a live view before it says "and N more".
NODES_SHOWN = 16
#: The values of `node_status`.
NODE_STATUSES = ("up", "leaving", "isolated", "drained", "cordoned", "lost", "left")


def milliseconds(duration_us: int) -> str:
    """Format microseconds as whole milliseconds, with one decimal below ten."""
    return f"{duration_us / 1000:.1f}" if duration_us < 10_000 else f"{duration_us / 1000:.0f}"


def node_status(node: Node) -> str:
    """Return up, lost or left; for a node that is up but gets no workers, leaving, isolated, drained or cordoned."""
    if node.status is not NodeStatus.UP:
        return node.status.value
    if node.departure.announced:
        return "leaving"
    if node.isolation.active:
        return "isolated"
    return ("drained" if node.cordon.draining else "cordoned") if node.cordon.active else "up"


def _node_reason(state: ClusterState, node: Node) -> str:
    """Return why the node does not work, and what it waits for; "" where it works."""
    prediction = "" if node.isolation.active else node.health.failure_forecast
    failure = prediction and f"expected to fail: {prediction}"
    hold = isolation_hold(state, node.name)
    hold_text = f"not isolated, held by policy.{hold.limit}: {hold.reason}" if hold else ""
    return "; ".join(
        filter(
            None,
            (hold_text, waits_for(state, node), node.reason or node.cordon.reason, departure_text(node), failure),
        )
    )


def nodes_table(
    state: ClusterState, rows_max: int | None = None, outbox_backlog: Mapping[str, Mapping[str, float]] | None = None
) -> Table:
    """Build a table with a row per node; with `rows_max`, nodes in trouble come first and the rest is summed up.
    `outbox_backlog`: of /v1/state."""
    workers_on = {name: len(state.by_node.on(name)) for name in state.nodes}
    workers: dict[str, list[str]] = {}
    for task in state.tasks.values():
        for worker in task.workers.values():
            mark = "" if worker.status is WorkerStatus.MEMBER else f" ({worker.status.value})"
            workers.setdefault(worker.node, []).append(f"{worker.worker}{mark}")
    nodes = sorted(state.nodes.values(), key=lambda node: node.name)
    rest: list[Node] = []
    if rows_max is not None and len(nodes) > rows_max:
        nodes.sort(key=lambda node: node_status(node) == "up")
        nodes, rest = nodes[:rows_max], nodes[rows_max:]
    rows: list[tuple[str, ...]] = [
        (
            node.name,
            "draining" if node_status(node) == "drained" and workers_on[node.name] else node_status(node),
            f"{workers_on[node.name]}/{node.slots}",
            ", ".join(workers.get(node.name, ())) or "-",
            "; ".join(filter(None, (_keeps_back(outbox_backlog, node), _node_reason(state, node)))) or "-",
        )
        for node in nodes
    ]
    headers: tuple[str, ...] = ("node", "status", "used", "workers", "reason")
    if any(node.gpu for node in nodes):
        headers, rows = (*headers, "GPU"), [(*row, node.gpu or "-") for row, node in zip(rows, nodes, strict=True)]
    if any(node.domain for node in nodes):
        headers, rows = (*headers, "domain"), [(*row, n.domain or "-") for row, n in zip(rows, nodes, strict=True)]
    if rest:
        counts = ", ".join(f"{count} {status}" for status, count in Counter(map(node_status, rest)).items())
        rows.append((f"and {len(rest)} more", counts, *([""] * (len(headers) - 2))))
    return Table(headers, tuple(rows), frozenset({"used"}), "no nodes")


def windows_table(state: ClusterState) -> Table:
    """Build a table of the planned maintenance windows, the next first."""
    rows = [
        (
            name,
            "open" if window.from_us <= state.now_us else "near" if window.near else "planned",
            ", ".join(window.nodes),
            to_the_second(window.from_us),
            to_the_second(window.until_us),
            window.reason,
        )
        for name, window in sorted(state.windows.items(), key=lambda entry: entry[1].from_us)
    ]
    headers = ("window", "status", "nodes", "from", "until", "reason")
    return Table(headers, tuple(rows), frozenset(), "no window is planned")


def windows_of(state: ClusterState, node: str) -> list[str]:
    """Return a line for each maintenance window of the node."""
    return [
        f"{name} from {to_the_second(window.from_us)} to {to_the_second(window.until_us)}: {window.reason}"
        for name, window in state.windows.items()
        if node in window.nodes
    ]


def turns(state: ClusterState) -> list[str]:
    """Return a line for each task that waits for workers under a bound, or has them in its turn (starvation.py)."""
    lines = []
    for task in state.tasks.values():
        turn, need = task.turn, f"{task.spec.min_workers} worker{'s' * (task.spec.min_workers != 1)}"
        if not state.starvation_us or task.status is not TaskStatus.ACTIVE:
            continue
        if turn.turn_since_us:
            until = to_the_second(turn.turn_since_us + state.starvation_us)
            lines.append(f"{task.name} has its turn: {need} before others until {until}")
        elif turn.overdue_us:
            lines.append(f"{task.name} is overdue: {need} before others as soon as they can be had")
        elif turn.waits_since_us:
            since, due_at = map(to_the_second, (turn.waits_since_us, turn.waits_since_us + state.starvation_us))
            lines.append(f"{task.name} has waited since {since}: {need} before others at {due_at}")
    return lines


def departures(state: ClusterState) -> list[str]:
    """Return a line for each planned departure that is not over: of nodes, and of windows."""
    lines = [
        f"node {node.name} {when}"
        for node in state.nodes.values()
        if not node.cordon.window and (when := departure_text(node))
    ]
    lines += [
        f"node {node.name} is expected to fail: {node.health.failure_forecast}"
        for node in state.nodes.values()
        if node.health.failure_forecast
    ]
    for name, window in state.windows.items():
        when = f"{to_the_second(window.from_us)} to {to_the_second(window.until_us)}"
        lines.append(f"maintenance {name} of {', '.join(window.nodes)}: {when}")
    return lines


def _keeps_back(outbox_backlog: Mapping[str, Mapping[str, float]] | None, node: Node) -> str:
    backlog = (outbox_backlog or {}).get(node.name)
    if backlog is None:
        return ""
    return f"holds back {backlog['entries']:.0f} observations, the oldest for {backlog['oldest_s']:.0f} s"


def workers_table(state: ClusterState, task: str = "", node: str = "") -> Table:
    """Build a table with a row per worker, by task and rank. `task`, `node`: only workers of these. The pid is the one
    on the node, for `kill` and `py-spy`."""
    rows = []
    for owner in state.tasks.values():
        if task not in ("", owner.name):
            continue
        ranks = ranks_of(owner)
        for worker in sorted(
            owner.workers.values(), key=lambda member: (ranks.get(member.worker, 1 << 30), member.worker)
        ):
            if node not in ("", worker.node):
                continue
            slow = owner.group.stragglers.get(worker.worker)
            notes = [f"busy: {worker.section}"] if worker.section else []
            notes += [f"{slow.factor:.2f} times as slow as the others"] if slow else []
            notes += [slow.deal.phrase()] if slow and slow.deal else []
            rows.append(
                (
                    worker.worker,
                    str(ranks.get(worker.worker, "-")),
                    worker.node,
                    str(worker.pid or "-"),
                    worker.status.value,
                    str(owner.generation_of(worker)),
                    f"{worker.replica}/{worker.shard}",
                    "; ".join(notes) or "-",
                )
            )
    headers = ("worker", "rank", "node", "pid", "status", "generation", "replica/shard", "note")
    return Table(headers, tuple(rows), frozenset({"rank", "pid", "generation"}), "no workers")


def ranks_of(task: Task) -> dict[str, int]:
    """Map each member to its rank in the newest membership."""
    members = task.membership.members if task.membership is not None else ()
    return {member.worker: rank for rank, member in enumerate(members)}


def task_workers(task: Task) -> str:
    """Format the number of members and the bounds: "2 of 1..3"."""
    members = len(task.membership.members) if task.membership else 0
    return f"{members} of {task.spec.min_workers}..{task.spec.max_workers}"


def loss(value: float | None) -> str:
    """Format a loss, or "-" where none is known."""
    return "-" if value is None else f"{value:.4f}"


def tasks_table(state: ClusterState, *, has_all_tasks: bool = True) -> Table:
    """Build a table with a row per task, in the order of submission. `has_all_tasks`: the state has those of all
    owners."""
    rows = [
        (
            task.name,
            task.status.value,
            f"{task.spec.weight:g}",
            f"{task.spec.priority}{'p' * task.spec.preemptible}",
            task_workers(task),
            f"{task.progress.iteration}/{task.spec.iterations}",
            loss(task.progress.loss),
            milliseconds(task.pace.iteration_us) if task.pace.iteration_us else "-",
            waf_in(state, achieved_now(state, task)),
            task.ending.reason.partition("\n")[0]
            or "; ".join(
                filter(
                    None,
                    (
                        "observed" * observes(state, task),
                        trouble_text(task),
                        pending_reason(state, task, has_all_tasks=has_all_tasks),
                        proof_text(state, task),
                    ),
                )
            )
            or _reshaping(task)
            or _slow(task)
            or "-",
        )
        for task in state.tasks.values()
    ]
    headers = ("task", "status", "weight", "priority", "workers", "iteration", "loss", "ms/iteration", "WAF", "reason")
    right = frozenset({"weight", "priority", "iteration", "loss", "ms/iteration", "WAF"})
    return Table(headers, tuple(rows), right, "no tasks")


def stragglers_table(state: ClusterState) -> Table:
    """Build a table of the members of active tasks that are slower than the other replicas."""
    rows = [
        (
            straggler.worker,
            str(rank),
            straggler.node,
            f"{straggler.factor:.2f}",
            f"{milliseconds(straggler.compute_us)} ms",
            f"{milliseconds(straggler.others_us)} ms",
            straggler.deal.phrase() if straggler.deal else "-",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(straggler.since_us / 1e6)),
            str(straggler.since_iteration),
        )
        for rank, straggler in stragglers(state)
    ]
    headers = ("straggler", "rank", "node", "factor", "micro-batch", "others", "deal", "since", "iteration")
    return Table(headers, tuple(rows), frozenset({"rank", "factor", "micro-batch", "others", "iteration"}), "none")


def links_table(state: ClusterState) -> Table:
    """Build a table of the links that are bad by the word of both ends."""
    rows = [
        (
            f"{link.first}-{link.second}",
            f"{' -> '.join(way)} is cut" if (way := link.cut_way) else "nothing passes" if link.is_silent else "slow",
            f"{max(link.took_us.values(), default=0) / 1e6:.2f} s",
            "no task on both" if link.is_barred else "none",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(link.since_us / 1e6)),
            str(link.times),
        )
        for link in state.links.values()
        if link.is_poor
    ]
    headers = ("link", "condition", "probe", "response", "since", "times")
    return Table(headers, tuple(rows), frozenset({"probe", "times"}), "none")


def stragglers(state: ClusterState) -> list[tuple[int, Straggler]]:
    """Return the stragglers of all active tasks, each with its rank."""
    ranked = []
    for task in state.tasks.values():
        if task.group.stragglers and task.membership is not None and task.status is TaskStatus.ACTIVE:
            ranks = ranks_of(task)
            ranked += [(ranks[name], straggler) for name, straggler in task.group.stragglers.items() if name in ranks]
    return ranked


def _slow(task: Task) -> str:
    """Describe the slowest of the task's stragglers in a few words."""
    if not task.group.stragglers or task.status is not TaskStatus.ACTIVE:
        return ""
    slowest = max(task.group.stragglers.values(), key=lambda straggler: straggler.factor)
    deal = f": {slowest.deal.phrase()}" if slowest.deal else ""
    rest = f", {len(task.group.stragglers) - 1} more" if len(task.group.stragglers) > 1 else ""
    return f"{slowest.worker} on {slowest.node} takes {slowest.factor:.2f} times as long as the others{deal}{rest}"


def _reshaping(task: Task) -> str:
    request = task.reshaping.reshape
    return f"changes to {request.shape}" if request else ""


def plan_table(state: ClusterState) -> Table:
    """Build a table of each task's share under the adopted plan, and its worth."""
    rows: list[tuple[str, ...]] = []
    wafs = planned_wafs(state)
    for name, assignment in state.plan.assignments.items():
        task = state.tasks.get(name)
        counts = Counter(node for nodes in assignment.replicas for node in nodes)
        where = ", ".join(node if count == 1 else f"{node} x{count}" for node, count in counts.items())
        rows.append(
            (
                name,
                str(assignment.workers),
                str(len(assignment.replicas)),
                waf_in(state, wafs[name]),
                waf_in(state, achieved_now(state, task)) if task else "-",
                where or "waits for workers",
            )
        )
    headers: tuple[str, ...] = ("task", "workers", "replicas", "planned WAF", "achieved WAF", "nodes")
    right = frozenset({"workers", "replicas", "planned WAF", "achieved WAF"})
    layouts = [layout_words(assignment) for assignment in state.plan.assignments.values()]
    if any(layouts):
        headers = (*headers, "layout")
        rows = [(*row, layout) for row, layout in zip(rows, layouts, strict=True)]
    if node_types(state.nodes.values())[1]:
        headers = (*headers, "GPU")
        types = [of_assignment(state.nodes, assignment) or "-" for assignment in state.plan.assignments.values()]
        rows = [(*row, gpu) for row, gpu in zip(rows, types, strict=True)]
    return Table(headers, tuple(rows), right, "no task is planned")


def layout_words(assignment: TaskAssignment) -> str:
    """Format the layout that a plan has chosen; "" where the task had no choice."""
    return str(assignment.shape or "")


def gradients_table(state: ClusterState) -> Table:
    """Build a table of the memory that a worker's gradients take, for each planned task (gradient_memory.py)."""
    rows = []
    for name, assignment in state.plan.assignments.items():
        task, replicas = state.tasks.get(name), len(assignment.replicas)
        if task is None or not replicas:
            continue
        count = gradients(task.spec, replicas)
        size_bytes = ELEMENT_BYTES * parameters(task.spec)
        built_in = task.spec.entry == BUILT_IN
        rows.append(
            (
                name,
                f"fixed, {task.spec.lanes} lanes" if task.spec.lanes else "follow",
                str(replicas),
                str(count.sums),
                str(count.results),
                str(count.healing),
                si(size_bytes, "B") if built_in else "a gradient",
                si(count.most * size_bytes, "B") if built_in else f"{count.most} gradients",
            )
        )
    headers = ("task", "numerics", "replicas", "sums", "result", "in healing", "each", "gradients of a worker")
    return Table(headers, tuple(rows), frozenset(headers[2:]), "no task is planned")


def costs_table(costs: Mapping[str, float]) -> Table:
    """Build a table of the uses of the cluster's failure-free work, in weighted FLOP (costs.py)."""
    free = costs["failure_free_flop"]
    rows = [
        (name.removesuffix("_flop").replace("_", " "), si(flop, "FLOP"), f"{100 * flop / free:.2f} %" if free else "-")
        for name, flop in costs.items()
    ]
    return Table(("weighted work", "amount", "share"), tuple(rows), frozenset({"amount", "share"}))


def incidents_table(state: ClusterState, now_us: int, last: int | None = None) -> Table:
    """Build a table of closed incidents, then open ones, oldest first; of the closed ones only the `last`, if given.

    Times of an open incident run until `now_us`. `repeated`: micro-batches computed again, and whole iterations.
    """
    closed = (
        state.closed_incidents
        if last is None
        else state.closed_incidents[len(state.closed_incidents) - min(last, len(state.closed_incidents)) :]
    )
    rows = [_incident_row(incident, now_us) for incident in (*closed, *state.incidents.values())]
    headers = ("incident", "sev", "cause", "tasks", "response", "detection", "transition", "repeat", "what")
    return Table(headers, tuple(rows), frozenset({"detection", "transition", "repeat"}), "no incident")


def _incident_row(incident: Incident, now_us: int) -> tuple[str, ...]:
    detection_us = incident.detection_us or max(0, incident.detected_us - incident.occurred_us)
    end_us = incident.resumed_us or (now_us if not incident.closed_us else incident.closed_us)
    transition_us = incident.transition_us or max(0, end_us - incident.detected_us)
    return (
        incident.id,
        incident.severity.name,
        incident.kind,
        ", ".join(incident.tasks) or "-",
        incident.response if incident.closed_us else f"{RESPONSE[incident.severity]} (open)",
        f"{milliseconds(detection_us)} ms",
        f"{milliseconds(transition_us)} ms",
        f"{incident.micro_batches_repeated}, {incident.iterations_lost} iterations"
        if incident.iterations_lost
        else str(incident.micro_batches_repeated),
        incident.message.partition("\n")[0],
    )


def derived_values(state: ClusterState, now_us: int) -> dict[str, Any]:
    """Return {"derived": {"waf", "delivered_flop"} by task, "costs"}, in FLOP/s and FLOP. `now_us`: wall clock."""
    by_task = {
        "waf": {task.name: achieved_waf(task, state.now_us) for task in state.tasks.values()},
        "delivered_flop": {task.name: delivered_flop(task) for task in state.tasks.values()},
    }
    # As floats: JSON's integers end long before a large cluster's work does.
    costs = {name: float(flop) for name, flop in costs_at(state, now_us)._asdict().items()}
    return {"derived": by_task, "costs": costs}
