"""Training: steps and checkpoints."""

from __future__ import annotations

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from unicrond.folding import strikes
from unicrond.folding.changes import with_task
from unicrond.state import CALM_ITERATIONS, TIMINGS_MAX, WARM_UP, ClusterState


def step_committed(state: ClusterState, event: v.StepCommitted, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    if task is None or not task.committed_generation <= event.generation <= task.generation:
        return state
    # Nine of ten events are steps: what rarely changes is looked at, and the task is made anew once.
    progressed = event.last > task.best_iteration
    membership, warm, timings = task.membership, task.warm, task.timings
    newest = event.generation == task.generation
    iteration_us = event.duration_us // max(1, event.last - event.first + 1)
    formed_after = min(task.formed_after, event.first - 1) if newest else task.formed_after  # after a rollback
    calm = newest and event.last - formed_after >= CALM_ITERATIONS
    if newest and membership is not None and (task.strikes or task.ends or task.breaks):
        several = len(membership.members) > 1  # one alone proves nothing about connections
        task = strikes.acquit(task, {member.node for member in membership.members}, calm=calm and several)
    if newest and iteration_us:
        # Keep the time of what was just committed, if the group has warmed up.
        if warm < WARM_UP:
            warm += 1
        else:
            timings = (*timings, iteration_us)[-TIMINGS_MAX:]
    below, suspicions = task.struck_below, task.suspicions
    if progressed and below:
        below = {node: number for node, number in below.items() if node}
    if suspicions and any(told.iteration <= event.last for told in suspicions.values()):
        suspicions = {}
    task = replace(
        task,
        iteration=event.last,
        best_iteration=event.last if progressed else task.best_iteration,
        committed_generation=event.generation,
        loss=event.loss,
        first_loss=event.loss if task.first_loss is None else task.first_loss,
        first_commit_us=task.first_commit_us or state.now_us,
        last_commit_us=state.now_us,
        iteration_us=iteration_us,
        reattempts=0 if calm else task.reattempts,
        early=0 if calm else task.early,
        formed_after=formed_after,
        stuck=0 if progressed else task.stuck,
        struck_below=below,
        suspicions=suspicions,
        timings=timings,
        warm=warm,
    )
    return with_task(state, task)


def checkpoint_saved(state: ClusterState, event: v.CheckpointSaved, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    return with_task(state, replace(task, checkpoint_iteration=event.iteration)) if task else state
