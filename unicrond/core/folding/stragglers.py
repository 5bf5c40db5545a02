"""Stragglers: which members are slower than the other replicas. People see them; no decision depends on them."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.state.changes import find_worker, with_task
from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.core.state.task_parts import Straggler
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope


def straggler_observed(state: ClusterState, event: v.StragglerObserved, _: Envelope) -> ClusterState:
    """Record that a member is slower than the others, by `factor`; its start is that of its first report."""
    pair = find_worker(state, event.task, event.straggler)
    if pair is None or pair[0].status is not TaskStatus.ACTIVE or not pair[0].is_member(event.straggler):
        return state
    task, worker = pair
    before = task.group.stragglers.get(event.straggler)
    straggler = Straggler(
        worker=worker.worker,
        node=worker.node,
        factor=event.factor,
        compute_us=event.compute_us,
        others_us=event.others_us,
        since_iteration=before.since_iteration if before else event.since_iteration,
        since_us=before.since_us if before else event.since_us,
    )
    return with_task(state, _with_stragglers(task, task.group.stragglers | {straggler.worker: straggler}))


def straggler_recovered(state: ClusterState, event: v.StragglerRecovered, _: Envelope) -> ClusterState:
    """Record that the member is as fast as the others again."""
    task = state.tasks.get(event.task)
    if task is None or event.straggler not in task.group.stragglers:
        return state
    rest = {name: straggler for name, straggler in task.group.stragglers.items() if name != event.straggler}
    return with_task(state, _with_stragglers(task, rest))


def keep_members(task: Task) -> Task:
    """Drop the stragglers that are members of the task no longer."""
    if not task.group.stragglers:
        return task
    members = task.member_names
    return _with_stragglers(
        task, {name: straggler for name, straggler in task.group.stragglers.items() if name in members}
    )


def _with_stragglers(task: Task, stragglers: dict[str, Straggler]) -> Task:
    return replace(task, group=replace(task.group, stragglers=stragglers))
