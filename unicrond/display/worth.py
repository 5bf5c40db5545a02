"""WAF as people read it: one unit on every screen. Pure.

Rules
-----
* WAF is in weighted FLOP/s wherever the throughput of any task is known, measured or from a table; until then nobody
  knows FLOP/s, and it is in weighted workers: planned, in health and achieved alike.
* What a plan is worth is said by what is known of throughput today, not when the plan was made: the two may be of
  different scales.
"""

from __future__ import annotations

from unicrond.core.nodes.gpu_types import of_assignment, on_type
from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.core.state.work import LINEAR_FLOPS, achieved_waf
from unicrond.core.tasks.reshaping import planned_shape
from unicrond.core.worth.costs import worth, worth_in_health
from unicrond.core.worth.waf import linear_flops, waf_unit


def si(value: float, unit: str = "") -> str:
    """Format a value with an SI prefix: 1.5e12, "FLOP/s" -> "1.5 TFLOP/s". A value that rounds up to the next prefix
    gets it."""
    value = float(f"{value:.3g}")
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def waf_text(value: float, unit: str) -> str:
    """Format a WAF of so many FLOP/s in the unit of the screen (`waf_unit`)."""
    return si(value, unit) if unit == "FLOP/s" else f"{value / LINEAR_FLOPS:.3g} {unit}"


def waf_in(state: ClusterState, value: float) -> str:
    """Format a WAF of so many FLOP/s in the unit that the state has."""
    return waf_text(value, waf_unit(state))


def planned_wafs(state: ClusterState) -> dict[str, int]:
    """Return what the adopted plan is worth today, by task, weighted FLOP/s."""
    linear, wafs = linear_flops(state), {}
    for name, assignment in state.plan.assignments.items():
        task = state.tasks.get(name)
        if task is None or task.status is not TaskStatus.ACTIVE:
            wafs[name] = 0
            continue
        gpu = of_assignment(state.nodes, assignment)
        shape = planned_shape(task.spec, assignment)
        wafs[name] = worth(
            on_type(task, task.pace.gpu if gpu is None else gpu), assignment.workers, lambda: linear, shape
        )
    return wafs


def healthy_waf(state: ClusterState) -> int:
    """Return what the cluster would achieve today with all its nodes in health, weighted FLOP/s."""
    linear = linear_flops(state)
    active = [task for task in state.tasks.values() if task.status is TaskStatus.ACTIVE]
    return sum(worth_in_health(state.plan, task, lambda: linear) for task in active)


def achieved_now(state: ClusterState, task: Task) -> int:
    """Return what the task has achieved since its first step, weighted FLOP/s; where the unit is another, what its
    workers that train now are worth in it."""
    if waf_unit(state) == "FLOP/s":
        return achieved_waf(task, state.now_us)
    account = state.ledger.accounts.get(task.name)
    return account.rate if account is not None and task.status is TaskStatus.ACTIVE else 0
