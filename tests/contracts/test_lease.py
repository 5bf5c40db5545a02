"""What every Lease promises (events/log/lease.py), checked on every one there is."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from tests.contracts.logs import beat
from tests.integration.nats_cluster import nats_cluster
from unicrond.events.log.event_log import BeatLog, LogUnavailable
from unicrond.events.log.lease import LEASE_S, Holder, Lease, LeaseEntry
from unicrond.events.nats.connection import connect
from unicrond.events.nats.event_log import NatsBeatLog
from unicrond.events.nats.lease import STREAM, NatsLease
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, create_streams
from unicrond.replay.simulation.cluster.lease import LeaseEnd, MemoryLease
from unicrond.replay.simulation.cluster.log_client import BeatEnd, Beats
from unicrond.replay.simulation.cluster.log_server import LogServer
from unicrond.replay.simulation.models.network import Link
from unicrond.replay.simulation.models.virtual_time import HostClock

ONE, TWO = Holder(head="a" * 16, process="one:1", api="one:7470"), Holder(head="b" * 16, process="two:2")


class Site(NamedTuple):
    """Two processes' access to one lease. `beats`: where the coordinator's own go."""

    one: Lease
    two: Lease
    beats: BeatLog | None


@asynccontextmanager
async def memory(_: Path) -> AsyncIterator[Site]:
    shared = MemoryLease()
    yield Site(shared, shared, None)


@asynccontextmanager
async def simulated(_: Path) -> AsyncIterator[Site]:
    loop, drawn = asyncio.get_running_loop(), random.Random(0)
    clock = HostClock(loop)
    server = LogServer(loop, clock, drawn, on_entry=lambda _: None)
    beats = Beats(server, clock.wall_us)
    shared, link = MemoryLease(loop.time), Link(loop, drawn)
    ends = [LeaseEnd(shared, server, beats, Link(loop, drawn)) for _ in range(2)]
    yield Site(ends[0], ends[1], BeatEnd(beats, link))


@asynccontextmanager
async def nats(directory: Path) -> AsyncIterator[Site]:
    server = EmbeddedServer(directory / "nats")
    await server.start()
    connections = [await connect(server.url, name=f"head {number}", timeout_s=10) for number in range(2)]
    try:
        await create_streams(connections[0])
        leases = [NatsLease(connection) for connection in connections]
        for lease in leases:
            await lease.make()
        yield Site(leases[0], leases[1], NatsBeatLog(connections[0]))
    finally:
        for connection in connections:
            await connection.close()
        await server.kill()


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[Site]:
    async with nats_cluster(directory / "nats") as servers:
        connections = [
            await connect(servers.urls, name=f"head {number}", login=servers.login, timeout_s=60) for number in range(2)
        ]
        try:
            await create_streams(connections[0], replicas=len(servers.urls))
            leases = [NatsLease(connection, replicas=len(servers.urls)) for connection in connections]
            for lease in leases:
                await lease.make()
            yield Site(leases[0], leases[1], NatsBeatLog(connections[0]))
        finally:
            for connection in connections:
                await connection.close()


LEASES: dict[str, Callable[[Path], AbstractAsyncContextManager[Site]]] = {
    "memory": memory,
    "simulated": simulated,
    "nats": nats,
    "nats cluster": cluster,
}


@pytest.fixture(params=sorted(LEASES))
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with LEASES[request.param](tmp_path) as opened:
        yield opened


async def held(lease: Lease) -> LeaseEntry | None:
    while True:
        try:
            return (await lease.look()).entry
        except LogUnavailable:
            await asyncio.sleep(0.05)


async def acquire_or_renew(lease: Lease, holder: Holder, after: int) -> LeaseEntry | None:
    """A cluster that has just begun may need a moment."""
    while True:
        try:
            return await lease.acquire_or_renew(holder, after)
        except LogUnavailable:
            await asyncio.sleep(0.05)
            if (present := await held(lease)) is not None and present.holder == holder:
                return present


async def test_lease_is_acquired_renewed_and_released(site: Site) -> None:
    assert await held(site.one) is None
    taken = await acquire_or_renew(site.one, ONE, 0)
    assert taken is not None
    assert await held(site.two) == taken
    assert await acquire_or_renew(site.two, TWO, 0) is None, "it is not free"
    renewed = await acquire_or_renew(site.one, ONE, taken.revision)
    assert renewed is not None and renewed.revision > taken.revision
    assert await acquire_or_renew(site.one, ONE, taken.revision) is None, "that was before"
    left = await acquire_or_renew(site.one, replace(ONE, has_left=True), renewed.revision)
    assert left is not None and await held(site.two) == left
    after = await acquire_or_renew(site.two, TWO, left.revision)
    assert after is not None and await held(site.one) == LeaseEntry(after.revision, TWO)


async def test_concurrent_acquisition_has_one_winner(site: Site) -> None:
    after = 0
    for _ in range(5):
        outcomes = await asyncio.gather(
            site.one.acquire_or_renew(ONE, after), site.two.acquire_or_renew(TWO, after), return_exceptions=True
        )  # fmt: skip
        assert sum(isinstance(outcome, LeaseEntry) for outcome in outcomes) <= 1, outcomes
        # On a busy machine neither may have got an answer in time.
        now = await held(site.one) or await acquire_or_renew(site.one, ONE, 0)
        assert now is not None
        after = now.revision


async def test_lease_expires_only_without_renewal(site: Site) -> None:
    began_s = time.monotonic()  # the server counts from when it stored the renewal, which is later
    taken = await acquire_or_renew(site.one, ONE, 0)
    for _ in range(5):
        await asyncio.sleep(LEASE_S / 4)
        seen = await held(site.two)
        assert taken is not None and (seen == taken or time.monotonic() - began_s > LEASE_S)
        began_s = time.monotonic()
        taken = await acquire_or_renew(site.one, ONE, seen.revision if seen is not None else 0)
    while await held(site.two) is not None:  # noqa: ASYNC110 - that is how a head finds out
        await asyncio.sleep(0.02)
    assert LEASE_S - 0.1 < time.monotonic() - began_s < LEASE_S + 5
    assert await acquire_or_renew(site.two, TWO, 0) is not None
    assert taken is not None and await acquire_or_renew(site.one, ONE, taken.revision) is None


async def test_heads_see_lease_of_each_other_and_news(site: Site) -> None:
    news, beats = asyncio.Event(), asyncio.Queue[int]()
    await site.two.listen(news.set, beats.put_nowait)
    await asyncio.sleep(0.05)
    await acquire_or_renew(site.one, ONE, 0)
    await asyncio.wait_for(news.wait(), 10)
    for lease, holder in ((site.one, ONE), (site.two, TWO)):
        await lease.announce(holder)
    assert sorted(one.process for one in await site.one.heads()) == ["one:1", "two:2"]
    if site.beats is not None:
        await site.beats.publish(beat(1, "n1"))
        await site.beats.publish(beat(2, "coordinator"))
        assert await asyncio.wait_for(beats.get(), 10) == 1 and beats.empty()


async def test_server_restart_loses_lease_visibly(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    connection = await connect(server.url, name="head", timeout_s=10)
    try:
        lease = NatsLease(connection)
        await lease.make()
        taken = await lease.acquire_or_renew(ONE, 0)
        assert taken is not None and not (await lease.look()).is_anew
        await server.kill()
        with pytest.raises(LogUnavailable):
            await lease.look()
        await server.start()
        async with asyncio.timeout(20):
            while True:
                try:
                    look = await lease.look()
                    break
                except LogUnavailable:
                    await asyncio.sleep(0.02)
        assert look.entry is None
        assert await lease.acquire_or_renew(ONE, taken.revision) is None
        assert await lease.acquire_or_renew(ONE, 0) is not None
    finally:
        await connection.close()
        await server.kill()


async def test_foreign_lease_entry_is_visible_and_replaceable(tmp_path: Path) -> None:
    """An agent can have NATS's own JSON stored there: replies are not checked."""
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    connection = await connect(server.url, name="head", timeout_s=10)
    try:
        lease = NatsLease(connection)
        await lease.make()
        await lease.acquire_or_renew(ONE, 0)
        session = await connection.session()
        await session.publish(f"$JS.API.STREAM.INFO.{STREAM}", b"", reply="$KV.UNICRON_HEADS.leader")
        await session.publish(f"$JS.API.STREAM.INFO.{STREAM}", b"", reply="$KV.UNICRON_HEADS.head.x")
        async with asyncio.timeout(20):
            while (now := await held(lease)) is None or now.holder is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert await lease.acquire_or_renew(ONE, now.revision) is not None
        assert await lease.heads() == []
        info = await api(connection, f"STREAM.INFO.{STREAM}", {})
        assert info["config"]["storage"] == "memory" and info["config"]["max_msgs"] == 1000
    finally:
        await connection.close()
        await server.kill()
