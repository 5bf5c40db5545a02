"""Sends the agent's observations to the log: in order, each repeated until the log acknowledges it as durable.

Rules
-----
* One producer, one boot, one series of numbers: an observation is numbered when it is put in, and repeated
  with the same number until it is acknowledged, so no repetition can stand in the log twice.
* One observation is under way at a time; the next follows its acknowledgement. The fold drops what comes after a later
  one of its producer, so none may overtake another, and a server that refuses one message (no room, a queue that is
  full, a change of leaders) may take those sent behind it. Many agents at once fill the server as well as many messages
  of one would; and atomic batches of a few cost it six times as much (`tests/benchmarks/append_cost.py`).
* A repetition goes out with the same message id: the server recognises it, and nothing is read to find out.
* An outage of the log costs nothing but memory, and that is bounded: when full, the oldest report of progress
  (StepCommitted) is dropped, or where there is none the oldest of all; an error in the agent's log says how many.
* An event that the present coordinator cannot read is sent in the form that it can read (`events/wire/schemas.py`).
* An invalid event would always be refused: it is dropped on arrival, and reported in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from random import Random

from msgspec.structs import replace

from unicrond.events.log.entrance import PACE, PACE_KIB, kib, sent_bytes
from unicrond.events.log.event_log import EventLog, LogError
from unicrond.events.log.subjects import headers
from unicrond.events.vocabulary import Name, Observation, StepCommitted
from unicrond.events.wire.codec import BadEvent, encode
from unicrond.events.wire.envelope import Envelope
from unicrond.events.wire.schemas import FIRST, lowered

logger = logging.getLogger(__name__)

CAPACITY = 100_000
#: The pause between attempts while the log refuses; up to twice as long, by chance.
_PAUSE_S = 0.5
#: An observation that has waited for less is on its way, not part of a backlog.
BACKLOG_AGE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Item:
    """An observation that the log has not acknowledged."""

    envelope: Envelope
    on_durable: Callable[[], None] | None
    put_s: float
    size_bytes: int


def _now_us() -> int:
    """Return the event loop's time."""
    return int(asyncio.get_running_loop().time() * 1e6)


class Outbox:
    """Queues the observations of one agent until the log has acknowledged them. `clock_us` returns the wall clock in
    microseconds (Envelope.observed_at_us)."""

    def __init__(self, producer: Name, boot: int, clock_us: Callable[[], int], *, capacity: int = CAPACITY) -> None:
        self._producer = producer
        self._boot = boot
        self._clock_us = clock_us
        self._capacity = capacity
        self._items: deque[_Item] = deque()
        self._under_way = 0
        #: Until when what was sent is paid for (Bucket), by count and by KiB.
        self._paid_us = self._paid_kib_us = 0
        self._random = Random(f"{producer} {boot}")  # its own, so that a simulation repeats itself
        self._number = 0
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self.lost_count = 0
        #: The schema that the coordinator reads (events/wire/schemas.py); an event that it does not know at all is not
        #: sent.
        self.schema = FIRST
        #: The last entry that the log has acknowledged; `on_backward` is called where a later one is not behind it.
        self.acked_seq = 0
        self.on_backward: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        """Return the number of observations that the log has not acknowledged yet."""
        return len(self._items)

    def backlog(self, now_s: float) -> tuple[int, int]:
        """Return how many observations the log does not accept, and the age of the oldest in microseconds.

        (0, 0) while all goes well. `now_s`: time.monotonic().
        """
        age_s = now_s - self._items[0].put_s if self._items else 0.0
        return (len(self._items), int(age_s * 1e6)) if age_s >= BACKLOG_AGE_S else (0, 0)

    def put(self, event: Observation, *, caused_by: str = "", on_durable: Callable[[], None] | None = None) -> None:
        """Queue an observation; never waits. `on_durable` is called once the log holds it."""
        self._number += 1
        envelope = Envelope(
            producer=self._producer,
            boot=self._boot,
            number=self._number,
            caused_by=caused_by,
            observed_at_us=self._clock_us(),
            event=event,  # type: ignore[arg-type]  # every Observation is one of AnyEvent
        )
        try:
            size_bytes = sent_bytes(encode(envelope), headers(envelope))
        except BadEvent as error:
            self._lose(envelope, f"not a valid event: {error.reason}")
            return
        if len(self._items) >= self._capacity:
            self._make_room()
        self._items.append(_Item(envelope, on_durable, time.monotonic(), size_bytes))
        self._empty.clear()
        self._filled.set()

    async def run(self, log: EventLog) -> None:
        """Append to `log` the observations that are put in, without end."""
        while True:
            await self._filled.wait()
            if pause_us := self._pause_us():
                await asyncio.sleep(pause_us / 1e6)
            item = self._items[0]
            self._under_way = 1
            seqs: list[int] = []
            try:
                if (envelope := self._in_schema(item.envelope)) is not None:
                    seqs = await log.append([envelope])
            except LogError as error:
                logger.error("the log accepts nothing (%s); keeping %d observations to try again", error, len(self))
                await asyncio.sleep(_PAUSE_S * self._random.uniform(1, 2))
                continue
            finally:
                self._under_way = 0
            self._items.popleft()
            self._pay(item)
            if seqs and seqs[-1] <= self.acked_seq:
                self.on_backward()
            self.acked_seq = max([self.acked_seq, *seqs])
            if item.on_durable is not None:
                item.on_durable()
            if not self._items:
                self._filled.clear()
                self._empty.set()

    def forget(self) -> None:
        """Drop all observations: their log no longer exists. Not to be called while `run` runs."""
        if self._items:
            logger.warning("%d observations were for the log before: they are dropped", len(self))
        self._items.clear()
        self._filled.clear()
        self._empty.set()
        self.acked_seq = 0

    def _pause_us(self) -> int:
        """Return how long the next observation has to wait, so that the head never takes this node for a flood."""
        now_us = _now_us()
        return max(PACE.pause_us(self._paid_us, now_us), PACE_KIB.pause_us(self._paid_kib_us, now_us))

    def _pay(self, item: _Item) -> None:
        """Count an observation that the log has taken."""
        now_us = _now_us()
        self._paid_us = PACE.paid_us(self._paid_us, now_us)
        self._paid_kib_us = PACE_KIB.paid_us(self._paid_kib_us, now_us, kib(item.size_bytes))

    def _in_schema(self, envelope: Envelope) -> Envelope | None:
        """Return the envelope in the form that the coordinator can read; None where it cannot read the event."""
        event = lowered(envelope.event, self.schema)
        if event is None:
            logger.info("not sending %s: the coordinator reads schema %d", envelope.event_id, self.schema)
            return None
        return envelope if event is envelope.event else replace(envelope, event=event)

    async def drained(self, timeout_s: float) -> bool:
        """Wait until the log holds all that was put in; return False if that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def _make_room(self) -> None:
        """Drop one observation that is not under way."""
        waiting = enumerate(islice(self._items, self._under_way, None), self._under_way)
        victim = next((i for i, item in waiting if isinstance(item.envelope.event, StepCommitted)), self._under_way)
        item = self._items[victim]
        del self._items[victim]
        self._lose(item.envelope, f"{self._capacity} observations wait for the log")

    def _lose(self, envelope: Envelope, reason: str) -> None:
        self.lost_count += 1
        if self.lost_count & (self.lost_count - 1) == 0:  # 1, 2, 4, 8, ...: loud, but not a flood
            kind = type(envelope.event).__name__
            logger.error("OBSERVATION LOST (%d so far): %s %s: %s", self.lost_count, kind, envelope.event_id, reason)
