"""How fast a log is folded again: entries per second, from the file or the server to the state.

    pytest tests/benchmarks/test_replay.py

CPU seconds, so that a busy machine does not count; the restart in wall time, replay from NATS in both, since there a
second process may read. Numbers and what they mean: docs/results/benchmarks.md, "Replay".
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from tests.replay.logs import write_log
from tests.unicrond.cluster import MiniCluster
from unicrond.core.fold import fold
from unicrond.core.replayer import EMPTY, replay
from unicrond.core.state.policy import Policy
from unicrond.events.log.log_identity import mark_of
from unicrond.events.log.segments import read_entries
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, connect
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.reader import read_stream
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import NANOS, api, create_streams
from unicrond.events.vocabulary import StepCommitted
from unicrond.events.wire.codec import decode, encode
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.replay.reading.nats_source import NatsSource
from unicrond.replay.reading.source import read
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.nats_snapshots import NatsSnapshotStore
from unicrond.service.coordinator.snapshots import SNAPSHOT_EVERY, Snapshots, encode_snapshot
from unicrond.service.coordinator.surroundings import HeadSettings

ENTRIES = 20_000
NATS_ENTRIES = 300_000
MILLION = 1_000_000
ROUNDS = 5


def long_log(nodes: int, count: int = ENTRIES) -> list[RecordedEvent]:
    """Entries of two tasks on `nodes` nodes: again and again 200 steps, then a worker dies and is replaced."""
    cluster = MiniCluster(1)
    for number in range(nodes):
        cluster.add_host(f"n{number}")
    cluster.submit("big", weight=2.0, max_workers=max(1, nodes * 3 // 4))
    cluster.submit("small", max_workers=nodes)
    cluster.run()
    while len(cluster.log) < count:
        for _ in range(100):
            cluster.train("big")
            cluster.train("small")
        host = cluster.hosts[f"n{len(cluster.log) % nodes}"]
        for worker in list(host.processes):
            cluster.kill_worker(host, worker)
        cluster.run()
    return cluster.log[:count]


@pytest.fixture(scope="module", params=[4, 64, 512], ids="{}-nodes".format)
def log(request: pytest.FixtureRequest) -> list[RecordedEvent]:
    return long_log(request.param)


def measure(benchmark: Any, work: Callable[[], Any], entries: int = ENTRIES) -> Any:
    """Run it ROUNDS times; the entries per second of the median and of the best round go into the report."""
    gc.disable()  # as unicron-replay does
    try:
        result = benchmark.pedantic(work, rounds=ROUNDS, warmup_rounds=1)
    finally:
        gc.enable()
    benchmark.extra_info["entries_per_s"] = round(entries / benchmark.stats.stats.median)
    benchmark.extra_info["entries_per_s_best"] = round(entries / benchmark.stats.stats.min)
    return result


@pytest.mark.benchmark(timer=time.process_time, group="file: read, checksum, decode, validate, fold")
def test_replay_from_file(benchmark: Any, log: list[RecordedEvent], tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.bin", list(log), 1000)
    assert measure(benchmark, lambda: replay(read_entries(path))).seq == ENTRIES
    benchmark.extra_info["bytes_per_entry"] = path.stat().st_size // ENTRIES


@pytest.mark.benchmark(timer=time.process_time, group="decode and validate alone")
def test_replay_decode_alone(benchmark: Any, log: list[RecordedEvent]) -> None:
    bodies = [encode(entry.envelope) for entry in log]
    measure(benchmark, lambda: [decode(body) for body in bodies])


@pytest.mark.benchmark(timer=time.process_time, group="fold alone")
def test_replay_fold_alone(benchmark: Any, log: list[RecordedEvent]) -> None:
    assert measure(benchmark, lambda: replay(log)).seq == ENTRIES


# --- from a NATS server ------------------------------------------------------------------------


async def append_all(connection: Connection, log: Sequence[RecordedEvent]) -> None:
    stream = NatsEventLog(connection)
    await stream.claim_term(log[0].envelope)
    for begin in range(1, len(log), 1000):
        await stream.append([entry.envelope for entry in log[begin : begin + 1000]])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server that holds NATS_ENTRIES entries of 4 nodes."""
    running = EmbeddedServer(tmp_path_factory.mktemp("nats") / "nats")

    async def fill() -> None:
        await running.start()
        connection = await connect(running.url, name="benchmark", timeout_s=10)
        await create_streams(connection)
        await append_all(connection, long_log(4, NATS_ENTRIES))
        await connection.close()

    asyncio.run(fill())
    try:
        yield running
    finally:
        asyncio.run(running.kill())


async def bare_pull(connection: Connection) -> int:
    """The fastest bare read that nats-py's own API offers: pulls of 1000, three outstanding, into a callback."""
    client = (await connection.session()).client
    config = {"name": "bare", "ack_policy": "none", "deliver_policy": "all", "mem_storage": True, "num_replicas": 1}
    await api(connection, f"CONSUMER.CREATE.{EVENT_STREAM}.bare", {"stream_name": EVENT_STREAM, "config": config})
    inbox, request = client.new_inbox(), json.dumps({"batch": 1000, "expires": 30 * NANOS}).encode()
    count, done = 0, asyncio.Event()

    async def ask() -> None:
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{EVENT_STREAM}.bare", request, reply=inbox)

    async def take(_: Msg) -> None:
        nonlocal count
        count += 1
        if count % 1000 == 0:
            await ask()
        if count == NATS_ENTRIES:
            done.set()

    subscription = await client.subscribe(inbox, cb=take, pending_msgs_limit=0, pending_bytes_limit=0)
    for _ in range(3):
        await ask()
    await asyncio.wait_for(done.wait(), 120)
    await subscription.unsubscribe()
    await api(connection, f"CONSUMER.DELETE.{EVENT_STREAM}.bare", {})
    return count


async def bare_read(connection: Connection) -> int:
    """Our reader, which checks order and leaves headers and bodies as they are."""
    count = 0
    async with aclosing(read_stream(connection, EVENT_STREAM, start={"deliver_policy": "all"})) as messages:
        async for _ in messages:
            count += 1
            if count == NATS_ENTRIES:
                break
    return count


async def whole_replay(connection: Connection, apart_from: int) -> int:
    """Read, decode, validate, fold."""
    state, source = EMPTY, NatsSource(connection, NATS_ENTRIES, 0, apart_from=apart_from)
    async with aclosing(read(source)) as chunks:
        async for chunk in chunks:
            state = replay(chunk.entries, start=state)
    return state.seq


async def replay_in_one(connection: Connection) -> int:
    return await whole_replay(connection, NATS_ENTRIES + 1)


async def replay_in_two(connection: Connection) -> int:
    """The same, with a process of its own that reads; two cores, where the machine has them."""
    return await whole_replay(connection, NATS_ENTRIES)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", [bare_pull, bare_read, replay_in_one, replay_in_two], ids=lambda way: way.__name__)
@pytest.mark.benchmark(timer=time.perf_counter, group="NATS, wall time")
def test_replay_from_nats(benchmark: Any, server: EmbeddedServer, way: Callable[[Connection], Awaitable[int]]) -> None:
    own_s: list[float] = []
    childs_s: list[float] = []

    async def run() -> int:
        connection = await connect(server.url, name="benchmark", timeout_s=10)
        try:
            began_s, childs_began_s = time.process_time(), cpu_of_ended_children_s()
            count = await way(connection)
            own_s.append(time.process_time() - began_s)
            childs_s.append(cpu_of_ended_children_s() - childs_began_s)
            return count
        finally:
            await connection.close()

    assert measure(benchmark, lambda: asyncio.run(run()), NATS_ENTRIES) == NATS_ENTRIES
    benchmark.extra_info["cpu_us_per_entry"] = round(median(own_s) / NATS_ENTRIES * 1e6, 2)
    benchmark.extra_info["cpu_us_per_entry_of_the_other_process"] = round(median(childs_s) / NATS_ENTRIES * 1e6, 2)


def cpu_of_ended_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- a restart behind a million events -----------------------------------------------------------


def a_million() -> Iterator[list[Envelope]]:
    """Batches of envelopes: a cluster with its history, then steps for weeks."""
    log = long_log(4)
    yield from ([entry.envelope for entry in log[begin : begin + 1000]] for begin in range(1, len(log), 1000))
    said = Counter(entry.envelope.producer for entry in log)
    last = next(entry for entry in reversed(log) if isinstance(entry.envelope.event, StepCommitted))
    node, boot = last.envelope.producer, last.envelope.boot
    number = said[node] + 10_000
    count = len(log)
    while count < MILLION:
        batch = []
        for _ in range(1000):
            number += 1
            batch.append(msgspec.structs.replace(last.envelope, number=number, boot=boot))
        count += len(batch)
        yield batch


@pytest.mark.timeout(900)
@pytest.mark.benchmark(timer=time.perf_counter, group="coordinator restart behind 1M events, wall time")
def test_restart_after_a_million_events(benchmark: Any, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    seqs: list[int] = []
    cpu_s: list[float] = []

    async def fill() -> None:
        await server.start()
        connection = await connect(server.url, name="benchmark", timeout_s=10)
        await create_streams(connection)
        stream = NatsEventLog(connection)
        await stream.claim_term(long_log(4, 1)[0].envelope)
        for batch in a_million():
            await stream.append(batch)
        last = await stream.last_seq()
        state, mark = EMPTY, None
        # As old as a snapshot gets: the whole interval is still to be folded.
        async with aclosing(stream.read(0, until_seq=last - SNAPSHOT_EVERY)) as entries:
            async for entry in entries:
                state, mark = fold(state, entry), mark_of(entry)
        assert mark is not None
        await NatsSnapshotStore(connection).save(encode_snapshot(state, mark))
        await connection.close()

    async def restart() -> None:
        began_s = time.process_time()
        connection = await connect(server.url, name="benchmark", timeout_s=10)
        snapshots = Snapshots(NatsSnapshotStore(connection), every=10**9)
        log, beats = NatsEventLog(connection), NatsBeatLog(connection)
        coordinator = Coordinator(log, beats, HeadSettings(policy=Policy(), heartbeat_s=30.0), snapshots=snapshots)
        running = asyncio.create_task(coordinator.run())
        await asyncio.wait_for(coordinator.live.wait(), 300)
        seqs.append(coordinator.state.seq)
        cpu_s.append(time.process_time() - began_s)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await connection.close()

    asyncio.run(fill())
    try:
        benchmark.pedantic(lambda: asyncio.run(restart()), rounds=ROUNDS)
    finally:
        asyncio.run(server.kill())
    assert min(seqs) > MILLION
    benchmark.extra_info["events"] = min(seqs)
    benchmark.extra_info["cpu_s"] = round(sorted(cpu_s)[len(cpu_s) // 2], 3)
