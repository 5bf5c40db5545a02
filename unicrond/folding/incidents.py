"""Incidents: facts open them (`blame`), and only decisions close them.

Rules
-----
* One incident per (task, generation): the first root cause names it.
* A broken connection is a symptom, and gives its place to the cause that explains it. So does any other cause to a
  worse one on another node: the response to it is about that node.
* A lost node is one incident for all its tasks and takes over what it explains.
"""

from __future__ import annotations

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from unicrond.folding import strikes
from unicrond.folding.changes import with_incident, with_task, with_worker, worker_known
from unicrond.severity import severity_of
from unicrond.state import CLOSED_INCIDENTS_MAX, ClusterState, Incident, Severity, Task, TaskStatus, WorkerStatus


def is_symptom(incident: Incident) -> bool:
    """It may still turn out to be the echo of a death or of a lost node."""
    return incident.severity is Severity.SEV3


def broken_generation(task: Task, workers: list[str]) -> int:
    """The generation that the loss of these workers breaks (see Incident.generations)."""
    return task.generation if any(task.is_member(worker) for worker in workers) else task.generation - 1


def blame(
    state: ClusterState,
    envelope: Envelope,
    *,
    kind: str,
    node: str,
    worker: str,
    generations: dict[str, int],
    message: str,
    log_tail: str = "",
    place: str = "",
) -> ClusterState:
    """Opens an incident, or gives the fact to the open one that it belongs to."""
    severity = severity_of(kind, state.severity)

    def shares_generation(incident: Incident) -> bool:
        return any(incident.generations.get(task) == broken for task, broken in generations.items())

    # The generation says more than the worker, who may have reported an older group's end as well.
    for incident in sorted(state.incidents.values(), key=shares_generation, reverse=True):
        if not shares_generation(incident) and not (worker and incident.worker == worker):
            continue
        if severity < incident.severity and (is_symptom(incident) or node != incident.node):
            # The root cause of what so far was only a broken connection; or what is worse, and acts on another node.
            return with_incident(
                state,
                replace(
                    incident,
                    kind=kind,
                    severity=severity,
                    node=node,
                    worker=worker,
                    generations=incident.generations | generations,
                    message=message,
                    log_tail=log_tail,
                    place=place or incident.place,
                    ripe=False,
                    occurred_us=min(incident.occurred_us, envelope.observed_at_us),
                    symptoms=incident.symptoms + 1,
                ),
            )
        return with_incident(
            state,
            replace(
                incident,
                severity=min(severity, incident.severity),
                generations=incident.generations | generations,
                log_tail=incident.log_tail or log_tail,
                symptoms=incident.symptoms + 1,
            ),
        )
    return open_incident(
        state,
        envelope,
        kind=kind,
        node=node,
        worker=worker,
        generations=generations,
        message=message,
        log_tail=log_tail,
        place=place,
        occurred_us=envelope.observed_at_us,
    )


def open_incident(
    state: ClusterState,
    envelope: Envelope,
    *,
    kind: str,
    node: str,
    worker: str,
    generations: dict[str, int],
    message: str,
    log_tail: str,
    place: str = "",
    occurred_us: int,
) -> ClusterState:
    incident = Incident(
        id=f"i{state.seq}",
        kind=kind,
        severity=severity_of(kind, state.severity),
        node=node,
        worker=worker,
        generations=generations,
        message=message,
        occurred_us=occurred_us,
        detected_us=state.now_us,
        log_tail=log_tail,
        place=place,
    )
    return replace(with_incident(state, incident), incidents_total=state.incidents_total + 1)


def lose_workers_of(
    state: ClusterState,
    envelope: Envelope,
    node: str,
    gone: dict[str, list[str]],
    *,
    kind: str,
    message: str,
    occurred_us: int,
) -> ClusterState:
    """One incident for all that was lost with a node; it takes over the incidents that it explains."""
    generations = {
        task: broken_generation(state.tasks[task], workers)
        for task, workers in gone.items()
        if state.tasks[task].status is TaskStatus.ACTIVE
    }
    explained = [
        incident
        for incident in state.incidents.values()
        if incident.node == node or (is_symptom(incident) and any(task in generations for task in incident.tasks))
    ]
    for incident in explained:
        generations = incident.generations | generations
        occurred_us = min(occurred_us, incident.occurred_us)
    state = replace(state, incidents={k: i for k, i in state.incidents.items() if i not in explained})
    state = open_incident(
        state,
        envelope,
        kind=kind,
        node=node,
        worker="",
        generations=generations,
        message=message,
        log_tail="",
        occurred_us=occurred_us,
    )
    opened = state.incidents[f"i{state.seq}"]
    symptoms = sum(1 + incident.symptoms for incident in explained)
    detected_us = min([opened.detected_us, *(incident.detected_us for incident in explained)])
    redone = sum(incident.redone for incident in explained)
    return with_incident(state, replace(opened, symptoms=symptoms, detected_us=detected_us, redone=redone))


def incident_escalated(state: ClusterState, event: v.IncidentEscalated, _: Envelope) -> ClusterState:
    incident = state.incidents.get(event.incident)
    known = worker_known(state, event.worker.rpartition(".")[0], event.worker)
    if incident is None or known is None or not known[1].alive:
        return state
    task, worker = known
    broken = broken_generation(task, [worker.worker])
    incident = replace(
        incident,
        severity=min(Severity(event.severity), incident.severity),
        node=worker.node,
        worker=worker.worker,
        generations=incident.generations | {task.name: broken},
        ripe=True,
    )
    task = strikes.struck(with_worker(task, replace(worker, status=WorkerStatus.LOST)), worker)
    return with_incident(with_task(state, task), incident)


def transition_completed(state: ClusterState, event: v.TransitionCompleted, _: Envelope) -> ClusterState:
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
    )
    if incident.severity < Severity.SEV3:
        state = replace(state, ledger=replace(state.ledger, failures=state.ledger.failures + 1))
    for name in incident.tasks if incident.resumed_us else ():
        task = state.tasks.get(name)
        if task is not None and task.status is TaskStatus.ACTIVE:
            state = with_task(state, replace(task, transition_us=_averaged(task.transition_us, event.transition_us)))
    return replace(
        state,
        incidents={name: i for name, i in state.incidents.items() if name != event.incident},
        closed=(*state.closed, closed)[-CLOSED_INCIDENTS_MAX:],
    )


def _averaged(before_us: int, measured_us: int) -> int:
    """D_transition of a task: the newest transition counts a quarter."""
    return max(1, (3 * before_us + measured_us) // 4 if before_us else measured_us)
