"""Random small clusters for the planner's tests: full of ties, plateaus, floors, caps and odd units."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from unicrond.core.planning.problem import Alternative, Curve, Prices, Problem, TaskProblem
from unicrond.core.planning.situation import NodeLoad, Situation
from unicrond.events.vocabulary.shape import Shape


def random_task(rng: Random, name: str, most: int, *, faulty: bool = False) -> TaskProblem:
    kind = rng.randrange(4)
    if kind == 0:  # linear, as without a table: nothing but ties
        flops = tuple(range(most + 1))
    elif kind == 1:  # plateaus
        flops = tuple(sorted(rng.choice((0, 1, 2, 3, 5, 8)) for _ in range(most + 1)))
    elif kind == 2:  # anything, not even rising
        flops = tuple(rng.randrange(0, 10) for _ in range(rng.randint(0, most + 2)))
    else:  # real sizes, where rounding begins to matter
        flops = tuple(int(x**0.9 * 1e14) + rng.randrange(1000) for x in range(most + 1))
    unit = rng.choice((1, 1, 1, 2, 3))
    return TaskProblem(
        name,
        weight=rng.choice((1, 1, 1, 2, 0.5, 3)),
        workers=rng.choice((0, rng.randint(0, most), rng.randint(0, most) // unit * unit)),
        throughput=flops,
        faulty=faulty,
        min_workers=rng.choice((0, 1, rng.randint(0, most))),
        max_workers=rng.choice((None, None, rng.randint(0, most))),
        floor=rng.choice((0, 0, 1, rng.randint(0, most))),
        unit=unit,
        d_transition_us=rng.choice((None, None, 0, rng.randint(0, 9))),
    )


def with_layouts(rng: Random, task: TaskProblem, most: int) -> TaskProblem:
    """The task with other layouts and prices, drawn at random."""
    small = max((float(flops) for flops in task.curve.points.values()), default=0.0) < 1000
    others = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        shape = Shape(rng.choice((1, 1, 2, 2, 4)), rng.choice((1, 1, 1, 2)))
        points = range(rng.randint(0, most + 1))
        if rng.random() < 0.4:  # as good as the present one: nothing but ties
            flops = {k: task.curve(k) for k in points}
        elif small:
            flops = {k: rng.choice((0, 1, 2, 3, 5, 8)) for k in points}
        else:
            flops = {k: int(k**0.9 * 1e14) + rng.randrange(1000) for k in points}
        others.append(Alternative(shape, Curve(flops), rng.choice((None, None, rng.randint(0, most)))))
    price = [rng.choice((None, 0, 1, rng.randint(0, 9), 20)) for _ in range(3)]
    tp = rng.choice([size for size in (1, 2, 4) if task.unit % size == 0])
    return replace(task, tp=tp, alternatives=tuple(others), prices=Prices(*price))


def random_seats(rng: Random, workers: int) -> tuple[tuple[int, int], ...]:
    """Nodes of one to five slots for so many workers."""
    slots: Counter[int] = Counter()
    left = workers
    while left:
        size = min(left, rng.randint(1, 5))
        slots[size] += 1
        left -= size
    return tuple(sorted(slots.items()))


def with_turns(rng: Random, problem: Problem) -> Problem:
    """Up to four tasks have a turn, in any order, and more tasks have floors."""
    turns = rng.sample(range(1, 5), min(4, len(problem.tasks)))
    tasks = [
        replace(task, turn=turn if rng.random() < 0.6 else 0, floor=task.floor or rng.randint(0, 3))
        for task, turn in zip(problem.tasks, turns, strict=False)
    ]
    return replace(problem, tasks=tuple(tasks) + problem.tasks[len(tasks) :])


def with_priorities(rng: Random, problem: Problem) -> Problem:
    """Return the problem with priorities, preemptible tasks and more floors."""
    tasks = [
        replace(
            task,
            priority=rng.choice((0, 0, 0, 1, -5)),
            preemptible=rng.random() < 0.2,
            floor=task.floor or rng.randint(0, 4),
        )
        for task in problem.tasks
    ]
    return replace(problem, tasks=tuple(tasks))


def with_residents(rng: Random, problem: Problem) -> Problem:
    """Return the problem with closed nodes, where some replicas of tasks of one layout stand, whole or in part."""
    tasks, closed = [], 0
    for task in problem.tasks:
        residents = []
        for _ in range(0 if task.alternatives else rng.randint(0, task.workers // task.unit)):
            here = rng.choice((task.unit, task.unit, rng.randint(1, task.unit // task.tp) * task.tp))
            if closed + here <= problem.workers:
                residents.append(here)
                closed += here
        tasks.append(replace(task, residents=tuple(sorted(residents, reverse=True))))
    closed = rng.choice((closed, closed, rng.randint(closed, problem.workers)))
    seats = random_seats(rng, problem.workers - closed) if problem.seats else ()
    return replace(problem, tasks=tuple(tasks), closed=closed, seats=seats)


def random_problem_of_layouts(rng: Random, most_tasks: int = 3, most_workers: int = 8) -> Problem:
    problem = random_problem(rng, most_tasks, most_workers)
    tasks = tuple(with_layouts(rng, task, most_workers) for task in problem.tasks)
    seats = random_seats(rng, problem.workers) if rng.random() < 0.7 else ()
    return replace(problem, tasks=tasks, seats=seats)


def random_problem(rng: Random, most_tasks: int = 4, most_workers: int = 9) -> Problem:
    tasks = tuple(
        random_task(rng, f"t{i}", most_workers, faulty=rng.random() < 0.3) for i in range(rng.randint(0, most_tasks))
    )
    return Problem(
        workers=rng.randint(0, most_workers),
        d_running_us=rng.choice((0, 1, 2, 5, 10)),
        d_transition_us=rng.choice((0, 1, 2, 7)),
        tasks=tasks,
        churn_us=rng.choice((0, 0, 1, 3)),
    )


def random_situation(rng: Random, most_tasks: int = 4, most_workers: int = 9) -> Situation:
    """Nodes of one to four slots; who has workers where is random as well: the planner takes it as it is."""
    names = [f"t{i}" for i in range(rng.randint(0, most_tasks))]
    rng.shuffle(names)
    queued = random_task(rng, names.pop(), most_workers) if names and rng.random() < 0.5 else None
    tasks = tuple(random_task(rng, name, most_workers) for name in names)
    nodes, left = [], rng.randint(1, most_workers)
    while left:
        slots = min(left, rng.choice((1, 2, 2, 4)))
        there = frozenset(rng.sample(names, rng.randint(0, min(len(names), slots))))
        nodes.append(NodeLoad(f"n{len(nodes)}", slots, there))
        left -= slots
    return Situation(
        nodes=tuple(nodes),
        tasks=tasks,
        mtbf_us=rng.choice((1, 10, 20, 50, 100)),
        d_transition_us=rng.choice((0, 1, 2, 7)),
        churn_us=rng.choice((0, 0, 1, 3)),
        queued=queued,
        join_slots=(rng.choice((1, 2, 4)),),
    )
