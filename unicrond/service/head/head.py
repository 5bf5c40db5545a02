"""One head: it stands by and folds, leads while it has the lease, and stands by again.

Rules
-----
* The head that leads holds the lease, and then claims a term; the term alone says which one decides
  (events/log/event_log.py).
* A head stands for the lease only once it has folded the log, so that it decides at once when it gets it. One that has
  stopped deciding never does: a restart ends that.
* When it may take a free lease: `unicrond/core/nodes/leadership.py`.
* A leader that cannot renew goes on: the log is away, and no other head can take the lease either. It stands by once
  the log says that another head has the lease, or has claimed a term.
* A leader that finds its lease forgotten takes it again once it has folded what the log then held: another head may
  have claimed a term meanwhile, and lost the same lease.
* What claimed a term without the lease is a head of an older version. The lease ends then by itself, and no head takes
  it while that coordinator sends beats: two versions do not fight.
* A head that ends gives the lease back, whatever ended it, so that the next one need not wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from unicrond.core.nodes.leadership import Candidacy
from unicrond.events.log.event_log import Fenced, LogError
from unicrond.events.log.lease import ANNOUNCED_S, RENEW_S, Holder, Lease
from unicrond.service.coordinator import other_processes
from unicrond.service.coordinator.clock import CLOCK, Clock
from unicrond.service.coordinator.coordinator import Coordinator

log = logging.getLogger("unicrond")

#: How often a head that stands by asks for the lease, and one that leads renews it when the last attempt failed.
LOOK_S = 0.2
_AGAIN_S = 0.1
_GIVE_BACK_S = 1.0


def this_process(api: str = "") -> Holder:
    """Return the lease holder that stands for this life of this process."""
    pid = os.getpid()
    return Holder(
        head=secrets.token_hex(8),
        process=f"{socket.gethostname()}:{pid}",
        api=api,
        machine=other_processes.machine(),
        pid=pid,
        start_ticks=other_processes.began(pid) or 0,
    )


def is_gone(holder: Holder) -> bool:
    """Return whether the holder was a process of this machine that no longer runs."""
    return other_processes.is_gone(holder.machine, holder.pid, holder.start_ticks)


class Head:
    """One head. `me`: this head in the lease. `is_patient`: it was told to stand by. `has_ended`: whether a holder was
    a process of this machine that has ended."""

    def __init__(
        self,
        coordinator: Coordinator,
        lease: Lease,
        me: Holder,
        heartbeat_s: float,
        clock: Clock = CLOCK,
        *,
        is_patient: bool = False,
        has_ended: Callable[[Holder], bool] = is_gone,
    ) -> None:
        self.me = me
        #: Who has the lease, as far as this head knows.
        self.leader: Holder | None = None
        #: All that have announced themselves, this one too.
        self.heads: list[Holder] = []
        self._coordinator = coordinator
        self._lease = lease
        self._heartbeat_us = int(heartbeat_s * 1e6)
        self._clock = clock
        self._is_patient = is_patient
        self._has_ended = has_ended
        self._news = asyncio.Event()
        self._candidacy: Candidacy | None = None

    @property
    def leads(self) -> bool:
        """Return whether this head has the lease, as far as it knows."""
        return self.leader is not None and self.leader.head == self.me.head

    @property
    def standing_by(self) -> list[str]:
        """The heads that are known and do not lead, HOST:PID."""
        leader = self.leader.head if self.leader is not None else ""
        return sorted(holder.process for holder in self.heads if holder.head != leader and not holder.has_left)

    async def run(self) -> None:
        """Run as a standby, lead, and stand by again, until cancelled. Raises what ends the coordinator, but no
        Fenced."""
        await self._lease.listen(self._news.set, self._on_beat)
        announcing = asyncio.create_task(self._announce(), name="announce")
        try:
            while True:
                await self._stand_by()
                await self._lead()
                self._is_patient = True
        finally:
            await _cancel(announcing)
            await self._take_leave()

    # --- standing by -----------------------------------------------------------------------------

    async def _stand_by(self) -> None:
        following = asyncio.create_task(self._coordinator.follow(), name="follow")
        taking = asyncio.create_task(self._take(), name="lease")
        try:
            await asyncio.wait({following, taking}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                await following  # raises: it has no other end
            await taking
        finally:
            self._candidacy = None
            await _cancel(following, taking)

    async def _take(self) -> None:
        await self._coordinator.caught_up.wait()
        candidacy = Candidacy(self.me.head, self._heartbeat_us, self._now_us(), is_patient=self._is_patient)
        self._candidacy = candidacy
        previous = ""
        while True:
            self._news.clear()
            try:
                look = await self._lease.look()
                entry = look.entry
                holder = entry.holder if entry is not None else None
                self.leader = holder if holder is not None and not holder.has_left else None
                is_ended = holder is not None and self._has_ended(holder)
                reason = candidacy.answered(entry, self._now_us(), is_anew=look.is_anew, is_gone=is_ended)
                may_lead = reason and not self._coordinator.fault
                if may_lead and await self._lease.acquire_or_renew(self.me, entry.revision if entry is not None else 0):
                    log.info("this head leads from now on: %s", reason)
                    self.leader = self.me
                    return
                if self.leader is not None and self.leader.process != previous:
                    previous = self.leader.process
                    log.info("standing by: the head %s leads", previous)
            except LogError as error:
                log.debug("cannot ask who leads: %s", error)
                candidacy.unanswered()
            await _wait(self._news, LOOK_S)

    def _on_beat(self, term: int) -> None:
        if self._candidacy is not None and term >= self._coordinator.state.term:
            self._candidacy.beat(self._now_us())

    # --- leading ---------------------------------------------------------------------------------

    async def _lead(self) -> None:
        """Run the coordinator until another head leads. Raises what else ends the coordinator."""
        ruling = asyncio.create_task(self._coordinator.run(), name="coordinator")
        renewing = asyncio.create_task(self._renew(), name="lease")
        gives_back = True
        try:
            await asyncio.wait({ruling, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if not ruling.done():
                gives_back = False
                log.warning("this head stands by from now on: %s", await renewing)
                return
            try:
                await ruling
            except Fenced as fenced:
                gives_back = False
                log.warning("this head stands by from now on: another coordinator took over (%s)", fenced)
        finally:
            await _cancel(ruling, renewing)
            self.leader = None
            if gives_back:
                await self._give_back()

    async def _renew(self) -> str:
        """Renew the lease as long as no other head has it; return who has it then."""
        delay_s = RENEW_S
        free_at_seq: int | None = None
        while True:
            await asyncio.sleep(delay_s)
            delay_s = _AGAIN_S
            try:
                # Asked each time: a server that forgets the lease counts its revisions from 1 again.
                present = (await self._lease.look()).entry
                holder = present.holder if present is not None else None
                if holder is not None and holder.head != self.me.head:
                    return f"the head {holder.process} has the lease"
                if holder is None and free_at_seq is None:
                    free_at_seq = await self._coordinator.end_seq()
                if self._coordinator.state.seq < (free_at_seq or 0) or self._coordinator.is_deposed:
                    continue  # a newer claim ends this head's term
                if await self._lease.acquire_or_renew(self.me, present.revision if present is not None else 0):
                    delay_s, free_at_seq = RENEW_S, None
            except LogError as error:
                log.debug("cannot renew the lease: %s", error)

    async def _give_back(self) -> None:
        """Give the lease back, so that the next head need not wait for its end."""
        try:
            async with asyncio.timeout(_GIVE_BACK_S):
                present = (await self._lease.look()).entry
                if present is not None and present.holder is not None and present.holder.head == self.me.head:
                    await self._lease.acquire_or_renew(replace(self.me, has_left=True), present.revision)
        except (LogError, TimeoutError) as error:
            log.debug("cannot give the lease back: %s", error)

    async def _announce(self) -> None:
        """Announce this head to the others, and learn of them."""
        while True:
            try:
                await self._lease.announce(self.me)
                self.heads = await self._lease.heads()
            except LogError as error:
                log.debug("cannot tell the heads of each other: %s", error)
            await asyncio.sleep(ANNOUNCED_S / 3)

    async def _take_leave(self) -> None:
        try:
            await self._lease.announce(replace(self.me, has_left=True))
        except LogError as error:
            log.debug("cannot take leave of the other heads: %s", error)

    def _now_us(self) -> int:
        return self._clock.monotonic_us()


async def other_heads(lease: Lease, me: Holder) -> list[Holder]:
    """Return the heads that run beside this one, asked now; none where the log does not answer."""
    try:
        entry = (await lease.look()).entry
        holders = [*await lease.heads(), *([entry.holder] if entry is not None and entry.holder is not None else [])]
    except LogError:
        return []
    return [holder for holder in holders if holder.head != me.head and not holder.has_left and not is_gone(holder)]


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
