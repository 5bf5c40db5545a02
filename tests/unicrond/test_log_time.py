"""The log's time: its server's word, as far as the clocks of those who write agree."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import SECOND_US, MiniCluster
from unicrond.core.fold import LEAP_MAX_US, fold, log_time_us
from unicrond.core.rules.survey import worker_mtbf_us
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope, QuarantinedMessage, RecordedEvent
from unicrond.service.coordinator.alarms import clock_alarms

YEAR_US = 365 * 86_400 * SECOND_US
NOW_US = 50 * YEAR_US


def entry(recorded_us: int, observed_us: int) -> RecordedEvent:
    event = v.NodeLeaving(node="n0", grace_us=0, reason="")
    return RecordedEvent(
        9, recorded_us, Envelope(producer="n0", boot=1, number=1, observed_at_us=observed_us, event=event)
    )


@pytest.mark.parametrize(
    ("recorded_us", "observed_us", "now_us"),
    [
        (NOW_US + SECOND_US, 0, NOW_US + SECOND_US),  # no leap: whatever the writer's clock says
        (NOW_US - SECOND_US, NOW_US, NOW_US),  # it never goes back
        (NOW_US + YEAR_US, NOW_US + YEAR_US, NOW_US + YEAR_US),  # the cluster was off for a year
        (NOW_US + YEAR_US, NOW_US + SECOND_US, NOW_US + SECOND_US + LEAP_MAX_US),  # the server's clock is wrong
        (NOW_US + YEAR_US, 0, NOW_US),  # the writer's clock is wrong: others will say
        (NOW_US + YEAR_US, 2**62 - 1, NOW_US + YEAR_US),  # a writer ahead of the server makes nothing later
    ],
)
def test_leap_is_believed_as_far_as_the_writer_agrees(recorded_us: int, observed_us: int, now_us: int) -> None:
    assert log_time_us(NOW_US, entry(recorded_us, observed_us)) == now_us


def test_message_without_a_writer_makes_time_leap_by_minutes_at_most() -> None:
    message = QuarantinedMessage(9, NOW_US + YEAR_US, "unicron.v1.obs.x", "no event", 1)
    assert log_time_us(NOW_US, message) == NOW_US + LEAP_MAX_US


def test_entry_ten_years_ahead_changes_no_estimate() -> None:
    cluster = MiniCluster(3)
    for number in range(2):
        cluster.add_host(f"n{number}", 1)
    cluster.submit("a", min_workers=1, max_workers=2, iterations=1000)
    cluster.run()
    before = cluster.state
    ahead = fold(before, RecordedEvent(before.seq + 1, before.now_us + 10 * YEAR_US, leaving(before.now_us)))
    after = fold(ahead, RecordedEvent(before.seq + 2, before.now_us + SECOND_US, leaving(before.now_us + SECOND_US)))
    assert after.now_us <= before.now_us + LEAP_MAX_US + SECOND_US
    assert worker_mtbf_us(after, cluster.policy) == pytest.approx(worker_mtbf_us(before, cluster.policy), rel=0.01)


def leaving(observed_us: int) -> Envelope:
    return Envelope(
        producer="n0", boot=10**6, number=observed_us % 2**40 + 1, observed_at_us=observed_us,
        event=v.NodeLeaving(node="n0", grace_us=0, reason=""),
    )  # fmt: skip


def test_clocks_that_differ_by_minutes_are_an_alarm() -> None:
    assert clock_alarms(LEAP_MAX_US) == [] and clock_alarms(-LEAP_MAX_US) == []
    (ahead,), (behind,) = clock_alarms(10 * YEAR_US), clock_alarms(-2 * LEAP_MAX_US)
    assert "3650 days ahead of this head's" in ahead and "10 min behind this head's" in behind
