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
from unicrond.events.wire.envelope import Quarantined, Recorded
from unicrond.events.wire.schemas import FIRST, SCHEMA

#: The bytes themselves. A change here says that logs out there may no longer be what the golden log is.
LOG_BLAKE2B = {1: "2e6da26c5c1344e9aa136385bd7a1feb"}
#: How many types of event each had, heartbeats aside: the log holds all of them.
TYPES = {1: 70}
schemas = pytest.mark.parametrize("schema", LOGS)


def test_every_schema_has_its_log() -> None:
    assert list(LOGS) == list(range(FIRST, SCHEMA + 1))


@schemas
def test_the_bytes_are_the_ones_that_were_written(schema: int) -> None:
    assert hashlib.blake2b(LOGS[schema].read_bytes(), digest_size=16).hexdigest() == LOG_BLAKE2B[schema]


@schemas
def test_every_entry_is_still_read(schema: int) -> None:
    entries = list(read_entries(LOGS[schema]))
    assert [entry.seq for entry in entries if isinstance(entry, Quarantined)] == [len(entries) - 1]
    kinds = {type(entry.envelope.event) for entry in entries if isinstance(entry, Recorded)}
    assert len(kinds) == TYPES[schema], f"the log of schema {schema} holds every type that it had, heartbeats aside"


@schemas
def test_it_folds_into_the_same_facts(schema: int) -> None:
    stored = json.loads(LOGS[schema].with_suffix(".json").read_text())
    assert json.loads(json.dumps(facts(replay(read_entries(LOGS[schema]))))) == stored["facts"]


@schemas
def test_it_folds_into_the_same_digests(schema: int) -> None:
    stored = json.loads(LOGS[schema].with_suffix(".json").read_text())
    assert expected(LOGS[schema])["digests"] == stored["digests"], (
        "the state's shape or the fold changed; if that is wanted: python -m tests.replay.golden --digests"
    )


def test_a_new_golden_log_would_hold_every_type() -> None:
    kinds = {type(entry.envelope.event) for entry in eventful(SEED) if isinstance(entry, Recorded)}
    assert set(get_args(AnyEvent)) - kinds == {Heartbeat}, "let tests/replay/logs.py:eventful say it"
