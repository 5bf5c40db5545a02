"""Workers: from start to exit, and what they say of themselves."""

from __future__ import annotations

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from unicrond.core.changes import (
    stray,
    with_incident,
    with_moved,
    with_task,
    with_worker,
    without_workers,
    worker_known,
)
from unicrond.core.folding import incidents, strikes
from unicrond.core.folding.incidents import Fact
from unicrond.core.severity import severity_of
from unicrond.core.state import ClusterState, Membership, Severity, Task, TaskStatus, WorkerStatus
from unicrond.core.worker_life import can_move


def worker_started(state: ClusterState, event: v.WorkerStarted, _: Envelope) -> ClusterState:
    """The process id; a worker of a known task that no command began is a stray."""
    task = state.tasks.get(event.task)
    if task is None:
        return state
    worker = task.workers.get(event.worker)
    if worker is None:
        return with_task(state, with_worker(task, stray(event.worker, event.node, event.pid)))
    return with_task(state, with_worker(task, replace(worker, pid=event.pid)))


def worker_ready(state: ClusterState, event: v.WorkerReady, _: Envelope) -> ClusterState:
    """The worker has started up and waits for a membership."""
    known = worker_known(state, event.task, event.worker)
    if known is None or not can_move(known[1], v.WorkerReady):
        return state
    task, worker = known
    return with_task(state, with_moved(task, worker, v.WorkerReady))


def worker_regrouped(state: ClusterState, event: v.WorkerRegrouped, _: Envelope) -> ClusterState:
    """The worker trains in `generation`; when all of an incident's task do, training has resumed."""
    known = worker_known(state, event.task, event.worker)
    if known is None or not can_move(known[1], v.WorkerRegrouped) or event.generation > known[0].generation:
        return state
    task, worker = known
    if event.generation < task.generation_of(worker):
        return state
    task = with_moved(task, worker, v.WorkerRegrouped, generation=event.generation, busy="", busy_us=0)
    leads = task.membership is not None and task.membership.lead == worker.worker
    if leads and task.awaits_lead and event.generation == task.generation:
        task = _met(task)
    if task.group.before and (task.group.met or task.confirmed):
        task = _with_nothing_before(task, task.group.before)
    state = with_task(state, task)
    for incident in state.incidents.values():
        broken = incident.generations.get(task.name)
        if broken is None or broken >= event.generation or incident.resumed_us:
            continue
        incident = replace(incident, redone=incident.redone + event.dealt + event.others_dealt)
        if event.source not in ("own", "replica"):
            lost = max(0, task.progress.iteration - event.iteration + 1)
            incident = replace(incident, iterations_lost=max(lost, incident.iterations_lost), state_from=event.source)
        if all(_regrouped(state.tasks.get(name), since) for name, since in incident.generations.items()):
            incident = replace(incident, resumed_us=state.now_us)
        state = with_incident(state, incident)
    return state


def _met(task: Task) -> Task:
    """The lead's word for all that keep their state: they are in the newest group, and with nothing else busy."""
    spoken_for = task.membership.spoken_for if task.membership else ()
    for worker in task.apart:
        if worker.worker in spoken_for and worker.busy_us:
            task = with_worker(task, replace(worker, busy="", busy_us=0))
    return replace(task, group=replace(task.group, met=True))


def _with_nothing_before(task: Task, before: Membership) -> Task:
    """The newest group has met. Of `before`, the last one whose lead has told, only the workers that have not left it
    yet are to be remembered."""
    stayed = [name for name in sorted(before.spoken_for - task.member_names) if name in task.workers]
    for worker in [task.workers[name] for name in stayed]:
        task = with_worker(task, replace(worker, generation=max(worker.generation, before.generation)))
    return replace(task, group=replace(task.group, before=None))


def _regrouped(task: Task | None, broken: int) -> bool:
    """The task has left the broken generation behind, or no longer needs to."""
    if task is None or task.status is not TaskStatus.ACTIVE:
        return True
    return task.generation > broken and task.confirmed


def worker_waits(state: ClusterState, event: v.WorkerWaits, _: Envelope) -> ClusterState:
    """The newest generation that the worker has answered."""
    known = worker_known(state, event.task, event.worker)
    if known is None or event.generation <= known[1].answered:
        return state
    return with_task(state, with_worker(known[0], replace(known[1], answered=event.generation)))


def worker_busy(state: ClusterState, event: v.WorkerBusy, _: Envelope) -> ClusterState:
    """What the worker is busy with, for at most `at_most_us`, so that its silence is not held against it."""
    known = worker_known(state, event.task, event.worker)
    if known is None:
        return state
    task, worker = known
    busy_us = event.at_most_us if event.what else 0
    return with_task(state, with_worker(task, replace(worker, busy=event.what, busy_us=busy_us)))


def worker_parked(state: ClusterState, event: v.WorkerParked, _: Envelope) -> ClusterState:
    """The worker has stepped out of its group and waits."""
    known = worker_known(state, event.task, event.worker)
    if known is None or not can_move(known[1], v.WorkerParked):
        return state
    return with_task(state, with_moved(*known, v.WorkerParked))


def worker_exited(state: ClusterState, event: v.WorkerExited, envelope: Envelope) -> ClusterState:
    """The worker's end; an end that was not expected is a strike."""
    known = worker_known(state, event.task, event.worker)
    if known is None:
        return state
    task, worker = known
    broken = incidents.broken_generation(task, [event.worker])
    state = with_task(state, without_workers(task, [event.worker]))
    if event.expected or not worker.alive or worker.status is WorkerStatus.PARKED:
        return state
    if task.status is not TaskStatus.ACTIVE:
        return state
    how = f"signal {event.signal}" if event.signal is not None else f"exit code {event.exit_code}"
    starting = worker.status is WorkerStatus.STARTING
    return strikes.strike(
        state,
        task=task.name,
        worker=worker,
        kind="start_failed" if starting else "process_exit",
        broken=broken,
        message=f"worker {event.worker} on {event.node} ended by {how}" + (" while it started" if starting else ""),
        occurred_us=envelope.observed_at_us,
        log_tail=event.log_tail,
    )


def error_reported(state: ClusterState, event: v.ErrorReported, envelope: Envelope) -> ClusterState:
    """A worker's error, as an incident; errors from groups that were left behind count no more."""
    known = worker_known(state, event.task, event.worker)
    if known is None or not known[1].alive or known[0].status is not TaskStatus.ACTIVE:
        return state
    task, worker = known
    generation = task.generation_of(worker)
    if event.generation < generation:
        return state  # the worker has trained on since
    if event.kind == "left_early":
        task = strikes.left_early(task, worker)
        state = with_task(state, task)
    severity = severity_of(event.kind, state.severity)
    in_group = task.is_member(worker.worker) or generation == event.generation
    if severity is Severity.SEV3 and (event.generation not in task.in_use or not in_group):
        return state  # the group that broke has been left behind already
    symptom = severity is Severity.SEV3
    broken = event.generation if symptom else incidents.broken_generation(task, [worker.worker])
    lost = tuple(sorted({name for name in event.lost if task.is_member(name) and name != worker.worker}))
    fact = Fact(
        kind=event.kind,
        node=worker.node,
        worker=worker.worker,
        generations={task.name: broken},
        message=event.message,
        occurred_us=envelope.observed_at_us,
        log_tail=event.detail,
        place=_place(task, event),
        lost={worker.worker: event.peer if task.is_member(event.peer) else ""} if symptom else {},
        links={worker.worker: lost} if symptom and lost else {},
    )
    return incidents.blame(state, fact)


def _place(task: Task, event: v.ErrorReported) -> str:
    members = task.membership.members if task.membership else ()
    rank = next((f"rank {rank}, " for rank, member in enumerate(members) if member.worker == event.worker), "")
    return f"{rank}iteration {event.iteration}, {event.phase}"
