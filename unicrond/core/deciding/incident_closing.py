"""The end of an incident: when it is closed, and its summary."""

from __future__ import annotations

from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.deciding.plans import FLOPS_MAX
from unicrond.core.deciding.response import is_break, is_refuted
from unicrond.core.faults.severity import RESPONSE
from unicrond.core.nodes import outages
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import ClusterState, Incident, Task, TaskStatus
from unicrond.core.tasks import reconcile
from unicrond.core.worth.costs import charge_of, sub_health_flops
from unicrond.events import vocabulary as v


def close_incident(batch: DecisionBatch, incident: Incident, fresh: bool) -> None:
    """Close the incident once every task that it hit has what the plan gives it. `fresh`: the plan fits the present
    nodes and tasks."""
    state = batch.state
    if not fresh or outages.is_awaited(state, incident.id, batch.survey.policy):
        return
    for name, broken in incident.generations.items():
        task = state.tasks.get(name)
        if task is None or task.status is not TaskStatus.ACTIVE:
            continue
        # Members of a broken group cannot leave at a boundary; they form a group again first, whatever the plan says.
        apart = is_break(incident, task) and reconcile.has_state(task)
        if is_refuted(task, incident):
            continue
        if apart or not _has_recovered(batch.survey, task, broken):
            return
    end_us = incident.resumed_us or state.now_us
    detection_flop, transition_flop = charge_of(state, incident.id)
    batch.add(
        v.TransitionCompleted(
            incident=incident.id,
            response=RESPONSE[incident.severity],
            detection_us=max(0, incident.detected_us - incident.occurred_us),
            transition_us=max(0, end_us - incident.detected_us),
            micro_batches_repeated=incident.micro_batches_repeated,
            reason=_outcome(state, incident),
            detection_flop=detection_flop,
            transition_flop=transition_flop,
            sub_health_flops=min(sub_health_flops(state), FLOPS_MAX),
            micro_batches_lost=incident.micro_batches_lost,
        )
    )


def _has_recovered(survey: Survey, task: Task, broken: int) -> bool:
    """Return whether the task has left the broken generation and has what the plan gives it."""
    assignment = survey.state.plan.assignments.get(task.name)
    if assignment is not None and not assignment.workers:
        return True  # the task waits for workers by the plan, not for the incident
    if not task.confirmed or task.generation <= broken:
        return False
    if survey.settled(task):
        return True
    staff = survey.staffing(task)
    if survey.pending(task) or staff.starting:
        return False
    return task.membership is not None and staff.workers == task.member_names


def _outcome(state: ClusterState, incident: Incident) -> str:
    """Describe, per task, how the incident ended and what was lost."""
    parts = []
    if incident.nodes:
        parts.append(outages.outcome(incident))
    for name in incident.tasks:
        task = state.tasks.get(name)
        if task is None or task.status is not TaskStatus.ACTIVE:
            parts.append(f"{name} {task.status.value if task else 'unknown'}")
        else:
            members = len(task.membership.members) if task.membership else 0
            parts.append(f"{name} continues with {members} workers in generation {task.generation}")
    if incident.state_from in ("own", "replica"):
        parts.append(f"{incident.iterations_lost} iterations trained again, state from a live replica")
    elif incident.state_from:
        source = _SOURCES.get(incident.state_from, incident.state_from)
        whole = any(state.tasks[name].spec.optimizer.distributed for name in incident.tasks if name in state.tasks)
        kind = "whole optimizer state" if whole else "replica"
        micro_batches = f", {incident.micro_batches_lost} finished micro-batches" if incident.micro_batches_lost else ""
        parts.append(
            f"no {kind} survived: {incident.iterations_lost} iterations{micro_batches} lost, state from {source}"
        )
    return "; ".join(parts)[:1024] or "no task affected"


_SOURCES = {
    "memory": "memory of a member's node",
    "peer": "memory of another node",
    "checkpoint": "storage",
    "init": "the seed",
}
