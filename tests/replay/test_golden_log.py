"""A log that was written by schema 1 replays for ever."""

from __future__ import annotations

import hashlib
import json
from typing import get_args

from events.envelope import Quarantined, Recorded
from events.segments import read_entries
from events.vocabulary import AnyEvent, Heartbeat
from replay.reading.replayer import replay
from tests.replay.golden import EXPECTED, LOG, SEED, expected, facts
from tests.replay.logs import eventful

#: The bytes themselves. A change here says that logs out there may no longer be what the golden log is.
LOG_BLAKE2B = "6f3293e69d2ddf035190e9f47e51ce8b"


def test_the_bytes_are_the_ones_that_were_written() -> None:
    assert hashlib.blake2b(LOG.read_bytes(), digest_size=16).hexdigest() == LOG_BLAKE2B


def test_every_entry_is_still_read() -> None:
    entries = list(read_entries(LOG))
    assert [entry.seq for entry in entries if isinstance(entry, Quarantined)] == [len(entries) - 1]
    kinds = {type(entry.envelope.event) for entry in entries if isinstance(entry, Recorded)}
    assert len(kinds) == 28, "the log of schema 1 holds every type that it had, heartbeats aside"


def test_it_folds_into_the_same_facts() -> None:
    stored = json.loads(EXPECTED.read_text())
    assert json.loads(json.dumps(facts(replay(read_entries(LOG))))) == stored["facts"]


def test_it_folds_into_the_same_digests() -> None:
    stored = json.loads(EXPECTED.read_text())
    assert expected()["digests"] == stored["digests"], (
        "the state's shape or the fold changed; if that is wanted: python -m tests.replay.golden --digests"
    )


def test_a_new_golden_log_would_hold_every_type() -> None:
    kinds = {type(entry.envelope.event) for entry in eventful(SEED) if isinstance(entry, Recorded)}
    assert set(get_args(AnyEvent)) - kinds == {Heartbeat}, "let tests/replay/logs.py:eventful say it"
