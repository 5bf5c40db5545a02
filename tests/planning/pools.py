"""Random problems with several types of GPU, and the oracle: every deal of the tasks among them.

`python -m tests.planning.pools` prints the table of docs/design/planning.md: how far the search stays below the best.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from random import Random
from statistics import mean

from unicrond.core.planning.floors import problem_values, with_floor_worths
from unicrond.core.planning.pools import best_of_pools, confined
from unicrond.core.planning.problem import Alternative, Curve, Pool, Prices, Problem, TaskProblem
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.events.vocabulary.shape import Shape

GPUS = ("a100-80g", "h100-80g", "h200-141g")
#: A worker's FLOP/s in each, about: of two generations the newer is some two to three times as fast.
SPEEDS = (140, 400, 420)
#: Types, tasks, and the share of the problems: each of the last takes a second.
SIZES = ((2, 4, 1), (2, 5, 0.25), (2, 6, 0.1), (3, 4, 0.1), (2, 8, 0.05), (2, 10, 0.01))
#: Gains are rounded to some 1e-13 of the objective.
NOTHING = 1e-12
MTBF_S, TRANSITION_S = 8 * 10**6, 40


def random_pools(rng: Random, tasks: int, pools: int, nodes: int) -> Problem:
    """A cluster of nodes of 8 with `pools` types: tasks of one or more nodes, at work on some type or waiting."""
    sizes = [rng.randint(1, nodes) for _ in range(pools)]
    own = tuple(Pool(gpu, 8 * size, ((8, size),)) for gpu, size in zip(GPUS, sizes, strict=False))
    workers, left = 8 * sum(sizes), {pool.gpu: pool.workers for pool in own}
    members = tuple(_task(rng, f"t{n}", own, left) for n in range(tasks))
    return Problem(workers, MTBF_S // workers, TRANSITION_S, members, rng.choice((0, 20)), (), own)


def _task(rng: Random, name: str, pools: tuple[Pool, ...], left: dict[str, int]) -> TaskProblem:
    unit = rng.choice((1, 2, 8, 8, 16))
    tp = min(8, unit)
    most = unit * rng.randint(1, max(1, 64 // unit))
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


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=2000)
    options = parser.parse_args()
    print("types tasks problems best-found mean-gap p99 worst floors-missed")
    for pools, tasks, share in SIZES:
        problems = max(1, int(options.problems * share))
        found = [_missed(pools, tasks, seed) for seed in range(problems)]
        gaps = sorted(one for one in found if one < 1)
        best = sum(one < NOTHING for one in gaps) / problems
        print(
            f"{pools:5} {tasks:5} {problems:8} {best:10.1%} {mean(gaps):8.3%} {gaps[int(len(gaps) * 0.99)]:.2%}"
            f" {gaps[-1]:.2%} {problems - len(gaps):6}",
            flush=True,
        )


def _missed(pools: int, tasks: int, seed: int) -> float:
    problem = random_pools(Random(f"{pools}/{tasks}/{seed}"), tasks, pools, 8)
    return gap(best_of_pools(problem, solve, all_max=0), every_deal(problem))


if __name__ == "__main__":
    main()
