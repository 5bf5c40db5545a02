"""The oracles: every plan there is, and the plainest dynamic programme. Neither shares code with the solver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

from unicrond.core.planning.problem import Problem, TaskProblem


def legal_counts(problem: Problem, task: TaskProblem) -> list[int]:
    return sorted({k for k, _ in legal_choices(problem, task)})


def legal_choices(problem: Problem, task: TaskProblem) -> list[tuple[int, int]]:
    """Workers and layout, 0 being the present one."""
    choices = []
    forms = [(task.unit, task.max_workers), *((each.shape.workers, each.most) for each in task.alternatives)]
    for layout, (unit, most) in enumerate(forms):
        cap = problem.workers if most is None else min(most, problem.workers)
        choices += [(k, layout) for k in range(0, cap + 1, unit) if k or not layout]
    return choices or [(0, 0)]


def waf(task: TaskProblem, workers: int, layout: int = 0) -> Fraction:
    curve = task.alternatives[layout - 1].curve.points if layout else task.curve.points
    return Fraction(task.weight) * Fraction(curve.get(workers, 0)) if workers >= task.min_workers else Fraction(0)


def gain(problem: Problem, task: TaskProblem, workers: int, layout: int | None = None) -> Fraction:
    """G as the paper writes it, in exact rationals, with a price for each kind of change; None: in the best layout."""
    if layout is None:
        return max(gain(problem, task, k, one) for k, one in legal_choices(problem, task) if k == workers)
    d_transition = problem.d_transition_us if task.d_transition_us is None else task.d_transition_us
    value = waf(task, workers, layout) * Fraction(problem.d_running_us)
    stays = (workers, layout) == (task.workers, 0)
    if stays and not task.faulty:
        return value
    if not waf(task, workers, layout):
        own = (task.prices.move_us, task.prices.reshape_us, task.prices.restart_us)
        price = max(d_transition, *(d_transition if one is None else one for one in own))
    elif layout:
        price = task.prices.reshape_us
    elif task.faulty:
        price = None
    else:
        price = task.prices.move_us
    value -= waf(task, task.workers) * Fraction(d_transition if price is None else price)
    if not task.faulty:
        value -= waf(task, task.workers) * Fraction(problem.churn_us)
    return value


def shortfall(problem: Problem, counts: Sequence[int]) -> list[object]:
    """Return what is minimised first: class by class the unmet turns, the worth and the number of unmet floors; then
    the first task that misses its floor."""
    missed = [bool(task.floor) and count < task.floor for task, count in zip(problem.tasks, counts, strict=True)]
    ranks: list[object] = []
    for preemptible in (False, True):
        for priority in sorted({task.priority for task in problem.tasks}, reverse=True):
            unmet_here = [
                task
                for task, unmet_floor in zip(problem.tasks, missed, strict=True)
                if unmet_floor and (task.preemptible, task.priority) == (preemptible, priority)
            ]
            ranks.append(sorted((task.turn for task in unmet_here if task.turn), reverse=True))
            ranks.append(sum((floor_worth(problem, task) for task in unmet_here), Fraction(0)))
            ranks.append(len(unmet_here))
    return [*ranks, missed]


def floor_worth(problem: Problem, task: TaskProblem) -> Fraction:
    """Return what is lost if the task's floor is not met."""
    choices = [
        (count, layout)
        for workers in [problem.workers, task.floor * 64]
        for count, layout in legal_choices(replace(problem, workers=workers), task)
        if count >= task.floor
    ]
    least = min((count for count, _ in choices), default=0)
    achieved = max((waf(task, count, layout) for count, layout in choices if count == least), default=Fraction(0))
    transition = problem.d_transition_us if task.d_transition_us is None else task.d_transition_us
    prices = [task.prices.move_us, task.prices.reshape_us, task.prices.restart_us]
    stop = max(transition, *(transition if price is None else price for price in prices))
    heal = transition if task.faulty else 0
    return achieved * Fraction(problem.d_running_us) + waf(task, task.workers) * (Fraction(stop) - Fraction(heal))


def newcomers_of(task: TaskProblem, workers: int, layout: int = 0) -> list[int]:
    """Return how many of the workers are none that stand on a closed node: one number for each choice of those that
    stay, as whole replicas."""
    if layout:
        return [workers]
    stays = {(0, 0)}  # how many replicas, and how many of their workers are on closed nodes
    for here in task.residents:
        stays |= {(replicas + 1, residents + here) for replicas, residents in stays}
    return sorted({workers - residents for replicas, residents in stays if replicas <= workers // task.unit})


def finds_room(groups: list[int], slots: list[int]) -> bool:
    """Every way to seat them, the largest first."""
    if not groups:
        return True
    size, *rest = groups
    for at in range(len(slots)):
        if slots[at] >= size and slots[at] not in slots[:at]:
            left = [*slots[:at], slots[at] - size, *slots[at + 1 :]]
            if finds_room(rest, left):
                return True
    return False


def brute_force(problem: Problem) -> tuple[tuple[int, ...], Fraction]:
    """The canonical optimum by looking at every plan; ties as `solver.py` orders them."""
    workers, _, value = brute_force_in(problem)
    return workers, value


def brute_force_in(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...], Fraction]:
    """The same with the layouts, and with seats where the problem has some."""

    def plans(index: int, left: int) -> Iterator[tuple[tuple[int, int], ...]]:
        if index == len(problem.tasks):
            yield ()
            return
        for count, layout in legal_choices(problem, problem.tasks[index]):
            if count <= left:
                for rest in plans(index + 1, left - count):
                    yield ((count, layout), *rest)

    slots = [size for size, nodes in problem.seats for _ in range(nodes)]

    def seated(plan: tuple[tuple[int, int], ...]) -> bool:
        """Return whether all but residents find seats on nodes that start workers, whichever residents stay."""
        choices = list(zip(problem.tasks, plan, strict=True))
        for newcomers in product(*(newcomers_of(task, *choice) for task, choice in choices)):
            groups: list[int] = []
            for (task, (_, layout)), count in zip(choices, newcomers, strict=True):
                tp = task.alternatives[layout - 1].shape.tp if layout else task.tp
                groups += [tp] * (count // tp)
            if sum(newcomers) <= problem.workers - problem.closed and (
                not slots or finds_room(sorted(groups, reverse=True), slots)
            ):
                return True
        return False

    gains = [{c: gain(problem, t, *c) for c in legal_choices(problem, t)} for t in problem.tasks]
    best = None
    for plan in plans(0, problem.workers):
        missed = shortfall(problem, [k for k, _ in plan])
        value = sum((gains[i][choice] for i, choice in enumerate(plan)), Fraction(0))
        taste = tuple(
            (k != t.workers, k, layout > 0, -waf(t, k, layout), layout)
            for t, (k, layout) in zip(problem.tasks, plan, strict=True)
        )
        rank = (missed, -value, taste)
        if (best is None or rank < best[0]) and seated(plan):
            best = (rank, plan, value)
    assert best is not None
    return tuple(k for k, _ in best[1]), tuple(layout for _, layout in best[1]), best[2]


def plain_dp(problem: Problem) -> tuple[list[object], Fraction]:
    """Return the shortfall and the objective of the best plan: every set of floors, then S(i, j) = max_k S(i-1, j-k) +
    G(t_i, k), as in the paper, exact; of the k only those count in j that are no residents."""
    seats = problem.workers - problem.closed
    least = [min((k for k in legal_counts(problem, t) if k >= t.floor), default=None) for t in problem.tasks]
    sets = [
        counts
        for counts in product(*([0, k] if k and t.floor else [0] for t, k in zip(problem.tasks, least, strict=True)))
        if sum(newcomers_of(t, k)[0] for t, k in zip(problem.tasks, counts, strict=True)) <= seats
    ]
    floors = min(sets, key=lambda counts: shortfall(problem, counts))
    row: list[Fraction | None] = [Fraction(0)] * (seats + 1)
    for task, floor in zip(problem.tasks, floors, strict=True):
        gains = [(newcomers_of(task, k)[0], gain(problem, task, k)) for k in legal_counts(problem, task) if k >= floor]
        row = [
            max((before + g for k, g in gains if k <= j and (before := row[j - k]) is not None), default=None)
            for j in range(seats + 1)
        ]
    assert row[-1] is not None
    return shortfall(problem, floors), row[-1]
