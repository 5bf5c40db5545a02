"""A head that begins anew and hears none of its agents: nothing is lost, nothing is ended, and it says so once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.integration.live import HEARTBEAT_S, TASK, Live, seats
from tests.integration.tcp_proxy import Proxy, proxy_to
from unicrond.core.state.state import NodeStatus
from unicrond.local.dev import DevCluster

NODES = 3


@asynccontextmanager
async def cluster_behind_proxy(directory: Path) -> AsyncIterator[tuple[Live, Proxy]]:
    """A head with its NATS server, and agents that reach it only through a proxy."""
    dev = DevCluster(directory, NODES, 1, 0, HEARTBEAT_S, settings={"policy": {"isolation_s": 1.0}})
    async with proxy_to("127.0.0.1", dev.nats_port) as proxy:
        url = f"nats://127.0.0.1:{proxy.port}"
        for agent in dev.agents.values():
            agent.command = [url if part == dev.nats_url else part for part in agent.command]
        try:
            await dev.start()
            yield Live(dev, NODES), proxy
        finally:
            proxy.mend()
            await dev.stop()


async def test_head_that_begins_deaf_loses_and_ends_nobody(tmp_path: Path) -> None:
    async with cluster_behind_proxy(tmp_path) as (live, proxy):
        await live.submit()
        state = await live.training(0, beyond=3)
        before, plan, since = seats(state), state.plan, state.seq
        iteration = state.tasks[TASK].progress.iteration

        proxy.cut()
        head = live.dev.coordinator.process
        assert head is not None
        head.send_signal(signal.SIGKILL)
        state = await live.until("the head hears nobody", lambda s: s.silence is not None)
        (incident,) = state.incidents.values()
        assert incident.kind == "head_deaf" and [node.status for node in state.nodes.values()] == [NodeStatus.UP] * 3
        status = await live.run("unicronctl", "status", "--url", live.dev.url)
        assert "the head hears none of 3 nodes since" in status and "password" in status

        proxy.mend()
        await live.until("it hears them", lambda s: s.silence is None and not s.incidents)
        state = await live.training(1, beyond=3)
        assert seats(state) == before and state.plan == plan, "the same processes, by the same plan"
        assert state.tasks[TASK].progress.iteration > iteration
        for never in ("NodeLost", "NodeIsolated", "StopWorker", "PlanAdopted", "MembershipDecided", "WorkerExited"):
            assert not live.events(never, after=since), never
        shown = await asyncio.gather(
            live.run("unicronctl", "incidents", "--url", live.dev.url),
            live.run("unicronctl", "story", "incident", incident.id, "--url", live.dev.url),
        )
        assert all("head_deaf" in text for text in shown)
        assert "the head hears none of 3 nodes" in shown[1] and "hears nodes again: 3 of 3" in shown[1]
