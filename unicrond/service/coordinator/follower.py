"""The read-only half of a coordinator: it reads the log and folds it, and decides nothing.

Rules
-----
* `state` is always the fold of everything up to `state.seq`. Entries come through an inbox, so that a burst of them is
  folded before the state is looked at once.
* Each entry that is folded is a step, which all views take (views/view.py); nothing is decided from them.
* The first reading may begin from a snapshot; to be cut off in it does no harm.
* A state that breaks the rules, though the fold made it, is a bug of ours: nothing more is decided (`fault` says why).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing

from unicrond.core.fold import fold
from unicrond.core.replayer import LogStep
from unicrond.core.rules.invariants import InvariantError, check
from unicrond.core.rules.skip_rules import SkipCheck
from unicrond.core.state.alarms import Alarm
from unicrond.core.state.state import ClusterState
from unicrond.events.log.event_log import EventLog, LogDamaged
from unicrond.events.log.log_identity import LogMark, mark_of
from unicrond.events.log.skips import apply_skips
from unicrond.events.log.subjects import subject
from unicrond.events.vocabulary import EntrySkipped
from unicrond.events.wire.envelope import Entry, QuarantinedMessage, RecordedEvent
from unicrond.service.coordinator.alarms import Alarms
from unicrond.service.coordinator.clock import Clock
from unicrond.service.coordinator.snapshots import Snapshots
from unicrond.service.coordinator.surroundings import HeadViews

log = logging.getLogger("unicrond")

_INBOX = 20_000
#: What a person can do about a log that is not the one this head worked on before.
CURE = "restore it, or take the log as it is: unicrond run --new-log"


class Follower:
    """Reads and folds a log. `caught_up`: it has folded the log as it was at the start. `skip`: entries to pass
    over."""

    def __init__(
        self,
        event_log: EventLog,
        clock: Clock,
        snapshots: Snapshots | None,
        skip: Sequence[int],
        views: HeadViews | None = None,
    ) -> None:
        self.state = ClusterState()
        self.caught_up = asyncio.Event()
        self.alarms = Alarms()
        self.views = HeadViews() if views is None else views
        #: Why nothing more is decided, in one line; empty as long as all is well.
        self.fault = ""
        #: The fault, where it is that the log ends before what was folded; "": it is another, or none.
        self._behind = ""
        self._resumed = asyncio.Event()
        self._event_log = event_log
        self._clock = clock
        self._inbox: asyncio.Queue[Entry | None] = asyncio.Queue(maxsize=_INBOX)
        self._read_us = clock.monotonic_us()
        self._snapshots = snapshots
        self._mark: LogMark | None = None
        #: The last state that was checked against the rules.
        self._sound: ClusterState | None = None
        self._skip = tuple(skip)
        self._skips: dict[int, str] = {}
        self._cause = ""
        #: Requests that wait until their entry is part of the state.
        self._arrivals: list[tuple[int, asyncio.Event]] = []

    async def until_folded(self, seq: int) -> None:
        """Wait until the entry with this number, and all before it, are part of the state."""
        if seq > self.state.seq:
            arrival = asyncio.Event()
            self._arrivals.append((seq, arrival))
            try:
                await arrival.wait()
            finally:
                self._arrivals.remove((seq, arrival))

    @property
    def mark(self) -> LogMark | None:
        """The last entry that was folded."""
        return self._mark

    async def end_seq(self) -> int:
        """Return the number of the log's last entry, folded or not. Raises LogError."""
        return await self._event_log.last_seq()

    def log_is_behind(self, reason: str) -> None:
        """Stop deciding until the log is whole: it ends before what was folded."""
        if not self.fault:
            self._behind = f"{reason}; {CURE}"
            self._stop_deciding(self._behind)

    def log_is_whole(self) -> None:
        """Decide again, if nothing but a log that ended before what was folded has stopped that: it was looked at while
        it was being restored, and holds what was folded again."""
        if self.fault and self.fault == self._behind:
            self.fault = self._behind = ""
            log.warning("deciding goes on: the log holds all that was read of it")
            self._resumed.set()
            if self._inbox.empty():
                self._inbox.put_nowait(None)

    async def _until_whole(self) -> None:
        """Wait until the log holds what was folded again."""
        while self.fault:
            self._resumed.clear()
            await self._resumed.wait()

    def standing_alarms(self) -> list[Alarm]:
        """Return what a person has to look at now, a line each."""
        return self.alarms.standing(self._clock.wall_us()) + self.views.alarms()

    async def unwritten_skips(self) -> list[EntrySkipped]:
        """Return the events that tell every reader which entries this coordinator was ordered to pass over."""
        in_log = await self._event_log.skips()
        return [EntrySkipped(seq=seq, reason=reason) for seq, reason in self._skips.items() if seq not in in_log]

    def _folded(self, before: ClusterState, entry: RecordedEvent) -> None:
        """Handle each valid entry once it is folded; for subclasses."""

    async def _catch_up(self) -> None:
        until_seq = await self._event_log.last_seq()
        if self.caught_up.is_set():
            await self._read_up(until_seq)
            self._require_sound_state()
            return
        self.state = ClusterState()  # to be cut off in the middle does no harm
        self.views.begin()
        await self._read_first(until_seq)
        self.caught_up.set()

    async def _read_first(self, until_seq: int) -> None:
        self._skips = await self._event_log.skips()
        fresh = {seq: "ordered by --skip" for seq in self._skip if seq not in self._skips}
        needed = SkipCheck(fresh, until_seq)
        self._skips |= fresh
        if until_seq == 0:
            return
        started = time.monotonic()
        usable = self._snapshots is not None and not fresh
        restored = await self._snapshots.restore(self._event_log, self._skips) if usable and self._snapshots else None
        if restored is not None:
            self.state, self._mark, books = restored
            self.views.goodput.resume(books)
            self._cause = self._mark.event_id
        first_seq = self.state.seq + 1
        await self._read_up(until_seq, needed)
        if fresh:
            needed.require(self.state)
        self._require_sound_state()
        log.info("folded entries %d to %d in %.2f s", first_seq, until_seq, time.monotonic() - started)

    async def _read_up(self, until_seq: int, needed: SkipCheck | None = None) -> None:
        if until_seq <= self.state.seq:
            return
        async with aclosing(self._event_log.read(self.state.seq, until_seq=until_seq)) as entries:
            async for entry in entries:
                if needed is not None:
                    needed.see(entry)
                self._fold(entry)

    async def _read(self) -> None:
        async with aclosing(self._event_log.read(self.state.seq)) as entries:
            async for entry in entries:
                self._delivered()
                await self._inbox.put(entry)
        raise RuntimeError("the event log ended, which must not happen")

    def _delivered(self) -> None:
        """Note that something has come from the log: an entry, or an acknowledgement."""
        self._read_us = self._clock.monotonic_us()

    def _fold(self, entry: Entry) -> None:
        before = self.state
        self._mark = mark_of(entry)
        entry = apply_skips(entry, self._skips)
        self.state = fold(before, entry)
        self.views.feed(LogStep(before, entry, self.state))
        if isinstance(entry, QuarantinedMessage):
            self._tell_quarantined(entry)
        else:
            if self.state.refusals is not before.refusals:
                reason, on_subject = self.state.refusals[-1].reason, subject(entry.envelope)
                self._tell_quarantined(QuarantinedMessage(entry.seq, entry.recorded_at_us, on_subject, reason, 0))
            self._cause = entry.envelope.event_id
            event = entry.envelope.event
            if isinstance(event, EntrySkipped) and event.seq < entry.seq and event.seq not in self._skips:
                raise LogDamaged(
                    f"entry {event.seq} was skipped after this coordinator folded it; restart the coordinator"
                )
            self._folded(before, entry)

    def _tell_quarantined(self, entry: QuarantinedMessage) -> None:
        log.warning("quarantined sequence %d on %s: %s", entry.seq, entry.subject, entry.reason)
        if (alarm := self.alarms.quarantined(entry, self.state)) and alarm in self.standing_alarms():
            log.error("ALARM: %s", alarm)

    async def _take_in(self) -> None:
        """Fold what has come; wait for at least one entry."""
        entry = await self._inbox.get()
        while True:
            if entry is not None:
                self._fold(entry)
            if self._inbox.empty():
                break
            entry = self._inbox.get_nowait()
        for seq, arrival in self._arrivals:  # once for all entries that came together
            if seq <= self.state.seq:
                arrival.set()
        self._require_sound_state()

    def _forget_unread(self) -> None:
        self._inbox = asyncio.Queue(maxsize=_INBOX)

    def _require_sound_state(self) -> None:
        if not self.fault:
            try:
                check(self.state, self._sound)
                self._sound = self.state
            except InvariantError as error:
                self._stop_deciding(str(error))

    def _stop_deciding(self, reason: str) -> None:
        self.fault = reason
        log.error(
            "DECIDING HAS STOPPED: %s; training continues, faults are not healed (docs/operate/recovery.md)",
            reason,
        )
