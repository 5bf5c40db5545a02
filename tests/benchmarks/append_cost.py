"""What an append costs the server, in each way in which agents could make it.

    python -m tests.benchmarks.append_cost --agents 1 64 500

One nats-server with `sync_interval: always`, as the coordinator starts it; its CPU is read from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from unicrond.events.log.subjects import headers, subject
from unicrond.events.nats.connection import Connection, Session, connect
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import answer, create_streams
from unicrond.events.vocabulary import NodeLeft
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Envelope

Append = Callable[[Session, list[Envelope]], Awaitable[None]]
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def observation(node: str, number: int) -> Envelope:
    event = NodeLeft(node=node, reason=f"fact {number}")
    return Envelope(producer=node, boot=1, number=number, observed_at_us=number, event=event)


async def one(session: Session, envelope: Envelope, more: dict[str, str] | None = None) -> int:
    reply = await session.request(subject(envelope), encode(envelope), {**headers(envelope), **(more or {})}, 60.0)
    return int(answer("append", reply.data)["seq"])


async def one_by_one(session: Session, envelopes: list[Envelope]) -> None:
    for envelope in envelopes:
        await one(session, envelope)


async def chained(session: Session, envelopes: list[Envelope]) -> None:
    """Each on the condition that the one before is the newest of its producer."""
    seq = 0
    for envelope in envelopes:
        marks = {"Nats-Expected-Last-Subject-Sequence-Subject": f"unicron.v1.obs.{envelope.producer}.*"}
        seq = await one(session, envelope, {**marks, "Nats-Expected-Last-Subject-Sequence": str(seq)} if seq else None)


def _parts(envelopes: list[Envelope], size: int) -> list[list[Envelope]]:
    return [envelopes[first : first + size] for first in range(0, len(envelopes), size)]


def pipelined(window: int) -> Append:
    async def append(session: Session, envelopes: list[Envelope]) -> None:
        for some in _parts(envelopes, window):
            await asyncio.gather(*(one(session, envelope) for envelope in some))

    return append


def batches(size: int) -> Append:
    async def append(session: Session, envelopes: list[Envelope]) -> None:
        for some in _parts(envelopes, size):
            batch_id = uuid.uuid4().hex
            for number, envelope in enumerate(some, start=1):
                marks = {**headers(envelope), "Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(number)}
                if number < len(some):
                    await session.publish(subject(envelope), encode(envelope), marks)
                else:
                    marks["Nats-Batch-Commit"] = "1"
                    answer("", (await session.request(subject(envelope), encode(envelope), marks, 60.0)).data)

    return append


WAYS: dict[str, Append] = {
    "one by one": one_by_one,
    "one by one, chained": chained,
    "pipelined, 32 outstanding": pipelined(32),
    "atomic batches of 3": batches(3),
    "atomic batches of 30": batches(30),
    "atomic batches of 200": batches(200),
}


async def measure(way: str, agents: int, each: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer(Path(directory) / "nats")
        await server.start()
        connections: list[Connection] = []
        try:
            connections = list(
                await asyncio.gather(
                    *(connect(server.url, name=f"agent {n}", timeout_s=30) for n in range(min(agents, 200)))
                )
            )
            await create_streams(connections[0])
            sessions = [await connection.session() for connection in connections]
            work = [[observation(f"n{agent}", number) for number in range(1, each + 1)] for agent in range(agents)]
            assert server.pid is not None
            before_s, mine_s, begin_s = cpu_s(server.pid), time.process_time(), time.perf_counter()
            append = WAYS[way]
            await asyncio.gather(*(append(sessions[n % len(sessions)], some) for n, some in enumerate(work)))
            wall_s = time.perf_counter() - begin_s
            count = agents * each
            return {
                "way": way,
                "agents": agents,
                "appends": count,
                "appends_per_s": round(count / wall_s),
                "server_us": round((cpu_s(server.pid) - before_s) / count * 1e6),
                "client_us": round((time.process_time() - mine_s) / count * 1e6),
            }
        finally:
            for connection in connections:
                await connection.close()
            await server.kill()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 64, 500])
    parser.add_argument("--total", type=int, default=6000)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args()
    for agents in options.agents:
        for way in options.ways:
            print(json.dumps(await measure(way, agents, max(1, options.total // agents))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
