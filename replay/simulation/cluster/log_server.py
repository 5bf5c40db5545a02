"""A model of the log's server: one total order, a disk, crashes. The contract is events/log/event_log.py's.

Rules
-----
* A batch is visible to readers, and acknowledged, once it is on the disk (one sync covers all batches that wait).
* A crash loses batches that are not on the disk yet, or a part of them: from the end, never in the middle.
* Ids in the log are recognised and not written again, unless the server has forgotten them (`forgets`: its window of
  duplicates is bounded; the fold must do without it).
* The fence is checked when a batch is written, against the newest claim that stands in the log or waits for the disk.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence

from unicrond.events.log.event_log import Fence, is_in_feed
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.codec import decode
from unicrond.events.wire.envelope import Entry, Envelope, QuarantinedMessage, RecordedEvent
from unicrond.replay.simulation.models.virtual_time import HostClock

#: Takes the answer to a request: sequence numbers, a Fence or a FencedReply.
Reply = Callable[[object], object]


class FencedReply:
    """The server refuses, because a newer term was claimed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _WriteBatch:
    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.replies: list[Callable[[], object]] = []


class Consumer:
    """The server's memory of one node's feed (events/nats/commands.py). `at`: how many entries it has scanned;
    `pending`: the one that waits for its acknowledgement; no later one is scanned until then."""

    def __init__(self, tasks: frozenset[str], at: int) -> None:
        self.tasks = tasks
        self.at = at
        self.pending: RecordedEvent | None = None
        self.request_number = 0


class LogServer:
    """The simulated server of the log. `entries`: what is durable. `on_entry` gets each of them once, in order."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: HostClock,
        rng: random.Random,
        on_entry: Callable[[Entry], object],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._rng = rng
        self._on_entry = on_entry
        self.entries: list[Entry] = []
        #: Per node.
        self.consumers: dict[str, Consumer] = {}
        self.requests = itertools.count(1)
        self.up = True
        self.forgets = False
        self.sync_s = (0.0002, 0.002)
        self.growth = asyncio.Event()
        self._seq_by_id: dict[str, int] = {}
        self._claims: list[RecordedEvent] = []
        self._waiting: list[_WriteBatch] = []
        self._syncing = 0
        self._life = 0

    @property
    def life(self) -> int:
        """Count its crashes."""
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
        # Decoded again, so that readers see exactly what a log on the wire would return.
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
        fence = self._newest_claim()
        self._when_durable(lambda: reply(fence))

    def last_seq(self, reply: Reply) -> None:
        """Reply with the newest durable entry's number."""
        if self.up:
            reply(len(self.entries))

    def next_for(self, node: str, tasks: frozenset[str], after_seq: int) -> RecordedEvent | None:
        """Return the next entry for the node; None: there is none yet. `tasks`: those that it follows, and `after_seq`
        the last entry that it has handled, where it has no consumer."""
        consumer = self.consumers.setdefault(node, Consumer(tasks, after_seq))
        while consumer.pending is None and consumer.at < len(self.entries):
            entry = self.entries[consumer.at]
            consumer.at += 1
            if isinstance(entry, RecordedEvent) and is_in_feed(entry.envelope.event, node, consumer.tasks):
                consumer.pending = entry
        return consumer.pending

    def acknowledge(self, node: str, seq: int) -> None:
        """Note that the node has handled the entry."""
        consumer = self.consumers.get(node)
        if self.up and consumer is not None and consumer.pending is not None and consumer.pending.seq == seq:
            consumer.pending = None

    def follow(self, node: str, tasks: frozenset[str], number: int, after_seq: int) -> None:
        """Let the node follow these tasks from where its consumer is. `number`: of the request; one connection keeps
        their order, so an older one never arrives after a newer one. `after_seq`: see next_for."""
        consumer = self.consumers.setdefault(node, Consumer(tasks, after_seq))
        if number > consumer.request_number:
            consumer.tasks, consumer.request_number = tasks, number

    def forge(self, *envelopes: Envelope) -> None:
        """Write envelopes without any client, all or none."""
        if self.up:
            self._write(list(envelopes))

    def garble(self) -> None:
        """Write a message that is not an event."""
        if self.up:
            seq = self._tail_seq() + 1
            self._enqueue(
                _WriteBatch(
                    [QuarantinedMessage(seq, self._clock.wall_us(), "unicron.v1.obs.x", "$.event: not an event", 7)]
                )
            )

    # --- the disk --------------------------------------------------------------------------------

    def _tail_seq(self) -> int:
        return len(self.entries) + sum(len(batch.entries) for batch in self._waiting)

    def _newest_claim(self) -> Fence:
        return Fence(self._claims[-1].envelope.term, self._claims[-1].seq) if self._claims else Fence(0, 0)

    @property
    def newest_start(self) -> CoordinatorStarted | None:
        """Return the claim of the newest term, None without one."""
        event = self._claims[-1].envelope.event if self._claims else None
        return event if isinstance(event, CoordinatorStarted) else None

    def _write(self, envelopes: Sequence[Envelope]) -> None:
        if not envelopes:
            return
        first, at_us = self._tail_seq() + 1, self._clock.wall_us()
        entries: list[Entry] = [RecordedEvent(first + i, at_us, envelope) for i, envelope in enumerate(envelopes)]
        for entry in entries:
            assert isinstance(entry, RecordedEvent)
            self._seq_by_id.setdefault(entry.envelope.event_id, entry.seq)
            if isinstance(entry.envelope.event, CoordinatorStarted):
                self._claims.append(entry)
        self._enqueue(_WriteBatch(entries))

    def _enqueue(self, batch: _WriteBatch) -> None:
        self._waiting.append(batch)
        self._sync()

    def _when_durable(self, callback: Callable[[], object]) -> None:
        if self._waiting:
            self._waiting[-1].replies.append(callback)
        else:
            callback()

    def _sync(self) -> None:
        if not self._syncing and self._waiting:
            self._syncing = len(self._waiting)
            self._loop.call_later(self._rng.uniform(*self.sync_s), self._synced, self._life)

    def _synced(self, life: int) -> None:
        if life != self._life:
            return
        batches, self._waiting = self._waiting[: self._syncing], self._waiting[self._syncing :]
        self._syncing = 0
        self._commit_batches(batches)
        for batch in batches:
            for callback in batch.replies:
                callback()
        self._sync()

    def _commit_batches(self, batches: Sequence[_WriteBatch]) -> None:
        for entry in [entry for batch in batches for entry in batch.entries]:
            self.entries.append(entry)
            self._on_entry(entry)
        self._announce()

    def _announce(self) -> None:
        self.growth.set()
        self.growth = asyncio.Event()

    # --- crashes ---------------------------------------------------------------------------------

    def crash(self) -> None:
        """Kill the process: no request is answered; a part of the unsynced entries may survive."""
        if not self.up:
            return
        self.up = False
        self.consumers.clear()
        self._life += 1
        self._syncing = 0
        survivors, self._waiting = self._waiting[: self._rng.randint(0, len(self._waiting))], []
        self._commit_batches(survivors)
        self._seq_by_id = {event_id: seq for event_id, seq in self._seq_by_id.items() if seq <= len(self.entries)}
        self._claims = [claim for claim in self._claims if claim.seq <= len(self.entries)]

    def start(self) -> None:
        """Start to serve again."""
        self.up = True
        self._announce()
