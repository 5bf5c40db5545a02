"""How far the archive is behind the log, and what following costs: `python -m tests.benchmarks.archive_lag [RATE [S]]`.

A head with an embedded server, and a producer that appends RATE entries a second for S seconds, if the log takes as
many. `--without`: no archive.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from tests.integration.head import config, daemon, get
from unicrond.events import vocabulary as v
from unicrond.events.nats.connection import connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.wire.envelope import Envelope

STEPS_PER_S = 50


def cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def entry(number: int) -> Envelope:
    event = v.CommandApplied(node="n1", command_id=str(number))
    return Envelope(producer="n1", boot=1, number=number, observed_at_us=number, event=event)


async def produce(log: NatsEventLog, rate: int, length_s: float) -> int:
    step, count, begin_s = max(1, rate // STEPS_PER_S), 0, time.monotonic()
    while (now_s := time.monotonic()) < begin_s + length_s:
        await asyncio.sleep(max(0.0, begin_s + count / rate - now_s))
        await log.append([entry(number) for number in range(count + 1, count + step + 1)])
        count += step
    return count


async def measure(rate: int, length_s: float, extra: str) -> dict[str, object]:
    behind_s: list[float] = []
    answers_ms: list[float] = []

    async def watch(url: str) -> None:
        while True:
            begin_s = time.perf_counter()
            health = await asyncio.to_thread(get, f"{url}/healthz")
            answers_ms.append(1e3 * (time.perf_counter() - begin_s))
            if isinstance(archive := health["archive"], dict) and archive:
                behind_s.append(archive["behind_s"])
            await asyncio.sleep(0.05)

    async def drain(errors: asyncio.StreamReader) -> None:
        async for _ in errors:
            pass

    with tempfile.TemporaryDirectory() as name:
        async with daemon(config(Path(name), extra)) as (process, url), contextlib.AsyncExitStack() as stack:
            assert process.stderr is not None
            tasks = [asyncio.create_task(drain(process.stderr))]
            await asyncio.sleep(5.0)  # the archive is begun
            head = psutil.Process(process.pid)
            archivers = [child for child in head.children() if child.cmdline()[-1:] == ["unicrond archive"]]
            server = EmbeddedServer.beside(Path(name) / "state" / "nats")
            await server.adopt()
            connection = await connect(server.url, name="producer", timeout_s=10)
            stack.push_async_callback(connection.close)
            tasks.append(asyncio.create_task(watch(url)))
            before_s, begin_s = [cpu_s(process) for process in (head, *archivers)], time.monotonic()
            count = await produce(NatsEventLog(connection), rate, length_s)
            took_s = time.monotonic() - begin_s
            shares = [
                (cpu_s(process) - before) / took_s for process, before in zip((head, *archivers), before_s, strict=True)
            ]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return {
                "entries a second": round(count / took_s),
                "behind, s, median and most": [round(f(behind_s or [0]), 2) for f in (statistics.median, max)],
                "answer of /healthz, ms, median and most": [round(f(answers_ms), 1) for f in (statistics.median, max)],
                "CPU of head and archiver": [round(share, 3) for share in shares],
                "memory of the archiver, MiB": [round(child.memory_info().rss / 2**20) for child in archivers],
            }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rate", nargs="?", type=int, default=5)
    parser.add_argument("length_s", nargs="?", type=float, default=20.0)
    parser.add_argument("--without", action="store_true")
    options = parser.parse_args()
    extra = "log: {archive_lag_s: 0}\n" if options.without else ""
    print(json.dumps(asyncio.run(measure(options.rate, options.length_s, extra)), indent=1))
