"""How much a node may write, and what becomes of one that writes more."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.seeds import at_most
from unicrond.core.state.state import ClusterState, NodeLogin
from unicrond.events.log.entrance import (
    ENTRANCE,
    ENTRANCE_KIB,
    ENTRANCE_READS,
    PACE,
    PACE_KIB,
    READS,
    Entrance,
    kib,
)
from unicrond.events.trust.keys import make_key
from unicrond.events.wire.codec import MAX_EVENT_BYTES
from unicrond.service.trust.fuses import Fuses, caller_of, producer_of

KEY, OTHER_KEY = make_key("agent-n1").user.key, make_key("agent-n2").user.key
SECOND_US = 1_000_000


def paced(sizes_bytes: list[int], gaps_us: list[int], begin_us: int) -> list[tuple[int, int]]:
    """Return when an agent sends these observations, each put in so long after the one before: (time, size)."""
    sent, put_us, now_us, paid_us, paid_kib_us = [], begin_us, begin_us, 0, 0
    for size_bytes, gap_us in zip(sizes_bytes, gaps_us, strict=True):
        put_us += gap_us
        now_us = max(now_us, put_us)
        now_us += max(PACE.pause_us(paid_us, now_us), PACE_KIB.pause_us(paid_kib_us, now_us))
        paid_us, paid_kib_us = PACE.paid_us(paid_us, now_us), PACE_KIB.paid_us(paid_kib_us, now_us, kib(size_bytes))
        sent.append((now_us, size_bytes))
    return sent


@settings(max_examples=at_most(60))
@given(
    st.lists(st.tuples(st.integers(1, MAX_EVENT_BYTES), st.sampled_from([0, 0, 0, 100, 10_000])), max_size=300),
    st.integers(0, 3 * SECOND_US),
    st.integers(1, 1_500),
)
def test_agent_that_keeps_its_pace_is_never_a_flood(said: list[tuple[int, int]], jitter_us: int, burst: int) -> None:
    """Also where it was started again with a full bucket, and where the head was busy and hears all of it at once."""
    entrance = Entrance()
    small = paced([300] * burst, [0] * burst, SECOND_US)
    big = paced([size for size, _ in said], [gap for _, gap in said], small[-1][0])
    for at_us, size_bytes in [*small, *big]:
        heard_us = at_us if jitter_us == 0 else -(-at_us // jitter_us) * jitter_us
        assert not entrance.take("n1", size_bytes, heard_us)
    assert not entrance.excesses


def test_restarted_agent_that_is_heard_late_is_no_flood() -> None:
    """The most that two agents of a node may send: each all at once, and a message that is as large as can be; the
    second one for 3 s more. The head was busy meanwhile, and hears it at once."""
    first = paced([1024] * (PACE_KIB.size - 1) + [MAX_EVENT_BYTES], [0] * PACE_KIB.size, SECOND_US)
    second = paced([1024] * 5_000, [0] * 5_000, SECOND_US)
    sizes = [size for _, size in first] + [size for at_us, size in second if at_us <= 4 * SECOND_US] + [MAX_EVENT_BYTES]
    assert sum(sizes) > 3_700_000
    entrance = Entrance()
    assert not any(entrance.take("n1", size, 4 * SECOND_US) for size in sizes)


def info(acc: str, key: str) -> bytes:
    who = b'"host":"127.0.0.1","id":7,"acc":"%s","user":"%s"' % (acc.encode(), key.encode())
    return b'Nats-Request-Info: {"start":"2026-11-28T00:10:36.79Z",%s,"lang":"python3"}\r\n' % who


@pytest.mark.parametrize(
    ("headers", "is_counted"),
    [
        (b"NATS/1.0\r\n" + info("AGENTS", KEY) + b"\r\n", True),
        (b"NATS/1.0\r\n" + info("AGENTS", OTHER_KEY) + info("AGENTS", KEY) + b"\r\n", True),
        (b"NATS/1.0\r\n" + info("AGENTS", KEY) + info("AGENTS", OTHER_KEY) + b"\r\n", False),
        (b"NATS/1.0\r\n" + info("AGENTS", KEY) + b"X: y\r\n\r\n", False),
        (b"NATS/1.0\r\n" + info("OPERATORS", KEY) + b"\r\n", False),
        (b"", False),
    ],
    ids=["its own", "behind an invented one", "invented", "not the last", "another account's", "none"],
)
def test_call_counts_for_the_key_that_the_server_names_last(headers: bytes, is_counted: bool) -> None:
    state = ClusterState(logins={"n1": NodeLogin(key=KEY)})
    fuses = Fuses(lambda: state, lambda: 0, "")
    for _ in range(ENTRANCE.size + 1):
        fuses._take_call(b"", b"", b"", headers)
    assert list(fuses.look()) == (["n1"] if is_counted else [])


@pytest.mark.parametrize(
    "filler",
    [
        b"\r\nNats-Request-Info: {",
        b'Nats-Request-Info: {"start":',
        b'"acc":"AGENTS","user":"%s"' % KEY.encode(),
        b"x",
        b"N",
    ],
    ids=["a line's begin", "the header's begin", "account and key", "x", "N"],  # the key is another in each process
)
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["no end", "an end"])
def test_caller_is_sought_in_linear_time(filler: bytes, end: bytes) -> None:
    """A search for the whole header from each place took half a minute for a megabyte, and nothing was decided."""
    headers = b"\r\nNats-Request-Info: {" + filler * (1_000_000 // len(filler)) + end
    durations_s = []
    for _ in range(3):
        start_s = time.process_time()
        assert not caller_of(headers)
        durations_s.append(time.process_time() - start_s)
    assert min(durations_s) < 0.05


def test_entrance_is_wider_than_pace_in_everything() -> None:
    for entrance, pace in ((ENTRANCE, PACE), (ENTRANCE_KIB, PACE_KIB)):
        assert entrance.size >= 2 * pace.size and entrance.every_us < pace.every_us


@pytest.mark.parametrize(
    ("size_bytes", "most"), [(300, ENTRANCE.size), (760_000, ENTRANCE_KIB.size * 1024 // 760_000 + 1)]
)
def test_flood_is_noticed_by_count_and_by_size(size_bytes: int, most: int) -> None:
    entrance = Entrance()
    count = next(number for number in range(1, 10_000) if entrance.take("n1", size_bytes, SECOND_US + number))
    assert most <= count <= most + 2
    excess = entrance.excesses["n1"]
    assert excess.messages == count and f"{count} messages" in excess.sentence()
    assert not entrance.take("n2", size_bytes, SECOND_US), "each node has buckets of its own"
    entrance.forget("n1")
    assert not entrance.take("n1", size_bytes, SECOND_US), "it begins anew"


def test_agent_that_reads_a_backlog_is_no_flood() -> None:
    """Also where two agents of a node do it, one after the other, and the head hears of 3 s of it at once."""
    entrance = Entrance()
    commands = 2 * READS.size + 3 * 200
    assert not any(entrance.take("n1", 300, SECOND_US, is_read=True) for _ in range(2 * commands))
    assert not any(entrance.take("n1", 300, SECOND_US) for _ in range(ENTRANCE.size)), "what it writes counts apart"
    for second in range(1, 60):
        at_us = SECOND_US + second * 3 * SECOND_US
        assert not any(entrance.take("n1", 300, at_us, is_read=True) for _ in range(2 * 3 * 200))
    assert any(entrance.take("n1", 300, at_us, is_read=True) for _ in range(ENTRANCE_READS.size)), "a flood"
    assert any(entrance.take("n2", 760_000, at_us, is_read=True) for _ in range(8)), "nor are they for free"


@pytest.mark.parametrize("subject", [b"unicron.v1.obs.n1.CommandFailed", b"$JS.API.STREAM.INFO.UNICRON_EVENTS"])
def test_headers_count_as_bodies_do(subject: bytes) -> None:
    """They are stored beside them."""
    head = Head()
    head.state = replace(head.state, logins={"n1": NodeLogin(key=KEY)})
    headers = b"NATS/1.0\r\nA: " + b"x" * 760_000 + b"\r\n" + info("AGENTS", KEY) + b"\r\n"
    take = head.fuses._take if b".obs." in subject else head.fuses._take_call
    for _ in range(8):
        take(subject, b"", b"", headers)
    assert list(head.fuses.look()) == ["n1"]


def test_flood_that_ends_is_over_soon() -> None:
    """What was too much is not paid for, or a long flood would shut the node out for hours."""
    entrance = Entrance()
    for number in range(100_000):
        entrance.take("n1", 300, number)
    assert not any(entrance.take("n1", 300, SECOND_US * 10 + number) for number in range(ENTRANCE.size))


# --- fuses ---------------------------------------------------------------------------------------


class Head:
    """Fuses over a state that a test changes."""

    def __init__(self, obstacle: str = "") -> None:
        self.state = replace(ClusterState(), logins={"n1": NodeLogin(key=KEY), "n2": NodeLogin(key=KEY)})
        self.now_us = SECOND_US
        self.fuses = Fuses(lambda: self.state, lambda: self.now_us, obstacle)

    def flood(self, node: str = "n1") -> None:
        for _ in range(ENTRANCE.size + 10):
            self.fuses._take(f"unicron.v1.obs.{node}.CommandFailed".encode(), b"", b"x", b"")

    def alarms(self) -> list[str]:
        return [alarm.key for alarm in self.fuses.alarms()]


def test_fuse_blows_once_and_holds_until_node_is_let_in_again() -> None:
    head = Head()
    head.flood()
    assert head.fuses.flooded.is_set()
    (reason,) = head.fuses.look().values()
    assert "floods the log" in reason and head.fuses.has_blown("n1")
    head.flood()
    assert head.fuses.look() == {} and head.alarms() == ["node-floods:n1"], "the log does not say it yet"
    head.now_us += 5 * SECOND_US
    assert list(head.fuses.look()) == ["n1"] and head.fuses.look() == {}, "it is asked for again, once"
    head.now_us += 5 * SECOND_US
    head.state = replace(head.state, logins={})
    assert head.fuses.look() == {} and head.fuses.has_blown("n1")
    head.state = replace(head.state, logins={"n1": NodeLogin(key=KEY)})
    assert head.fuses.look() == {} and not head.fuses.has_blown("n1") and head.alarms() == []
    head.flood()
    assert list(head.fuses.look()) == ["n1"]


@pytest.mark.parametrize(
    ("state", "obstacle", "why"),
    [
        ({"mode": "observe"}, "", "mode observe"),
        ({"logins": {}}, "", "has enrolled no key of it"),
        ({}, "the NATS servers are your own", "your own"),
    ],
)
def test_flood_that_no_fuse_may_end_is_told(state: dict[str, object], obstacle: str, why: str) -> None:
    head = Head(obstacle)
    head.state = replace(head.state, **state)
    head.flood()
    assert head.fuses.look() == {} and not head.fuses.has_blown("n1")
    (alarm,) = head.fuses.alarms()
    assert why in alarm and "its login stands" in alarm
    head.now_us += 61 * SECOND_US
    assert head.alarms() == [], "it is over"


def test_share_of_logins_may_end_within_an_hour() -> None:
    """Or a bug of the agents would end them all."""
    head = Head()
    head.flood("n1")
    head.flood("n2")
    assert list(head.fuses.look()) == ["n1"]
    assert head.fuses.look() == {}
    (held,) = [alarm for alarm in head.fuses.alarms() if alarm.subject == "n2"]
    assert "policy.isolated_share: 0.25" in held
    head.state = replace(head.state, logins={"n2": NodeLogin(key=KEY)})
    head.now_us += 3_601 * SECOND_US
    assert head.fuses.look() == {}, "it is over"
    head.flood("n2")
    assert list(head.fuses.look()) == ["n2"]


@pytest.mark.parametrize(
    ("subject", "producer"),
    [
        ("unicron.v1.obs.n1.NodeJoined", "n1"),
        ("unicron.v1.beat.n1", "n1"),
        ("unicron.v1.obs.api.TaskSubmitted", ""),
        ("unicron.v1.beat.coordinator", ""),
        ("unicron.v1.decision.n1.NodeIsolated", ""),
    ],
)
def test_nodes_alone_are_counted(subject: str, producer: str) -> None:
    assert producer_of(subject) == producer
