"""How late the coordinator hears its own beats: `python -m tests.benchmarks.beat_delay --beats-per-s 1200 4000`.

A real nats-server, a process that beats for many nodes, another that appends events (`--events-per-s`), and here what a
coordinator does: it reads all events, each for `--fold-us`, hears all beats, and sends its own four times a second.
Each line is one run: whether beats are synced to disk one by one, whether they have a connection of their own, and how
long own beats took to come back (median, p99, longest); "deaf": the longest time in which no beat came at all.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from statistics import median

from unicrond.events.log.subjects import BEAT_STREAM
from unicrond.events.nats.connection import Connection, connect
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, beat_stream_config, create_streams
from unicrond.events.vocabulary import CoordinatorStarted, Heartbeat, NodeLeft
from unicrond.events.wire.envelope import Envelope, RecordedEvent

OWN = "coordinator"
#: Publishers that share a process take turns this often.
TURN_S = 0.01


def beat_of(node: str, boot: int, number: int) -> Envelope:
    """A beat like an agent's."""
    event = Heartbeat(node=node, agent_boot=boot, beat=number, workers=8, load_milli=100, memory_free_bytes=1 << 40)
    return Envelope(producer=node, boot=boot, number=number, observed_at_us=time.time_ns() // 1000, event=event)


async def beat(url: str, per_s: int) -> None:
    """Beats of as many nodes as beats a second, until killed."""
    connections = [await connect(url, name="beats", timeout_s=10) for _ in range(16)]
    logs = [NatsBeatLog(connection) for connection in connections]
    began_s, sent = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - began_s) * per_s)
        for number in range(sent, due):
            await logs[number % 16].publish(beat_of(f"n{number % per_s:05d}", 1, number // per_s + 1))
        sent = due
        await asyncio.sleep(TURN_S)


async def tell(url: str, per_s: int) -> None:
    """Events, until killed."""
    connection = await connect(url, name="events", timeout_s=10)
    log, event = NatsEventLog(connection), NodeLeft(node="n0", reason="x" * 800)
    began_s, sent = time.monotonic(), 0
    while True:
        due = min(int((time.monotonic() - began_s) * per_s), sent + 500)
        if due > sent:
            told = [
                Envelope(producer="n0", boot=1, number=n + 1, observed_at_us=1, event=event) for n in range(sent, due)
            ]
            await log.append(told)
            sent = due
        await asyncio.sleep(TURN_S)


async def measure(options: argparse.Namespace, beats_per_s: int, events_per_s: int, sync: bool, apart: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="beats-") as directory:
        server = EmbeddedServer(Path(directory) / "nats")
        await server.start()
        connection = await connect(server.url, name="coordinator", timeout_s=10)
        if sync:
            config = {key: value for key, value in beat_stream_config().items() if key != "persist_mode"}
            await api(connection, f"STREAM.CREATE.{BEAT_STREAM}", config)
        await create_streams(connection)
        started = CoordinatorStarted(term=1, version="0", policy={}, severity={})
        claim = Envelope(producer=OWN, boot=1, number=1, term=1, observed_at_us=1, event=started)
        await NatsEventLog(connection).claim_term(claim)
        beating = await connect(server.url, name="coordinator, beats", timeout_s=10) if apart else connection
        others = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.benchmarks.beat_delay", "--as", kind, server.url, str(per_s)
            )
            for kind, per_s in (("beat", beats_per_s), ("tell", events_per_s))
            if per_s
        ]
        try:
            return await coordinate(options, connection, beating)
        finally:
            for other in others:
                other.kill()
                await other.wait()
            await connection.close()
            await beating.close()
            await server.kill()


async def coordinate(options: argparse.Namespace, connection: Connection, beating: Connection) -> str:
    beats = NatsBeatLog(beating)
    sent_s: dict[int, float] = {}
    late_ms: list[float] = []
    count = {"beats": 0, "events": 0}
    heard_s, deaf_s = time.monotonic(), 0.0

    async def listen() -> None:
        nonlocal heard_s, deaf_s
        async with aclosing(beats.subscribe()) as entries:
            async for entry in entries:
                now_s = time.monotonic()
                deaf_s, heard_s = max(deaf_s, now_s - heard_s), now_s
                count["beats"] += 1
                if isinstance(entry, RecordedEvent) and entry.envelope.producer == OWN:
                    late_ms.append((now_s - sent_s.pop(entry.envelope.number)) * 1000)

    async def read() -> None:
        async with aclosing(NatsEventLog(connection).read()) as entries:
            async for _ in entries:
                count["events"] += 1
                until_s = time.perf_counter() + options.fold_us / 1e6
                while time.perf_counter() < until_s:
                    pass

    async def send() -> None:
        for number in itertools.count(1):
            sent_s[number] = time.monotonic()
            await beats.publish(beat_of(OWN, 1, number))
            await asyncio.sleep(0.25)

    work = [asyncio.create_task(each) for each in (listen(), read(), send())]
    await asyncio.sleep(2)
    late_ms.clear()
    count.update(beats=0, events=0)
    deaf_s, heard_s = 0.0, time.monotonic()
    await asyncio.sleep(options.seconds)
    deaf_s = max(deaf_s, time.monotonic() - heard_s)
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    told = "- | - | -"
    if late_ms:
        longest_ms = sorted(late_ms)
        told = f"{median(longest_ms):.1f} | {longest_ms[int(len(longest_ms) * 0.99)]:.1f} | {longest_ms[-1]:.1f}"
    due = options.seconds * 4
    heard, read_in = (count[name] / options.seconds for name in ("beats", "events"))
    return f"{told} | {len(late_ms)} of {due:g} | {deaf_s:.2f} s | {heard:.0f} | {read_in:.0f}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beats-per-s", type=int, nargs="+", default=[1200])
    parser.add_argument("--events-per-s", type=int, nargs="+", default=[0])
    parser.add_argument("--fold-us", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--as", nargs=3, dest="role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        kind, url, per_s = options.role
        await (beat if kind == "beat" else tell)(url, int(per_s))
        return
    print(
        "beats/s | events/s | synced | connection | median ms | p99 | longest | back | deaf | beats heard/s | events/s"
    )
    for beats_per_s, events_per_s in itertools.product(options.beats_per_s, options.events_per_s):
        for sync, apart in itertools.product((True, False), repeat=2):
            said = await measure(options, beats_per_s, events_per_s, sync, apart)
            how = f"{'each' if sync else 'no'} | {'own' if apart else 'shared'}"
            print(f"{beats_per_s} | {events_per_s} | {how} | {said}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
