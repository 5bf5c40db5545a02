"""A log that was written by an older schema replays as ever."""

from __future__ import annotations

import hashlib
import json
from typing import get_args

import pytest

from tests.replay.golden import LOGS, SEED, expected, facts
from tests.replay.logs import eventful
from unicrond.core.replayer import replay
from unicrond.events.log.segments import read_entries
from unicrond.events.vocabulary import AnyEvent, Heartbeat
from unicrond.events.wire.envelope import QuarantinedMessage, RecordedEvent
from unicrond.events.wire.schemas import FIRST, SCHEMA

#: The bytes themselves. A change here says that logs out there may no longer be what the golden log is.
LOG_BLAKE2B = {1: "dc15fe14a44028bb13cbfa219116d63a"}
#: How many types of event each had, heartbeats aside: the log holds all of them.
TYPES = {1: 82}
schemas = pytest.mark.parametrize("schema", LOGS)


def test_golden_logs_cover_every_schema() -> None:
    assert list(LOGS) == list(range(FIRST, SCHEMA + 1))


@schemas
def test_golden_log_bytes_are_unchanged(schema: int) -> None:
    assert hashlib.blake2b(LOGS[schema].read_bytes(), digest_size=16).hexdigest() == LOG_BLAKE2B[schema]


@schemas
def test_golden_log_entries_are_readable(schema: int) -> None:
    entries = list(read_entries(LOGS[schema]))
    assert [entry.seq for entry in entries if isinstance(entry, QuarantinedMessage)] == [len(entries) - 1]
    kinds = {type(entry.envelope.event) for entry in entries if isinstance(entry, RecordedEvent)}
    assert len(kinds) == TYPES[schema], f"the log of schema {schema} holds every type that it had, heartbeats aside"


@schemas
def test_golden_log_folds_to_same_facts(schema: int) -> None:
    stored = json.loads(LOGS[schema].with_suffix(".json").read_text())
    assert json.loads(json.dumps(facts(replay(read_entries(LOGS[schema]))))) == stored["facts"]


@schemas
def test_golden_log_folds_to_same_digests(schema: int) -> None:
    stored = json.loads(LOGS[schema].with_suffix(".json").read_text())
    assert expected(LOGS[schema])["digests"] == stored["digests"], (
        "the state's shape or the fold changed; if that is wanted: python -m tests.replay.golden --digests"
    )


def test_new_golden_log_would_hold_every_type() -> None:
    kinds = {type(entry.envelope.event) for entry in eventful(SEED) if isinstance(entry, RecordedEvent)}
    assert set(get_args(AnyEvent)) - kinds == {Heartbeat}, "let tests/replay/logs.py:eventful say it"
