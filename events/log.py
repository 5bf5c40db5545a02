"""What every log promises, wherever it is kept (memory, files, NATS).

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
* A claim is recognised by all that it says, not by its event id: of two that claim one term, both as its
  first event, one gets it.
* Reading never raises on what a message holds: an invalid message comes as `Quarantined`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import NamedTuple, Protocol, get_args

from events.codec import BadEvent, decode, encode
from events.envelope import Entry, Envelope, Recorded
from events.vocabulary import (
    AnyDecision,
    AnyEvent,
    BroadcastDecision,
    Command,
    CoordinatorStarted,
    Heartbeat,
)

#: The largest batch that can be written atomically (the limit of NATS).
MAX_BATCH = 1000
#: Decisions that the nodes of a task read themselves.
TOLD = tuple(kind for kind in get_args(AnyDecision) if issubclass(kind, BroadcastDecision))


class LogError(Exception):
    """Base of all that a log raises besides BadEvent and ValueError."""


class Fenced(LogError):
    """A newer term was claimed: this coordinator has been replaced and must stop deciding."""


class LogUnavailable(LogError):
    """Given up after `give_up_s`; what was to be written may or may not be in the log."""


class LogDamaged(LogError):
    """Entries that must be there are missing or broken; the message says which and where."""


class Fence(NamedTuple):
    """The right to decide: `term`, and the sequence number under which it was claimed."""

    term: int
    seq: int


class EventLog(Protocol):
    """The event stream: observations, decisions and commands in one total order."""

    async def append(self, envelopes: Sequence[Envelope], *, fence: Fence | None = None) -> list[int]:
        """Write a batch of at most MAX_BATCH envelopes atomically; their sequence numbers, in order.

        Envelopes whose event id is in the log already keep their first number and are not written again;
        the others are still written as one atomic batch.
        Raises BadEvent (nothing written), Fenced, LogUnavailable, ValueError (batch too long).
        """
        ...

    async def claim_term(self, envelope: Envelope) -> Fence:
        """Write a CoordinatorStarted, or raise Fenced where its term, or a higher one, was claimed after `based_on`."""
        ...

    def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
        """Entries after_seq+1, after_seq+2, ...: history, then live, without end, or up to and with `until_seq`.

        `read(0, until_seq=await log.last_seq())` is the history as it stands. Close the generator
        (contextlib.aclosing) where it is left early.
        """
        ...

    async def skips(self) -> dict[int, str]:
        """Which entries every fold of the log skips, and why (events/skips.py); `read` gives them as they are."""
        ...

    async def last_seq(self) -> int:
        """The newest entry's sequence number, 0 for an empty log."""
        ...

    async def close(self) -> None:
        """Release what the log holds. Reads that still run are to be cancelled by their owners."""
        ...


class BeatLog(Protocol):
    """The heartbeat stream: its entries expire within minutes, and their numbers are its own."""

    async def publish(self, envelope: Envelope) -> None:
        """Send a Heartbeat and forget it: never waits for the log, never raises because it is away."""
        ...

    def subscribe(self) -> AsyncGenerator[Entry, None]:
        """Beats from now on; an outage leaves a gap.

        What was said before is not told again: a beat heard now is a sign of life now.
        """
        ...


class CommandFeed(Protocol):
    """One node's commands and, of the tasks that it follows, what is told once (TOLD): at least once each, in
    the order of the log."""

    async def follow(self, tasks: Collection[str]) -> None:
        """From the entry at hand on, also what is told once of these tasks, and of no others.

        To be called before the first entry is asked for, and while one is handled. What stands behind the entry at hand
        has not been looked at then, so nothing of it is missed.
        """
        ...

    def read(self) -> AsyncGenerator[Recorded, None]:
        """Entries not yet acknowledged, then live, without end.

        To ask for the next entry acknowledges the one before; leaving the loop (break, exception,
        cancellation) does not, so the entry comes again, even to another process.
        """
        ...


def is_told_to(event: AnyEvent, node: str, tasks: Collection[str]) -> bool:
    """Whether the feed of `node`, which follows `tasks`, has the event."""
    if isinstance(event, Command):
        return event.node == node
    return isinstance(event, BroadcastDecision) and event.task in tasks


def encode_batch(envelopes: Sequence[Envelope]) -> list[bytes]:
    """Bodies for `append`; raises what `append` must raise on bad input (BadEvent, ValueError)."""
    if len(envelopes) > MAX_BATCH:
        raise ValueError(f"envelopes: at most {MAX_BATCH} in one batch, got {len(envelopes)}; split them")
    seen: set[str] = set()
    for envelope in envelopes:
        if isinstance(envelope.event, Heartbeat):
            raise BadEvent("$.event: a Heartbeat belongs on the heartbeat stream (BeatLog.publish)")
        if isinstance(envelope.event, CoordinatorStarted):
            raise BadEvent("$.event: only claim_term writes a CoordinatorStarted")
        if envelope.event_id in seen:
            raise BadEvent(f"$.number: {envelope.event_id} occurs twice in one batch")
        seen.add(envelope.event_id)
    return [encode(envelope) for envelope in envelopes]


def claimed_term(envelope: Envelope) -> int:
    """The term that a CoordinatorStarted envelope claims; BadEvent on any other."""
    if not isinstance(envelope.event, CoordinatorStarted):
        raise BadEvent(f"$.event: claim_term needs a CoordinatorStarted, got {type(envelope.event).__name__}")
    encode(envelope)
    return envelope.event.term


class LocalLog(ABC):
    """What every EventLog without a server does: it numbers what it takes, and knows the ids and the newest claim."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock`: the receive time in microseconds since the epoch."""
        self._clock = clock
        self._last_seq = 0
        self._seq_by_id: dict[str, int] = {}
        self._fence = Fence(0, 0)
        self._claim: Envelope | None = None
        self._grown = asyncio.Event()

    async def append(self, envelopes: Sequence[Envelope], *, fence: Fence | None = None) -> list[int]:
        """See EventLog."""
        bodies = encode_batch(envelopes)
        # Decoded anew, so that readers see exactly what a log on the wire would give them.
        known = self._seq_by_id
        fresh = [decode(body) for one, body in zip(envelopes, bodies, strict=True) if one.event_id not in known]
        if fresh and fence is not None and fence != self._fence:
            raise Fenced(f"term {fence.term} was replaced by term {self._fence.term}")
        if fresh:
            self._write(fresh)
        return [known[envelope.event_id] for envelope in envelopes]

    async def claim_term(self, envelope: Envelope) -> Fence:
        """See EventLog."""
        term = claimed_term(envelope)
        if envelope != self._claim:
            if term <= self._fence.term and self._fence.seq > envelope.based_on:
                raise Fenced(f"term {term} is not above term {self._fence.term}")
            self._write([envelope])
        return self._fence

    async def last_seq(self) -> int:
        """See EventLog."""
        return self._last_seq

    @abstractmethod
    def _store(self, entries: Sequence[Entry]) -> None:
        """Keep the entries, all or none."""

    def _write(self, envelopes: Sequence[Envelope]) -> None:
        now_us = self._clock()
        self._keep([Recorded(seq, now_us, envelope) for seq, envelope in enumerate(envelopes, self._last_seq + 1)])

    def _keep(self, entries: Sequence[Entry]) -> None:
        self._store(entries)
        for entry in entries:
            self._take_in(entry)
        self._grown.set()  # wakes all readers at the end; later ones wait on a fresh event
        self._grown = asyncio.Event()

    def _take_in(self, entry: Entry) -> None:
        """An entry that is kept. LogDamaged where it is not the next one."""
        if entry.seq != self._last_seq + 1:
            raise LogDamaged(f"entry {entry.seq} follows entry {self._last_seq}")
        self._last_seq = entry.seq
        if isinstance(entry, Recorded):
            self._seq_by_id.setdefault(entry.envelope.event_id, entry.seq)
            if isinstance(entry.envelope.event, CoordinatorStarted):
                self._fence, self._claim = Fence(entry.envelope.event.term, entry.seq), entry.envelope
