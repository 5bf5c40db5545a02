"""The plan problems that the cluster's state poses: pure questions, answered by `unicrond.core.planning`.

    problem_of          what to do now (paper, section "plan generation")
    situation_of        what stands now, so that every next problem can be answered before it comes
    healthy_problem_of  the shares if every node were healthy: the measure of sub-health (costs.py)

Rules
-----
* `situation_of(state).after(event) == problem_of(state after event)`, field by field: that is what makes the
  one-step table a look-up. A test holds them to it. Beside cordoned nodes the seats differ (`Problem.sums_only`).
* What is learnt (measured throughput, failure rate, transition times) enters here and nowhere else; a plan's
  `basis` does not hold it, so that learning by itself never moves a worker.
* With several types of GPU each is a pool, also while no node of it may carry workers.
* While nodes cannot talk to each other (faults/links.py) no task gets more workers than stand on nodes of which all
  can; and no table is made, since such a plan holds only until the link is back.
* The workers on cordoned nodes are residents: no other task gets their seats, since nothing starts there. They are
  counted replica by replica, where the whole replica may stay.
* A task with workers on a cordoned node keeps its layout: for another one all of them leave, and nothing starts there
  again. No table is made meanwhile, since their loss would change that.
* A task whose program fails without achieving anything is worth next to nothing: one FLOP/s for each worker, and no
  floor. So it gets workers that idle otherwise, and none that another has a use for (faults/program_faults.py).
* A task whose tensor-parallel group is larger than any node gets nothing, and keeps nothing from others. Nor does one
  whose `gpus` say that it achieves nothing on the types that there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypedDict

from unicrond.core.faults.links import ends_to_leave
from unicrond.core.planning.feasibility import Seats, seats_matter, seats_of
from unicrond.core.planning.problem import Alternative, Curve, Pool, Prices, Problem, TaskProblem
from unicrond.core.planning.situation import NodeLoad, Situation, d_running_us
from unicrond.core.rules.pinning import Pins, open_capacity, pins_of
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import NodeStatus, Task
from unicrond.core.tasks.reshaping import most_workers, planned_shape
from unicrond.events.vocabulary import DETERMINISTIC, TaskAssignment
from unicrond.events.vocabulary.shape import Shape

_SECOND_US = 1_000_000
#: What a reshape costs until the task has had one, in transitions (docs/results/benchmarks.md#reshape).
RESHAPE_TRANSITIONS = 3


def problem_of(survey: Survey, pins: Pins | None = None) -> Problem:
    """Return the problem that the present nodes and tasks pose, after what has happened since the last plan. `pins`:
    the seats of tasks that keep theirs; None: as their modes say."""
    pins = pins_of(survey) if pins is None else pins
    policy, capacity = survey.policy, open_capacity(survey, pins)
    workers = sum(capacity.values())
    unpinned = [task for task in survey.active if task.name not in pins]
    residents = _residents(survey, capacity, unpinned)
    tasks = tuple(
        [
            _task_problem(survey, task, faulty=_is_faulty(survey, task), residents=residents.get(task.name, ()))
            for task in unpinned
        ]
    )
    return Problem(
        workers=workers,
        d_running_us=d_running_us(survey.worker_mtbf_us, workers, survey.stands_us),
        d_transition_us=int(policy.transition_s * _SECOND_US),
        tasks=tasks,
        churn_us=int(policy.churn_s * _SECOND_US),
        **_room(survey, capacity, tasks, survey.nodes.cordoned),
    )


def situation_of(survey: Survey) -> Situation | None:
    """Return what stands before the next event; None while the last one has not been planned for."""
    state, policy, capacity, tasks = survey.state, survey.policy, survey.capacity, survey.active
    if not survey.fresh or survey.barred_pairs or survey.absence.absentees or pins_of(survey):
        return None
    if any(_is_faulty(survey, task) or (task.spec.layouts and _is_on_cordoned(survey, task)) for task in tasks):
        return None
    on_node: dict[str, set[str]] = {name: set() for name in capacity}
    for task in tasks:
        assignment = state.plan.assignments.get(task.name)
        for nodes in assignment.replicas if assignment else ():
            for node in nodes:
                on_node[node].add(task.name)
    problems = tuple([_task_problem(survey, task) for task in tasks])
    present = [node for node in state.nodes.values() if node.status is not NodeStatus.LEFT]
    return Situation(
        nodes=tuple(
            NodeLoad(name, slots, frozenset(on_node[name]), survey.gpus.get(name, ""))
            for name, slots in capacity.items()
        ),
        tasks=problems,
        mtbf_us=survey.worker_mtbf_us,
        stands_us=survey.stands_us,
        d_transition_us=int(policy.transition_s * _SECOND_US),
        churn_us=int(policy.churn_s * _SECOND_US),
        join_slots=tuple(sorted({node.slots for node in present})),
        seats_matter=seats_matter(problems),
        gpus=survey.types,
    )


def healthy_problem_of(survey: Survey) -> Problem:
    """Return the problem of the most WAF that the active tasks could reach on every node that has joined and not left
    on purpose.

    Nothing is there yet and nothing costs a transition: the same question whatever fails meanwhile. A cordoned or
    leaving node counts as far as it is still used: it is on its way out.
    """
    slots = {
        node.name: survey.capacity.get(node.name, 0) if node.cordon.active or node.departure.announced else node.slots
        for node in survey.state.nodes.values()
        if node.status is not NodeStatus.LEFT
    }
    tasks = tuple([_task_problem(survey, task, at_rest=True) for task in survey.active])
    room = _room(survey, slots, tasks)
    return Problem(workers=sum(slots.values()), d_running_us=1, d_transition_us=0, tasks=tasks, **room)


def present_replicas(survey: Survey, task: Task) -> list[tuple[str, ...]]:
    """Return the replicas that the plan gives the task now; those on a cordoned node only while they live. Of a task
    that has been reshaped since, those that have its present shape; of one that is on its way to the layout that the
    plan has chosen, those that it will have."""
    state = survey.state
    assignment = state.plan.assignments.get(task.name)
    shape = _shape(task, assignment)
    replicas = [nodes for nodes in (assignment.replicas if assignment else ()) if shape.fits(nodes)]
    going = {node for nodes in replicas for node in nodes if node not in state.nodes or state.nodes[node].cordon.active}
    if going:
        for nodes in survey.staffing(task).missing:
            if nodes in replicas and not going.isdisjoint(nodes):
                replicas.remove(nodes)
    return replicas


class _Room(TypedDict):
    seats: Seats
    pools: tuple[Pool, ...]
    closed: int


def _room(
    survey: Survey, slots: Mapping[str, int], tasks: tuple[TaskProblem, ...], closed: Sequence[str] = ()
) -> _Room:
    """Return seats and pools of nodes with so many slots. `closed`: nodes that start no workers."""
    asks = seats_matter(tasks)
    closed_slots = {name: slots[name] for name in closed if name in slots}
    open_slots = {name: count for name, count in slots.items() if name not in closed_slots} if closed_slots else slots
    closed_workers = sum(closed_slots.values())
    if not survey.types:
        return {"seats": seats_of(open_slots) if asks else (), "pools": (), "closed": closed_workers}
    pools = []
    for gpu in survey.types:
        pool_slots = {name: count for name, count in open_slots.items() if survey.gpus[name] == gpu}
        pool_closed = sum(count for name, count in closed_slots.items() if survey.gpus[name] == gpu)
        seats = seats_of(pool_slots) if asks else ()
        pools.append(Pool(gpu, sum(pool_slots.values()) + pool_closed, seats, pool_closed))
    return {"seats": (), "pools": tuple(pools), "closed": closed_workers}


def _is_faulty(survey: Survey, task: Task) -> bool:
    """Return whether the plan has workers of the task where it can have none now."""
    assignment = survey.state.plan.assignments.get(task.name)
    if assignment is None:
        return False
    nodes = {node for nodes in assignment.replicas for node in nodes}
    off = any(node not in survey.capacity or node in survey.absence.absentees for node in nodes)
    gpu = survey.type_of(task)
    if survey.types and any(survey.gpus.get(node) != gpu for node in nodes):
        return True
    return off or len(present_replicas(survey, task)) < len(assignment.replicas)


def _shape(task: Task, assignment: TaskAssignment | None) -> Shape:
    """Return the layout that the task has, or is on its way to because the plan has chosen it."""
    return planned_shape(task.spec, assignment) if task.reshaping.plan else task.spec.shape


def _task_problem(
    survey: Survey, task: Task, *, faulty: bool = False, at_rest: bool = False, residents: tuple[int, ...] = ()
) -> TaskProblem:
    share = survey.state.plan.assignments.get(task.name)
    assignment = None if at_rest else share
    shape = _shape(task, share)
    chooses = _chooses(survey, task)
    gpu = survey.type_of(task)
    curves = survey.curves(task, gpu)
    most = most_workers(task.spec, shape) if chooses else task.spec.max_workers
    alternatives = _alternatives(survey, task, shape, gpu, at_rest=at_rest) if chooses or survey.types else ()
    curve = curves.get(shape) or curves[task.spec.shape]
    fits = shape.tp <= survey.largest and not _kept_off(task, curve)
    if survey.barred_pairs and not at_rest:
        most = min(most, _room_of_one(survey, gpu))
        fits = fits and most >= task.spec.min_workers
    problem = TaskProblem(
        name=task.name,
        weight=task.spec.weight,
        workers=assignment.workers if assignment else 0,
        faulty=faulty,
        min_workers=task.spec.min_workers,
        max_workers=most if fits else 0,
        floor=task.spec.min_workers if fits or alternatives else 0,
        unit=shape.workers,
        tp=shape.tp,
        form=shape,
        throughput=curve,
        d_transition_us=None if at_rest or not task.pace.transition_us else task.pace.transition_us,
        alternatives=alternatives,
        prices=Prices() if at_rest else _prices(survey, task, chooses=chooses or bool(survey.types)),
        turn=0 if at_rest else survey.turns.get(task.name, 0),
        gpu=gpu if survey.types else "",
        priority=task.spec.priority,
        preemptible=task.spec.preemptible or task.name in survey.over_quota,
        residents=residents,
    )
    if task.name in survey.failing and not problem.turn:
        return _worthless(problem)
    if not task.spec.gpus or survey.types or not problem.floor:
        return problem
    return replace(problem, floor=problem.least_that_achieves or problem.floor)  # as in a pool of several


def _worthless(problem: TaskProblem) -> TaskProblem:
    """Return the problem of a task that gets only what others have no use for."""
    alternatives = [replace(option, curve=_idle_curve(option.curve)) for option in problem.alternatives]
    return replace(
        problem,
        floor=0,
        preemptible=True,
        throughput=_idle_curve(problem.curve),
        alternatives=tuple(alternatives),
    )


def _idle_curve(curve: Curve) -> Curve:
    """Return a curve that achieves one FLOP/s for each worker where `curve` achieves anything."""
    return Curve({workers: float(workers) for workers, flops in curve.rounded() if flops})


def _alternatives(survey: Survey, task: Task, current: Shape, gpu: str, *, at_rest: bool) -> tuple[Alternative, ...]:
    """Return the task's other layouts on its type of GPU, then all on each other type, unless it must have the same
    bits."""
    chooses, alternatives = _chooses(survey, task), []
    stays = task.membership is not None and task.spec.env.get(DETERMINISTIC) == "require"
    for gpu_type in (gpu, *(candidate for candidate in survey.types if candidate != gpu and not stays)):
        curves = survey.curves(task, gpu_type)
        for shape in curves if chooses and (at_rest or not _is_on_cordoned(survey, task)) else [current]:
            if (gpu_type, shape) == (gpu, current) or shape.tp > survey.largest:
                continue
            most = most_workers(task.spec, shape) if chooses else task.spec.max_workers
            if survey.barred_pairs and not at_rest:
                most = min(most, _room_of_one(survey, gpu_type) // shape.workers * shape.workers)
            curve = curves.get(shape) or curves[task.spec.shape]
            if most >= task.spec.min_workers and not _kept_off(task, curve):
                alternatives.append(Alternative(shape, curve, most, gpu_type if survey.types else ""))
    return tuple(alternatives)


def _room_of_one(survey: Survey, gpu: str) -> int:
    """Return the most workers that one task can have on this type: of nodes that cannot talk to each other, only one
    end counts."""
    slots = {name: count for name, count in survey.capacity.items() if not survey.types or survey.gpus[name] == gpu}
    pairs = [pair for pair in survey.barred_pairs if all(end in slots for end in pair)]
    ends = ends_to_leave(pairs, {end: (slots[end],) for pair in pairs for end in pair})
    return sum(slots.values()) - sum(slots[end] for end in ends)


def _kept_off(task: Task, curve: Curve) -> bool:
    """Return whether the task's file names types of GPU and gives 0 FLOP/s to this choice: then it gets no workers
    there, not even to meet a floor."""
    return bool(task.spec.gpus) and not any(flops for _, flops in curve.rounded())


def _residents(survey: Survey, slots: Mapping[str, int], tasks: Sequence[Task]) -> dict[str, tuple[int, ...]]:
    """Return the residents of the tasks that have some, as in TaskProblem. `slots`: those of each node that a plan may
    use. A replica counts if it may stay as a whole: each shard has a slot, on a node of the task's type."""
    if not survey.nodes.cordoned:
        return {}
    cordoned, free = frozenset(survey.nodes.cordoned), Counter(dict(slots))
    residents: dict[str, tuple[int, ...]] = {}
    for task in tasks:
        gpu, counts = survey.type_of(task), []
        for nodes in present_replicas(survey, task) if _is_on_cordoned(survey, task) else ():
            shards = Counter(nodes)
            if cordoned.isdisjoint(shards) or any(free[node] < count for node, count in shards.items()):
                continue
            if not survey.types or all(survey.gpus[node] == gpu for node in shards):
                free.subtract(shards)
                counts.append(sum(node in cordoned for node in nodes))
        residents[task.name] = tuple(sorted(counts, reverse=True))
    return residents


def _is_on_cordoned(survey: Survey, task: Task) -> bool:
    """Return whether workers of the task are on nodes that start nothing."""
    return any(survey.state.by_node.of_task(node, task.name) for node in survey.nodes.cordoned)


def _chooses(survey: Survey, task: Task) -> bool:
    """Return whether a plan may give the task another layout; not while a person has asked for one."""
    by_person = task.reshaping.reshape is not None and not task.reshaping.plan
    return bool(task.spec.layouts) and not by_person


def _prices(survey: Survey, task: Task, *, chooses: bool) -> Prices:
    """Return what changes cost the task, as far as it was measured; otherwise a reshape costs RESHAPE_TRANSITIONS
    transitions. Stopping it costs what its own last start took. `chooses`: it may get another layout or type."""
    if not chooses:
        return Prices(restart_us=task.pace.start_us or None)
    transition_us = task.pace.transition_us or int(survey.policy.transition_s * _SECOND_US)
    return Prices(
        move_us=task.pace.move_us or None,
        reshape_us=task.pace.reshape_us or RESHAPE_TRANSITIONS * transition_us,
        restart_us=task.pace.start_us or None,
    )
