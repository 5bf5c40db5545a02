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
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve

Rule: TypeAlias = Callable[[Problem], Solution]


def optimal(problem: Problem) -> Solution:
    """Return the planner's own solution."""
    return solve(problem)


def equal(problem: Problem) -> Solution:
    """Share the nodes equally among the tasks."""
    return _shared(problem, {task.name: 1.0 for task in problem.tasks})


def weighted(problem: Problem) -> Solution:
    """Share the nodes by the tasks' weights."""
    return _shared(problem, {task.name: float(task.weight) for task in problem.tasks})


def sized(sizes: Mapping[str, float]) -> Rule:
    """Build the rule that shares the nodes by the models' parameters (`sizes`: task -> parameters)."""
    return lambda problem: _shared(problem, sizes)


def _shared(problem: Problem, share: Mapping[str, float]) -> Solution:
    """Give each task its floor first, in order, as far as the nodes go; then unit by unit to the task furthest below
    its share."""
    counts = {task.name: 0 for task in problem.tasks}
    free = problem.workers
    for task in problem.tasks:
        if task.floor_point <= free:
            counts[task.name] = task.floor_point
            free -= task.floor_point
    while True:
        open_to = [
            task
            for task in problem.tasks
            if task.unit <= free
            and counts[task.name] >= task.floor_point
            and task.may_have(counts[task.name] + task.unit)
        ]
        if not open_to:
            return Solution(problem, tuple(counts.values()))
        poorest = min(open_to, key=lambda task: (counts[task.name] + task.unit) / share[task.name])
        counts[poorest.name] += poorest.unit
        free -= poorest.unit


def stay(home: Mapping[str, int]) -> Rule:
    """Build the rule under which every task keeps its nodes; a hit one shrinks, one below its first plan (`home`) grows
    back."""

    def rule(problem: Problem) -> Solution:
        """Solve the problem by shrinking hit tasks and growing back those below `home`."""
        counts = {task.name: task.workers for task in problem.tasks}
        over = sum(counts.values()) - problem.workers
        hit_first = sorted(problem.tasks, key=lambda task: (not task.faulty, -task.workers))
        for task in hit_first:
            release = min(counts[task.name], -(-max(0, over) // task.unit) * task.unit)
            counts[task.name] -= release
            over -= release
        free = problem.workers - sum(counts.values())
        for task in sorted(problem.tasks, key=lambda task: counts[task.name] - home[task.name]):
            deficit = max(0, home[task.name] - counts[task.name])
            grant = min(deficit, free) // task.unit * task.unit
            counts[task.name] += grant
            free -= grant
        return Solution(problem, tuple(counts.values()))

    return rule
