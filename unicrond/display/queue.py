"""The queue: why an active task has no workers, which tasks go before it, and what would change that. Pure."""

from __future__ import annotations

from unicrond.core.nodes.outages import held_nodes
from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.core.tasks.quotas import over_quota, quota_of
from unicrond.core.tasks.reconcile import schedulable
from unicrond.events.vocabulary.phrases import abridge, count

#: The most tasks that a reason names.
_NAMES_MAX = 3


def pending_reason(state: ClusterState, task: Task, *, has_all_tasks: bool = True) -> str:
    """Return why the plan gives the task no workers, like "pending: needs 3 workers, 1 free; runs with 2 more;
    before it: prod"; "" where it has some, or has ended. `has_all_tasks`: the state has those of all owners; else
    nobody can say what is free, and what goes before it."""
    if task.status is not TaskStatus.ACTIVE:
        return ""
    if state.plan.workers.get(task.name):
        return _outage_reason(state, task)
    if not has_all_tasks:
        return f"pending: needs {count(task.spec.min_workers, 'worker')}"
    slots, _ = schedulable(state.nodes)
    free = sum(slots.values()) - sum(state.plan.workers.values())
    needs = f"pending: needs {count(task.spec.min_workers, 'worker')}, {max(0, free)} free"
    if task.name not in state.plan.assignments:
        return f"{needs}; waits for the next plan"
    parts = [needs]
    if task.name in over_quota(state):
        parts.append(f"over the quota of {task.owner or 'its owner'} ({count(quota_of(state, task) or 0, 'worker')})")
    if task.spec.tp > max(slots.values(), default=0):
        parts.append(f"no node has room for tp {task.spec.tp}")
    elif task.spec.min_workers > free:
        parts.append(f"runs with {task.spec.min_workers - max(0, free)} more")
    if ahead := _ahead(state, task):
        names = [f"{rival.name}{_rank(state, rival)}" for rival in ahead[:_NAMES_MAX]]
        more = f" and {len(ahead) - _NAMES_MAX} more" if len(ahead) > _NAMES_MAX else ""
        parts.append(f"before it: {', '.join(names)}{more}")
    return "; ".join(parts)


def _outage_reason(state: ClusterState, task: Task) -> str:
    """Return for which nodes a task without members waits, that were lost together; "" where it waits for none."""
    absent_nodes = held_nodes(state)
    if not absent_nodes or task.tally.able:
        return ""
    nodes = sorted({node for replica in state.plan.assignments[task.name].replicas for node in replica} & absent_nodes)
    return f"pending: waits for {abridge(nodes)}, lost together" if nodes else ""


def pending_tasks(state: ClusterState) -> list[str]:
    """Return a line for each active task without workers: its name and why."""
    return [f"{task.name} {reason}" for task in state.tasks.values() if (reason := pending_reason(state, task))]


def _ahead(state: ClusterState, task: Task) -> list[Task]:
    """Return the tasks that have workers, those first that have most."""
    shares = state.plan.workers
    running = [rival for rival in state.active if shares.get(rival.name)]
    return sorted(running, key=lambda rival: (-shares[rival.name], rival.name))


def _rank(state: ClusterState, task: Task) -> str:
    """Return what sets the task apart from the usual ones, in parentheses."""
    parts = [f"priority {task.spec.priority}"] if task.spec.priority else []
    if task.spec.preemptible or task.name in over_quota(state):
        parts.append("preemptible")
    return f" ({', '.join(parts)})" if parts else ""
