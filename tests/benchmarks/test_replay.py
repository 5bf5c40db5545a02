"""How fast a log is folded again: entries per second, from the file or the server to the state.

    pytest tests/benchmarks/test_replay.py

CPU seconds, so that a busy machine does not count; NATS in wall time, as the server works too. Numbers and
what they mean: docs/benchmarks.md, "Replay".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from events.codec import decode, encode
from events.envelope import Recorded
from events.nats_connection import connect
from events.nats_log import NatsEventLog
from events.nats_server import EmbeddedServer
from events.nats_streams import create_streams
from events.segments import read_entries
from replay.nats_source import open_nats
from replay.replayer import EMPTY, replay
from replay.source import read
from tests.replay.logs import write_log
from tests.unicrond.cluster import MiniCluster
from unicrond.state import ClusterState

ENTRIES = 20_000
ROUNDS = 5


def long_log(nodes: int) -> list[Recorded]:
    """ENTRIES entries of two tasks on `nodes` nodes: again and again 200 steps, then a worker dies and is replaced."""
    cluster = MiniCluster(1)
    for number in range(nodes):
        cluster.add_host(f"n{number}")
    cluster.submit("big", weight=2.0, max_workers=max(1, nodes * 3 // 4))
    cluster.submit("small", max_workers=nodes)
    cluster.run()
    while len(cluster.log) < ENTRIES:
        for _ in range(100):
            cluster.train("big")
            cluster.train("small")
        host = cluster.hosts[f"n{len(cluster.log) % nodes}"]
        for worker in list(host.processes):
            cluster.kill_worker(host, worker)
        cluster.run()
    return cluster.log[:ENTRIES]


@pytest.fixture(scope="module", params=[4, 64, 512], ids="{}-nodes".format)
def log(request: pytest.FixtureRequest) -> list[Recorded]:
    return long_log(request.param)


def measure(benchmark: Any, work: Callable[[], Any]) -> Any:
    """Run it ROUNDS times; the entries per second of the median round go into the report."""
    result = benchmark.pedantic(work, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["entries_per_s"] = round(ENTRIES / benchmark.stats.stats.median)
    return result


@pytest.mark.benchmark(timer=time.process_time, group="file: read, checksum, decode, validate, fold")
def test_from_a_file(benchmark: Any, log: list[Recorded], tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.bin", list(log), 1000)
    assert measure(benchmark, lambda: replay(read_entries(path))).seq == ENTRIES
    benchmark.extra_info["bytes_per_entry"] = path.stat().st_size // ENTRIES


@pytest.mark.benchmark(timer=time.process_time, group="decode and validate alone")
def test_decode_alone(benchmark: Any, log: list[Recorded]) -> None:
    bodies = [encode(entry.envelope) for entry in log]
    measure(benchmark, lambda: [decode(body) for body in bodies])


@pytest.mark.benchmark(timer=time.process_time, group="fold alone")
def test_fold_alone(benchmark: Any, log: list[Recorded]) -> None:
    assert measure(benchmark, lambda: replay(log)).seq == ENTRIES


@pytest.mark.benchmark(timer=time.perf_counter, group="NATS, wall time")
def test_from_nats(benchmark: Any, tmp_path: Path) -> None:
    log = long_log(4)
    server = EmbeddedServer(tmp_path / "nats")

    async def fill() -> None:
        await server.start()
        connection = await connect(server.url, name="benchmark", timeout_s=10)
        await create_streams(connection)
        stream = NatsEventLog(connection)
        await stream.claim_term(log[0].envelope)
        for begin in range(1, len(log), 1000):
            await stream.append([entry.envelope for entry in log[begin : begin + 1000]])
        await connection.close()

    async def replay_it() -> ClusterState:
        state = EMPTY
        async with open_nats([server.url]) as source, aclosing(read(source)) as chunks:
            async for chunk in chunks:
                state = replay(chunk.entries, start=state)
        return state

    asyncio.run(fill())
    try:
        assert measure(benchmark, lambda: asyncio.run(replay_it())).seq == ENTRIES
    finally:
        asyncio.run(server.kill())
