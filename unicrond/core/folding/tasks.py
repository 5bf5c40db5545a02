"""Tasks: from submission to their end."""

from __future__ import annotations

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from events.vocabulary import TaskSpec
from unicrond.core.changes import with_task
from unicrond.core.reshaping import asked_by_plan, changes_nothing, layout_key, reshaped
from unicrond.core.state import ClusterState, Task, TaskStatus
from unicrond.core.task_parts import Numbers, Pace, Progress, Reshaping


def task_submitted(state: ClusterState, event: v.TaskSubmitted, _: Envelope) -> ClusterState:
    """A new task; a name can be used again once its task has ended and is at rest."""
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
            numbers=old.numbers if old else Numbers(),
            membership=replace(old.membership, members=(), joiners=()) if old and old.membership else None,
        ),
    )


def reshape_requested(state: ClusterState, event: v.ReshapeRequested, _: Envelope) -> ClusterState:
    """The last one asked for holds; to ask for what is there takes back what was asked for before. Then what the plan
    in force has chosen stands again: its workers would find no place in another layout.
    """
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    asked: v.ReshapeRequested | None = event
    epoch = 0
    if changes_nothing(task.spec, event) and not task.reshaping.plan:
        assignment = state.plan.assignments.get(task.name)
        asked = asked_by_plan(task.spec, assignment, state.plan.epoch) if assignment and task.spec.layouts else None
        epoch = state.plan.epoch if asked else 0
    return with_task(state, replace(task, reshaping=replace(task.reshaping, reshape=asked, plan=epoch)))


def task_reshaped(state: ClusterState, event: v.TaskReshaped, _: Envelope) -> ClusterState:
    """The task has other replicas from now on. What was measured holds only in its layout: of a task that may come
    back to that it is kept. A plan that has chosen the layout was made for it; a person's wish asks for another.
    What a plan has chosen that is no longer in force changes nothing.
    """
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE or (event.plan and event.plan != task.reshaping.plan):
        return state
    spec = reshaped(task.spec, event)
    in_place = (spec.cut, spec.micro_batch) == (task.spec.cut, task.spec.micro_batch)
    reshaping, pace = Reshaping(reshaped_us=state.now_us), task.pace
    if spec.layouts and not in_place:
        reshaping = replace(reshaping, since_us=task.progress.last_commit_us)
    if not in_place:
        pace = _in_another_layout(pace, task.spec, spec)
    seq = task.submitted_seq if event.plan else state.seq
    return with_task(state, replace(task, spec=spec, reshaping=reshaping, pace=pace, submitted_seq=seq))


def _in_another_layout(pace: Pace, before: TaskSpec, after: TaskSpec) -> Pace:
    """What was measured is of replicas of another form."""
    pace, elsewhere = replace(pace, timings=(), warm=0), dict(pace.elsewhere)
    if pace.measured and after.layouts:
        elsewhere[layout_key(before.shape)] = pace.measured
    measured = elsewhere.pop(layout_key(after.shape), {})
    if not after.layouts:
        return replace(pace, measured=measured, elsewhere={}, on_gpus={})
    return replace(pace, measured=measured, elsewhere=elsewhere)


def task_completed(state: ClusterState, event: v.TaskCompleted, _: Envelope) -> ClusterState:
    """The active task has done all its iterations, or those that it was to do before its stop."""
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE or event.worker not in task.workers:
        return state
    reason = f"all {event.iteration} iterations are committed"
    if task.ending.stop and event.iteration < task.spec.iterations:
        reason = _stopped(task, event.iteration, task.ending.stop)
    ending = replace(task.ending, reason=reason, params_digest=event.params_digest)
    progress = replace(_reached(task.progress, event.iteration), loss=event.loss)
    return with_task(state, replace(task, status=TaskStatus.COMPLETED, progress=progress, ending=ending))


def _reached(progress: Progress, iteration: int) -> Progress:
    return replace(progress, iteration=iteration, best_iteration=max(iteration, progress.best_iteration))


def stop_asked(state: ClusterState, event: v.StopAsked, _: Envelope) -> ClusterState:
    """The first reason counts. Where all members have left the loop after the same iteration, the task is complete."""
    task = state.tasks.get(event.task)
    if task is None or event.worker not in task.workers:
        return state
    ending, reached = task.ending, task.progress.iteration
    if task.status is TaskStatus.COMPLETED and not ending.stop and reached < task.spec.iterations:
        reason = _stopped(task, reached, event.reason)  # its lead was quicker to tell of the end
        return with_task(state, replace(task, ending=replace(ending, stop=event.reason, reason=reason)))
    if task.status is not TaskStatus.ACTIVE:
        return state
    ending = replace(ending, stop=ending.stop or event.reason or "no reason given")
    if event.left:
        ending = replace(ending, left=ending.left | {event.worker: event.iteration})
        members = task.member_names
        if members and all(ending.left.get(name) == event.iteration for name in members):
            ending = replace(ending, reason=_stopped(task, event.iteration, ending.stop))
            progress = _reached(task.progress, event.iteration)
            task = replace(task, status=TaskStatus.COMPLETED, progress=progress)
    return with_task(state, replace(task, ending=ending))


def _stopped(task: Task, iteration: int, why: str) -> str:
    return f"stopped by its program after iteration {iteration} of {task.spec.iterations}: {why or 'no reason given'}"


def task_cancelled(state: ClusterState, event: v.TaskCancelled, _: Envelope) -> ClusterState:
    """The task is ended by a person."""
    return _end_task(state, event.task, TaskStatus.CANCELLED, event.reason)


def task_failed(state: ClusterState, event: v.TaskFailed, _: Envelope) -> ClusterState:
    """The task is ended by the coordinator."""
    return _end_task(state, event.task, TaskStatus.FAILED, event.reason)


def _end_task(state: ClusterState, name: str, status: TaskStatus, reason: str) -> ClusterState:
    task = state.tasks.get(name)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    return with_task(state, replace(task, status=status, ending=replace(task.ending, reason=reason)))
