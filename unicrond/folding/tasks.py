"""Tasks: from submission to their end."""

from __future__ import annotations

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from unicrond.folding.changes import with_task
from unicrond.reshaping import changes_nothing, reshaped
from unicrond.state import ClusterState, Task, TaskStatus


def task_submitted(state: ClusterState, event: v.TaskSubmitted, _: Envelope) -> ClusterState:
    old = state.tasks.get(event.spec.name)
    if old is not None and (old.status is TaskStatus.ACTIVE or not old.at_rest):
        return state
    return with_task(
        state,
        Task(
            spec=event.spec,
            status=TaskStatus.ACTIVE,
            submitted_seq=state.seq,
            submitted_us=state.now_us,
            # Worker ids and generations never repeat, not even in the next life of a name.
            next_worker=old.next_worker if old else 1,
            next_replica=old.next_replica if old else 0,
            membership=replace(old.membership, members=(), joiners=()) if old and old.membership else None,
        ),
    )


def reshape_requested(state: ClusterState, event: v.ReshapeRequested, _: Envelope) -> ClusterState:
    """The last one asked for holds; to ask for what is there takes back what was asked for before."""
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    return with_task(state, replace(task, reshape=None if changes_nothing(task.spec, event) else event))


def task_reshaped(state: ClusterState, event: v.TaskReshaped, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    spec = reshaped(task.spec, event)
    in_place = (spec.tp, spec.pp) == (task.spec.tp, task.spec.pp)
    task = replace(task, spec=spec, reshape=None, submitted_seq=state.seq, reshaped_us=state.now_us)
    # What was measured is of replicas of another form.
    return with_task(state, task if in_place else replace(task, measured={}, timings=(), warm=0))


def task_completed(state: ClusterState, event: v.TaskCompleted, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE or event.worker not in task.workers:
        return state
    return with_task(
        state,
        replace(
            task,
            status=TaskStatus.COMPLETED,
            iteration=event.iteration,
            best_iteration=max(event.iteration, task.best_iteration),
            loss=event.loss,
            params_digest=event.params_digest,
            reason=_stopped(task, event.iteration, task.stop)
            if task.stop and event.iteration < task.spec.iterations
            else f"all {event.iteration} iterations are committed",
        ),
    )


def stop_asked(state: ClusterState, event: v.StopAsked, _: Envelope) -> ClusterState:
    """The first reason counts. Where all members have left the loop after the same iteration, the task is complete."""
    task = state.tasks.get(event.task)
    if task is None or event.worker not in task.workers:
        return state
    if task.status is TaskStatus.COMPLETED and not task.stop and task.iteration < task.spec.iterations:
        reason = _stopped(task, task.iteration, event.reason)  # its lead was quicker to tell of the end
        return with_task(state, replace(task, stop=event.reason, reason=reason))
    if task.status is not TaskStatus.ACTIVE:
        return state
    task = replace(task, stop=task.stop or event.reason or "no reason given")
    if event.left:
        task = replace(task, left=task.left | {event.worker: event.iteration})
        members = task.member_names
        if members and all(task.left.get(name) == event.iteration for name in members):
            reason = _stopped(task, event.iteration, task.stop)
            best = max(event.iteration, task.best_iteration)
            task = replace(
                task, status=TaskStatus.COMPLETED, iteration=event.iteration, best_iteration=best, reason=reason
            )
    return with_task(state, task)


def _stopped(task: Task, iteration: int, why: str) -> str:
    return f"stopped by its program after iteration {iteration} of {task.spec.iterations}: {why or 'no reason given'}"


def task_cancelled(state: ClusterState, event: v.TaskCancelled, _: Envelope) -> ClusterState:
    return _end_task(state, event.task, TaskStatus.CANCELLED, event.reason)


def task_failed(state: ClusterState, event: v.TaskFailed, _: Envelope) -> ClusterState:
    return _end_task(state, event.task, TaskStatus.FAILED, event.reason)


def _end_task(state: ClusterState, name: str, status: TaskStatus, reason: str) -> ClusterState:
    task = state.tasks.get(name)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    return with_task(state, replace(task, status=status, reason=reason))
