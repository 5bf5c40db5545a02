"""Decisions about incidents: escalation, and the end."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.faults import blame, program_faults
from unicrond.core.faults.severity import severity_of
from unicrond.core.folding import failure_counts as strikes
from unicrond.core.folding import holds, incidents
from unicrond.core.nodes import brakes
from unicrond.core.state.changes import find_worker, with_task, with_worker
from unicrond.core.state.incident_lifecycle import IncidentTrigger, advance
from unicrond.core.state.state import CLOSED_INCIDENTS_MAX, ClusterState, Incident, Severity, Task, TaskStatus
from unicrond.core.state.worker_lifecycle import given_up
from unicrond.core.state.workers import WorkerError
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope


def incident_escalated(state: ClusterState, event: v.IncidentEscalated, _: Envelope) -> ClusterState:
    """Give up a worker for the incident, which becomes as severe as the event says, or stays worse."""
    incident = state.incidents.get(event.incident)
    pair = find_worker(state, event.worker.rpartition(".")[0], event.worker)
    if incident is None or pair is None or not pair[1].alive:
        return state
    if brakes.is_on_suspicion(state, event):
        state = holds.count_eviction(state, pair[0].name)
    task, worker = state.tasks[pair[0].name], pair[1]
    broken = incidents.broken_generation(task, [worker.worker])
    broke = severity_of(incident.kind, state.severity) is Severity.SEV3
    breaks_again = task.is_member(worker.worker) and broken > incident.generations.get(task.name, 0)
    echoes = [] if incidents.is_symptom(incident) else _echoes(state, incident, task, broken)
    unclear = broke and worker.node not in blame.verdict(task, incident).clear
    if broke and incidents.is_symptom(incident):  # the first of several workers that are given up for it
        task = strikes.count_ends(task, blame.evidence(task, incident))
    incident = advance(
        incident,
        IncidentTrigger.WORKER_GIVEN_UP,
        severity=min(Severity(event.severity), incident.severity),
        node=worker.node,
        worker=worker.worker,
        generations=incident.generations | {task.name: broken},
        resumed_us=0 if breaks_again else incident.resumed_us,
    )
    task = with_worker(task, given_up(worker))
    if broke:
        task = strikes.count_strike(task, worker, broke=True, unclear=unclear)
    else:
        error = worker.error or WorkerError(kind=incident.kind, text=incident.message)
        verdict = program_faults.judge_report(error)
        ordered = strikes.is_ordered(worker, incident.kind)
        task = strikes.count_failure(
            task, worker, verdict, now_us=state.now_us, log_tail=incident.log_tail, excluded_from_blame=ordered
        )
        if not ordered and program_faults.is_part_of_last(task, worker, verdict):
            incident = replace(incident, is_program_fault=True)
    return holds.without_hold(
        incidents.take_over(with_task(state, task), incident, echoes), v.hold_key("eviction", worker=event.worker)
    )


def _echoes(state: ClusterState, cause: Incident, task: Task, generation: int) -> list[Incident]:
    """Return the other open incidents, of which no more is known than that this generation of the task broke."""
    return [
        incident
        for incident in state.incidents.values()
        if incident is not cause
        and incidents.is_symptom(incident)
        and incidents.is_same_break(task, incident.generations.get(task.name, -1), generation)
    ]


def transition_completed(state: ClusterState, event: v.TransitionCompleted, _: Envelope) -> ClusterState:
    """Close the incident, with its costs in time (microseconds) and FLOP."""
    incident = state.incidents.get(event.incident)
    if incident is None:
        return state
    closed = replace(
        incident,
        response=event.response,
        closed_us=state.now_us,
        detection_us=event.detection_us,
        transition_us=event.transition_us,
        detection_flop=event.detection_flop,
        transition_flop=event.transition_flop,
        sub_health_flops=event.sub_health_flops,
        links={},
    )
    for name in incident.tasks if incident.resumed_us and not incident.is_program_fault else ():
        task = state.tasks.get(name)
        if task is not None and task.status is TaskStatus.ACTIVE:
            transition_us = moving_average(task.pace.transition_us, event.transition_us)
            state = with_task(state, replace(task, pace=replace(task.pace, transition_us=transition_us)))
    return replace(
        state,
        incidents={name: i for name, i in state.incidents.items() if name != event.incident},
        closed_incidents=(*state.closed_incidents, closed)[-CLOSED_INCIDENTS_MAX:],
    )


def moving_average(before_us: int, measured_us: int) -> int:
    """Return the exponential moving average of a duration in microseconds, such as D_transition of a task: the newest
    counts a quarter."""
    return max(1, (3 * before_us + measured_us) // 4 if before_us else measured_us)
