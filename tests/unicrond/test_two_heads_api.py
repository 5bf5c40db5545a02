"""Two heads and their APIs over a log and a lease in memory: what each answers, and that a client finds who leads."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.contracts.memory_log import MemoryBeatLog, MemoryLog
from tests.unicrond.serving import Files
from unicrond.core.state.policy import Policy
from unicrond.ctl.client import ApiRefused, Client, ConnectionFailed, NotLeader
from unicrond.events.log.lease import Holder
from unicrond.intake.config import Config
from unicrond.replay.simulation.cluster.lease import MemoryLease
from unicrond.service.api.access import Access
from unicrond.service.api.api import Api
from unicrond.service.api.process_status import ProcessStatus
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.surroundings import HeadSettings
from unicrond.service.head.head import Head
from unicrond.service.trust.certificates import Certificates


class Served:
    """A head and its API."""

    def __init__(
        self,
        name: str,
        log: MemoryLog,
        lease: MemoryLease,
        directory: Path,
        config: Config | None = None,
        access: Access | None = None,
    ) -> None:
        config = config or Config()
        self.coordinator = Coordinator(
            log, MemoryBeatLog(), HeadSettings(policy=Policy(), heartbeat_s=60, process=name)
        )
        me = Holder(head=name, process=name, api=config.api.advertise or f"{name}:7470")
        self.head = Head(self.coordinator, lease, me, 0.2, has_ended=lambda _: False)
        shown = ProcessStatus(str, self.head, lambda: ["a promise"])
        self.access = access or Access()
        api = Api(config, self.coordinator, log, Files(directory), self.access, shown)  # type: ignore[arg-type]
        self._port = int(config.api.advertise.rpartition(":")[2] or 0)
        self._context = Certificates(config.certificates, None, is_for_api=config.api_tls).context
        self._runner = web.AppRunner(api.application(), access_log=None, shutdown_timeout=0.1)
        self.url = ""

    async def start(self) -> None:
        self._task = asyncio.create_task(self.head.run())
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._context).start()
        self.url = f"http{'s' if self._context else ''}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close_api(self) -> None:
        await self._runner.cleanup()

    async def stop(self) -> None:
        await self.close_api()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def get(self, path: str) -> str:
        def ask() -> str:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return str(answer.read().decode())

        return await asyncio.to_thread(ask)

    async def health(self, status: str) -> dict[str, Any]:
        """Once it says so."""
        async with asyncio.timeout(60):
            while (told := json.loads(await self.get("/healthz")))["status"] != status:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # it offers no event
        return dict(told)


@asynccontextmanager
async def two(directory: Path) -> AsyncIterator[tuple[Served, Served]]:
    log, lease = MemoryLog(), MemoryLease()
    served = [Served(name, log, lease, directory) for name in ("one", "two")]
    try:
        await served[0].start()
        await served[0].health("live")
        await served[1].start()
        await served[1].health("standby")
        yield served[0], served[1]
    finally:
        for each in served:
            if each.url:
                await each.stop()


async def test_standby_head_answers_and_refers_to_leader(tmp_path: Path) -> None:
    async with two(tmp_path) as (leads, stands_by):
        told = await stands_by.health("standby")
        assert not told["leads"] and told["heads"]["leader"] == {"process": "one", "api": "one:7470"}
        assert told["weaker"] == ["a promise"]
        assert (await leads.health("live"))["leads"]
        assert (
            json.loads(await stands_by.get("/v1/state"))["digest"] == json.loads(await leads.get("/v1/state"))["digest"]
        )
        assert "unicron_leads 0.0" in await stands_by.get("/metrics")
        assert "unicron_leads 1.0" in await leads.get("/metrics")
        with pytest.raises(NotLeader, match=r"this head stands by; ask the one that leads, one \(API one:7470\)"):
            await asyncio.to_thread(Client(stands_by.url).submit, {"name": "a"})


async def test_client_of_both_heads_asks_leader(tmp_path: Path) -> None:
    async with two(tmp_path) as (leads, stands_by):
        client = Client(f"{stands_by.url}, {leads.url}")
        assert (await asyncio.to_thread(client.submit, {"name": "a"}))["task"] == "a"
        assert client.url == leads.url
        with pytest.raises(ApiRefused, match="already exists"):
            await asyncio.to_thread(client.submit, {"name": "a"})
        await leads.stop()
        leads.url = ""
        await stands_by.health("live")
        assert (await asyncio.to_thread(client.cancel, "a", "x"))["task"] == "a"
        assert client.url == stands_by.url
        state, _ = await asyncio.to_thread(client.state)
        assert state.term == 2 and state.tasks["a"].ending.reason == "x"


async def test_client_without_any_head_prints_one_line() -> None:
    client = Client("http://127.0.0.1:1,http://127.0.0.1:2")
    with pytest.raises(
        ConnectionFailed, match=r"no coordinator at any of http://127\.0\.0\.1:1, http://127\.0\.0\.1:2; "
    ) as told:
        await asyncio.to_thread(client.health)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("urls", ["http://a:1,", "http://a:1,b:2", "http://a:1 http://b:1"])
def test_client_refuses_bad_addresses(urls: str) -> None:
    with pytest.raises(ValueError):
        Client(urls)
