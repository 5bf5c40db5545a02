"""The checks themselves: what they must report."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.replay.logs import eventful
from unicrond.core import fold
from unicrond.core.state.state import ClusterState
from unicrond.core.worth import costs
from unicrond.events import vocabulary as v
from unicrond.replay.simulation.checks import invariants
from unicrond.replay.simulation.checks.checker import InvariantChecker
from unicrond.views import goodput


def test_checker_reports_fold_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fold refuses the entry and goes on: no state is wrong, and a fact is lost all the same."""

    def raises(*_: Any) -> Any:
        raise KeyError("made up")

    entries = eventful(1)
    monkeypatch.setitem(fold.FOLDS, v.NodeJoined, raises)
    checker = InvariantChecker()
    for entry in entries:
        checker.on_entry(entry)
        if checker.violation is not None:
            break
    assert checker.violation is not None and checker.violation.rule == "state_is_sound"
    assert checker.violation.story == "its fold fails: KeyError: 'made up'"


def test_checker_accepts_log_without_faults_of_fold() -> None:
    checker = InvariantChecker()
    entry = next(iter(eventful(1)))
    checker.on_entry(entry)
    assert checker.violation is None


def states_of(log: list[Any]) -> list[ClusterState]:
    states = [ClusterState()]
    for entry in log:
        states.append(fold.fold(states[-1], entry))
    return states


def test_books_are_open_where_work_is_delivered_and_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    log = list(eventful(1))
    assert not any(map(invariants.books_close, states_of(log)))
    date_back = costs._date_back

    def generous(ledger: Any, state: ClusterState) -> Any:
        return replace(date_back(ledger, state), delivered=ledger.delivered, repeated=ledger.repeated)

    monkeypatch.setattr(costs, "_date_back", generous)
    assert any(text.startswith("parts of") for text in map(invariants.books_close, states_of(log)))


def test_goodput_is_held_against_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report closes all the same: what is missing is rounded in."""
    log = list(eventful(1))
    states = states_of(log)
    assert not invariants.goodput_closes(states, log)
    monkeypatch.setattr(goodput, "_interrupt", lambda totals, *_: totals)
    assert "detection 0, not" in invariants.goodput_closes(states, log)
