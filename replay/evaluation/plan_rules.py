"""Other answers to the plan problem than the optimal one, for the real core to carry out.

    equal, weighted, sized   the paper's plan baselines: beyond the floors, all nodes are shared out equally, by
                             weight, or by model size
    stay                     only the hit task shrinks, and gets its nodes back: what a fast restart alone is worth

They replace `solve`, nothing else: detection, restart and transition are the core's own, so the difference in WAF
is the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from unicrond.core.planning.problem import Problem
from unicrond.core.planning.solver import Solution, solve

Rule: TypeAlias = Callable[[Problem], Solution]


def optimal(problem: Problem) -> Solution:
    """The planner's own answer."""
    return solve(problem)


def equal(problem: Problem) -> Solution:
    """The same for every task."""
    return _shared(problem, {task.name: 1.0 for task in problem.tasks})


def weighted(problem: Problem) -> Solution:
    """By weight."""
    return _shared(problem, {task.name: float(task.weight) for task in problem.tasks})


def sized(sizes: Mapping[str, float]) -> Rule:
    """By the model's parameters (`sizes`: task -> parameters)."""
    return lambda problem: _shared(problem, sizes)


def _shared(problem: Problem, share: Mapping[str, float]) -> Solution:
    """Floors first, in order, as far as they go; then unit by unit to the task furthest below its share."""
    counts = {task.name: 0 for task in problem.tasks}
    left = problem.workers
    for task in problem.tasks:
        if task.floor_point <= left:
            counts[task.name] = task.floor_point
            left -= task.floor_point
    while True:
        open_to = [
            task
            for task in problem.tasks
            if task.unit <= left
            and counts[task.name] >= task.floor_point
            and task.may_have(counts[task.name] + task.unit)
        ]
        if not open_to:
            return Solution(problem, tuple(counts.values()))
        poorest = min(open_to, key=lambda task: (counts[task.name] + task.unit) / share[task.name])
        counts[poorest.name] += poorest.unit
        left -= poorest.unit


def stay(home: Mapping[str, int]) -> Rule:
    """Every task keeps what it has; a hit one shrinks, one below its first plan (`home`) grows back."""

    def rule(problem: Problem) -> Solution:
        counts = {task.name: task.workers for task in problem.tasks}
        over = sum(counts.values()) - problem.workers
        hit_first = sorted(problem.tasks, key=lambda task: (not task.faulty, -task.workers))
        for task in hit_first:
            given = min(counts[task.name], -(-max(0, over) // task.unit) * task.unit)
            counts[task.name] -= given
            over -= given
        left = problem.workers - sum(counts.values())
        for task in sorted(problem.tasks, key=lambda task: counts[task.name] - home[task.name]):
            wanted = max(0, home[task.name] - counts[task.name])
            taken = min(wanted, left) // task.unit * task.unit
            counts[task.name] += taken
            left -= taken
        return Solution(problem, tuple(counts.values()))

    return rule
