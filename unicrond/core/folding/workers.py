"""Workers: from start to exit, with the reports of their trainers."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.faults.program_faults import Guilt, judge_end, judge_report
from unicrond.core.faults.severity import severity_of
from unicrond.core.folding import failure_counts as strikes
from unicrond.core.folding import incidents, strays
from unicrond.core.folding.incidents import Fact
from unicrond.core.folding.responses import moving_average
from unicrond.core.rules import healing_proofs as proofs
from unicrond.core.state.changes import (
    find_worker,
    with_incident,
    with_moved,
    with_task,
    with_worker,
    without_workers,
)
from unicrond.core.state.state import (
    ClusterState,
    Incident,
    Membership,
    Severity,
    Task,
    TaskStatus,
    Worker,
    WorkerStatus,
)
from unicrond.core.state.worker_lifecycle import can_move
from unicrond.core.state.workers import WorkerError
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope


def worker_started(state: ClusterState, event: v.WorkerStarted, _: Envelope) -> ClusterState:
    """Record the process id. A worker of a known task that no command started is a stray of its node."""
    task = state.tasks.get(event.task)
    if task is None:
        return state
    worker = task.workers.get(event.worker)
    if worker is None:
        return strays.with_stray(state, event)
    return with_task(state, with_worker(task, replace(worker, pid=event.pid)))


def worker_ready(state: ClusterState, event: v.WorkerReady, _: Envelope) -> ClusterState:
    """Record that the worker has started up and waits for a membership."""
    pair = find_worker(state, event.task, event.worker)
    if pair is None or not can_move(pair[1], v.WorkerReady):
        return state
    task, worker = pair
    return with_task(state, with_moved(task, worker, v.WorkerReady))


def worker_regrouped(state: ClusterState, event: v.WorkerJoinedGroup, _: Envelope) -> ClusterState:
    """Record that the worker trains in `generation`; once all workers of an incident's tasks do, training resumes."""
    pair = find_worker(state, event.task, event.worker)
    if pair is None or not can_move(pair[1], v.WorkerJoinedGroup) or event.generation > pair[0].generation:
        return state
    task, worker = pair
    if event.generation < task.generation_of(worker):
        return state
    task = with_moved(task, worker, v.WorkerJoinedGroup, generation=event.generation, section="", section_limit_us=0)
    leads = task.membership is not None and task.membership.lead == worker.worker
    if leads and task.awaits_lead and event.generation == task.generation:
        task = _mark_met(task)
    if task.group.last_membership and (task.group.lead_confirmed or task.confirmed):
        task = _forget_previous_group(task, task.group.last_membership)
    if task.confirmed and not pair[0].confirmed:
        task = _measure_start(task, state.now_us)
        task = _measure_pause(task, state.now_us) if task.spec.layouts else task
    is_first = task.progress.committed_generation < event.generation  # else only the report comes late
    if is_first and event.generation == task.generation and event.iteration <= task.progress.iteration:
        state, task = incidents.fall_back(state, task, event.iteration, event.generation, event.source)
    state = with_task(state, task)
    for incident in state.incidents.values():
        broken = incident.generations.get(task.name)
        if broken is None or broken >= event.generation or incident.resumed_us:
            continue
        if not worker.shard:  # all shards of a replica get the same micro-batches
            incident = replace(
                incident,
                micro_batches_repeated=incident.micro_batches_repeated
                + event.micro_batches_assigned
                + event.micro_batches_assigned_elsewhere,
            )
        if event.source not in ("own", "replica"):
            incident = _without_survivors(incident, task, event)
        incident = replace(incident, micro_batches_finished=_computed_by_others(incident, task))
        if all(_has_left_generation(state.tasks.get(name), since) for name, since in incident.generations.items()):
            incident = replace(incident, resumed_us=state.now_us)
        state = with_incident(state, incident)
    return state


def _without_survivors(incident: Incident, task: Task, event: v.WorkerJoinedGroup) -> Incident:
    """Record what is lost where the task continues from a stored state: the iterations that were committed since are
    trained again, and the micro-batches of the iteration after the last one committed are discarded."""
    iterations_lost = max(0, task.progress.iteration - event.iteration + 1)
    micro_batches_lost = sum(
        count
        for key, (iteration, count) in incident.micro_batches_finished.items()
        if key.rpartition("/")[0] == task.name and iteration > task.progress.iteration
    )
    return replace(
        incident,
        iterations_lost=max(iterations_lost, incident.iterations_lost),
        state_from=event.source,
        micro_batches_lost=incident.micro_batches_lost + micro_batches_lost,
    )


def _computed_by_others(incident: Incident, task: Task) -> dict[str, tuple[int, int]]:
    """Return the work that ended with workers of other tasks: this one has done its own again, or discarded it."""
    return {key: value for key, value in incident.micro_batches_finished.items() if key.rpartition("/")[0] != task.name}


def _measure_start(task: Task, now_us: int) -> Task:
    """Measure how long the task's last start from nothing took, once its first group stands: that is what it loses when
    it is stopped and comes back."""
    since_us = task.pace.starting_since_us
    if not since_us:
        return task
    return replace(task, pace=replace(task.pace, start_us=max(1, now_us - since_us), starting_since_us=0))


def _measure_pause(task: Task, now_us: int) -> Task:
    """Measure, once the newest group stands, how long nobody has trained for it since the last commit
    (planning/problem.py)."""
    pace, reshaping, stopped_us = task.pace, task.reshaping, task.progress.last_commit_us
    if reshaping.since_us:
        took_us = moving_average(pace.reshape_us, now_us - reshaping.since_us)
        return replace(task, pace=replace(pace, reshape_us=took_us), reshaping=replace(reshaping, since_us=0))
    if task.membership is not None and not task.membership.urgent and stopped_us:
        return replace(task, pace=replace(pace, move_us=moving_average(pace.move_us, now_us - stopped_us)))
    return task


def _mark_met(task: Task) -> Task:
    """Record the lead's word for all members that keep their state: they are in the newest group and not busy."""
    spoken_for = task.membership.spoken_for if task.membership else ()
    for worker in task.apart:
        if worker.worker in spoken_for and worker.section_limit_us:
            task = with_worker(task, replace(worker, section="", section_limit_us=0))
    return replace(task, group=replace(task.group, lead_confirmed=True))


def _forget_previous_group(task: Task, before: Membership) -> Task:
    """Forget the previous group, since the newest has met. Of `before`, the last one whose lead has confirmed it, only
    the workers that have not left it yet are remembered."""
    stayed = [name for name in sorted(before.spoken_for - task.member_names) if name in task.workers]
    for worker in [task.workers[name] for name in stayed]:
        task = with_worker(task, replace(worker, generation=max(worker.generation, before.generation)))
    return replace(task, group=replace(task.group, last_membership=None))


def _has_left_generation(task: Task | None, broken: int) -> bool:
    """Return whether the task has left the broken generation, or no longer needs to."""
    if task is None or task.status is not TaskStatus.ACTIVE:
        return True
    return task.generation > broken and task.confirmed


def worker_waits(state: ClusterState, event: v.WorkerWaiting, _: Envelope) -> ClusterState:
    """Record the newest generation that the worker has answered."""
    pair = find_worker(state, event.task, event.worker)
    if pair is None or event.generation <= pair[1].answered_generation:
        return state
    return with_task(state, with_worker(pair[0], replace(pair[1], answered_generation=event.generation)))


def worker_busy(state: ClusterState, event: v.WorkerBusy, _: Envelope) -> ClusterState:
    """Record what the worker is busy with, for at most `limit_us`, so that its silence does not count against it."""
    pair = find_worker(state, event.task, event.worker)
    if pair is None:
        return state
    task, worker = pair
    limit_us = event.limit_us if event.section else 0
    return with_task(state, with_worker(task, replace(worker, section=event.section, section_limit_us=limit_us)))


def worker_parked(state: ClusterState, event: v.WorkerPaused, _: Envelope) -> ClusterState:
    """Record that the worker has left its group and waits."""
    pair = find_worker(state, event.task, event.worker)
    if pair is None or not can_move(pair[1], v.WorkerPaused):
        return state
    return with_task(state, with_moved(*pair, v.WorkerPaused))


def _ended_with_agent(state: ClusterState, node: str, envelope: Envelope) -> bool:
    """Return whether the worker ended with an earlier agent, whose end was announced or expected."""
    pair = state.nodes.get(node)
    return pair is not None and pair.may_go and envelope.boot > pair.agent.boot


def worker_exited(state: ClusterState, event: v.WorkerExited, envelope: Envelope) -> ClusterState:
    """Record the worker's end; an end that was not expected is a strike."""
    pair = find_worker(state, event.task, event.worker)
    if pair is None:
        return strays.without_strays(state, event.node, event.worker)
    task, worker = pair
    broken = incidents.broken_generation(task, [event.worker])
    state = proofs.after_exit(with_task(state, without_workers(task, [event.worker])), event)
    as_expected = event.is_expected or not worker.alive or worker.status is WorkerStatus.PARKED
    if not as_expected and task.status is TaskStatus.ACTIVE and not _ended_with_agent(state, event.node, envelope):
        state = _strike_exit(state, task, worker, event, broken, envelope)
    return incidents.record_lost_work(state, task.name, worker, event.iteration, event.micro_batches_finished)


def _strike_exit(
    state: ClusterState, task: Task, worker: Worker, event: v.WorkerExited, broken: int, envelope: Envelope
) -> ClusterState:
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
        verdict=judge_end(worker, event),
        log_tail=event.log_tail,
    )


def error_reported(state: ClusterState, event: v.ErrorReported, envelope: Envelope) -> ClusterState:
    """Open an incident for a worker's error; errors from groups that were left behind do not count."""
    pair = find_worker(state, event.task, event.worker)
    if pair is None or not pair[1].alive or pair[0].status is not TaskStatus.ACTIVE:
        return state
    task, worker = pair
    if _ended_with_agent(state, event.node, envelope):
        return state
    generation = task.generation_of(worker)
    if event.generation < generation:
        return state  # the worker has trained on since
    error = WorkerError(kind=event.kind, text=event.message, iteration=event.iteration)
    task = with_worker(task, replace(worker, error=error))
    state = with_task(state, task)
    severity = severity_of(event.kind, state.severity)
    in_group = task.is_member(worker.worker) or generation == event.generation
    if severity is Severity.SEV3 and (event.generation not in task.in_use or not in_group):
        return state  # the group that broke has been left behind already
    symptom = severity is Severity.SEV3
    broken = event.generation if symptom else incidents.broken_generation(task, [worker.worker])
    lost_peers = tuple(sorted({name for name in event.lost_peers if task.is_member(name) and name != worker.worker}))
    fact = Fact(
        kind=event.kind,
        node=worker.node,
        worker=worker.worker,
        generations={task.name: broken},
        message=event.message,
        occurred_us=envelope.observed_at_us,
        log_tail=event.detail,
        place=_place(task, event),
        lost_peers={worker.worker: event.peer if task.is_member(event.peer) else ""} if symptom else {},
        links={worker.worker: lost_peers} if symptom and lost_peers else {},
        is_program_fault=judge_report(error).guilt is Guilt.PROGRAM and not strikes.is_ordered(worker, event.kind),
    )
    is_known = any(incidents.shares_generation(state, incident, fact) for incident in state.incidents.values())
    if symptom and not is_known and _is_explained(task, event):
        return state
    return incidents.blame(state, fact)


def _is_explained(task: Task, event: v.ErrorReported) -> bool:
    """Return whether one of the peers that the worker has lost is a member whose process has ended. The caller has seen
    that no incident of this generation is open, so that process ended as expected; the task's next membership leaves it
    out. The worker's other losses follow from that end."""
    peers = {*event.lost_peers, event.peer} - {"", event.worker}
    return any(task.is_member(name) and name not in task.workers for name in peers)


def _place(task: Task, event: v.ErrorReported) -> str:
    members = task.membership.members if task.membership else ()
    rank = next((f"rank {rank}, " for rank, member in enumerate(members) if member.worker == event.worker), "")
    return f"{rank}iteration {event.iteration}, {event.phase}"
