"""The one-step table: the plan for every event that may come next, computed before it comes.

The theory
----------
All scenarios at one n' differ from the resting problem in a few tasks: one is faulty, one is absent, the
queued one is present. With prefix rows P and suffix rows S of the resting problem, a scenario that changes
the tasks a..b costs b - a + 1 max-plus products and one merge:

    best = max_u C(u) + S_{b+1}(n' - u),    C = P_a (+) changed choices of a..b

so the whole table costs a few passes of the dynamic programme, not one per scenario. Scenarios can share
rows if they agree on n', D_running and the scale of the integers; a *sweep* is the pair of row sets for
one such key. A node loss or join changes D_running and so every row of its sweep. Events at the same n'
leave the rows before the first and behind the last changed task as they are: those are reused, and counted.

Rules
-----
* An entry is the very plan that `solver.solve` gives for `situation.after(event)`, ties included.
* Where floors do not fit together, an event that hits or ends a task whose floor is met may change which floors are,
  and so needs rows of its own: beyond FLOOR_SETS_MAX sets of floors it has no entry, and is solved when it comes.
* With several types of GPU there are no rows: plans are solved one by one, and looked up by their problem
  (`multi_type_lookahead.py`).
* A `PlanTable` holds plans, no rows. Except for the plans of several types it is immutable. The rows belong to the
  `Planner`, which is used from one thread at a time; a mere look-up needs no planner and no thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning.feasibility import has_room
from unicrond.core.planning.floors import floors_to_meet, problem_floors
from unicrond.core.planning.points import (
    ABSENT,
    FAULTY,
    HEALTHY,
    Bounds,
    Outline,
    Points,
    Scale,
    bounds,
    outline,
    scale,
    useful,
    without,
)
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.situation import NextEvent, NodeLoss, Situation
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve

#: How a plan came about: looked up, solved on rows that were valid, solved from scratch.
SolveMethod: TypeAlias = Literal["table", "incremental", "fresh"]

#: The most sets of floors that are weighed for one table, where not all floors can be met.
FLOOR_SETS_MAX = 32

# Forms of a task in a scenario, as `kernel.answer` has them.
_AT_REST, _CHANGED = 0, 1

#: The load of a node: its slots, the tasks on it, its type of GPU. Many nodes have the same load and share an entry.
_Load: TypeAlias = tuple[int, frozenset[str], str]
#: The effect of an event: n' after it, the absent tasks, the faulty ones (indices in the lineup).
_Change: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Effort:
    """The work of building a table, in rows of the dynamic programme."""

    rows_computed: int = 0
    rows_reused: int = 0
    scenarios: int = 0
    sweeps: int = 0


class _Key(NamedTuple):
    """What scenarios must agree on to share rows. `floors`: the floors to meet, empty where all are."""

    workers: int
    d_running_us: int
    scale: Scale
    floors: tuple[int, ...]


#: The tasks `first`, `first + 1`, ... take these forms instead of those at rest; and the scenario's row in the table. A
#: plain tuple that begins with a number: hundreds are sorted for every table, and such tuples sort four times as fast.
_Scenario: TypeAlias = tuple[int, tuple[int, ...], int]


#: For scenarios with one n' and the same absent tasks: the resolution of their plans, and all that share their rows.
_ScenarioGroup: TypeAlias = tuple[float, list[_Scenario]]


@dataclass
class _Sweep:
    """Rows of the resting problem. Valid: prefixes[:prefix_valid], suffixes[suffix_valid:]."""

    points: Points
    prefixes: NDArray[np.float64]  # (tasks + 1, size + 1)
    suffixes: NDArray[np.float64]
    prefix_valid: int
    suffix_valid: int


@dataclass(frozen=True)
class PlanTable:
    """Plans for all expected events; a look-up computes nothing. `ahead`: with several types of GPU, the plans that
    have been made so far; it grows."""

    situation: Situation
    effort: Effort
    _plans: NDArray[np.int64] = field(repr=False)
    _row_of: Mapping[NextEvent | _Load, int] = field(repr=False)  # node losses by load
    _row_of_change: Mapping[_Change, int] = field(repr=False)
    _resolutions: tuple[float, ...] = field(repr=False)
    _events: tuple[NextEvent, ...] = field(repr=False)  # one per row
    ahead: dict[Problem, Solution] = field(default_factory=dict, repr=False)

    def look_up(self, event: NextEvent) -> tuple[int, ...] | None:
        """Return the workers per task of `situation.lineup` (0 for absent tasks); None if the event has no entry."""
        row = self._row(event)
        return None if row is None else tuple(self._plans[row].tolist())

    def solution(self, event: NextEvent) -> Solution | None:
        """Return the entry with its problem, objective and reason; None if there is none."""
        if self.situation.gpus:
            return self.ahead.get(self.situation.after(event))
        row = self._row(event)
        if row is None:
            return None
        solution = self._solution(row, self.situation.after(event))
        return solution if has_room(solution) else solve(solution.problem)

    def _row(self, event: NextEvent) -> int | None:
        if isinstance(event, NodeLoss):
            node = self.situation.load_of.get(event.node)
            return None if node is None else self._row_of.get(node.load)
        return self._row_of.get(event)

    def answer(self, problem: Problem) -> Solution | None:
        """Return the entry for exactly this problem; None if the table does not hold it, or it finds no seats."""
        if problem.pools:
            return self.ahead.get(problem)
        row = self._row_of_change.get(_change(self.situation, problem))
        if row is None:
            return None
        prospect = self.situation.after(self._events[row])
        if (prospect.sums_only != problem.sums_only) if problem.closed else (prospect != problem):
            return None
        solution = self._solution(row, problem)
        return solution if has_room(solution) else None

    def _solution(self, row: int, problem: Problem) -> Solution:
        names = {task.name for task in problem.tasks}
        counts = zip(self.situation.lineup, self._plans[row].tolist(), strict=True)
        plan = tuple(count for task, count in counts if task.name in names)
        return Solution(problem, plan, self._resolutions[row])


def _change(situation: Situation, problem: Problem) -> _Change:
    faulty_of = {task.name: task.faulty for task in problem.tasks}
    absent = tuple(i for i, task in enumerate(situation.lineup) if task.name not in faulty_of)
    faulty = tuple(i for i, task in enumerate(situation.lineup) if faulty_of.get(task.name))
    return problem.workers, absent, faulty


@dataclass(frozen=True)
class Answer:
    """A plan and how it came about. `rows_reused`: rows of the dynamic programme that were valid already."""

    solution: Solution
    method: SolveMethod
    rows_reused: int = 0


class Planner:
    """Keeper of the rows from one table to the next. Not to be used from two threads at once."""

    def __init__(self) -> None:
        self._sweeps: dict[_Key, _Sweep] = {}
        self.table: PlanTable | None = None

    def refresh(self, situation: Situation) -> PlanTable:
        """Build the table for the situation and keep it: to be done after every event, off the event loop."""
        self.table = None
        build = _Build(situation, self._sweeps)
        table = build.table() if not situation.gpus else build.empty_table()
        self._sweeps = build.sweeps
        self.table = table
        return table

    def answer(self, problem: Problem) -> Answer:
        """Return the canonical plan, by the quickest method. The method never changes the plan."""
        if self.table is not None and (solution := self.table.answer(problem)) is not None:
            return Answer(solution, "table", self.table.effort.rows_reused)
        if (answer := self._solve_on_rows(problem)) is not None:
            return answer
        return Answer(solve(problem), "fresh")

    def _solve_on_rows(self, problem: Problem) -> Answer | None:
        """Solve on the rows that are valid, if the problem differs from a resting one in the middle only; else return
        None."""
        if self.table is None or not problem.tasks or problem.pools:
            return None
        lineup = self.table.situation.lineup
        place = {task.name: index for index, task in enumerate(lineup)}
        places = [place.get(task.name, -1) for task in problem.tasks]
        if places != sorted(set(places)) or places[0] < 0:
            return None
        tasks = {task.name: task for task in problem.tasks}
        tasks_now = [tasks.get(task.name, task) for task in lineup]
        forms = np.array([int(t.faulty) if t.name in tasks else ABSENT for t in tasks_now], dtype=np.int64)
        absent = tuple(i for i, task in enumerate(tasks_now) if task.name not in tasks)
        flat = outline(tasks_now, float(problem.d_transition_us), float(problem.churn_us))
        d_running = float(problem.d_running_us)
        by = scale(flat, bounds(flat, problem.workers, d_running), absent)
        floor_of = dict(zip(tasks, problem_floors(problem), strict=True))
        floors = [floor_of.get(task.name, 0) for task in tasks_now]
        for key, sweep in self._sweeps.items():
            if (key.workers, float(key.d_running_us), key.scale) != (problem.workers, d_running, by):
                continue
            if sweep.prefixes.shape[1] != problem.workers // flat.grain + 1:
                continue
            points = useful(flat, forms, floors, problem.workers, d_running, by)
            first, behind = points.leading(sweep.points), points.trailing(sweep.points)
            first = min(first, len(tasks_now) - 1)
            last = max(len(tasks_now) - behind, first + 1)
            if first >= sweep.prefix_valid or last < sweep.suffix_valid:
                continue
            plan = (_answers(sweep, points, [(first, (_CHANGED,) * (last - first), 0)])[0] * flat.grain).tolist()
            solution = Solution(problem, tuple(plan[i] for i in places), by.resolution(len(places)))
            if not has_room(solution):
                return None
            return Answer(solution, "incremental", first + len(tasks_now) - last)
        return None


class _Build:
    """One build of a table: it groups the scenarios by what they can share, then sweeps group by group."""

    def __init__(self, situation: Situation, old: Mapping[_Key, _Sweep]) -> None:
        self.situation = situation
        self.old = old
        self.sweeps: dict[_Key, _Sweep] = {}
        self.flat: Outline = outline(situation.lineup, float(situation.d_transition_us), float(situation.churn_us))
        self.index = {name: i for i, name in enumerate(self.flat.names)}
        waiting = situation.queued
        self.waiting: tuple[int, ...] = (self.index[waiting.name],) if waiting else ()
        self.at_rest = np.full(len(self.index), HEALTHY, dtype=np.int64)
        self.alternate = np.full(len(self.index), FAULTY, dtype=np.int64)
        for i in self.waiting:
            self.at_rest[i], self.alternate[i] = ABSENT, HEALTHY
        self.rest_form: tuple[int, ...] = (_AT_REST,)
        self.alternate_run: tuple[int, ...] = (_CHANGED,) * len(self.index)
        self.computed = self.reused = 0
        self.floor_points = [task.floor_point for task in situation.lineup]
        self.floors_at: dict[int, tuple[int, ...]] = {}  # per n', with all tasks that run
        self.floor_sets = 0
        self.limits_at: dict[int, tuple[int, Bounds]] = {}  # per n': D_running, and the bounds of the tasks' gains
        self.groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], _ScenarioGroup] = {}
        self.row_of_change: dict[_Change, int] = {}
        self.events: list[NextEvent] = []
        self.resolutions: list[float] = []
        self.scenarios: dict[_Key, list[_Scenario]] = {}

    def table(self) -> PlanTable:
        """Build the table, on the rows of the one before where possible."""
        row_of: dict[NextEvent | _Load, int] = {}
        load_of = self.situation.load_of
        for event in self.situation.expected(distinct=True):
            known_by = load_of[event.node].load if isinstance(event, NodeLoss) else event
            row = self._add_scenario(event)
            if row is not None:
                row_of[known_by] = row
        plans = np.zeros((len(self.events), len(self.index)), dtype=np.int64)
        if len(self.index):
            for key, scenarios in self.scenarios.items():
                scenarios.sort()  # those that begin alike are neighbours and share the work
                plans[[row for _, _, row in scenarios]] = self._solve(key, scenarios)
            plans *= self.flat.grain
        effort = Effort(self.computed, self.reused, len(self.events), len(self.scenarios))
        resolutions, events = tuple(self.resolutions), tuple(self.events)
        return PlanTable(self.situation, effort, plans, row_of, self.row_of_change, resolutions, events)

    def empty_table(self) -> PlanTable:
        """Return a table without plans."""
        return PlanTable(self.situation, Effort(), np.zeros((0, len(self.index)), dtype=np.int64), {}, {}, (), ())

    def _add_scenario(self, event: NextEvent) -> int | None:
        """Put the event's scenario where it shares rows; return its row in the table, None if it gets none."""
        workers, faulty_names, finished, launched = self.situation.change(event)
        faulty: tuple[int, ...] = ()
        absent, first, forms = self.waiting, 0, self.rest_form
        if faulty_names:
            faulty = tuple(sorted([self.index[name] for name in faulty_names]))
            first, behind = faulty[0], faulty[-1] + 1
            forms = self.alternate_run[: len(faulty)]
            if behind - first > len(faulty):
                forms = tuple([_CHANGED if i in faulty else _AT_REST for i in range(first, behind)])
        elif finished:
            first, forms = self.index[finished], (ABSENT,)
            absent = (first, *self.waiting)
        elif launched:
            first, forms, absent = self.index[launched], (_CHANGED,), ()
        if (row := self.row_of_change.get((workers, absent, faulty))) is not None:
            return row
        floors = self._floors(workers, absent, faulty)
        if floors is None:
            return None
        group = self.groups.get((workers, absent, floors)) or self._group_of(workers, absent, floors)
        resolution, scenarios = group
        row = self.row_of_change[workers, absent, faulty] = len(self.events)
        self.events.append(event)
        self.resolutions.append(resolution)
        scenarios.append((first, forms, row))
        return row

    def _floors(self, workers: int, absent: tuple[int, ...], faulty: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        """Return the floors to meet, empty where all are; None if there are too many sets of them."""
        if sum(without(self.floor_points, absent)) <= workers:
            return ()
        if faulty or len(absent) > len(self.waiting):
            at_rest = self._floors(workers, self.waiting)
            if at_rest and not any(at_rest[i] for i in (*absent, *faulty)):
                return at_rest  # a task whose floor is unmet in any case changes nothing by being worth less, or gone
        elif absent == self.waiting and workers in self.floors_at:
            return self.floors_at[workers]
        if self.floor_sets >= FLOOR_SETS_MAX:
            return None
        self.floor_sets += 1
        situation = self.situation
        lineup = [replace(task, faulty=i in faulty) for i, task in enumerate(situation.lineup)]
        present = without(lineup, absent)
        best = floors_to_meet(present, workers, situation.d_running_us(workers), situation.d_transition_us)
        floor_of = {task.name: floor for task, floor in zip(present, best, strict=True)}
        floors = tuple([floor_of.get(task.name, 0) for task in situation.lineup])
        if absent == self.waiting and not faulty:
            self.floors_at[workers] = floors
        return floors

    def _group_of(self, workers: int, absent: tuple[int, ...], floors: tuple[int, ...]) -> _ScenarioGroup:
        if workers not in self.limits_at:
            d_running = self.situation.d_running_us(workers)
            self.limits_at[workers] = d_running, bounds(self.flat, workers, float(d_running))
        d_running, limits = self.limits_at[workers]
        by = scale(self.flat, limits, absent)
        scenarios = self.scenarios.setdefault(_Key(workers, d_running, by, floors), [])
        entry = self.groups[workers, absent, floors] = by.resolution(len(self.index) - len(absent)), scenarios
        return entry

    def _solve(self, key: _Key, scenarios: list[_Scenario]) -> NDArray[np.int64]:
        floors = key.floors or self.floor_points
        points = useful(self.flat, self.at_rest, floors, key.workers, float(key.d_running_us), key.scale)
        if any(_CHANGED in forms for _, forms, _ in scenarios):
            alternate = useful(self.flat, self.alternate, floors, key.workers, float(key.d_running_us), key.scale)
        else:
            alternate = points
        first = max([first for first, _, _ in scenarios])
        last = min([first + len(forms) for first, forms, _ in scenarios])
        sweep = self.sweeps[key] = self._sweep(key, points, first + 1, last)
        return _answers(sweep, alternate, scenarios)

    def _sweep(self, key: _Key, points: Points, prefix_rows: int, suffix_from: int) -> _Sweep:
        """Compute rows for the points: prefixes[:prefix_rows] and suffixes[suffix_from:], reusing as many as
        possible."""
        tasks, size = len(points.stay), key.workers // self.flat.grain
        prefixes, suffixes = np.empty((tasks + 1, size + 1)), np.empty((tasks + 1, size + 1))
        prefixes[0], prefixes[0, 0], suffixes[tasks] = -np.inf, 0.0, 0.0
        leading = trailing = 0
        old = self.old.get(key)
        if old is not None and old.prefixes.shape[1] == size + 1:
            leading = min(points.leading(old.points), old.prefix_valid - 1)
            trailing = min(points.trailing(old.points), len(old.suffixes) - 1 - old.suffix_valid)
            prefixes[1 : leading + 1] = old.prefixes[1 : leading + 1]
            suffixes[tasks - trailing : tasks] = old.suffixes[len(old.suffixes) - 1 - trailing : -1]
        prefix_rows, suffix_from = max(prefix_rows, leading + 1), min(suffix_from, tasks - trailing)
        compute, workers, values = kernel.active(), points.workers, points.values
        compute.prefix(workers, values, points.starts[:prefix_rows], prefixes, leading)
        first_valid = tasks - trailing - suffix_from
        compute.suffix(workers, values, points.starts[suffix_from:], suffixes[suffix_from:], first_valid)
        self.reused += leading + trailing
        self.computed += prefix_rows - 1 - leading + tasks - trailing - suffix_from
        return _Sweep(points, prefixes, suffixes, prefix_rows, suffix_from)


def _answers(sweep: _Sweep, alternate: Points, scenarios: Sequence[_Scenario]) -> NDArray[np.int64]:
    """Return the grains per scenario and task."""
    points = sweep.points
    plans = np.zeros((len(scenarios), len(points.stay)), dtype=np.int64)
    starts = np.zeros(len(scenarios) + 1, dtype=np.int64)
    np.cumsum([len(forms) for _, forms, _ in scenarios], out=starts[1:])
    kernel.active().answer(
        points.workers,
        points.values,
        points.starts,
        points.stay,
        sweep.prefixes,
        sweep.suffixes,
        alternate.workers,
        alternate.values,
        alternate.starts,
        alternate.stay,
        np.array([first for first, _, _ in scenarios], dtype=np.int64),
        starts,
        np.array([form for _, forms, _ in scenarios for form in forms], dtype=np.int64),
        plans,
    )
    return plans
