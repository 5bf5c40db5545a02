"""The plan problems that the cluster's state poses: pure questions, answered by `unicrond.core.planning`.

    problem_of          what to do now (paper, section "plan generation")
    situation_of        what stands now, so that every next problem can be answered before it comes
    healthy_problem_of  the shares if every node were healthy: the measure of sub-health (costs.py)

Rules
-----
* `situation_of(state).after(event) == problem_of(state after event)`, field by field: that is what makes the
  one-step table a look-up. A test holds them to it.
* What is learnt (measured throughput, failure rate, transition times) enters here and nowhere else; a plan's
  `basis` does not hold it, so that learning by itself never moves a worker.
* A task whose tensor-parallel group is larger than any node gets nothing, and keeps nothing from others.
"""

from __future__ import annotations

from unicrond.core.planning.placement import Shape
from unicrond.core.planning.problem import Problem, TaskProblem
from unicrond.core.planning.situation import NodeLoad, Situation
from unicrond.core.state import NodeStatus, Task
from unicrond.core.survey import Survey

_SECOND_US = 1_000_000


def problem_of(survey: Survey) -> Problem:
    """The problem that the present nodes and tasks pose, after what has happened since the last plan."""
    policy, workers = survey.policy, sum(survey.capacity.values())
    return Problem(
        workers=workers,
        d_running_us=survey.worker_mtbf_us // max(1, workers),
        d_transition_us=int(policy.transition_s * _SECOND_US),
        tasks=tuple([_task_problem(survey, task, faulty=_is_faulty(survey, task)) for task in survey.active]),
        churn_us=int(policy.churn_s * _SECOND_US),
    )


def situation_of(survey: Survey) -> Situation | None:
    """What stands before the next event; None while the last one has not been planned for."""
    state, policy, capacity, tasks = survey.state, survey.policy, survey.capacity, survey.active
    if not survey.fresh or any(_is_faulty(survey, task) for task in tasks):
        return None
    on_node: dict[str, set[str]] = {name: set() for name in capacity}
    for task in tasks:
        assignment = state.plan.assignments.get(task.name)
        for nodes in assignment.replicas if assignment else ():
            for node in nodes:
                on_node[node].add(task.name)
    known = [node for node in state.nodes.values() if node.status is not NodeStatus.LEFT]
    return Situation(
        nodes=tuple(NodeLoad(name, slots, frozenset(on_node[name])) for name, slots in capacity.items()),
        tasks=tuple([_task_problem(survey, task) for task in tasks]),
        mtbf_us=survey.worker_mtbf_us,
        d_transition_us=int(policy.transition_s * _SECOND_US),
        churn_us=int(policy.churn_s * _SECOND_US),
        join_slots=tuple(sorted({node.slots for node in known})),
    )


def healthy_problem_of(survey: Survey) -> Problem:
    """The most WAF that the active tasks could reach on every node that has joined and not left on purpose.

    Nothing is there yet and nothing costs a transition: the same question whatever fails meanwhile.
    A cordoned node counts as far as it is still used: it is on its way out.
    """
    workers = sum(
        survey.capacity.get(node.name, 0) if node.cordoned else node.slots
        for node in survey.state.nodes.values()
        if node.status is not NodeStatus.LEFT
    )
    tasks = [_task_problem(survey, task, at_rest=True) for task in survey.active]
    return Problem(workers=workers, d_running_us=1, d_transition_us=0, tasks=tuple(tasks))


def present_replicas(survey: Survey, task: Task) -> list[tuple[str, ...]]:
    """The replicas that the plan gives the task now; those on a cordoned node only while they live. Of a task that has
    been reshaped since, those that have its present shape."""
    state = survey.state
    assignment = state.plan.assignments.get(task.name)
    shape = Shape(task.spec.tp, task.spec.pp)
    replicas = [nodes for nodes in (assignment.replicas if assignment else ()) if shape.fits(nodes)]
    if any(state.nodes[node].cordoned for nodes in replicas for node in nodes):
        for nodes in survey.staffing(task).missing:
            if nodes in replicas and any(state.nodes[node].cordoned for node in nodes):
                replicas.remove(nodes)
    return replicas


def _is_faulty(survey: Survey, task: Task) -> bool:
    """The plan has workers of the task where it can have none now."""
    assignment = survey.state.plan.assignments.get(task.name)
    if assignment is None:
        return False
    off = any(node not in survey.capacity for nodes in assignment.replicas for node in nodes)
    return off or len(present_replicas(survey, task)) < len(assignment.replicas)


def _task_problem(survey: Survey, task: Task, *, faulty: bool = False, at_rest: bool = False) -> TaskProblem:
    assignment = None if at_rest else survey.state.plan.assignments.get(task.name)
    fits = task.spec.tp <= survey.largest
    return TaskProblem(
        name=task.name,
        weight=task.spec.weight,
        workers=assignment.workers if assignment else 0,
        faulty=faulty,
        min_workers=task.spec.min_workers,
        max_workers=task.spec.max_workers if fits else 0,
        floor=task.spec.min_workers if fits else 0,
        unit=task.spec.replica_workers,
        throughput=survey.throughput(task),
        d_transition_us=None if at_rest or not task.pace.transition_us else task.pace.transition_us,
    )
