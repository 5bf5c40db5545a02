"""The contract of every event log, wherever it is stored (memory, files, NATS).

Rules
-----
* One total order: sequence numbers start at 1 and have no gaps. An entry never changes or goes away.
* `append` is all or nothing, and returns only when the batch is durable. Cancelled or given up, it may
  or may not have been written; to append the same envelopes again is always safe, because an event id
  that already stands in the log is recognised and its first sequence number returned.
* `claim_term` is how a coordinator takes over. It returns a `Fence`; an `append` that carries a fence
  raises `Fenced` as soon as a newer term was claimed, and then nothing of it is written.
* Claims that stand in the log where the claimer has read it (`based_on`) do not count against a new one: its fold has
  judged them, and a forged one belongs to no coordinator.
* A claim is recognised by all of its fields, not by its event id: of two that claim one term, both as its
  first event, one gets it.
* Reading never raises on what a message holds: an invalid message comes as `QuarantinedMessage`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from typing import NamedTuple, Protocol, get_args

from unicrond.events.vocabulary import AnyDecision, AnyEvent, BroadcastDecision, Command, CoordinatorStarted, Heartbeat
from unicrond.events.wire.codec import BadEvent, encode
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent

#: The largest batch that can be written atomically (the limit of NATS).
MAX_BATCH = 1000
#: Decisions that are broadcast: the nodes of a task read them themselves.
BROADCAST_TYPES = tuple(kind for kind in get_args(AnyDecision) if issubclass(kind, BroadcastDecision))


class LogError(Exception):
    """Base of all that a log raises besides BadEvent and ValueError."""


class Fenced(LogError):
    """A newer term was claimed: this coordinator has been replaced and must stop deciding."""


class LogUnavailable(LogError):
    """The log did not answer within `give_up_s`; what was to be written may or may not be in the log."""


class LogDamaged(LogError):
    """Entries that must be there are missing or broken; the message says which and where."""


class AnotherLog(LogError):
    """The log that answers is another one than was read before; the message says what differs. Nothing of it was read,
    and nothing written to it."""


class Fence(NamedTuple):
    """The right to decide: `term`, and the sequence number under which it was claimed."""

    term: int
    seq: int


class EventLog(Protocol):
    """The event stream: observations, decisions and commands in one total order."""

    async def append(self, envelopes: Sequence[Envelope], *, fence: Fence | None = None) -> list[int]:
        """Write a batch of at most MAX_BATCH envelopes atomically; return their sequence numbers, in order.

        Envelopes whose event id is in the log already keep their first number and are not written again; the others are
        still written as one atomic batch. Raises BadEvent (nothing written), Fenced, LogUnavailable, ValueError (batch
        too long).
        """
        ...

    async def claim_term(self, envelope: Envelope) -> Fence:
        """Write a CoordinatorStarted; raise Fenced where its term, or a higher one, was claimed after `based_on`."""
        ...

    def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
        """Yield entries after_seq+1, after_seq+2, ...: history, then live, without end, or up to and including
        `until_seq`.

        `read(0, until_seq=await log.last_seq())` is the history as it stands. Close the generator (contextlib.aclosing)
        where it is left early.
        """
        ...

    async def skips(self) -> dict[int, str]:
        """Return the entries that every fold of the log skips, and why (events/log/skips.py); `read` gives them as they
        are."""
        ...

    async def last_seq(self) -> int:
        """Return the newest entry's sequence number, 0 for an empty log."""
        ...

    async def close(self) -> None:
        """Release what the log holds. Owners cancel the reads that still run."""
        ...


class BeatLog(Protocol):
    """The heartbeat stream: its entries expire within minutes, and their numbers are its own."""

    async def publish(self, envelope: Envelope) -> None:
        """Send a Heartbeat without waiting for the log; never raises because the log is away."""
        ...

    def subscribe(self) -> AsyncGenerator[Entry, None]:
        """Yield beats from now on; an outage leaves a gap.

        Earlier beats are not repeated: a beat received now is a sign of life now.
        """
        ...


class CommandFeed(Protocol):
    """One node's commands and, for the tasks that it follows, the broadcast decisions (BROADCAST_TYPES): at least once
    each, in the order of the log."""

    async def follow(self, tasks: Collection[str]) -> None:
        """Include the broadcast decisions of these tasks, and of no others, from the current entry on.

        Call it before the first entry is requested, or while one is handled. What follows the current entry has not
        been looked at by then, so nothing of it is missed.
        """
        ...

    def read(self) -> AsyncGenerator[RecordedEvent, None]:
        """Yield entries not yet acknowledged, then live, without end.

        To request the next entry acknowledges the previous one; leaving the loop (break, exception, cancellation) does
        not, so the entry comes again, even to another process.
        """
        ...


def is_in_feed(event: AnyEvent, node: str, tasks: Collection[str]) -> bool:
    """Say whether the feed of `node`, which follows `tasks`, contains the event."""
    if isinstance(event, Command):
        return event.node == node
    return isinstance(event, BroadcastDecision) and event.task in tasks


def encode_batch(envelopes: Sequence[Envelope]) -> list[bytes]:
    """Encode the bodies for `append`. Raises what `append` must raise on bad input (BadEvent, ValueError)."""
    if len(envelopes) > MAX_BATCH:
        raise ValueError(f"envelopes: at most {MAX_BATCH} in one batch, got {len(envelopes)}; split them")
    event_ids: set[str] = set()
    for envelope in envelopes:
        if isinstance(envelope.event, Heartbeat):
            raise BadEvent("$.event: a Heartbeat belongs on the heartbeat stream (BeatLog.publish)")
        if isinstance(envelope.event, CoordinatorStarted):
            raise BadEvent("$.event: only claim_term writes a CoordinatorStarted")
        if envelope.event_id in event_ids:
            raise BadEvent(f"$.number: {envelope.event_id} occurs twice in one batch")
        event_ids.add(envelope.event_id)
    return [encode(envelope) for envelope in envelopes]


def claimed_term(envelope: Envelope) -> int:
    """Return the term that a CoordinatorStarted envelope claims. Raises BadEvent on any other."""
    if not isinstance(envelope.event, CoordinatorStarted):
        raise BadEvent(f"$.event: claim_term needs a CoordinatorStarted, got {type(envelope.event).__name__}")
    encode(envelope)
    return envelope.event.term
