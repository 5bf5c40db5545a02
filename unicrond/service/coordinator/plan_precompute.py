"""Foresight: while nothing happens, the plan for everything that may happen next is made in a thread.

Rules
-----
* The event loop only looks up: a problem that was foreseen is answered at once. One that was not is solved in a
  thread, on rows that stand if there are any.
* The table is made anew when the cluster is at rest and something has changed that plans depend on: nodes, tasks,
  the plan, or what was learnt. Only the newest state counts; what comes while a table is made makes the next one.
* With it the healthy cluster's problem is solved, so that no lost node waits for that either.
* The planner's rows belong to one thread at a time. While they are in use, others are solved from nothing. What waits
  for the thread may be cancelled (a term begins, or ends): the rows stay in use until the thread has ended.
* With several types of GPU the likeliest events are solved one by one (planning/multi_type_lookahead.py). That ends at
  once where another plan is to be solved, or another table is wanted.
* A small cluster is planned in plain numpy within milliseconds; where that would take longer, the compiled
  kernel is loaded first, in the thread, never on the loop.
* How a plan is obtained never changes the plan (`planning/table.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from unicrond.core.deciding.plans import PlanAnswer
from unicrond.core.planning.multi_type_lookahead import AHEAD_MAX, InterruptedSolve, interruptible, likeliest
from unicrond.core.planning.problem import Problem, ProblemError
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import Answer, Planner, PlanTable
from unicrond.core.rules.plan_problems import healthy_problem_of
from unicrond.core.rules.survey import Survey
from unicrond.views.plan_preview import table_of

log = logging.getLogger("unicrond")
T = TypeVar("T")


class Foresight:
    """The next plans of one coordinator. `table`: what is foreseen from plan `epoch` on, None = nothing yet.

    `monotonic_us`: the clock that times answers. `ahead_max`: how many events are planned for one by one.
    """

    def __init__(self, monotonic_us: Callable[[], int]) -> None:
        self.table: PlanTable | None = None
        self.epoch = 0
        self.ahead_max = AHEAD_MAX
        self._monotonic_us = monotonic_us
        self._planner = Planner()
        self._healthy: Solution | None = None
        self._rows = asyncio.Lock()
        self._working: set[asyncio.Task[Any]] = set()
        self._request = asyncio.Event()
        self._survey: Survey | None = None
        self._basis: object = None
        self._interrupted = False

    def look_up(self, problem: Problem) -> PlanAnswer | None:
        """Return the answer if it was foreseen, else None: quick, on the event loop."""
        asked_us = self._monotonic_us()
        if self._healthy is not None and self._healthy.problem == problem:
            return PlanAnswer(self._healthy, "table", self._monotonic_us() - asked_us)
        solution = self.table.answer(problem) if self.table is not None else None
        if self.table is None or solution is None:
            return None
        return PlanAnswer(solution, "table", self._monotonic_us() - asked_us, self.table.effort.rows_reused)

    async def solve(self, problem: Problem) -> PlanAnswer:
        """Return the answer, computed in a thread."""
        asked_us = self._monotonic_us()
        self._interrupted = True
        if self._rows.locked():
            solution = await asyncio.to_thread(solve, problem)
            return PlanAnswer(solution, "fresh", self._monotonic_us() - asked_us)
        answer = await self._to_its_end(self._answer(problem))
        return PlanAnswer(answer.solution, answer.method, self._monotonic_us() - asked_us, answer.rows_reused)

    def look_from(self, survey: Survey) -> None:
        """Start from the state of a cluster at rest: ask for a new table if anything has changed."""
        state = survey.state
        if not survey.fresh or not state.plan.epoch:
            return
        paces = [(task.name, task.pace) for task in survey.active]
        learnt = tuple(
            (
                name,
                tuple(pace.measurements.items()),
                pace.transition_us,
                pace.move_us,
                pace.reshape_us,
                pace.start_us,
                len(pace.other_layouts),
            )
            for name, pace in paces
        )
        basis = (state.plan.epoch, survey.basis, state.worker_mtbf_us, learnt)
        if basis != self._basis:
            self._basis, self._survey = basis, survey
            self._interrupted = True
            self._request.set()

    async def run(self) -> None:
        """Make tables as they are asked for, without end."""
        while True:
            await self._request.wait()
            await self._to_its_end(self._make())

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. The work goes on where this is cancelled."""
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._on_end)
        return await asyncio.shield(task)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._working.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be waiting for it

    async def _answer(self, problem: Problem) -> Answer:
        async with self._rows:
            return await asyncio.to_thread(self._planner.answer, problem)

    async def _make(self) -> None:
        """Make the table of the newest state that was asked for."""
        async with self._rows:
            self._request.clear()
            self._interrupted = False
            asked_us, survey = self._monotonic_us(), self._survey
            assert survey is not None
            try:
                self.table = await asyncio.to_thread(self._foresee, survey)
                self.epoch = survey.state.plan.epoch
            except asyncio.CancelledError:
                self._request.set()
                raise
            except ProblemError as error:
                log.warning("no table of plans: %s", error)
                self.table = None
        if self.table is not None:
            effort, took_ms = self.table.effort, (self._monotonic_us() - asked_us) / 1000
            rows = f"{effort.rows_computed} rows computed, {effort.rows_reused} reused"
            log.debug("table of plans: %d scenarios in %.1f ms, %s", effort.scenarios, took_ms, rows)
            await self._solve_ahead(self.table)

    async def _solve_ahead(self, table: PlanTable) -> None:
        """Solve the likeliest events one by one (with several types of GPU), while nothing else is to be solved."""
        for event in likeliest(table.situation, self.ahead_max) if table.situation.gpus else ():
            problem = table.situation.after(event)
            with suppress(InterruptedSolve, ProblemError):  # whoever asks for that plan hears why there is none
                table.ahead[problem] = await asyncio.to_thread(interruptible, problem, lambda: self._interrupted)
            if self._interrupted:
                return

    def _foresee(self, survey: Survey) -> PlanTable | None:
        """Compute the table, and the healthy cluster's solution; runs in the thread."""
        table = table_of(survey, self._planner)
        if table is None:
            return None
        healthy = healthy_problem_of(survey)
        if self._healthy is None or self._healthy.problem != healthy:
            self._healthy = solve(healthy)
        return table
