"""The checks themselves: what they must report."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replay.logs import eventful
from unicrond.core import fold
from unicrond.events import vocabulary as v
from unicrond.replay.simulation.checks.checker import InvariantChecker


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
