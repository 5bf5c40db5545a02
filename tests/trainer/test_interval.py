"""How often to save: Young's and Daly's estimates, and what bounds them."""

from __future__ import annotations

from math import expm1, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.trainer.states.saving import INTERVAL_MAX_S, optimal_s, save_interval

costs = st.floats(1e-4, 1e3)
times = st.floats(1.0, 1e8)


@given(costs, times)
def test_save_interval_minimizes_waste(cost_s: float, mtbf_s: float) -> None:
    """Daly's model of the expected time for a second of work, of which his formula is the approximate minimum."""
    if cost_s > mtbf_s / 4:
        return

    def wasted(interval_s: float) -> float:
        return mtbf_s * expm1((interval_s + cost_s) / mtbf_s) / interval_s

    best = wasted(optimal_s(cost_s, mtbf_s))
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert best <= wasted(factor * optimal_s(cost_s, mtbf_s)) * (1 + 1e-9)


def test_cheap_save_interval_matches_young() -> None:
    assert optimal_s(1.0, 1e8) == pytest.approx(sqrt(2e8), rel=1e-3)


def test_costly_save_interval_matches_mtbf() -> None:
    assert optimal_s(100.0, 50.0) == 50.0


def test_save_interval_converts_to_iterations() -> None:
    assert save_interval(0.5, 2.0, 10_000.0) == round(optimal_s(0.5, 10_000.0) / 2.0)
    assert save_interval(0.0, 2.0, 10_000.0) == 1, "what costs nothing is done each time"
    assert save_interval(60.0, 1.0, 1e9) == INTERVAL_MAX_S
    assert save_interval(1.0, 0.0, 1.0) == 1, "no pace is known yet"
    assert save_interval(1.0, 1.0, 0.0) == save_interval(1.0, 1.0, 86400.0), "no failure rate is known yet"
