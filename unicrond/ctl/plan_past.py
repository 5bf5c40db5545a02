"""The plans of a moment of the past: what the coordinator would have answered then.

The state is folded from the log (`past_state.py`), the questions are the coordinator's own
(`unicrond.views.plan_preview`, `what_if`, `spares`), under the policy that its log gives it for that term. Planning
needs numpy, which the base install has not: `plan.py` imports this module for `--at` alone.
"""

from __future__ import annotations

from typing import Any

import msgspec

from unicrond.core.planning.multi_type_lookahead import fill
from unicrond.core.planning.problem import ProblemError
from unicrond.core.planning.table import Planner
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState
from unicrond.ctl.client import ApiRefused, Client
from unicrond.ctl.past_state import PointArgument, moment_at
from unicrond.views.plan_preview import table_json, table_of
from unicrond.views.spares import spares
from unicrond.views.what_if import WhatIfError, answer, changes_of, what_if


class PastPlans:
    """Plans of a past moment; answers and refuses as `Client` does."""

    def __init__(self, state: ClusterState, policy: Policy) -> None:
        self.state = state
        self._policy = policy

    @classmethod
    def at(cls, client: Client, at: PointArgument) -> PastPlans:
        """Read the log up to the point. Raises UsageError beyond its end."""
        return cls(*moment_at(client, at))

    def plan_table(self) -> dict[str, Any]:
        """Return what Client.plan_table would have returned."""
        state = self.state
        if not state.plan.epoch:
            raise ApiRefused(f"table: there was no plan yet at entry {state.seq}; give a later --at", 503)
        try:
            table = table_of(Survey(state, self._policy), Planner())
            table = fill(table) if table is not None else None
        except ProblemError as error:
            raise ApiRefused(f"table: {error}", 400) from None
        if table is None:
            problem = f"plan {state.plan.epoch} was not made for what had just happened at entry {state.seq}"
            raise ApiRefused(f"table: {problem}; give an --at after the next plan", 503)
        return {"epoch": state.plan.epoch, **msgspec.to_builtins(table_json(table))}

    def plan_whatif(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return what Client.plan_whatif would have returned."""
        try:
            outcome = what_if(self.state, self._policy, changes_of(changes))
        except (WhatIfError, ProblemError) as error:
            raise ApiRefused(str(error), 400) from None
        return dict(msgspec.to_builtins(answer(self.state, outcome)))

    def plan_spares(self, repair_s: int, mtbf_s: int) -> dict[str, Any]:
        """Return what Client.plan_spares would have returned."""
        try:
            return dict(msgspec.to_builtins(spares(self.state, self._policy, repair_s, mtbf_s)))
        except ValueError as error:
            raise ApiRefused(str(error), 400) from None
