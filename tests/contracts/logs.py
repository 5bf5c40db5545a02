"""The implementations under contract, each opened fresh, and the envelopes that the suites write."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from tests.contracts.file_log import FileLog
from tests.contracts.memory_log import MemoryBeatLog, MemoryCommandFeed, MemoryLog
from tests.integration.nats_cluster import nats_cluster
from unicrond.events.log.event_log import BeatLog, CommandFeed, EventLog
from unicrond.events.nats.commands import NatsCommandFeed
from unicrond.events.nats.connection import connect
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.events.vocabulary import (
    AnyDecision,
    CoordinatorStarted,
    Heartbeat,
    MembershipDecided,
    NodeLeft,
    StopWorker,
    StoreAddress,
)
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.replay.simulation.cluster.log_client import BeatEnd, Beats, CommandEnd, Endpoint
from unicrond.replay.simulation.cluster.log_server import LogServer
from unicrond.replay.simulation.models.network import Link
from unicrond.replay.simulation.models.virtual_time import HostClock


class Bus(NamedTuple):
    """Everything one implementation offers. `feed(node)`: a command feed of its own each time."""

    log: EventLog
    beats: BeatLog
    feed: Callable[[str], CommandFeed]


@asynccontextmanager
async def memory_bus(_: Path) -> AsyncIterator[Bus]:
    log = MemoryLog()
    yield Bus(log, MemoryBeatLog(), lambda node: MemoryCommandFeed(log, node))


@asynccontextmanager
async def simulated_bus(_: Path) -> AsyncIterator[Bus]:
    loop, drawn = asyncio.get_running_loop(), random.Random(0)
    clock, link = HostClock(loop), Link(loop, drawn)
    server = LogServer(loop, clock, drawn, on_entry=lambda _: None)
    yield Bus(
        Endpoint(server, link, lambda *_: None),
        BeatEnd(Beats(server, clock.wall_us), link),
        lambda node: CommandEnd(server, link, node),
    )


@asynccontextmanager
async def nats_bus(directory: Path) -> AsyncIterator[Bus]:
    server = EmbeddedServer(directory / "nats")
    await server.start()
    try:
        connection = await connect(server.url, name="contract", timeout_s=10)
        try:
            await create_streams(connection)
            yield Bus(NatsEventLog(connection), NatsBeatLog(connection), lambda node: NatsCommandFeed(connection, node))
        finally:
            await connection.close()
    finally:
        await server.kill()


@asynccontextmanager
async def cluster_bus(directory: Path) -> AsyncIterator[Bus]:
    """Three servers: a stream of several replicas checks what is written to it in another order."""
    async with nats_cluster(directory / "nats") as nats:
        connection = await connect(nats.urls, name="contract", login=nats.login, timeout_s=60)
        try:
            await create_streams(connection, replicas=len(nats.urls))
            yield Bus(NatsEventLog(connection), NatsBeatLog(connection), lambda node: NatsCommandFeed(connection, node))
        finally:
            await connection.close()


@asynccontextmanager
async def cluster_log(directory: Path) -> AsyncIterator[EventLog]:
    async with cluster_bus(directory) as bus:
        yield bus.log


@asynccontextmanager
async def memory_log(directory: Path) -> AsyncIterator[EventLog]:
    async with memory_bus(directory) as bus:
        yield bus.log


@asynccontextmanager
async def simulated_log(directory: Path) -> AsyncIterator[EventLog]:
    async with simulated_bus(directory) as bus:
        yield bus.log


@asynccontextmanager
async def nats_log(directory: Path) -> AsyncIterator[EventLog]:
    async with nats_bus(directory) as bus:
        yield bus.log


@asynccontextmanager
async def file_log(directory: Path) -> AsyncIterator[EventLog]:
    log = FileLog(directory / "log", segment_bytes=20_000)  # small, so that the suite crosses segments
    try:
        yield log
    finally:
        await log.close()


LOGS: dict[str, Callable[[Path], AbstractAsyncContextManager[EventLog]]] = {
    "memory": memory_log,
    "simulated": simulated_log,
    "file": file_log,
    "nats": nats_log,
    "nats cluster": cluster_log,
}
BUSES: dict[str, Callable[[Path], AbstractAsyncContextManager[Bus]]] = {
    "memory": memory_bus,
    "simulated": simulated_bus,
    "nats": nats_bus,
    "nats cluster": cluster_bus,
}


def fact(number: int, node: str = "n1") -> Envelope:
    """An observation of `node`, recognisable by its number."""
    event = NodeLeft(node=node, reason=f"fact {number}")
    return Envelope(producer=node, boot=1, number=number, observed_at_us=number, event=event)


def facts(first: int, last: int, node: str = "n1") -> list[Envelope]:
    return [fact(number, node) for number in range(first, last + 1)]


def command(number: int, node: str = "n1", term: int = 1) -> Envelope:
    event = StopWorker(
        command_id=f"{term}.1.{node}.{number}", node=node, epoch=1, task="t", worker=f"t.{number}", reason="test"
    )
    return Envelope(producer="coordinator", boot=term, number=number, term=term, observed_at_us=1, event=event)


def decision(number: int, event: AnyDecision, term: int = 1) -> Envelope:
    return Envelope(producer="coordinator", boot=term, number=number, term=term, observed_at_us=1, event=event)


def membership(task: str, generation: int) -> MembershipDecided:
    """One without members."""
    return MembershipDecided(
        task=task,
        generation=generation,
        size=1,
        seats=(),
        urgent=False,
        store=StoreAddress(host="h", port=1),
        incident="",
        reason="test",
    )


def started(term: int, process: str = "") -> Envelope:
    event = CoordinatorStarted(term=term, version="test", process=process)
    return Envelope(producer="coordinator", boot=term, number=10**6, term=term, observed_at_us=1, event=event)


def beat(number: int, node: str = "n1") -> Envelope:
    event = Heartbeat(node=node, agent_boot=1, beat=number, workers=0, load_milli=0, memory_free_bytes=0)
    return Envelope(producer=node, boot=1, number=number, observed_at_us=number, event=event)


def envelope_of(entry: Entry) -> Envelope:
    assert isinstance(entry, RecordedEvent), entry
    return entry.envelope


async def history(log: EventLog, after_seq: int = 0) -> list[Entry]:
    return [entry async for entry in log.read(after_seq, until_seq=await log.last_seq())]
