"""Random small clusters for the planner's tests: full of ties, plateaus, floors, caps and odd units."""

from __future__ import annotations

from random import Random

from unicrond.core.planning.problem import Problem, TaskProblem
from unicrond.core.planning.situation import NodeLoad, Situation


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
