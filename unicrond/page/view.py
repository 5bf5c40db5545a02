"""What the page shows of a state, as plain JSON types: small, for a thousand nodes are asked for every second. Pure.

    {"seq", "now_us", "term", "attention", "nodes", "tasks", "incidents", "incidents_total", "waf_unit",
     "linear_flops", "plan"}

Workers stand with their nodes as [task, number, rank, status]: the task's place in `tasks`, the rank -1 for one that is
no member. Nodes that tell a type of GPU have it (`gpu`); tasks and the plan's shares where there are several. A task's
ranks, with what each does, are asked for one task at a time (`ranks_of`); the end of a worker's log is with its events.
`hide`: what becomes of a text that may hold a secret. `now_us`: a head's wall clock; 0: the log's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unicrond.core.faults.program_faults import trouble_text
from unicrond.core.faults.severity import RESPONSE
from unicrond.core.nodes.drains import departure_text
from unicrond.core.nodes.gpu_types import node_types, of_assignment, of_members
from unicrond.core.nodes.isolation import waits_for
from unicrond.core.rules.healing_proofs import proof_text
from unicrond.core.state.state import ClusterState, Incident, Node, NodeStatus, Task, TaskStatus
from unicrond.core.state.work import LINEAR_FLOPS, iteration_flop
from unicrond.core.worth.waf import waf_unit
from unicrond.display.cluster_tables import node_status
from unicrond.display.plan_explanation import explain_plan
from unicrond.display.queue import pending_reason
from unicrond.display.worth import achieved_now, healthy_waf, planned_wafs
from unicrond.page.attention import attention

#: Closed incidents, the newest.
CLOSED_SHOWN = 200


def view(state: ClusterState, hide: Callable[[str], str] = str, now_us: int = 0) -> dict[str, Any]:
    """Return all that the page shows of a state."""
    places = {name: number for number, name in enumerate(state.tasks)}
    several = bool(node_types(state.nodes.values())[1])
    workers: dict[str, list[list[Any]]] = {}
    for task in state.tasks.values():
        ranks = _ranks(task)
        for worker in task.workers.values():
            number = int(worker.worker.rpartition(".")[2])
            row = [places[task.name], number, ranks.get(worker.worker, -1), worker.status.value]
            workers.setdefault(worker.node, []).append(row)
    return {
        "seq": state.seq,
        "now_us": state.now_us,
        "term": state.term,
        "attention": attention(state, hide, now_us),
        "nodes": [_node(state, node, workers.get(node.name, []), hide) for node in state.nodes.values()],
        "tasks": [_task(state, task, hide) | _gpu(state, task, several) for task in state.tasks.values()],
        "incidents": [
            _incident(incident, hide)
            for incident in (*state.closed_incidents[-CLOSED_SHOWN:], *state.incidents.values())
        ],
        "incidents_total": state.incidents_total,
        "waf_unit": waf_unit(state),
        "linear_flops": LINEAR_FLOPS,
        "plan": _plan(state, several),
    }


def ranks_of(task: Task, hide: Callable[[str], str] = str) -> list[dict[str, Any]]:
    """Return a task's members in rank order: where each is, and what it is known to do. Only a member that stands still
    has its mark here; the others train."""
    rows = []
    for rank, member in enumerate(task.membership.members if task.membership else ()):
        worker = task.workers.get(member.worker)
        row: dict[str, Any] = {
            "rank": rank,
            "worker": member.worker,
            "node": member.node,
            "replica": member.replica,
            "shard": member.shard,
            "status": worker.status.value if worker else "lost",
            "pid": worker.pid if worker else 0,
            "in_group": worker is not None and task.has_joined(worker),
            "busy": hide(worker.section) if worker else "",
        }
        if still := task.group.suspicions.get(member.worker):
            row["still"] = {
                "phase": still.phase,
                "iteration": still.iteration,
                "micro_batch": still.micro_batch,
                "collective": still.collectives_entered,
                "is_waiting": still.is_waiting,
                "still_us": still.still_us,
            }
        if slow := task.group.stragglers.get(member.worker):
            row["factor"] = slow.factor
            row["deal"] = slow.deal.phrase() if slow.deal else ""
        rows.append(row)
    return rows


def _ranks(task: Task) -> dict[str, int]:
    return {member.worker: rank for rank, member in enumerate(task.membership.members if task.membership else ())}


def _node(state: ClusterState, node: Node, workers: list[list[Any]], hide: Callable[[str], str]) -> dict[str, Any]:
    status = node_status(node)
    row: dict[str, Any] = {"name": node.name, "status": status, "slots": node.slots, "workers": workers}
    if status != "up" or node.health.repair_need:
        waits = waits_for(state, node) if node.isolation.active else ""
        row["reason"] = hide("; ".join(filter(None, (waits, node.reason or node.cordon.reason, departure_text(node)))))
    if node.status is NodeStatus.UP:
        row["address"] = node.address
    if node.gpu:
        row["gpu"] = node.gpu
    if node.domain:
        row["domain"] = node.domain
    return row


def _gpu(state: ClusterState, task: Task, several: bool) -> dict[str, str]:
    """Return the type of GPU that the task's group is on, where there are several."""
    members = task.membership.members if task.membership and task.status is TaskStatus.ACTIVE else ()
    return {"gpu": of_members(state, members)} if several else {}


def _task(state: ClusterState, task: Task, hide: Callable[[str], str]) -> dict[str, Any]:
    spec, pace_us = task.spec, task.pace.iteration_us
    active = task.status is TaskStatus.ACTIVE
    members = len(task.membership.members) if task.membership and active else 0
    iterations_left = spec.iterations - task.progress.iteration
    per_s = 1e6 / pace_us if pace_us and active and task.confirmed else 0.0
    return {
        "name": task.name,
        "status": task.status.value,
        "reason": hide(task.ending.reason.partition("\n")[0] or trouble_text(task)) or pending_reason(state, task),
        "weight": spec.weight,
        "workers": members,
        "min_workers": spec.min_workers,
        "max_workers": spec.max_workers,
        "tp": spec.tp,
        "pp": spec.pp,
        "replica_workers": spec.replica_workers,
        "layout": str(spec.shape),
        "generation": task.generation,
        "whole": task.confirmed and task.all_able,
        "iteration": task.progress.iteration,
        "iterations": spec.iterations,
        "loss": task.progress.loss,
        "step_us": pace_us,
        "tokens_per_s": per_s * spec.global_batch * spec.model.seq,
        "flops": per_s * iteration_flop(spec),
        "waf": achieved_now(state, task),
        "eta_us": iterations_left * pace_us if per_s else None,
        "checkpoint": task.progress.checkpoint_iteration,
        "stragglers": len(task.group.stragglers),
        "healing": proof_text(state, task),
    }


def _incident(incident: Incident, hide: Callable[[str], str]) -> dict[str, Any]:
    return {
        "id": incident.id,
        "kind": incident.kind,
        "severity": incident.severity.name,
        "node": incident.node or incident.location,
        "worker": incident.worker,
        "tasks": list(incident.tasks),
        "message": hide(incident.message),
        "place": hide(incident.place),
        "symptoms": incident.symptoms,
        "response": incident.response or RESPONSE[incident.severity],
        "occurred_us": incident.occurred_us,
        "detected_us": incident.detected_us,
        "resumed_us": incident.resumed_us,
        "closed_us": incident.closed_us,
        "detection_us": incident.detection_us or max(0, incident.detected_us - incident.occurred_us),
        "transition_us": incident.transition_us,
        "micro_batches_repeated": incident.micro_batches_repeated,
        "iterations_lost": incident.iterations_lost,
        "state_from": incident.state_from,
        "flop": incident.detection_flop + incident.transition_flop,
    }


def _plan(state: ClusterState, several: bool) -> dict[str, Any]:
    plan, wafs = state.plan, planned_wafs(state)
    return {
        "epoch": plan.epoch,
        "trigger": plan.trigger,
        "reason": plan.reason,
        "why": explain_plan(state),
        "method": plan.method,
        "took_us": plan.duration_us,
        "adopted_us": plan.adopted_us,
        "waf": float(sum(wafs.values())),
        "waf_if_healthy": float(healthy_waf(state)),
        "transition_flop": plan.transition_flop,
        "tasks": [
            {
                "task": name,
                "workers": share.workers,
                "waf": float(wafs[name]),
                "healthy": plan.healthy.get(name, 0),
                **({"gpu": of_assignment(state.nodes, share) or ""} if several else {}),
            }
            for name, share in plan.assignments.items()
        ],
    }
