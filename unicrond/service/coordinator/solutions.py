"""The cache of solutions to plan problems of one coordinator: looked up or solved, and kept for a while.

Rules
-----
* A problem that was foreseen is answered at once. Any other is solved in a thread, and never twice at a time.
* The newest ANSWERS_MAX are kept. An answer never grows old: it depends on its problem alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unicrond.core.deciding.plans import PlanAnswer
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.solution import Solution
from unicrond.service.coordinator.plan_precompute import Foresight

ANSWERS_MAX = 64


class Answers:
    """The solutions of plan problems that one coordinator has. `ask` says which are missing; `solve` makes them."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight = foresight
        self._solutions: dict[Problem, Solution] = {}
        self._answered: dict[Problem, PlanAnswer] = {}
        self._solving: set[Problem] = set()

    @property
    def solutions(self) -> Mapping[Problem, Solution]:
        """Return the solutions by problem, for `decide`."""
        return self._solutions

    def answer_of(self, problem: Problem) -> PlanAnswer | None:
        """Return the solution with its provenance (how it was obtained); None if there is none yet."""
        return self._answered.get(problem)

    def ask(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems that have to be solved and are not being solved yet. Quick, on the event loop."""
        to_solve = []
        for problem in problems:
            if problem in self._solutions or problem in self._solving:
                continue
            answer = self._foresight.look_up(problem)
            if answer is not None:
                self._keep(problem, answer)
            else:
                self._solving.add(problem)
                to_solve.append(problem)
        return to_solve

    async def solve(self, problem: Problem) -> None:
        """Solve a problem that `ask` has returned, and keep the solution. Raises what the solver raises."""
        try:
            self._keep(problem, await self._foresight.solve(problem))
        finally:
            self._solving.discard(problem)

    def forget_unsolved(self) -> None:
        """Forget which problems are being solved: the tasks that solved them were cancelled."""
        self._solving.clear()

    def _keep(self, problem: Problem, answered: PlanAnswer) -> None:
        while len(self._solutions) >= ANSWERS_MAX:
            oldest = next(iter(self._solutions))
            del self._solutions[oldest], self._answered[oldest]
        self._solutions[problem], self._answered[problem] = answered.solution, answered
