"""Training: steps and checkpoints."""

from __future__ import annotations

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from unicrond.core.changes import with_task
from unicrond.core.folding import strikes
from unicrond.core.state import ClusterState, Task
from unicrond.core.task_parts import CALM_ITERATIONS, TIMINGS_MAX, WARM_UP, Group, Pace, Progress, Troubles


def step_committed(state: ClusterState, event: v.StepCommitted, _: Envelope) -> ClusterState:
    """Progress, pace and group after committed iterations; reports of outdated generations change nothing."""
    task = state.tasks.get(event.task)
    if task is None:
        return state
    generation, group = task.generation, task.group
    if not task.progress.committed_generation <= event.generation <= generation:
        return state
    # Nine of ten events are steps: parts that rarely change are looked at, and only made anew where they do.
    newest = event.generation == generation
    formed_after = min(group.formed_after, event.first - 1) if newest else group.formed_after  # after a rollback
    calm = newest and event.last - formed_after >= CALM_ITERATIONS
    task = replace(
        task,
        progress=_progress(task.progress, event, state.now_us),
        pace=_pace(task.pace, event, newest=newest),
        group=_group(group, event, formed_after, calm=calm),
        troubles=_troubles(task, event, newest=newest, calm=calm),
    )
    return with_task(state, task)


def _progress(progress: Progress, event: v.StepCommitted, now_us: int) -> Progress:
    progress = replace(
        progress,
        iteration=event.last,
        best_iteration=max(event.last, progress.best_iteration),
        committed_generation=event.generation,
        loss=event.loss,
        last_commit_us=now_us,
    )
    if progress.first_loss is None:
        progress = replace(progress, first_loss=event.loss)
    return progress if progress.first_commit_us else replace(progress, first_commit_us=now_us)


def _pace(pace: Pace, event: v.StepCommitted, *, newest: bool) -> Pace:
    """The time of what was just committed is kept, if the group has warmed up."""
    iteration_us = event.duration_us // max(1, event.last - event.first + 1)
    if not newest or not iteration_us:
        return replace(pace, iteration_us=iteration_us)
    if pace.warm < WARM_UP:
        return replace(pace, iteration_us=iteration_us, warm=pace.warm + 1)
    return replace(pace, iteration_us=iteration_us, timings=(*pace.timings, iteration_us)[-TIMINGS_MAX:])


def _group(group: Group, event: v.StepCommitted, formed_after: int, *, calm: bool) -> Group:
    """After a calm, earlier reattempts are forgotten; with a step, suspicions that are older than it."""
    if formed_after != group.formed_after:
        group = replace(group, formed_after=formed_after)
    if calm and group.reattempts:
        group = replace(group, reattempts=0)
    if group.suspicions and any(told.iteration <= event.last for told in group.suspicions.values()):
        group = replace(group, suspicions={})
    return group


def _troubles(task: Task, event: v.StepCommitted, *, newest: bool, calm: bool) -> Troubles:
    """A step proves the nodes of its members; a new iteration proves the task; a calm proves its program, too."""
    held, membership = task.troubles, task.membership
    if newest and membership is not None and held.of_nodes:
        several = len(membership.members) > 1  # one alone proves nothing about connections
        held = strikes.acquit(held, {member.node for member in membership.members}, calm=calm and several)
    if calm and held.early:
        held = replace(held, early=0)
    if event.last > task.progress.best_iteration and (held.stuck or held.struck_below):
        below = {node: number for node, number in held.struck_below.items() if node}
        held = replace(held, stuck=0, struck_below=below)
    return held


def checkpoint_saved(state: ClusterState, event: v.CheckpointSaved, _: Envelope) -> ClusterState:
    """The newest iteration that storage holds."""
    task = state.tasks.get(event.task)
    if task is None:
        return state
    progress = replace(task.progress, checkpoint_iteration=event.iteration, unsaved=_saved(task.progress, "unicron"))
    return with_task(state, replace(task, progress=progress))


def save_failed(state: ClusterState, event: v.SaveFailed, _: Envelope) -> ClusterState:
    """A checkpoint was not written, or one is again."""
    task = state.tasks.get(event.task)
    if task is None or event.worker not in task.workers:
        return state
    unsaved = _saved(task.progress, event.by)
    if event.reason:
        unsaved = {**unsaved, event.by: f"of iteration {event.iteration}: {event.reason}"}
    return with_task(state, replace(task, progress=replace(task.progress, unsaved=unsaved)))


def _saved(progress: Progress, by: v.Saver) -> dict[str, str]:
    return {whose: why for whose, why in progress.unsaved.items() if whose != by}
