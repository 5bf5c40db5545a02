"""Subjects, headers and prose: what the `nats` CLI shows, and the check that keeps nodes honest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import EVENT_TYPES, envelopes
from unicrond.events.log.subjects import (
    BEAT_SUBJECTS,
    EVENT_SUBJECTS,
    MAX_SUMMARY_CHARS,
    TERM_SUBJECT,
    entry,
    headers,
    subject,
)
from unicrond.events.vocabulary import (
    AnyEvent,
    CoordinatorStarted,
    Heartbeat,
    NodeLeft,
    PlanAdopted,
    StopWorker,
    TaskCancelled,
    TaskFailed,
)
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Envelope, QuarantinedMessage, RecordedEvent


def matches(pattern: str, name: str) -> bool:
    tokens, names = pattern.split("."), name.split(".")
    return len(tokens) == len(names) and all(a in ("*", b) for a, b in zip(tokens, names, strict=True))


def envelope(event: AnyEvent, producer: str = "n1", term: int = 0) -> Envelope:
    return Envelope(producer=producer, boot=1, number=1, term=term, observed_at_us=1, event=event)


def test_subjects_match_examples() -> None:
    stop = StopWorker(command_id="1.1.n1.0", node="n1", epoch=1, task="t", worker="t.1", reason="")
    plan = PlanAdopted(epoch=1, assignments=(), waf=0, basis="", trigger="", reason="")
    for event, producer, expected in (
        (NodeLeft(node="n1", reason=""), "n1", "unicron.v1.obs.n1.NodeLeft"),
        (TaskCancelled(task="t", reason=""), "api", "unicron.v1.obs.api.TaskCancelled"),
        (stop, "c", "unicron.v1.command.n1.StopWorker"),
        (TaskFailed(task="t", reason=""), "c", "unicron.v1.decision.t.TaskFailed"),
        (plan, "c", "unicron.v1.decision.cluster.PlanAdopted"),
        (CoordinatorStarted(term=1, version=""), "c", TERM_SUBJECT),
    ):
        assert subject(envelope(event, producer)) == expected


@given(envelopes(kinds=EVENT_TYPES))
def test_event_belongs_to_one_stream(made: Envelope) -> None:
    patterns = BEAT_SUBJECTS if isinstance(made.event, Heartbeat) else EVENT_SUBJECTS
    assert sum(matches(pattern, subject(made)) for pattern in EVENT_SUBJECTS + BEAT_SUBJECTS) == 1
    assert any(matches(pattern, subject(made)) for pattern in patterns)


@given(envelopes(kinds=EVENT_TYPES))
def test_headers_are_short_plain_lines(made: Envelope) -> None:
    named = headers(made)
    assert named["Nats-Msg-Id"] == made.event_id
    assert named["Unicron-Type"] == type(made.event).__name__
    for value in named.values():
        assert isinstance(value, str)
        assert value == value.strip() != ""
        assert all(" " <= char <= "~" for char in value)
        assert len(value) <= max(MAX_SUMMARY_CHARS, 80)


@given(envelopes(kinds=EVENT_TYPES), st.integers(1, 10**9))
def test_entry_is_accepted_only_on_its_subject(made: Envelope, seq: int) -> None:
    body = encode(made)
    found = entry(seq, 5, subject(made), body)
    assert isinstance(found, RecordedEvent)
    assert encode(found.envelope) == body
    foreign = entry(seq, 5, "unicron.v1.obs.somebody-else.NodeLeft", body)
    assert isinstance(foreign, QuarantinedMessage)
    assert "belongs on subject" in foreign.reason
    assert foreign.size_bytes == len(body)


def test_stored_acknowledgement_is_quarantined() -> None:
    """Reply subjects are unchecked by the server: a node can make it store a PubAck under any subject."""
    found = entry(3, 5, "unicron.v1.obs.n2.NodeLeft", b'{"stream":"UNICRON_EVENTS","seq":2}')
    assert isinstance(found, QuarantinedMessage)


@given(envelopes(kinds=EVENT_TYPES))
def test_event_makes_sentence(made: Envelope) -> None:
    assert len(made.event.sentence()) > 10
