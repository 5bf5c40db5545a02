"""Tasks: from submission to their end."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.faults.program_faults import diverging_text
from unicrond.core.rules import healing_proofs as proofs
from unicrond.core.rules.authority import leads_end
from unicrond.core.state.changes import with_task
from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.core.state.task_parts import Copies, HealingProof, Numbers, Pace, Reshaping, TaskProgress, Troubles
from unicrond.core.tasks.reshaping import changes_nothing, layout_key, reshape_of_plan, reshaped
from unicrond.core.tasks.task_validation import name_conflict
from unicrond.core.worth import evidence
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary import TaskSpec
from unicrond.events.wire.envelope import Envelope


def task_submitted(state: ClusterState, event: v.TaskSubmitted, _: Envelope) -> ClusterState:
    """Add a new task. A name can be used again once its task has ended and is at rest."""
    if name_conflict(state, event.spec.name):
        return state
    old = state.tasks.get(event.spec.name)
    proof = HealingProof(requested_us=state.now_us) if event.spec.start and event.spec.start.prove else None
    return with_task(
        state,
        Task(
            troubles=Troubles(proof=proof),
            spec=event.spec,
            status=TaskStatus.ACTIVE,
            submitted_seq=state.seq,
            submitted_us=state.now_us,
            owner=event.owner or event.requester,
            # Worker ids and generations never repeat, not even when a name is used again.
            numbers=old.numbers if old else Numbers(),
            membership=replace(old.membership, members=(), joiners=()) if old and old.membership else None,
            # Who held a state of the task before may still, and says so when it comes back.
            copies=Copies(carriers=old.copies.carriers) if old else Copies(),
        ),
    )


def proof_requested(state: ClusterState, event: v.ProofRequested, _: Envelope) -> ClusterState:
    """Record that an active task is to prove that it heals."""
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    return with_task(state, proofs.with_request(task, state.now_us))


def task_updated(state: ClusterState, event: v.TaskUpdated, _: Envelope) -> ClusterState:
    """Give the task the settings that the request names; they need another plan. The layout that the last plan has
    chosen is chosen anew with them, and a program that fails gets another chance."""
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    task = replace(task, spec=replace(task.spec, **event.settings), submitted_seq=state.seq, updated_us=state.now_us)
    if task.reshaping.plan:
        task = replace(task, reshaping=replace(task.reshaping, reshape=None, plan=0))
    return with_task(state, replace(task, troubles=replace(task.troubles, crashes=None)))


def reshape_requested(state: ClusterState, event: v.ReshapeRequested, _: Envelope) -> ClusterState:
    """Store the last request. A request for the present layout withdraws the earlier one; then the choice of the plan
    in force stands again, since its workers would find no place in another layout."""
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    request: v.ReshapeRequested | None = event
    epoch = 0
    if changes_nothing(task.spec, event) and not task.reshaping.plan:
        assignment = state.plan.assignments.get(task.name)
        request = reshape_of_plan(task.spec, assignment, state.plan.epoch) if assignment and task.spec.layouts else None
        epoch = state.plan.epoch if request else 0
    return with_task(state, replace(task, reshaping=replace(task.reshaping, reshape=request, plan=epoch)))


def task_reshaped(state: ClusterState, event: v.TaskReshaped, _: Envelope) -> ClusterState:
    """Give the task its other layout or bounds. Measurements hold only in their layout; a task that may come back to a
    layout keeps them. A plan that has chosen the layout was made for it, while a person's request needs another plan.
    The choice of a plan that is no longer in force changes nothing."""
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE or (event.plan and event.plan != task.reshaping.plan):
        return state
    spec = reshaped(task.spec, event)
    in_place = (spec.cut, spec.micro_batch) == (task.spec.cut, task.spec.micro_batch)
    reshaping, pace = Reshaping(reshaped_us=state.now_us), task.pace
    if spec.layouts and not in_place:
        reshaping = replace(reshaping, since_us=task.progress.last_commit_us)
    if not in_place:
        pace = evidence.put_in_force(_pace_in_layout(pace, task.spec, spec), state.now_us)
    seq = task.submitted_seq if event.plan else state.seq
    return with_task(state, replace(task, spec=spec, reshaping=reshaping, pace=pace, submitted_seq=seq))


def _pace_in_layout(pace: Pace, before: TaskSpec, after: TaskSpec) -> Pace:
    """Return the pace for replicas of another form, with the throughputs that were measured in it before."""
    pace, by_layout = replace(pace, timings=(), warm_up_reports=0, circumstances={}), dict(pace.other_layouts)
    if pace.measurements and after.layouts:
        by_layout[layout_key(before.shape)] = pace.measurements
    throughputs = by_layout.pop(layout_key(after.shape), {})
    if not after.layouts:
        return replace(pace, measurements=throughputs, other_layouts={}, on_gpus={})
    return replace(pace, measurements=throughputs, other_layouts=by_layout)


def task_completed(state: ClusterState, event: v.TaskCompleted, _: Envelope) -> ClusterState:
    """Complete the active task: it has done all its iterations, or those that it was to do before its stop."""
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE or event.worker not in task.workers:
        return state
    if not leads_end(task, event):
        return state
    reason = f"all {event.iteration} iterations are committed"
    if task.ending.stop and event.iteration < task.spec.iterations:
        reason = _stop_reason(task, event.iteration, task.ending.stop)
    reason = "; ".join(filter(None, (reason, diverging_text(task))))
    ending = replace(task.ending, reason=reason, params_digest=event.params_digest)
    progress = replace(_with_iteration(task.progress, event.iteration), loss=event.loss)
    return with_task(state, replace(task, status=TaskStatus.COMPLETED, progress=progress, ending=ending))


def _with_iteration(progress: TaskProgress, iteration: int) -> TaskProgress:
    return replace(progress, iteration=iteration, best_iteration=max(iteration, progress.best_iteration))


def stop_asked(state: ClusterState, event: v.StopRequested, _: Envelope) -> ClusterState:
    """Record that the task's program asks for its end; the first reason counts. Where all members have left the loop
    after the same iteration, the task is complete."""
    task = state.tasks.get(event.task)
    if task is None or event.worker not in task.workers:
        return state
    ending, reached = task.ending, task.progress.iteration
    if task.status is TaskStatus.COMPLETED and not ending.stop and reached < task.spec.iterations:
        reason = _stop_reason(task, reached, event.reason)  # its lead has reported the end first
        return with_task(state, replace(task, ending=replace(ending, stop=event.reason, reason=reason)))
    if task.status is not TaskStatus.ACTIVE:
        return state
    ending = replace(ending, stop=ending.stop or event.reason or "no reason given")
    if event.has_left_loop:
        ending = replace(ending, loop_exits=ending.loop_exits | {event.worker: event.iteration})
        members = task.member_names
        if members and all(ending.loop_exits.get(name) == event.iteration for name in members):
            ending = replace(ending, reason=_stop_reason(task, event.iteration, ending.stop))
            progress = _with_iteration(task.progress, event.iteration)
            task = replace(task, status=TaskStatus.COMPLETED, progress=progress)
    return with_task(state, replace(task, ending=ending))


def _stop_reason(task: Task, iteration: int, reason: str) -> str:
    return (
        f"stopped by its program after iteration {iteration} of {task.spec.iterations}: {reason or 'no reason given'}"
    )


def task_cancelled(state: ClusterState, event: v.TaskCancelled, _: Envelope) -> ClusterState:
    """End the task for a person."""
    return _end_task(state, event.task, TaskStatus.CANCELLED, event.reason)


def task_failed(state: ClusterState, event: v.TaskFailed, _: Envelope) -> ClusterState:
    """End the task as failed, by a decision of the coordinator."""
    return _end_task(state, event.task, TaskStatus.FAILED, event.reason)


def _end_task(state: ClusterState, name: str, status: TaskStatus, reason: str) -> ClusterState:
    task = state.tasks.get(name)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    return with_task(state, replace(task, status=status, ending=replace(task.ending, reason=reason)))
