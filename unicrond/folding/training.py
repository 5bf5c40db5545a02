"""Training: steps and checkpoints."""

from __future__ import annotations

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from unicrond.folding import strikes
from unicrond.folding.changes import with_task
from unicrond.state import TIMINGS_MAX, WARM_UP, ClusterState, Task


def step_committed(state: ClusterState, event: v.StepCommitted, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    if task is None or not task.committed_generation <= event.generation <= task.generation:
        return state
    # Nine of ten events are steps: what rarely changes is looked at, and the task is made anew once.
    progressed = event.last > task.best_iteration
    newest = event.generation == task.generation and task.membership is not None
    if newest and task.strikes and task.membership is not None:
        task = strikes.acquit(task, {member.node for member in task.membership.members})
    below, suspicions = task.struck_below, task.suspicions
    if progressed and below:
        below = {node: number for node, number in below.items() if node}
    if suspicions and any(told.iteration <= event.last for told in suspicions.values()):
        suspicions = {}
    task = replace(
        task,
        iteration=event.last,
        best_iteration=max(event.last, task.best_iteration),
        committed_generation=event.generation,
        loss=event.loss,
        first_loss=event.loss if task.first_loss is None else task.first_loss,
        first_commit_us=task.first_commit_us or state.now_us,
        last_commit_us=state.now_us,
        iteration_us=event.duration_us // max(1, event.last - event.first + 1),
        reattempts=0 if newest else task.reattempts,
        stuck=0 if progressed else task.stuck,
        struck_below=below,
        suspicions=suspicions,
    )
    return with_task(state, _timed(task, event.generation))


def _timed(task: Task, generation: int) -> Task:
    """Keep the time of what was just committed, if the newest group did it and has warmed up."""
    if generation != task.generation or not task.iteration_us:
        return task
    if task.warm < WARM_UP:
        return replace(task, warm=task.warm + 1)
    return replace(task, timings=(*task.timings, task.iteration_us)[-TIMINGS_MAX:])


def checkpoint_saved(state: ClusterState, event: v.CheckpointSaved, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    return with_task(state, replace(task, checkpoint_iteration=event.iteration)) if task else state
