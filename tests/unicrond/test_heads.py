"""Heads in their loop, over a log and a lease in memory and in virtual time: one leads, the others stand by."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, cast

from tests.contracts.memory_log import MemoryBeatLog, MemoryLog
from tests.unicrond.test_coordinator import entries_until, joined, observation
from unicrond.core.state.policy import Policy
from unicrond.events import vocabulary as v
from unicrond.events.log.event_log import EventLog, LogUnavailable
from unicrond.events.log.lease import Holder, LeaseEntry, LeaseView
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.replay.simulation.cluster.lease import MemoryLease
from unicrond.replay.simulation.models.virtual_time import HostClock, VirtualLoop
from unicrond.service.coordinator import other_processes
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.surroundings import HeadSettings
from unicrond.service.head import head as heads
from unicrond.service.head.head import Head


def in_virtual_time(scenario: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that plays it: no timer waits, and no other process disturbs it."""

    @functools.wraps(scenario)
    def play() -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(scenario())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    return play


class Away:
    """A Lease behind a connection that can be cut, over one that is shared."""

    def __init__(self, shared: MemoryLease) -> None:
        self.shared = shared
        self.is_cut = False

    def _require(self) -> None:
        if self.is_cut:
            raise LogUnavailable("cut")

    async def look(self) -> LeaseView:
        self._require()
        return await self.shared.look()

    async def acquire_or_renew(self, holder: Holder, after: int) -> LeaseEntry | None:
        self._require()
        return await self.shared.acquire_or_renew(holder, after)

    async def announce(self, holder: Holder) -> None:
        self._require()
        await self.shared.announce(holder)

    async def heads(self) -> list[Holder]:
        self._require()
        return await self.shared.heads()

    async def listen(self, on_news: Callable[[], object], on_beat: Callable[[int], object]) -> None:
        await self.shared.listen(on_news, on_beat)


class Late:
    """An EventLog over one that is shared: what a head reads may be held up."""

    def __init__(self, shared: MemoryLog) -> None:
        self._shared = shared
        self.passes = asyncio.Event()
        self.passes.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    async def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncIterator[Entry]:
        async with aclosing(self._shared.read(after_seq, until_seq=until_seq)) as entries:
            async for entry in entries:
                await self.passes.wait()
                yield entry


class Run:
    """One head that runs."""

    def __init__(self, name: str, log: MemoryLog, lease: MemoryLease, *, is_patient: bool = False) -> None:
        self.lease = Away(lease)
        self.log = Late(log)
        clock = HostClock(asyncio.get_running_loop())
        self.coordinator = Coordinator(
            cast("EventLog", self.log),
            MemoryBeatLog(),
            HeadSettings(policy=Policy(), heartbeat_s=1.0, process=name),
            clock,
        )
        me = Holder(head=name, process=name)
        self.head = Head(
            self.coordinator,
            self.lease,
            me,
            1.0,
            clock,
            is_patient=is_patient,
            has_ended=lambda holder: holder.machine == "gone",
        )
        self.task = asyncio.create_task(self.head.run())

    async def leads(self) -> None:
        async with asyncio.timeout(30):
            await self.coordinator.live.wait()
        assert self.head.leads

    async def stands_by(self) -> None:
        async with asyncio.timeout(30):
            while self.coordinator.live.is_set() or not self.coordinator.caught_up.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def kill(self) -> None:
        """Nothing more of it happens, and it gives nothing back."""
        self.lease.is_cut = True
        self.task.cancel()


@asynccontextmanager
async def site() -> AsyncIterator[tuple[MemoryLog, MemoryLease, Callable[..., Run]]]:
    log, lease = MemoryLog(), MemoryLease()
    async with AsyncExitStack() as stack:

        def start(name: str, **how: bool) -> Run:
            run = Run(name, log, lease, **how)
            stack.push_async_callback(run.leave)
            return run

        yield log, lease, start


async def terms(log: MemoryLog) -> list[str]:
    """Who claimed them."""
    read = [entry async for entry in log.read(until_seq=await log.last_seq())]
    claims = [e.envelope.event for e in read if isinstance(e, RecordedEvent)]
    return [event.process for event in claims if isinstance(event, v.CoordinatorStarted)]


@in_virtual_time
async def test_standby_head_folds_and_replaces_killed_leader() -> None:
    async with site() as (log, _, start):
        one = start("one")
        await one.leads()
        two = start("two")
        await two.stands_by()
        await log.append([observation(joined(), 1)])
        await one.coordinator.submit(observation(v.TaskSubmitted(spec=v.TaskSpec(name="a")), 1, "api"))
        await entries_until(log, lambda e: isinstance(e, v.StartWorker))
        async with asyncio.timeout(30):
            while "a" not in two.coordinator.state.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not two.coordinator.live.is_set() and two.head.leader == one.head.me
        one.kill()
        await two.leads()
        assert await terms(log) == ["one", "two"]
        assert not two.coordinator.state.incidents


@in_virtual_time
async def test_head_that_stopped_deciding_never_leads() -> None:
    async with site() as (log, _, start):
        one = start("one")
        await one.leads()
        two = start("two")
        await two.stands_by()
        two.coordinator.log_is_behind("the event log ends at entry 1")
        one.kill()
        await asyncio.sleep(30)
        assert two.coordinator.fault and not two.head.leads and await terms(log) == ["one"]
        await two.leave()
        await start("again").leads()  # a restart ends it
        assert await terms(log) == ["one", "again"]


@in_virtual_time
async def test_leader_decides_again_once_its_log_is_whole() -> None:
    """It looked while the log was being restored."""
    async with site() as (log, _, start):
        one = start("one")
        await one.leads()
        one.coordinator.log_is_behind("the event log ends at entry 1")
        await log.append([observation(joined(), 1)])
        await log.append([observation(v.TaskSubmitted(spec=v.TaskSpec(name="a")), 1, "api")])
        await asyncio.sleep(30)
        assert not [entry async for entry in log.read(until_seq=await log.last_seq()) if is_start(entry)]
        one.coordinator.log_is_whole()
        await entries_until(log, lambda event: isinstance(event, v.StartWorker))
        assert not one.coordinator.fault and await terms(log) == ["one"], "in the same term"


@in_virtual_time
async def test_whole_log_ends_no_other_stop() -> None:
    async with site() as (_, _, start):
        one = start("one")
        await one.leads()
        one.coordinator._stop_deciding("cannot decide: a bug")
        one.coordinator.log_is_behind("the event log ends at entry 1")
        one.coordinator.log_is_whole()
        assert one.coordinator.fault == "cannot decide: a bug"


def is_start(entry: Entry) -> bool:
    return isinstance(entry, RecordedEvent) and isinstance(entry.envelope.event, v.StartWorker)


@in_virtual_time
async def test_standby_head_follows_leaving_leader_at_once() -> None:
    async with site() as (log, _, start):
        one = start("one")
        await one.leads()
        two = start("two")
        await two.stands_by()
        loop = asyncio.get_running_loop()
        left_s = loop.time()
        await one.leave()
        await two.leads()
        assert loop.time() - left_s < 0.1, "it waited for the end of the lease"
        assert await terms(log) == ["one", "two"]


@in_virtual_time
async def test_repeated_restarts_make_one_takeover_each() -> None:
    async with site() as (log, _, start):
        one, two = start("one"), start("two")
        for number in range(4):
            async with asyncio.timeout(30):
                while not (one.head.leads or two.head.leads):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            leader, other = (one, two) if one.head.leads else (two, one)
            await leader.leads()
            await other.stands_by()
            await asyncio.sleep(5.0)
            assert leader.head.leads and len(await terms(log)) == number + 1
            leader.kill()
            one, two = start(f"again{number}"), other  # as systemd does


@in_virtual_time
async def test_leader_begins_new_term_and_keeps_lead() -> None:
    async with site() as (log, _, start):
        one = start("one")
        await one.leads()
        two = start("two")
        await two.stands_by()
        for run in (two, one):  # the archive asks for it, of a head that may have stood down meanwhile
            run.coordinator.renew_term()
        await asyncio.sleep(5.0)
        assert one.head.leads and one.coordinator.live.is_set()
        await one.leave()
        await two.leads()
        await asyncio.sleep(1.0)
        assert await terms(log) == ["one", "one", "two"]


@in_virtual_time
async def test_leader_keeps_lead_while_log_is_unreachable() -> None:
    async with site() as (log, lease, start):
        one = start("one")
        await one.leads()
        two = start("two", is_patient=True)
        await two.stands_by()
        for away_s in (0.1, 1.0, 6.0):
            one.lease.is_cut = two.lease.is_cut = True
            await asyncio.sleep(away_s)
            lease.forget()
            two.lease.is_cut = False
            await asyncio.sleep(1.0)  # it takes longer to connect again
            one.lease.is_cut = False
            await asyncio.sleep(5.0)
            assert one.head.leads and one.coordinator.live.is_set()
        assert await terms(log) == ["one"]


@in_virtual_time
async def test_isolated_leader_is_deposed_and_stands_by() -> None:
    async with site() as (log, _, start):
        one = start("one")
        await one.leads()
        two = start("two")
        await two.stands_by()
        one.lease.is_cut = True
        await two.leads()
        one.lease.is_cut = False
        await one.stands_by()
        await asyncio.sleep(5.0)
        assert two.coordinator.live.is_set() and one.head.leader == two.head.me
        assert await terms(log) == ["one", "two"]
        await two.leave()
        await one.leads()
        assert await terms(log) == ["one", "two", "one"]


@in_virtual_time
async def test_deposed_leader_leaves_lost_lease_to_successor() -> None:
    """It reaches the lease before it hears of the newer term."""
    async with site() as (log, lease, start):
        one = start("one")
        await one.leads()
        two = start("two")
        await two.stands_by()
        one.lease.is_cut = True
        one.log.passes.clear()
        await two.leads()
        lease.forget()
        one.lease.is_cut = False
        await asyncio.sleep(5.0)
        assert two.head.leads and two.coordinator.live.is_set()
        one.log.passes.set()
        await one.stands_by()
        await asyncio.sleep(5.0)
        assert two.head.leads and two.coordinator.live.is_set()
        assert await terms(log) == ["one", "two"]


@in_virtual_time
async def test_head_without_lease_takes_over_only_once() -> None:
    async with site() as (log, lease, start):
        one = start("one")
        await one.leads()
        event = v.CoordinatorStarted(term=2, version="old", process="old")
        claim = Envelope(producer="coordinator", boot=2, number=1, term=2, based_on=1, observed_at_us=1, event=event)
        await log.claim_term(claim)
        two = start("two")
        for _ in range(40):
            lease.beat(2)
            await asyncio.sleep(0.25)
        assert await terms(log) == ["one", "old"]
        assert not one.coordinator.live.is_set() and not two.coordinator.live.is_set()
        async with asyncio.timeout(30):  # it beats no more
            while not (one.head.leads or two.head.leads):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@in_virtual_time
async def test_foreign_lease_entry_deposes_no_head() -> None:
    async with site() as (log, lease, start):
        one = start("one")
        await one.leads()
        two = start("two")
        await two.stands_by()
        for _ in range(5):
            lease._revision += 1
            lease._held = LeaseEntry(lease._revision, None)
            lease.beat(1)
            await asyncio.sleep(0.6)
        await asyncio.sleep(3.0)
        assert one.head.leads and await terms(log) == ["one"]


@in_virtual_time
async def test_restart_on_same_machine_skips_wait_for_own_lease() -> None:
    async with site() as (_, lease, start):
        await lease.acquire_or_renew(Holder(head="before", process="me:1", machine="gone"), 0)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await start("one").leads()
        assert loop.time() - began_s < 0.1


def test_process_identity_includes_start_time() -> None:
    me = heads.this_process()
    assert me.machine and me.start_ticks and not heads.is_gone(me)
    assert other_processes.is_gone(me.machine, 2**22 + 1, 5) and not other_processes.is_gone("another", 2**22 + 1, 5)
    assert other_processes.is_gone(me.machine, 1, (other_processes.began(1) or 0) + 1)
    assert not other_processes.is_gone("", 2**22 + 1, 5)
