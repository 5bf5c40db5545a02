"""Random problems with several types of GPU, and the oracle: every deal of the tasks among them.

`python -m tests.planning.pools` prints the table of docs/design/planning.md: what is proven, within how much, and the
CPU time of a plan.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from random import Random
from statistics import mean

from unicrond.core.planning import kernel_choice
from unicrond.core.planning.floors import problem_values, with_floor_worths
from unicrond.core.planning.pools import confined
from unicrond.core.planning.problem import Alternative, Curve, Pool, Prices, Problem, TaskProblem
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.events.vocabulary.shape import Shape

GPUS = ("a100-80g", "h100-80g", "h200-141g")
#: A worker's FLOP/s in each, about: of two generations the newer is some two to three times as fast.
SPEEDS = (140, 400, 420)
#: Gains are rounded to some 1e-13 of the objective.
NOTHING = 1e-12
MTBF_S, TRANSITION_S = 8 * 10**6, 40


def random_pools(rng: Random, tasks: int, pools: int, nodes: int, most: int = 64, fewest: int = 1) -> Problem:
    """A cluster of `fewest` to `nodes` nodes of 8 of each of `pools` types: tasks of up to `most` workers, at work on
    some type or waiting."""
    sizes = [rng.randint(fewest, nodes) for _ in range(pools)]
    own = tuple(Pool(gpu, 8 * size, ((8, size),)) for gpu, size in zip(GPUS, sizes, strict=False))
    workers, left = 8 * sum(sizes), {pool.gpu: pool.workers for pool in own}
    members = tuple(_task(rng, f"t{n}", own, left, most) for n in range(tasks))
    return Problem(workers, MTBF_S // workers, TRANSITION_S, members, rng.choice((0, 20)), (), own)


def _task(rng: Random, name: str, pools: tuple[Pool, ...], left: dict[str, int], largest: int) -> TaskProblem:
    unit = rng.choice((1, 2, 8, 8, 16))
    tp = min(8, unit)
    most = unit * rng.randint(1, max(1, largest // unit))
    scaling = rng.uniform(0.75, 0.99)
    curves = {}
    for gpu, speed in zip(GPUS, SPEEDS, strict=True):
        fits = rng.random() > 0.1  # there may be no room for the model in this type's memory
        worth = speed * rng.uniform(0.6, 1.1) * fits
        curves[gpu] = Curve({k: worth * k**scaling for k in range(unit, most + 1, unit)})
    at = rng.choice(pools).gpu
    has = min(most, rng.randrange(0, left[at] + 1)) // unit * unit
    left[at] -= has
    others = tuple(Alternative(Shape(tp, unit // tp), curves[p.gpu], most, p.gpu) for p in pools if p.gpu != at)
    least = rng.choice((0, unit, unit, min(most, 2 * unit)))
    return TaskProblem(
        name=name,
        weight=round(rng.uniform(0.5, 3), 2),
        workers=has,
        throughput=curves[at],
        faulty=bool(has) and rng.random() < 0.3,
        min_workers=least,
        max_workers=most,
        floor=least,
        unit=unit,
        tp=tp,
        alternatives=others,
        prices=Prices(reshape_us=3 * TRANSITION_S),
        gpu=at,
    )


def every_deal(problem: Problem) -> Solution:
    """The best of all deals: a pool's own plan is exact, so this is the best plan there is."""
    known: dict[tuple[str, tuple[int, ...]], Solution] = {}
    values, pinned = problem_values(problem), with_floor_worths(problem)

    def part(pool: Pool, tasks: tuple[int, ...]) -> Solution:
        if (pool.gpu, tasks) not in known:
            own = tuple(confined(pinned.tasks[i], pool.gpu)[0] for i in tasks)
            known[pool.gpu, tasks] = solve(
                replace(problem, workers=pool.workers, seats=pool.seats, closed=pool.closed, tasks=own, pools=())
            )
        return known[pool.gpu, tasks]

    def plan(deal: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        for place, pool in enumerate(problem.pools):
            tasks = tuple(i for i, its in enumerate(deal) if its == place)
            found = part(pool, tasks)
            for i, count, layout in zip(tasks, found.workers, found.layouts, strict=True):
                yield i, count, confined(problem.tasks[i], pool.gpu)[1][layout]

    def rank(deal: tuple[int, ...]) -> tuple[int, Fraction]:
        parts = [
            (tasks, part(pool, tasks))
            for place, pool in enumerate(problem.pools)
            for tasks in [tuple(i for i, its in enumerate(deal) if its == place)]
        ]
        missed = sum(
            values[i]
            for tasks, each in parts
            for i, (task, workers) in zip(tasks, each, strict=True)
            if workers < task.floor
        )
        return missed, -sum((each.exact_objective for _, each in parts), Fraction(0))

    best = min(product(range(len(problem.pools)), repeat=len(problem.tasks)), key=rank)
    choices = sorted(plan(best))
    return Solution(problem, tuple(k for _, k, _ in choices), 0.0, tuple(layout for _, _, layout in choices))


def gap(found: Solution, best: Solution) -> float:
    """The share of the best objective that the plan misses, where it meets as many floors; else 1."""
    if found.shortfall != best.shortfall:
        return 1.0
    return float((best.exact_objective - found.exact_objective) / (abs(best.exact_objective) or Fraction(1)))


def adopted(problem: Problem, solution: Solution) -> Problem:
    """The problem after the plan was carried out: all tasks are healthy and have what it gave them."""
    tasks = []
    for (task, workers), layout in zip(solution, solution.layouts, strict=True):
        others = task.alternatives
        if layout:
            choice, present = others[layout - 1], Alternative(task.shape, task.curve, task.max_workers, task.gpu)
            others = (present, *others[: layout - 1], *others[layout:])
            task = replace(task, throughput=choice.curve, max_workers=choice.most, gpu=choice.gpu)
        tasks.append(replace(task, workers=workers, faulty=False, alternatives=others))
    return replace(problem, tasks=tuple(tasks))


def with_nodes(problem: Problem, place: int, nodes: int) -> Problem:
    """The problem where one pool has so many nodes of 8."""
    pool = Pool(problem.pools[place].gpu, 8 * nodes, ((8, nodes),) if nodes else ())
    pools = (*problem.pools[:place], pool, *problem.pools[place + 1 :])
    return replace(problem, pools=pools, workers=sum(pool.workers for pool in pools))


def after_join(rng: Random, tasks: int, pools: int, nodes: int) -> Problem:
    """All nodes of the fastest type join."""
    problem = random_pools(rng, tasks, pools, nodes)
    return adopted(problem, solve(with_nodes(problem, pools - 1, 0)))


def after_loss(rng: Random, tasks: int, pools: int, nodes: int) -> Problem:
    """One node is lost, on which two tasks had workers."""
    problem = random_pools(rng, tasks, pools, nodes)
    problem = adopted(problem, solve(problem))
    place = rng.randrange(pools)
    there = [task.name for task in problem.tasks if task.workers and task.gpu == problem.pools[place].gpu]
    hit = rng.sample(there, min(2, len(there)))
    faulty = tuple(replace(task, faulty=task.name in hit) for task in problem.tasks)
    return with_nodes(replace(problem, tasks=faulty), place, problem.pools[place].workers // 8 - 1)


def full_pools(rng: Random, tasks: int, pools: int, nodes: int) -> Problem:
    """Each pool has all its nodes, and the tasks ask for more."""
    return random_pools(rng, tasks, pools, nodes, most=256, fewest=nodes)


def crowded_pools(seed: int) -> Problem:
    """Two small pools after a loss, four tasks without floors of very unlike weights, and little time to the next
    failure: some that run are worth less than what they hold up."""
    rng = Random(f"x{seed}")
    problem = random_pools(rng, 4, 2, 2)
    tasks = tuple([replace(t, floor=0, min_workers=0, weight=rng.choice((0.01, 0.1, 1, 3))) for t in problem.tasks])
    nodes = tuple([replace(pool, workers=8, seats=((8, 1),)) for pool in problem.pools])
    d_running_us = rng.choice((100, 1000, 10_000, 100_000))
    return replace(problem, tasks=tasks, pools=nodes, workers=16, d_running_us=d_running_us)


#: What comes before, types, tasks, nodes a pool, problems.
ROWS = (
    ("random", random_pools, 2, 8, 8, 30),
    ("random", random_pools, 3, 12, 8, 30),
    ("random", random_pools, 3, 32, 64, 16),
    ("random", random_pools, 3, 100, 240, 6),
    ("random", random_pools, 2, 100, 640, 6),
    ("random, scarce", full_pools, 3, 100, 320, 6),
    ("the fastest type joins", after_join, 2, 32, 64, 10),
    ("a lost node", after_loss, 3, 32, 64, 10),
    ("a lost node", after_loss, 2, 100, 640, 4),
)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="")
    options = parser.parse_args()
    kernel_choice.warm()
    print("| before | types, tasks, nodes a pool | problems | proven | gap: mean, worst | CPU, ms: mean, worst |")
    print("|---|---|---|---|---|---|", flush=True)
    for before, cluster, pools, tasks, nodes, problems in ROWS:
        if options.rows not in f"{before} {pools} {tasks}":
            continue
        gaps, times_ms = [], []
        for seed in range(problems):
            problem = cluster(Random(f"{pools}/{tasks}/{seed}"), tasks, pools, nodes)
            begun = time.thread_time()
            solution = solve(problem)
            times_ms.append((time.thread_time() - begun) * 1000)
            gaps.append(solution.gap)
        proven = sum(not gap for gap in gaps)
        figures = f"{mean(gaps):.4%}, {max(gaps):.4%} | {mean(times_ms):.0f}, {max(times_ms):.0f}"
        print(f"| {before} | {pools}, {tasks}, {nodes} | {problems} | {proven} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
