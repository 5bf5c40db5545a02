"""Two `unicrond run` on one log, and one publisher in the place of all nodes: for tests and benchmarks of takeovers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.unicrond import cluster as mini
from unicrond.core.replayer import replay
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.streams import create_streams
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.local.dev import free_port

TIMEOUT_S = 120.0
HEARTBEAT_S = 1.0


class HeadProcess:
    """One head, as on a host of its own. `nats`: the section of its configuration."""

    def __init__(self, name: str, directory: Path, nats: dict[str, Any], **settings: Any) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.output = directory / f"{name}.log"
        self._path = directory / f"{name}.yaml"
        config = {
            "state_dir": str(directory / name),
            "checkpoint_dir": str(directory / "checkpoints"),
            "heartbeat_s": HEARTBEAT_S,
            "nats": nats,
            "api": {"port": self.port},
            "auth": "off",
            **settings,
        }
        self._path.write_text(yaml.safe_dump(config))
        self.process: asyncio.subprocess.Process

    async def start(self, *options: str) -> None:
        with self.output.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.integration.elsewhere", self.name, "run", "--config", str(self._path)),
                *options,
                stdout=output,
                stderr=output,
            )

    async def end(self, how: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(how)
        await asyncio.wait_for(self.process.wait(), 30)

    async def health(self) -> dict[str, Any]:
        """Empty where it does not answer."""

        def ask() -> dict[str, Any]:
            with (
                contextlib.suppress(OSError, ValueError),
                urllib.request.urlopen(f"{self.url}/healthz", timeout=5) as a,
            ):
                return dict(json.loads(a.read()))
            return {}

        return await asyncio.to_thread(ask)

    async def until(self, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        deadline, told = time.monotonic() + TIMEOUT_S, {}
        while time.monotonic() < deadline:
            if holds(told := await self.health()):
                return told
            assert self.process.returncode is None, self.output.read_text()[-2000:]
            await asyncio.sleep(0.05)
        raise AssertionError(f"{self.name}: {told}: {self.output.read_text()[-2000:]}")

    async def leads(self) -> dict[str, Any]:
        return await self.until(lambda told: told.get("leads") and told["status"] == "live")

    async def stands_by(self) -> dict[str, Any]:
        """Folds, and knows who leads."""
        return await self.until(lambda told: told.get("status") == "standby" and told["heads"]["leader"])


@asynccontextmanager
async def two_heads(
    directory: Path, nats: dict[str, Any], *, other_nats: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[list[HeadProcess]]:
    """The first leads, the second stands by. `other_nats`: how the second reaches NATS, where not as the first."""
    ways = [nats, other_nats or nats]
    heads = [HeadProcess(f"head{number}", directory, way, **settings) for number, way in enumerate(ways, start=1)]
    try:
        await heads[0].start()
        await heads[0].leads()
        await heads[1].start("--standby")
        await heads[1].stands_by()
        yield heads
    finally:
        for head in heads:
            if hasattr(head, "process") and head.process.returncode is None:
                await head.end(signal.SIGTERM)


def story(nodes: int, tasks: int) -> mini.MiniCluster:
    """`nodes` of one slot, and tasks that train on all of them."""
    mini.check = lambda *_: None  # type: ignore[attr-defined]  # after each of ten thousand entries it takes minutes
    cluster = mini.MiniCluster(seed=1)
    for number in range(1, nodes + 1):
        cluster.add_host(f"n{number}")
    for number in range(1, tasks + 1):
        cluster.submit(f"t{number}", max_workers=nodes // tasks)
        cluster.run()
    assert sum(a.workers for a in cluster.state.plan.assignments.values()) == nodes // tasks * tasks
    return cluster


class Publisher:
    """What the nodes of a MiniCluster say, from one connection."""

    def __init__(self, connection: Connection, cluster: mini.MiniCluster) -> None:
        self.connection = connection
        self.cluster = cluster
        self.log = NatsEventLog(connection)
        self._beats = NatsBeatLog(connection)
        self._beat = 0
        self._numbers = dict(cluster._numbers)

    async def tell_story(self) -> None:
        batch: list[Envelope] = []
        for entry in self.cluster.log:
            if isinstance(entry.envelope.event, v.CoordinatorStarted):
                await self.log.claim_term(entry.envelope)
                continue
            batch.append(entry.envelope)
            if len(batch) == 500:
                await self.log.append(batch)
                batch = []
        if batch:
            await self.log.append(batch)

    async def beat(self) -> None:
        """All nodes' beats, until cancelled: spread over the heartbeat."""
        hosts, parts = list(self.cluster.hosts.values()), 20
        while True:
            self._beat += 1
            for part in range(parts):
                due_s = time.monotonic() + HEARTBEAT_S / parts
                for host in hosts[part::parts]:
                    event = v.Heartbeat(
                        node=host.name, agent_boot=host.boot, beat=self._beat, workers=1, load_milli=0,
                        memory_free_bytes=0,
                    )  # fmt: skip
                    await self._beats.publish(self._say(host.name, host.boot, self._beat, event))
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def lose_worker(self, number: int) -> int:
        """A worker is killed; the sequence number under which the log has it. `number`: the how manyth time. Who
        replaces a worker is not played, so each time another one dies."""
        workers = [(h.name, p) for h in self.cluster.hosts.values() for p in h.processes.values()]
        node, process = workers[number]
        event = v.WorkerExited(
            node=node, task=process.task, worker=process.worker, exit_code=None, signal=9, is_expected=False
        )
        host = self.cluster.hosts[node]
        key = (node, host.boot)
        self._numbers[key] = self._numbers.get(key, 0) + 1
        (seq,) = await self.log.append([self._say(node, host.boot, self._numbers[key], event)])
        return seq

    async def after(self, seq: int, wanted: Callable[[RecordedEvent], object]) -> tuple[RecordedEvent, float]:
        """The first such entry after that one, and when it came."""
        async with asyncio.timeout(TIMEOUT_S), aclosing(self.log.read(seq)) as entries:
            async for entry in entries:
                if isinstance(entry, RecordedEvent) and wanted(entry):
                    return entry, time.monotonic()
        raise AssertionError("the log ended")

    async def state(self) -> ClusterState:
        """The whole log, folded."""
        return replay([entry async for entry in self.log.read(until_seq=await self.log.last_seq())])

    def _say(self, producer: str, boot: int, number: int, event: v.AnyEvent) -> Envelope:
        return Envelope(producer=producer, boot=boot, number=number, observed_at_us=time.time_ns() // 1000, event=event)


@asynccontextmanager
async def publisher(
    urls: Sequence[str] | str, cluster: mini.MiniCluster, login: Login | None = None, replicas: int = 1
) -> AsyncIterator[Publisher]:
    """It has told the cluster's story, and sends the beats."""
    connection = await connect(urls, name="nodes", login=login, timeout_s=60)
    try:
        await create_streams(connection, replicas=replicas)
        made = Publisher(connection, cluster)
        await made.tell_story()
        beating = asyncio.create_task(made.beat())
        try:
            yield made
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
    finally:
        await connection.close()


def is_decision(term: int) -> Callable[[RecordedEvent], bool]:
    """Of that term or a later one, and not the claim."""

    def holds(entry: RecordedEvent) -> bool:
        return entry.envelope.term >= term and not isinstance(entry.envelope.event, v.CoordinatorStarted)

    return holds


def is_claim(term: int) -> Callable[[RecordedEvent], bool]:
    """Of that term or a later one."""

    def holds(entry: RecordedEvent) -> bool:
        return isinstance(entry.envelope.event, v.CoordinatorStarted) and entry.envelope.term >= term

    return holds
