"""The wire format stands still: bytes written before read the same, and are written the same."""

from __future__ import annotations

import pytest

from tests.golden.regenerate import example, golden
from tests.strategies import EVENT_TYPES
from unicrond.events.wire.codec import decode, encode

GOLDEN = golden()


def test_golden_bytes_cover_every_event_type() -> None:
    missing = [kind.__name__ for kind in EVENT_TYPES if kind.__name__ not in GOLDEN]
    assert not missing, "run `python -m tests.golden.regenerate` and commit tests/golden/events.json"


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_bytes_stay_stable(name: str) -> None:
    body = bytes.fromhex(GOLDEN[name]["hex"])
    envelope = decode(body)
    assert type(envelope.event).__name__ == name
    assert encode(envelope) == body
    assert repr(envelope) == GOLDEN[name]["repr"]


@pytest.mark.parametrize("kind", EVENT_TYPES, ids=lambda kind: kind.__name__)
def test_new_fields_change_golden_bytes(kind: type) -> None:
    """A field that was added since the golden bytes were written is not in them: that is a schema change."""
    assert encode(example(kind)).hex() == GOLDEN[kind.__name__]["hex"], "the schema of this event has changed"


def test_hang_of_before_its_sections_reads_the_same() -> None:
    """With more than 15 fields in the class msgspec writes the length of its map in three bytes; before it was one."""
    body = bytes.fromhex(GOLDEN["HangSuspected"]["hex"])
    assert body.count(b"event\xde\x00\x0d") == 1
    assert decode(body.replace(b"event\xde\x00\x0d", b"event\x8d")) == decode(body)
