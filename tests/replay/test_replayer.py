"""Any prefix of a log, folded again, is what the live fold believed at that moment."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.replay.logs import eventful, troubled
from unicrond.core.fold import fold
from unicrond.core.replayer import EMPTY, replay
from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import digest
from unicrond.events.log.event_log import LogDamaged
from unicrond.events.log.point import AtSeq, AtTime, BeforeEnd, parse_point
from unicrond.events.vocabulary.phrases import format_time
from unicrond.events.wire.envelope import Entry, RecordedEvent

seeds = st.integers(0, 7)


@cache
def log_of(seed: int) -> tuple[list[Entry], list[str]]:
    """A log, and the digest of the live fold before the first entry and after each."""
    entries = eventful(seed)
    states = [EMPTY]
    for entry in entries:
        states.append(fold(states[-1], entry))
    return entries, [digest(state) for state in states]


@pytest.mark.parametrize("seed", range(10))
def test_replay_matches_state_of_cluster(seed: int) -> None:
    cluster = troubled(seed)
    assert digest(replay(cluster.log)) == digest(cluster.state)
    assert replay(cluster.log) == cluster.state


@given(seed=seeds, share=st.floats(0, 1))
def test_replay_to_number_matches_prefix_fold(seed: int, share: float) -> None:
    entries, digests = log_of(seed)
    seq = round(share * len(entries))
    assert digest(replay(entries, AtSeq(seq))) == digests[seq]


@given(seed=seeds, share=st.floats(0, 1), before_us=st.integers(-2, 2))
def test_replay_to_time_matches_prefix_by_log_time(seed: int, share: float, before_us: int) -> None:
    entries, digests = log_of(seed)
    time_us = entries[round(share * (len(entries) - 1))].recorded_at_us + before_us
    state = replay(entries, AtTime(time_us))
    assert digest(state) == digests[state.seq]
    assert state.now_us <= time_us
    if state.seq < len(entries):
        assert fold(state, entries[state.seq]).now_us > time_us


@given(seed=seeds, cuts=st.lists(st.integers(0, 400), max_size=4))
def test_replay_continues_in_pieces(seed: int, cuts: list[int]) -> None:
    entries, digests = log_of(seed)
    bounds = [0, *sorted(min(cut, len(entries)) for cut in cuts), len(entries)]
    state = EMPTY
    for begin, end in pairwise(bounds):
        state = replay(entries[begin:end], start=state)
    assert digest(state) == digests[-1]


@given(seed=seeds, share=st.floats(0, 1))
def test_missing_entry_counts_as_damage(seed: int, share: float) -> None:
    entries, _ = log_of(seed)
    gone = round(share * (len(entries) - 2))
    with pytest.raises(LogDamaged, match=f"entry {gone + 2} follows entry {gone}"):
        replay(entries[:gone] + entries[gone + 1 :])


def test_clock_set_back_hides_no_entry() -> None:
    first, second, third = troubled(1).log[:3]
    entries = [
        RecordedEvent(1, 100, first.envelope),
        RecordedEvent(2, 200, second.envelope),
        RecordedEvent(3, 150, third.envelope),
    ]
    assert replay(entries, AtTime(150)).seq == 1, "entry 3 is at 200 by the log's time"
    assert replay(entries, AtTime(200)).seq == 3


def test_replay_leaves_its_input_unchanged() -> None:
    entries, digests = log_of(1)
    start = replay(entries, AtSeq(100))
    replay(entries[100:], start=start)
    assert digest(start) == digests[100]
    assert ClusterState() == EMPTY


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("0", AtSeq(0)),
        ("1234", AtSeq(1234)),
        ("1970-01-01T00:00:01Z", AtTime(1_000_000)),
        ("1970-01-01T02:00:01.000001+02:00", AtTime(1_000_001)),
        ("2026-11-20 09:30:00Z", AtTime(1_795_167_000_000_000)),
        ("-10m", BeforeEnd(600_000_000)),
        ("-1.5s", BeforeEnd(1_500_000)),
        ("-20ms", BeforeEnd(20_000)),
        ("-2h", BeforeEnd(7_200_000_000)),
        ("-1d", BeforeEnd(86_400_000_000)),
        ("10m", BeforeEnd(600_000_000)),
    ],
)
def test_point_parses_accepted_forms(text: str, point: object) -> None:
    assert parse_point(text) == point


@pytest.mark.parametrize("text", ["", "ten", "-10", "-m", "1.5", "--1s", "-1s\n", "٣", "2026-13-01T00:00:00Z"])
def test_invalid_point_lists_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match="is not a point of a log; give a sequence number"):
        parse_point(text)


def test_point_refuses_time_without_zone() -> None:
    with pytest.raises(ValueError, match="no time zone; append Z"):
        parse_point("2026-11-20T09:30:00")


@given(time_us=st.integers(-(2**70), 2**70))
def test_time_format_accepts_any_time(time_us: int) -> None:
    text = format_time(time_us)
    if not text.endswith("us") and time_us >= 0:
        assert parse_point(text) == AtTime(time_us)
