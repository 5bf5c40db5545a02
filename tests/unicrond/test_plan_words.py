"""Why a plan is as it is: the numbers are those of T(x)."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unicrond.serving import healed_cluster
from unicrond.core.state.state import ClusterState
from unicrond.display.plan_explanation import explain_plan


def with_flops(state: ClusterState, **measured: dict[int, int]) -> ClusterState:
    """`measured`: by task, workers -> FLOP/s."""
    tasks = {
        name: replace(
            task, pace=replace(task.pace, measurements={str(x): flops for x, flops in measured[name].items()})
        )
        for name, task in state.tasks.items()
    }
    return replace(state, tasks=tasks)


def test_plan_explains_best_move_with_gain_and_cost() -> None:
    state = with_flops(
        healed_cluster().state,
        big={2: 20_000_000, 3: 21_000_000},
        small={1: 10_000_000, 2: 11_000_000},
    )
    told = explain_plan(state)
    assert told.startswith("big (weight 2) has 3, small (weight 1) has 1; by what was measured, 1 worker moved from")
    # big: 2 * (21 - 20) MFLOP/s; small: 11 - 10.
    assert "would bring small 1 MFLOP/s and cost big 2 MFLOP/s" in told and told.endswith("no move is better")


def test_plan_explains_move_that_costs_more() -> None:
    state = with_flops(healed_cluster().state, big={2: 20_000_000, 3: 20_100_000}, small={1: 10_000_000, 2: 19_000_000})
    assert explain_plan(state).endswith("less than the move itself would cost before the next failure is due")


def test_plan_without_choice_explains_nothing() -> None:
    assert explain_plan(ClusterState()) == ""
