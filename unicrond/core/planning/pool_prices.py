"""Prices for the seats of each pool, and what follows from them: upper bounds for plans over several pools.

    bound = sum_p price(p) seats(p) + sum_t max_p net(t, p)
    net(t, p) = max_k value(t, p, k) - price(p) seats(t, p, k)         regret(t, p) = max_q net(t, q) - net(t, p)

Rules
-----
* The bound holds for any prices >= 0 (Lagrange): a plan that fits pays for no more seats than there are. Of plans with
  a task in a given pool, the bound is less by its regret of that pool.
* The best prices are found by cutting planes, in the form of Dantzig and Wolfe: a simplex whose columns are plans that
  need not fit, with a row for each pool and one for the columns' shares, which add up to 1. It begins with a plan that
  gives each task the least, in pools where that fits. Each step asks for all tasks' best choices at its prices; it ends
  where these are worth no more than they cost, or after STEPS_MAX.
* All prices that it has met give bounds, and so do the best ones with some of them changed by SPREAD: which bound is
  lowest depends on the deal.
* Numbers are float64, added and multiplied one by one in a fixed order (no BLAS): every machine has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import fsum

import numpy as np
from numpy.typing import NDArray

from unicrond.core.planning.points import beside_residents, bounds, outline_of, scale, useful
from unicrond.core.planning.problem import Problem

Floats = NDArray[np.float64]

#: The most steps of the simplex.
STEPS_MAX = 60
#: Choices are worth more than they cost if that adds more than this share of the bound.
WORTH_SHARE = 1e-9
#: By which shares of a pool's best price others are regarded: for so many pools together, for more one by one.
SPREAD = (0.02, 0.1)
POOLS_TOGETHER = 4


class Offers:
    """The choices of all tasks in one pool: seats, values, and where each task's begin."""

    def __init__(
        self, seats: Floats, values: Floats, starts: NDArray[np.int64], seats_in_pool: int, is_open: Sequence[bool]
    ) -> None:
        self.seats, self.values, self.starts = seats, values, starts
        self.seats_in_pool, self.is_open = float(seats_in_pool), np.array(is_open, dtype=np.bool_)
        self._best: dict[float, tuple[Floats, Floats]] = {}

    def best(self, price: float) -> tuple[Floats, Floats]:
        """Return per task the value of its best choice less the price of its seats, and how many seats that takes."""
        if price not in self._best:
            nets = self.values - price * self.seats
            best = np.maximum.reduceat(nets, self.starts[:-1])
            is_best = nets == np.repeat(best, np.diff(self.starts))
            seats = np.minimum.reduceat(np.where(is_best, self.seats, np.inf), self.starts[:-1])
            self._best[price] = np.where(self.is_open, best, -np.inf), seats
        return self._best[price]


def offers_of(problem: Problem, floors: Sequence[int], is_open: Sequence[bool]) -> Offers:
    """Return the choices in a pool with all tasks. `floors`: the workers that each has at least; `is_open`: whether it
    may be in this pool at all."""
    tasks, d_running = outline_of(problem), float(problem.d_running_us)
    by = scale(tasks, bounds(tasks, problem.workers, d_running))
    forms = np.array([int(task.faulty) for task in problem.tasks], dtype=np.int64)
    floors = [floor if may_be else 0 for floor, may_be in zip(floors, is_open, strict=True)]
    points, grain = useful(tasks, forms, floors, problem.workers, d_running, by), tasks.grain
    if problem.closed:
        points, _, grain = beside_residents(points, grain, problem)
    seats, values = (points.workers * grain).astype(np.float64), points.values * 2.0**by.exponent
    return Offers(seats, values, points.starts, problem.open_workers, is_open)


@dataclass(frozen=True)
class PoolPrices:
    """The prices that bounds are known at. `price_sums`: (pools, prices) a price times the seats of the pool; `nets`:
    (tasks, pools, prices); `firsts`: (tasks, pools) the value of a task's first choice, which needs no seat unless it
    has a floor that is met."""

    price_sums: Floats
    nets: Floats
    firsts: Floats

    @cached_property
    def bounds(self) -> Floats:
        """Return the bound of all plans at each of the prices."""
        bounds: Floats = self.price_sums.sum(axis=0) + self.nets.max(axis=1).sum(axis=0)
        return bounds

    @property
    def lowest(self) -> float:
        """Return the best of the bounds."""
        return float(self.bounds.min())

    @cached_property
    def regrets(self) -> Floats:
        """Return the regret of each task in each pool at each of the prices; inf where it may not be."""
        regrets: Floats = self.nets.max(axis=1, keepdims=True) - self.nets
        return regrets

    @cached_property
    def nearest(self) -> Floats:
        """Return the regrets at the best prices."""
        return self.regrets[:, :, int(self.bounds.argmin())]

    @cached_property
    def is_idle(self) -> NDArray[np.bool_]:
        """Return per task whether no choice in any pool is better than the first, at the best prices."""
        nets = self.nets[:, :, int(self.bounds.argmin())]
        is_idle: NDArray[np.bool_] = nets.max(axis=1) <= self.firsts.max(axis=1)
        return is_idle

    @cached_property
    def besides(self) -> Floats:
        """Return per task the least that all pools but one have of it, at no price, where it is in all of them."""
        besides: Floats = self.firsts.sum(axis=1) - self.firsts.max(axis=1)
        return besides

    def apart(self, tasks_of: Sequence[Sequence[int]]) -> float:
        """Return a bound of one deal, given as the tasks in each pool: of each pool at the prices that are best for
        it."""
        return fsum(
            [
                float((self.nets[list(tasks), place].sum(axis=0) + self.price_sums[place]).min())
                for place, tasks in enumerate(tasks_of)
            ]
        )


def best_prices(pools: Sequence[Offers], places: Sequence[int]) -> PoolPrices:
    """Return the best prices that are found, and others. `places`: per task the pool in which its least fits, beside
    those of all others."""
    count, free = len(pools), [offers.seats_in_pool for offers in pools]
    firsts = [(place, int(pools[place].starts[i])) for i, place in enumerate(places)]
    demand = [fsum([pools[at].seats[first] for at, first in firsts if at == place]) for place in range(count)]
    worth = fsum([pools[place].values[first] for place, first in firsts])
    # Columns of the basis: a slack for each pool, then the first plan.
    inverse = [[float(row == column) for column in range(count)] + [-demand[row]] for row in range(count)]
    inverse.append([0.0] * count + [1.0])
    worths, levels = [0.0] * count + [worth], [*[a - b for a, b in zip(free, demand, strict=True)], 1.0]
    bound_of: dict[tuple[float, ...], float] = {}
    for _ in range(STEPS_MAX):
        duals = [fsum([worth * row[at] for worth, row in zip(worths, inverse, strict=True)]) for at in range(count + 1)]
        prices, lowest = tuple(duals[:count]), min(range(count), key=duals.__getitem__)
        if duals[lowest] < 0:
            column, worth = [float(place == lowest) for place in range(count + 1)], 0.0
        else:
            answers = [offers.best(price) for offers, price in zip(pools, prices, strict=True)]
            nets = np.stack([net for net, _ in answers], axis=1)
            places_of = nets.argmax(axis=1)
            demand = [fsum(answers[place][1][places_of == place].tolist()) for place in range(count)]
            value, price_sum = fsum(nets.max(axis=1).tolist()), fsum([a * b for a, b in zip(prices, free, strict=True)])
            bound_of[prices] = value + price_sum
            if value - duals[count] <= WORTH_SHARE * abs(value + price_sum):
                break
            column, worth = [*demand, 1.0], fsum([value, *[a * b for a, b in zip(prices, demand, strict=True)]])
        if not _pivot(inverse, levels, worths, column, worth):
            break
    best = min(bound_of, key=bound_of.__getitem__)
    shares = [1.0, *[1 + sign * share for share in SPREAD for sign in (1, -1)]]
    near: Iterable[tuple[float, ...]] = product(*[[price * share for share in shares] for price in best])
    if count > POOLS_TOGETHER:
        near = [(*best[:at], best[at] * share, *best[at + 1 :]) for at in range(count) for share in shares]
    prices_of = np.array(list(dict.fromkeys([*bound_of, *near])))
    nets_of = [
        np.stack([pool.best(price)[0] for price in prices_of[:, at].tolist()], 1) for at, pool in enumerate(pools)
    ]
    firsts_of = np.stack([pool.values[pool.starts[:-1]] for pool in pools], axis=1)
    return PoolPrices(prices_of.T * np.array(free)[:, None], np.stack(nets_of, axis=1), firsts_of)


def _pivot(
    inverse: list[list[float]], levels: list[float], worths: list[float], column: Sequence[float], worth: float
) -> bool:
    """Let a column enter the basis, in place; return False if none can leave for it."""
    rates = [fsum(entry * part for entry, part in zip(row, column, strict=True)) for row in inverse]
    ratios = [(level / rate, at) for at, (level, rate) in enumerate(zip(levels, rates, strict=True)) if rate > 1e-12]
    if not ratios:
        return False
    _, leaving = min(ratios)
    share = 1.0 / rates[leaving]
    inverse[leaving] = [entry * share for entry in inverse[leaving]]
    levels[leaving] *= share
    for at, rate in enumerate(rates):
        if at != leaving and rate:
            inverse[at] = [entry - rate * pivot for entry, pivot in zip(inverse[at], inverse[leaving], strict=True)]
            levels[at] = max(0.0, levels[at] - rate * levels[leaving])
    worths[leaving] = worth
    return True
