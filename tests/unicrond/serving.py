"""A coordinator that serves its HTTP API over a log in memory, for the tests of what people type and see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.contracts.memory_log import MemoryBeatLog, MemoryLog
from tests.unicrond.cluster import MiniCluster
from unicrond.core.state.state import ClusterState
from unicrond.events.queries.worker_queries import Collective, LogsReply, WorkerMark
from unicrond.events.vocabulary import AnyEvent, CoordinatorStarted
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.events.wire.schemas import SCHEMA
from unicrond.intake.config import Config
from unicrond.service.api.access import Access
from unicrond.service.api.api import Api
from unicrond.service.api.worker_output import LogsUnavailable
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.surroundings import HeadSettings


class Files:
    """In the place of a LogReader: workers' output in files beside the test, `<dir>/<rank>`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.worker = "big.1"
        self.missed = asyncio.Event()
        self.asked_for_marks = 0

    async def stacks(self, _: ClusterState, task: str, rank: int) -> dict[str, Any]:
        """As LogReader.stacks."""
        if rank > 1:
            raise LogsUnavailable("node n3: py-spy is not on this node; pip install 'unicrond[stacks]'")
        told = {"worker": f"{task}.{rank + 1}", "node": "n1", "pid": 4711, "text": f"Thread of rank {rank}\n"}
        one = Collective(
            library="gloo", group=3, number=7, is_p2p=False, name="all_reduce", state="scheduled", is_over=not rank,
            sizes="Float[4096]", since_us=2_500_000,
        )  # fmt: skip
        return {**told, "no_stacks": "", "collectives": [one], "no_flight": ""}

    async def ask(self, node: str, body: bytes, timeout_s: float) -> LogsReply:
        """As LogReader.ask, of checks: no agent is there."""
        raise LogsUnavailable("no answer within 10 s")

    async def marks(self, state: ClusterState, task: str) -> dict[str, Any]:
        """As LogReader.marks: rank 1 waits in a collective."""
        if task not in state.tasks:
            raise LookupError(f"task: no task {task}")
        membership = state.tasks[task].membership
        self.asked_for_marks += 1
        members = membership.members if membership else ()
        marks = {
            member.worker: WorkerMark(
                worker=member.worker, phase="reduce" if rank else "forward", generation=2, iteration=11,
                micro_batch=rank, collectives_entered=7, is_waiting=bool(rank), still_us=40_000 * (rank + 1),
            )
            for rank, member in enumerate(members)
        }  # fmt: skip
        return {"marks": marks, "silent": {}}

    async def read(
        self,
        _: ClusterState,
        task: str,
        rank: int | None = None,
        tail_bytes: int | None = None,
        offset: int | None = None,
        worker: str | None = None,
    ) -> dict[str, Any]:
        """As LogReader.read: the end of the log, or what follows `offset`. The one of a worker is `<dir>/<worker>`."""
        path = self.directory / (worker or str(rank or 0))
        if task != "big" or not path.exists():
            self.missed.set()
            raise LookupError(f"task: {task} has no worker of rank {rank or 0}")
        data = path.read_bytes()
        start = max(0, len(data) - (tail_bytes or 0)) if offset is None else offset
        text = data[start:].decode()
        return {"worker": self.worker, "node": "n1", "offset": start + len(text), "text": text}


class Audible(Coordinator):
    """A Coordinator that says what it has folded."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.folded: asyncio.Queue[Entry] = asyncio.Queue()

    def _fold(self, entry: Entry) -> None:
        super()._fold(entry)
        self.folded.put_nowait(entry)


class Served:
    """One coordinator and its API. `log` outlives both; `stop` and `start` are a restart on the same port."""

    def __init__(self, logs: Path, token: str = "", config: Config | None = None, schema: int = SCHEMA) -> None:
        self.log = MemoryLog()
        self.files = Files(logs)
        self.port = 0
        self._schema = schema
        self._access = Access(token, Path(config.api.tokens_file) if config and config.api.tokens_file else None)
        self._config = config or Config()
        self._beats = MemoryBeatLog()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        # A heartbeat of a minute: no node is given up for lost while a test runs.
        policy = self._config.policy
        self.coordinator = Audible(
            self.log, self._beats, HeadSettings(policy=policy, heartbeat_s=60, schema=self._schema)
        )
        self._task = asyncio.create_task(self.coordinator.run())
        await asyncio.wait_for(self.coordinator.live.wait(), 10)
        api = Api(self._config, self.coordinator, self.log, self.files, self._access)  # type: ignore[arg-type]
        self.application = api.application()
        self._runner = web.AppRunner(self.application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def tell(self, story: list[RecordedEvent]) -> None:
        """Copy a MiniCluster's log into ours."""
        for entry in story:
            if isinstance(entry.envelope.event, CoordinatorStarted):
                await self.log.claim_term(entry.envelope)
            else:
                await self.log.append([entry.envelope])

    async def until(self, kind: type[AnyEvent], after: int = 0) -> int:  # type: ignore[valid-type]
        """The sequence number of the first `kind` after `after`, once it is folded."""
        while True:
            async with asyncio.timeout(60):
                entry = await self.coordinator.folded.get()
            if isinstance(entry, RecordedEvent) and entry.seq > after and isinstance(entry.envelope.event, kind):
                return entry.seq


def healed_cluster() -> MiniCluster:
    """Four nodes, two tasks that train, one worker that died and was replaced."""
    cluster = MiniCluster(seed=7)
    for number in range(1, 5):
        cluster.add_host(f"n{number}")
    cluster.submit("big", weight=2.0, max_workers=3)
    cluster.submit("small", max_workers=3)
    cluster.run()
    for task in ("big", "small"):
        cluster.train(task, 5)
    victim = cluster.state.tasks["big"].membership.members[-1]
    cluster.kill_worker(cluster.hosts[victim.node], victim.worker)
    cluster.run()
    for task in ("big", "small"):
        cluster.train(task, 5)
    cluster.run()
    cluster.assert_whole()
    return cluster


@asynccontextmanager
async def serving(
    logs: Path,
    story: list[RecordedEvent] | None = None,
    token: str = "",
    config: Config | None = None,
    schema: int = SCHEMA,
) -> AsyncIterator[Served]:
    """A Served that has started and will have stopped."""
    served = Served(logs, token, config, schema)
    await served.tell(healed_cluster().log if story is None else story)
    await served.start()
    try:
        yield served
    finally:
        await served.stop()
