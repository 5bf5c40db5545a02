"""The envelope: producer, term, cause and time of an event."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from unicrond.events.vocabulary import AnyEvent, Boot, Count, Micros, Name, Serial, Text
from unicrond.events.wire.schemas import FIRST, SCHEMA


class Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event with its producer, term, cause and time, as it is written to the log.

    `schema` concerns the bytes alone: there it is the lowest number whose readers can read the event (`schemas.py`);
    the codec puts it in, and here it always is FIRST.
    `(producer, boot, number)` is the identity: boot grows with every start of the producer, number
    counts from 1 within a boot, so a repeated delivery is recognised by comparing two integers.
    `term`: the coordinator's term under which it was decided, 0 for an observation.
    `caused_by`: the event id that led to it, or "". `based_on`: the last sequence a decision had folded.
    `observed_at_us`: the producer's wall clock when the thing happened; never used for ordering.

    Bounds: `boot` < 2**52; `number` and `based_on` < 2**53; `term` < 10**9; `observed_at_us` < 2**62.
    """

    schema: Annotated[int, Meta(ge=1, le=SCHEMA)] = FIRST
    producer: Name
    boot: Boot
    number: Annotated[int, Meta(ge=1, lt=2**53)]
    term: Serial = 0
    caused_by: Text = ""
    based_on: Count = 0
    observed_at_us: Micros
    event: AnyEvent

    @property
    def event_id(self) -> str:
        """Return the event's id, "producer-boot-number"; also the NATS message id."""
        return f"{self.producer}-{self.boot}-{self.number}"


class RecordedEvent(msgspec.Struct, frozen=True):
    """An envelope as the log holds it. `recorded_at_us`: when the log received it.

    `body`: its bytes, where they hold more than this version knows (`tolerance.py`); else b"". `warrant`: the
    certificate that accompanies a membership, for the nodes that read it (`membership_certificates.py`).
    """

    seq: int
    recorded_at_us: int
    envelope: Envelope
    body: bytes = b""
    warrant: str = ""


class QuarantinedMessage(msgspec.Struct, frozen=True):
    """A message in the log that is not a valid event: counted, never folded."""

    seq: int
    recorded_at_us: int
    subject: str
    reason: str
    size_bytes: int


Entry = RecordedEvent | QuarantinedMessage
