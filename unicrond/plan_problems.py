"""The plan problems that the cluster's state poses: pure questions, answered by `unicrond.planning`.

    problem_of          what to do now (paper, section "plan generation")
    situation_of        what stands now, so that every next problem can be answered before it comes
    healthy_problem_of  who would have what, were every node in health: the measure of sub-health (costs.py)

Rules
-----
* `situation_of(state).after(event) == problem_of(state after event)`, field by field: that is what makes the
  one-step table a look-up. A test holds them to it.
* What is learnt (measured throughput, failure rate, transition times) enters here and nowhere else; a plan's
  `basis` does not hold it, so that learning by itself never moves a worker.
* A task whose tensor-parallel group is larger than any node gets nothing, and keeps nothing from others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from unicrond import reconcile
from unicrond.last_answer import kept_while_equal
from unicrond.planning.placement import Shape
from unicrond.planning.problem import Problem, TaskProblem
from unicrond.planning.situation import NodeLoad, Situation
from unicrond.policy import Policy
from unicrond.state import ClusterState, Node, NodeStatus, Task, TaskStatus
from unicrond.waf import linear_flops, throughput

_SECOND_US = 1_000_000


def active_tasks(state: ClusterState) -> list[Task]:
    """The tasks to plan for, in the order that decides ties."""
    return [task for task in state.tasks.values() if task.status is TaskStatus.ACTIVE]


def basis(state: ClusterState) -> str:
    """Digest of the nodes and tasks that a plan depends on."""
    tasks = tuple((task.name, task.submitted_seq) for task in active_tasks(state))
    return _digest(reconcile.capacity(state), tasks)


@kept_while_equal
def _digest(nodes: Mapping[str, int], tasks: tuple[tuple[str, int], ...]) -> str:
    """In no order of theirs."""
    told = repr((sorted(nodes.items()), sorted(tasks)))
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def is_fresh(state: ClusterState) -> bool:
    """The plan was made for the present nodes and tasks."""
    return state.plan.basis == basis(state) or (not state.plan.epoch and not state.nodes and not state.tasks)


def worker_mtbf_us(state: ClusterState, policy: Policy) -> int:
    """Mean time between failures of one worker: learnt from the log, else configured."""
    return state.worker_mtbf_us or int(policy.worker_mtbf_s * _SECOND_US)


def problem_of(state: ClusterState, policy: Policy) -> Problem:
    """The problem that the present nodes and tasks pose, after what has happened since the last plan."""
    capacity = reconcile.capacity(state)
    workers = sum(capacity.values())
    linear = linear_flops(state)
    return Problem(
        workers=workers,
        d_running_us=worker_mtbf_us(state, policy) // max(1, workers),
        d_transition_us=int(policy.transition_s * _SECOND_US),
        tasks=tuple(
            _task_problem(state, task, linear, faulty=_is_faulty(state, task, capacity)) for task in active_tasks(state)
        ),
        churn_us=int(policy.churn_s * _SECOND_US),
    )


def situation_of(state: ClusterState, policy: Policy) -> Situation | None:
    """What stands before the next event; None while the last one has not been planned for."""
    capacity = reconcile.capacity(state)
    tasks = active_tasks(state)
    if not is_fresh(state) or any(_is_faulty(state, task, capacity) for task in tasks):
        return None
    on_node: dict[str, set[str]] = {name: set() for name in capacity}
    for task in tasks:
        assignment = state.plan.assignments.get(task.name)
        for nodes in assignment.replicas if assignment else ():
            for node in nodes:
                on_node[node].add(task.name)
    linear = linear_flops(state)
    known = [node for node in state.nodes.values() if node.status is not NodeStatus.LEFT]
    return Situation(
        nodes=tuple(NodeLoad(name, slots, frozenset(on_node[name])) for name, slots in capacity.items()),
        tasks=tuple(_task_problem(state, task, linear) for task in tasks),
        mtbf_us=worker_mtbf_us(state, policy),
        d_transition_us=int(policy.transition_s * _SECOND_US),
        churn_us=int(policy.churn_s * _SECOND_US),
        join_slots=tuple(sorted({node.slots for node in known})),
    )


def healthy_problem_of(state: ClusterState) -> Problem:
    """The most WAF that the active tasks could reach on every node that has joined and not left on purpose.

    Nothing is there yet and nothing costs a transition: the same question whatever fails meanwhile.
    A cordoned node counts as far as it is still used: it is on its way out.
    """
    capacity = reconcile.capacity(state)
    workers = sum(
        capacity.get(node.name, 0) if node.cordoned else node.slots
        for node in state.nodes.values()
        if node.status is not NodeStatus.LEFT
    )
    linear = linear_flops(state)
    tasks = (_task_problem(state, task, linear, at_rest=True) for task in active_tasks(state))
    return Problem(workers=workers, d_running_us=1, d_transition_us=0, tasks=tuple(tasks))


def present_replicas(state: ClusterState, task: Task) -> list[tuple[str, ...]]:
    """The replicas that the plan gives the task now; those on a cordoned node only while they live. Of a task that has
    been reshaped since, those that have its present shape."""
    assignment = state.plan.assignments.get(task.name)
    shape = Shape(task.spec.tp, task.spec.pp)
    replicas = [nodes for nodes in (assignment.replicas if assignment else ()) if shape.fits(nodes)]
    if any(state.nodes[node].cordoned for nodes in replicas for node in nodes):
        for nodes in reconcile.staffing(state, task).missing:
            if nodes in replicas and any(state.nodes[node].cordoned for node in nodes):
                replicas.remove(nodes)
    return replicas


def _is_faulty(state: ClusterState, task: Task, capacity: Mapping[str, int]) -> bool:
    """The plan has workers of the task where it can have none now."""
    assignment = state.plan.assignments.get(task.name)
    if assignment is None:
        return False
    off = any(node not in capacity for nodes in assignment.replicas for node in nodes)
    return off or len(present_replicas(state, task)) < len(assignment.replicas)


@kept_while_equal
def _largest(nodes: Mapping[str, Node]) -> int:
    """The most slots of a node that is there or may come back: a larger tensor-parallel group finds no seat at all."""
    return max([node.slots for node in nodes.values() if node.status is not NodeStatus.LEFT], default=0)


def _task_problem(
    state: ClusterState, task: Task, linear: int, *, faulty: bool = False, at_rest: bool = False
) -> TaskProblem:
    assignment = None if at_rest else state.plan.assignments.get(task.name)
    fits = task.spec.tp <= _largest(state.nodes)
    return TaskProblem(
        name=task.name,
        weight=task.spec.weight,
        workers=assignment.workers if assignment else 0,
        faulty=faulty,
        min_workers=task.spec.min_workers,
        max_workers=task.spec.max_workers if fits else 0,
        floor=task.spec.min_workers if fits else 0,
        unit=task.spec.replica_workers,
        throughput=throughput(task, linear),
        d_transition_us=None if at_rest or not task.pace.transition_us else task.pace.transition_us,
    )
