"""Probes of links (health/link_probe.py) to peers that answer both connections, one of them late, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from unicrond.agents.health.link_probe import BYTES, SLOW_S, LinkProber, probe_peer
from unicrond.events.vocabulary import ProbedPeer

HOST = "127.0.0.1"
NEVER_S = 30.0


async def condition_of(delays_s: Sequence[float], limit_s: float = 1.0) -> str:
    """What a probe finds of a peer that echoes after these times, one connection after the other."""
    rest, echoes = list(delays_s), set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        echoes.add(task)
        try:
            body = await reader.readexactly(BYTES)
            await asyncio.sleep(rest.pop(0))
            writer.write(body)
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    async with server:
        peer = ProbedPeer(node="n2", host=HOST, port=server.sockets[0].getsockname()[1])
        probe = await probe_peer(peer, HOST, limit_s)
        for task in echoes:
            task.cancel()
        await asyncio.gather(*echoes, return_exceptions=True)
    return probe.condition


@pytest.mark.parametrize(
    ("delays_s", "condition"),
    [((0.0, 0.0), "good"), ((0.0, 2 * SLOW_S), "slow"), ((0.0, NEVER_S), "slow"), ((NEVER_S, NEVER_S), "silent")],
)
async def test_link_is_good_by_both_connections_and_silent_by_none(
    delays_s: tuple[float, float], condition: str
) -> None:
    """Where a quarter of all packets is lost one of two is often quick: such a link was believed, again and again."""
    assert await condition_of(delays_s) == condition


async def test_agent_answers_probes_and_a_closed_port_says_nothing() -> None:
    prober = LinkProber("n2", HOST, lambda _: None)
    peer = ProbedPeer(node="n2", host=HOST, port=await prober.serve())
    assert (await probe_peer(peer, HOST)).condition == "good"
    await prober.close()
    assert (await probe_peer(peer, HOST)).condition == "unknown"
