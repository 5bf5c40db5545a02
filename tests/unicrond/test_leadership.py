"""When a head may take the lease: the rules of leadership.py, one by one."""

from __future__ import annotations

import pytest

from unicrond.core.nodes.leadership import GAP_US, GRACE_US, SILENT_US, Candidacy
from unicrond.events.log.lease import Holder, LeaseEntry

LOOK_US = 200_000
OTHER = LeaseEntry(7, Holder(head="b", process="head2:2"))


def candidacy(*, is_patient: bool = False, heartbeat_us: int = 1_000_000) -> Candidacy:
    return Candidacy("a", heartbeat_us, 0, is_patient=is_patient)


def first_us(standing: Candidacy, held: LeaseEntry | None, from_us: int, until_us: int = 10 * GRACE_US) -> int | None:
    """When it may be taken first, with a look at each LOOK_US."""
    for now_us in range(from_us, until_us, LOOK_US):
        if standing.answered(held, now_us):
            return now_us
    return None


def test_head_never_takes_lease_of_another() -> None:
    assert first_us(candidacy(), OTHER, LOOK_US) is None


def test_lone_head_takes_lease_at_once() -> None:
    assert candidacy().answered(None, LOOK_US) == "no head leads"


def test_patient_head_waits_grace_period() -> None:
    assert first_us(candidacy(is_patient=True), None, LOOK_US) == LOOK_US + GRACE_US


def test_observed_end_of_lease_suffices() -> None:
    standing = candidacy(is_patient=True)
    first_us(standing, OTHER, LOOK_US, 3 * GRACE_US)
    assert standing.answered(None, 3 * GRACE_US)


def test_head_skips_wait_for_departed_holder() -> None:
    left = LeaseEntry(8, Holder(head="b", process="head2:2", has_left=True))
    standing = candidacy(is_patient=True)
    standing.beat(LOOK_US)
    assert standing.answered(left, LOOK_US) == "the head head2:2 has left"


def test_head_skips_wait_for_dead_process_of_same_machine() -> None:
    standing = candidacy()
    assert "of this machine has ended" in standing.answered(OTHER, LOOK_US, is_gone=True)


@pytest.mark.parametrize("how", ["unanswered", "another connection", "no look for long"])
def test_holder_gets_grace_period_after_interruption(how: str) -> None:
    standing = candidacy()
    assert first_us(standing, OTHER, LOOK_US, 2 * GRACE_US) is None
    back_us = 2 * GRACE_US + 100_000
    if how == "unanswered":
        standing.unanswered()
    if how == "no look for long":
        back_us += GAP_US
    assert not standing.answered(None, back_us, is_anew=how == "another connection")
    found_us = first_us(standing, None, back_us + LOOK_US)
    assert found_us == back_us + GRACE_US
    # It has come back meanwhile: nothing is taken.
    assert not standing.answered(OTHER, found_us + LOOK_US)


def test_beating_coordinator_keeps_lead_without_lease() -> None:
    standing = candidacy()
    for now_us in range(0, 10 * SILENT_US, LOOK_US):
        standing.beat(now_us)
        assert not standing.answered(None, now_us)
    assert first_us(standing, None, 10 * SILENT_US) is not None


def test_head_waits_longer_for_rare_beats() -> None:
    standing = candidacy(heartbeat_us=60_000_000)
    standing.beat(0)
    assert first_us(standing, None, LOOK_US, 30_000_000) is None


def test_head_ignores_foreign_lease_entry() -> None:
    assert candidacy().answered(LeaseEntry(9, None), LOOK_US) == "no head leads"
