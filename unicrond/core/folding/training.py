"""Training: steps and checkpoints."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.faults import local_faults
from unicrond.core.folding import failure_counts as strikes
from unicrond.core.folding import incidents
from unicrond.core.rules import healing_proofs as proofs
from unicrond.core.rules.authority import is_forgotten, saves_newest
from unicrond.core.state.changes import with_task
from unicrond.core.state.state import ClusterState, Task
from unicrond.core.state.task_parts import (
    CALM_ITERATIONS,
    NO_TROUBLES,
    TIMINGS_MAX,
    UNPLAIN_MAX,
    WARM_UP,
    GroupHealth,
    Pace,
    TaskProgress,
    Troubles,
)
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope


def step_committed(state: ClusterState, event: v.StepCommitted, _: Envelope) -> ClusterState:
    """Update progress, pace and group after committed iterations; reports of outdated generations change nothing."""
    task = state.tasks.get(event.task)
    if task is None:
        return state
    generation, group = task.generation, task.group
    if not task.progress.committed_generation <= event.generation <= generation:
        return state
    if event.generation < generation and is_forgotten(task, event):
        return state
    # Nine of ten events are steps: parts that rarely change are compared first, and only rebuilt where they do.
    newest, troubled = event.generation == generation, task.troubles is not NO_TROUBLES
    formed_after = min(group.formed_after, event.first - 1) if newest else group.formed_after  # after a rollback
    calm = newest and event.last - formed_after >= CALM_ITERATIONS
    if event.first <= task.progress.iteration:
        state, task = incidents.fall_back(state, task, event.first, event.generation)
    task = replace(
        task,
        progress=_progress(task.progress, event, state.now_us),
        pace=_pace(task.pace, event, newest=newest),
        group=_group(group, event, formed_after, calm=calm),
        troubles=_troubles(task, event, state.now_us, newest=newest, calm=calm) if troubled else task.troubles,
    )
    if task.troubles.proof is not None:
        task = proofs.after_commit(state, task, event)
    return with_task(state, task)


def _progress(progress: TaskProgress, event: v.StepCommitted, now_us: int) -> TaskProgress:
    progress = replace(
        progress,
        iteration=event.last,
        best_iteration=max(event.last, progress.best_iteration),
        committed_generation=event.generation,
        loss=event.loss,
        last_commit_us=now_us,
        trained_us=progress.trained_us + event.duration_us,
    )
    if progress.repeats_until and event.last >= progress.repeats_until:
        progress = replace(progress, repeats_until=0)
    if progress.first_loss is None:
        progress = replace(progress, first_loss=event.loss)
    return progress if progress.first_commit_us else replace(progress, first_commit_us=now_us)


def _pace(pace: Pace, event: v.StepCommitted, *, newest: bool) -> Pace:
    """Record the time of the committed iterations, if the group has warmed up; those during checkpoints are no
    timing."""
    iterations = max(1, event.last - event.first + 1)
    iteration_us = event.duration_us // iterations
    if not newest or not iteration_us:
        return replace(pace, iteration_us=iteration_us)
    if pace.warm_up_reports < WARM_UP:
        return replace(pace, iteration_us=iteration_us, warm_up_reports=pace.warm_up_reports + 1)
    plain, plain_us = iterations - event.not_plain, event.duration_us - event.not_plain_us
    if plain <= 0 or plain_us <= 0:
        if pace.unplain_reports < UNPLAIN_MAX:
            return replace(pace, iteration_us=iteration_us, unplain_reports=pace.unplain_reports + 1)
        timing_us = iteration_us
    else:
        timing_us = plain_us // plain
        pace = replace(pace, unplain_reports=0) if pace.unplain_reports else pace
    return replace(pace, iteration_us=iteration_us, timings=(*pace.timings, timing_us)[-TIMINGS_MAX:])


def _group(group: GroupHealth, event: v.StepCommitted, formed_after: int, *, calm: bool) -> GroupHealth:
    """Forget reattempts once the group is stable, and suspicions that are older than the step."""
    if formed_after != group.formed_after:
        group = replace(group, formed_after=formed_after)
    if calm and group.reattempts:
        group = replace(group, reattempts=0)
    if group.suspicions and any(suspicion.iteration <= event.last for suspicion in group.suspicions.values()):
        group = replace(group, suspicions={})
    return group


def _troubles(task: Task, event: v.StepCommitted, now_us: int, *, newest: bool, calm: bool) -> Troubles:
    """Clear the failures that the step disproves. A step proves the nodes of its members, a new iteration the task, and
    a stable group its program, too."""
    troubles, membership = task.troubles, task.membership
    if troubles.crashes is not None or troubles.local_faults:
        troubles = local_faults.after_commit(task, event, calm=calm, now_us=now_us)
    if newest and membership is not None and troubles.of_nodes:
        several = len(membership.members) > 1  # one alone proves nothing about connections
        troubles = strikes.acquit(troubles, {member.node for member in membership.members}, calm=calm and several)
    if troubles.deaths and event.last > task.progress.best_iteration:
        troubles = replace(troubles, deaths={})
    if event.last > task.progress.best_iteration and (troubles.stuck or troubles.struck_below):
        below = {node: number for node, number in troubles.struck_below.items() if node}
        troubles = replace(troubles, stuck=0, struck_below=below)
    return troubles if troubles != NO_TROUBLES else NO_TROUBLES  # the very same, for the next step to tell


def checkpoint_saved(state: ClusterState, event: v.CheckpointSaved, _: Envelope) -> ClusterState:
    """Record the newest iteration that storage holds, by the word of those who may save (rules/authority.py)."""
    task = state.tasks.get(event.task)
    if task is None or not saves_newest(task, event):
        return state
    progress = replace(_without_failure(task.progress, "unicron"), checkpoint_iteration=event.iteration)
    return with_task(state, replace(task, progress=progress))


def save_failed(state: ClusterState, event: v.SaveFailed, _: Envelope) -> ClusterState:
    """Record that a checkpoint was not written, or, without a reason, that one is again."""
    task = state.tasks.get(event.task)
    if task is None or event.worker not in task.workers:
        return state
    progress = _without_failure(task.progress, event.saver)
    if event.reason:
        since_us = task.progress.unsaved_since_us.get(event.saver, state.now_us)
        progress = replace(
            progress,
            save_failures={**progress.save_failures, event.saver: f"of iteration {event.iteration}: {event.reason}"},
            unsaved_since_us={**progress.unsaved_since_us, event.saver: since_us},
        )
    return with_task(state, replace(task, progress=progress))


def _without_failure(progress: TaskProgress, saver: v.Saver) -> TaskProgress:
    return replace(
        progress,
        save_failures={by: reason for by, reason in progress.save_failures.items() if by != saver},
        unsaved_since_us={by: since_us for by, since_us in progress.unsaved_since_us.items() if by != saver},
    )
