"""Times that contradict each other are named; the defaults do not."""

from __future__ import annotations

import pytest

from unicrond.agents.trainer.process.context import WorkerSettings
from unicrond.core.state.policy import Policy
from unicrond.intake.timeouts import TRAINER_DEFAULTS, contradictions


def test_default_timeouts_are_consistent() -> None:
    assert contradictions(Policy(), 1.0, {}) == []


def test_default_timeouts_match_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TRAINER_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    patience = WorkerSettings.from_environment()
    assert list(TRAINER_DEFAULTS.values()) == [
        patience.fault_wait_s,
        patience.lease_s,
        patience.collective_timeout_s,
        patience.hang_floor_s,
        patience.start_s,
    ]


@pytest.mark.parametrize(
    ("policy", "heartbeat_s", "env", "name"),
    [
        (Policy(), 1.0, {"UNICRON_FAULT_WAIT_S": "20"}, "UNICRON_FAULT_WAIT_S"),
        (Policy(regroup_s=300.0), 1.0, {}, "UNICRON_FAULT_WAIT_S"),
        (Policy(), 40.0, {"UNICRON_FAULT_WAIT_S": "300"}, "UNICRON_LEASE_S"),
        (Policy(), 1.0, {"UNICRON_LEASE_S": "3"}, "UNICRON_LEASE_S"),
        (Policy(), 1.0, {"UNICRON_COLLECTIVE_TIMEOUT_S": "2"}, "UNICRON_COLLECTIVE_TIMEOUT_S"),
        (Policy(), 1.0, {"UNICRON_COLLECTIVE_TIMEOUT_S": "1800"}, "UNICRON_COLLECTIVE_TIMEOUT_S"),
        (Policy(), 1.0, {"UNICRON_START_S": "5", "UNICRON_HANG_FLOOR_S": "9"}, "UNICRON_START_S"),
        (Policy(symptom_window_s=5.0), 1.0, {}, "policy.symptom_window_s"),
        (Policy(exit_s=70.0), 1.0, {}, "policy.exit_s"),
    ],
)
def test_contradiction_names_its_field(policy: Policy, heartbeat_s: float, env: dict[str, str], name: str) -> None:
    found = contradictions(policy, heartbeat_s, env)
    assert [sentence.partition(":")[0] for sentence in found] == [name]


def test_timeout_check_skips_invalid_numbers() -> None:
    assert contradictions(Policy(), 1.0, {"UNICRON_LEASE_S": "soon"}) == []
