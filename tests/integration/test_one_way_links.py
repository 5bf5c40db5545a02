"""A link to NATS that carries one way only: who is heard and hears nothing is as good as lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.live import Live, seats
from tests.integration.tcp_proxy import Proxy, proxy_to
from tests.integration.two_heads import is_claim, publisher, story, two_heads
from unicrond.core.state.state import NodeStatus
from unicrond.events.nats.server import EmbeddedServer
from unicrond.local.dev import DevCluster

NODES = 3
#: Two beats that do not come back and a judgement, or the lease's end and a look; and what a busy machine takes.
NODE_S, LEADER_S = 3.2, 3.0
SLACK_S = 3.0


async def test_node_that_is_heard_and_hears_nothing_is_lost(tmp_path: Path) -> None:
    dev = DevCluster(tmp_path, NODES, 1, 0, settings={"policy": {"isolation_s": 1.0}})
    async with proxy_to("127.0.0.1", dev.nats_port) as proxy:
        name, agent = next(iter(dev.agents.items()))
        agent.command = [f"nats://127.0.0.1:{proxy.port}" if part == dev.nats_url else part for part in agent.command]
        try:
            await dev.start()
            live = Live(dev, NODES)
            await live.submit()
            state = await live.training(0, beyond=3)
            since = state.seq
            proxy.cut_back()
            cut_us = time.time_ns() // 1000
            state = await live.until("it is lost", lambda s: s.nodes[name].status is NodeStatus.LOST)
            (entry,) = [line for line in live.client.events(since) if line.type == "NodeLost"]
            took_s, lost = (entry.recorded_at_us - cut_us) / 1e6, entry.envelope["event"]
            print(f"lost {took_s:.2f} s after the cut")
            assert lost["node"] == name and "heard, and hears nothing" in lost["reason"], lost
            assert took_s <= NODE_S + SLACK_S
            await live.until("the others train on", lambda s: name not in str(seats(s)) and seats(s))
            proxy.mend()
            await live.until("it is back", lambda s: s.nodes[name].status is NodeStatus.UP)
        finally:
            proxy.mend()
            await dev.stop()


@pytest.mark.parametrize("cut", [Proxy.cut_back, Proxy.cut_out], ids=["hears nothing", "is not heard"])
async def test_leader_of_a_one_way_link_is_deposed(nats_server: EmbeddedServer, tmp_path: Path, cut) -> None:  # type: ignore[no-untyped-def]
    async with proxy_to("127.0.0.1", int(nats_server.url.rpartition(":")[2])) as proxy:
        nats = {"url": f"nats://127.0.0.1:{proxy.port}"}
        cluster = story(4, 1)
        async with (
            publisher(nats_server.url, cluster) as nodes,
            two_heads(tmp_path, nats, other_nats={"url": nats_server.url}) as (one, two),
        ):
            term, seq = int((await two.health())["term"]), (await nodes.state()).seq
            cut(proxy)
            cut_us = time.time_ns() // 1000
            claim, _ = await nodes.after(seq, is_claim(term + 1))
            took_s = (claim.recorded_at_us - cut_us) / 1e6
            print(f"deposed {took_s:.2f} s after the cut")
            assert took_s <= LEADER_S + SLACK_S
            await two.leads()
            proxy.mend()
            await one.stands_by()
            assert (await nodes.state()).term == term + 1
