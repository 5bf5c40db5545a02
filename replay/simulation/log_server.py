"""The log's server as its clients meet it: one total order, a disk, crashes. The contract is events/log.py's.

Rules
-----
* What is written is seen by readers, and acknowledged, once the disk has it (one sync covers all that waits for it).
* A crash loses what the disk had not got yet, or a part of that: batches fall from the end, never in the middle.
* Ids in the log are recognised and not written again, unless the server has forgotten them (`forgets`: its window of
  duplicates is bounded; the fold must do without it).
* The fence is checked when a batch is written, against the newest claim that stands in the log or waits for the disk.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence

from events.codec import decode
from events.envelope import Entry, Envelope, Quarantined, Recorded
from events.log import Fence, is_in_feed
from events.vocabulary import CoordinatorStarted
from replay.simulation.virtual_time import HostClock

#: Takes the answer to a request: sequence numbers, a Fence or a FencedReply.
Reply = Callable[[object], object]


class FencedReply:
    """The server refuses: a newer term was claimed."""

    def __init__(self, why: str) -> None:
        self.why = why


class _Batch:
    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.replies: list[Callable[[], object]] = []


class Consumer:
    """What the server keeps in memory of one node's feed (events/nats_commands.py). `at`: entries that it has looked
    at; `pending`: the one that waits for its acknowledgement; nothing behind it is looked at meanwhile."""

    def __init__(self, tasks: frozenset[str], at: int) -> None:
        self.tasks = tasks
        self.at = at
        self.pending: Recorded | None = None
        self.fitted = 0


class LogServer:
    """`entries`: what is durable. `on_entry` gets each of them once, in order."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: HostClock,
        drawn: random.Random,
        on_entry: Callable[[Entry], object],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._drawn = drawn
        self._on_entry = on_entry
        self.entries: list[Entry] = []
        #: Per node.
        self.consumers: dict[str, Consumer] = {}
        self.requests = itertools.count(1)
        self.up = True
        self.forgets = False
        self.sync_s = (0.0002, 0.002)
        self.grown = asyncio.Event()
        self._seq_by_id: dict[str, int] = {}
        self._claims: list[Recorded] = []
        self._waiting: list[_Batch] = []
        self._syncing = 0
        self._life = 0

    @property
    def life(self) -> int:
        """How often it has crashed."""
        return self._life

    # --- requests --------------------------------------------------------------------------------

    def append(self, envelopes: Sequence[Envelope], bodies: Sequence[bytes], fence: Fence | None, reply: Reply) -> None:
        """Write what is not in the log yet, as one batch; `reply` is called once all of it is durable."""
        if not self.up:
            return
        fresh = [
            body
            for envelope, body in zip(envelopes, bodies, strict=True)
            if self.forgets or envelope.event_id not in self._seq_by_id
        ]
        if fresh and fence is not None and fence != self._newest_claim():
            reply(FencedReply(f"term {fence.term} was replaced by term {self._newest_claim().term}"))
            return
        # Decoded anew, so that readers see exactly what a log on the wire would give them.
        self._write([decode(body) for body in fresh])
        ids = [envelope.event_id for envelope in envelopes]
        self._when_durable(lambda: reply([self._seq_by_id[event_id] for event_id in ids]))

    def claim(self, envelope: Envelope, reply: Reply) -> None:
        """Write a CoordinatorStarted above every term, or refuse."""
        if not self.up:
            return
        assert isinstance(envelope.event, CoordinatorStarted)
        if not self._claims or envelope != self._claims[-1].envelope:
            newest = self._newest_claim()
            if envelope.event.term <= newest.term and newest.seq > envelope.based_on:
                reply(FencedReply(f"term {envelope.event.term} is not above term {newest.term}"))
                return
            self._write([envelope])
        claimed = self._newest_claim()
        self._when_durable(lambda: reply(claimed))

    def last_seq(self, reply: Reply) -> None:
        """The newest durable entry's number."""
        if self.up:
            reply(len(self.entries))

    def next_for(self, node: str, tasks: frozenset[str], after_seq: int) -> Recorded | None:
        """The next entry for the node; None: there is none yet. `tasks`: what it follows, and `after_seq` what it has
        handled, where it has no consumer."""
        consumer = self.consumers.setdefault(node, Consumer(tasks, after_seq))
        while consumer.pending is None and consumer.at < len(self.entries):
            entry = self.entries[consumer.at]
            consumer.at += 1
            if isinstance(entry, Recorded) and is_in_feed(entry.envelope.event, node, consumer.tasks):
                consumer.pending = entry
        return consumer.pending

    def acknowledge(self, node: str, seq: int) -> None:
        """The node has handled the entry."""
        consumer = self.consumers.get(node)
        if self.up and consumer is not None and consumer.pending is not None and consumer.pending.seq == seq:
            consumer.pending = None

    def follow(self, node: str, tasks: frozenset[str], number: int, after_seq: int) -> None:
        """The node follows these tasks from where its consumer is. `number`: of the request; one connection keeps their
        order, so an older one never comes after a newer one. `after_seq`: see next_for."""
        consumer = self.consumers.setdefault(node, Consumer(tasks, after_seq))
        if number > consumer.fitted:
            consumer.tasks, consumer.fitted = tasks, number

    def forge(self, envelope: Envelope) -> None:
        """Somebody has written this past all clients."""
        if self.up:
            self._write([envelope])

    def garble(self) -> None:
        """A message that is not an event."""
        if self.up:
            seq = self._tail_seq() + 1
            self._put(_Batch([Quarantined(seq, self._clock.wall_us(), "unicron.v1.obs.x", "$.event: not an event", 7)]))

    # --- the disk --------------------------------------------------------------------------------

    def _tail_seq(self) -> int:
        return len(self.entries) + sum(len(batch.entries) for batch in self._waiting)

    def _newest_claim(self) -> Fence:
        return Fence(self._claims[-1].envelope.term, self._claims[-1].seq) if self._claims else Fence(0, 0)

    @property
    def newest_started(self) -> CoordinatorStarted | None:
        """The claim of the newest term."""
        event = self._claims[-1].envelope.event if self._claims else None
        return event if isinstance(event, CoordinatorStarted) else None

    def _write(self, envelopes: Sequence[Envelope]) -> None:
        if not envelopes:
            return
        first, at_us = self._tail_seq() + 1, self._clock.wall_us()
        entries: list[Entry] = [Recorded(first + i, at_us, envelope) for i, envelope in enumerate(envelopes)]
        for entry in entries:
            assert isinstance(entry, Recorded)
            self._seq_by_id.setdefault(entry.envelope.event_id, entry.seq)
            if isinstance(entry.envelope.event, CoordinatorStarted):
                self._claims.append(entry)
        self._put(_Batch(entries))

    def _put(self, batch: _Batch) -> None:
        self._waiting.append(batch)
        self._sync()

    def _when_durable(self, say: Callable[[], object]) -> None:
        if self._waiting:
            self._waiting[-1].replies.append(say)
        else:
            say()

    def _sync(self) -> None:
        if not self._syncing and self._waiting:
            self._syncing = len(self._waiting)
            self._loop.call_later(self._drawn.uniform(*self.sync_s), self._synced, self._life)

    def _synced(self, life: int) -> None:
        if life != self._life:
            return
        done, self._waiting = self._waiting[: self._syncing], self._waiting[self._syncing :]
        self._syncing = 0
        self._keep(done)
        for batch in done:
            for say in batch.replies:
                say()
        self._sync()

    def _keep(self, batches: Sequence[_Batch]) -> None:
        for entry in [entry for batch in batches for entry in batch.entries]:
            self.entries.append(entry)
            self._on_entry(entry)
        self._announce()

    def _announce(self) -> None:
        self.grown.set()
        self.grown = asyncio.Event()

    # --- crashes ---------------------------------------------------------------------------------

    def crash(self) -> None:
        """The process is killed: no request is answered; a part of the unsynced entries may survive."""
        if not self.up:
            return
        self.up = False
        self.consumers.clear()
        self._life += 1
        self._syncing = 0
        kept, self._waiting = self._waiting[: self._drawn.randint(0, len(self._waiting))], []
        self._keep(kept)
        self._seq_by_id = {event_id: seq for event_id, seq in self._seq_by_id.items() if seq <= len(self.entries)}
        self._claims = [claim for claim in self._claims if claim.seq <= len(self.entries)]

    def start(self) -> None:
        """Serve again."""
        self.up = True
        self._announce()
