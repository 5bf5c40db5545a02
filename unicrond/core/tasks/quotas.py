"""Quotas: for how many workers of an owner floors go before those of tasks over quota (`policy.quotas`). Pure.

Rules
-----
* The owner of a task is that of the token that submitted it; "" where the API wants no token. "*" is the quota of
  each owner who has none of his own; where there is neither, he has no limit.
* An owner's tasks claim their floors (`min_workers`) in the order of their priority, then of their submission. A task
  whose floor is more than what is left of the quota is *over quota*; a later, smaller one may still be within it.
* A task over quota is not refused: it runs on what the others leave, as a preemptible one does (planning/floors.py).
* A preemptible task claims nothing of a quota.
"""

from __future__ import annotations

from unicrond.core.state.state import ClusterState, Task

#: Stands for the owners who have no quota of their own.
EACH_OWNER = "*"


def over_quota(state: ClusterState) -> frozenset[str]:
    """Return the names of the active tasks whose floors exceed what is left of their owner's quota."""
    if not state.quotas:
        return frozenset()
    remaining: dict[str, int] = {}
    over = set()
    for task in sorted(state.active, key=lambda task: (-task.spec.priority, task.submitted_us, task.name)):
        quota = quota_of(state, task)
        if quota is None or task.spec.preemptible:
            continue
        workers = remaining.setdefault(task.owner, quota)
        if task.spec.min_workers > workers:
            over.add(task.name)
        else:
            remaining[task.owner] = workers - task.spec.min_workers
    return frozenset(over)


def quota_of(state: ClusterState, task: Task) -> int | None:
    """Return the quota of the task's owner, in workers; None if he has no limit."""
    return state.quotas.get(task.owner, state.quotas.get(EACH_OWNER))
