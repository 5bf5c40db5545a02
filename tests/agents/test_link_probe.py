"""Probes of links (health/link_probe.py) to peers that answer both connections, one of them late, or none; and
datagrams that name the way of a silent link that is cut (health/datagrams.py)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

import pytest

from unicrond.agents.health.datagrams import NAMES_MAX, Datagrams
from unicrond.agents.health.link_probe import BYTES, SLOW_S, LinkProber, probe_peer, verdict
from unicrond.events.vocabulary import LinksProbed, ProbedPeer, ProbeLinks

HOST = "127.0.0.1"
NEVER_S = 30.0


async def condition_of(delays_s: Sequence[float], limit_s: float = 1.0) -> str:
    """What a probe finds of a peer that echoes after these times, one connection after the other, again and again."""
    rest, echoes = itertools.cycle(delays_s), set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        echoes.add(task)
        try:
            body = await reader.readexactly(BYTES)
            await asyncio.sleep(next(rest))
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
    [
        ((0.0, 0.0), "good"),
        ((0.0, 2 * SLOW_S, 0.0, 0.0), "good"),
        ((0.0, 2 * SLOW_S), "slow"),
        ((0.0, NEVER_S), "slow"),
        ((NEVER_S, NEVER_S), "silent"),
    ],
)
async def test_link_is_good_by_both_connections_and_silent_by_none(delays_s: tuple[float, ...], condition: str) -> None:
    """Where a quarter of all packets is lost one of two is often quick: such a link was believed, again and again."""
    assert await condition_of(delays_s) == condition


@pytest.mark.parametrize(
    ("first", "condition"), [(("unknown", "good"), "good"), (("unknown", "unknown"), "unknown")], ids=["one", "both"]
)
async def test_one_refused_connection_does_not_end_a_probe(
    first: tuple[str, str], condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another round tells more, unless both were refused."""
    answers = itertools.chain(first, itertools.repeat("good"))

    async def exchange(*_: object) -> str:
        return next(answers)

    monkeypatch.setattr("unicrond.agents.health.link_probe._exchange", exchange)
    assert (await probe_peer(ProbedPeer(node="n2", host=HOST, port=1), HOST)).condition == condition


def is_good(drawn: random.Random, late_share: float) -> bool:
    """What a probe says of a link of whose rounds so many are not quick."""
    quick: list[bool] = []
    while (outcome := verdict(quick)) is None:
        quick.append(drawn.random() >= late_share)
    return outcome


@pytest.mark.parametrize(("late_share", "good_share"), [(0.0, 1.0), (0.41, 0.95), (0.98, 0.01), (1.0, 0.0)])
def test_verdict_on_a_lossy_link_is_steady(late_share: float, good_share: float) -> None:
    """Of single rounds 0.41 were not quick where 5 % of the packets are lost, 0.98 where 25 % are: 29 of 70 probes said
    that the first was slow."""
    drawn = random.Random(5)
    goods = sum(is_good(drawn, late_share) for _ in range(4000)) / 4000
    assert goods == pytest.approx(good_share, abs=0.02)


async def test_agent_answers_probes_and_a_closed_port_says_nothing() -> None:
    prober = LinkProber("n2", HOST, lambda _: None)
    peer = ProbedPeer(node="n2", host=HOST, port=await prober.serve())
    assert (await probe_peer(peer, HOST)).condition == "good"
    await prober.close()
    assert (await probe_peer(peer, HOST)).condition == "unknown"


@pytest.mark.parametrize("is_heard", [True, False])
async def test_end_of_a_silent_link_says_whether_it_hears_the_other(*, is_heard: bool) -> None:
    outcome: asyncio.Future[LinksProbed] = asyncio.get_running_loop().create_future()
    prober, peer = LinkProber("n1", HOST, outcome.set_result), Datagrams("n2")
    port = await prober.serve()
    writers = []
    silent = await asyncio.start_server(lambda _, writer: writers.append(writer), HOST, 0)
    silent_port = silent.sockets[0].getsockname()[1]
    await peer.serve(HOST, silent_port)
    to_prober = ProbedPeer(node="n1", host="localhost", port=port if is_heard else silent_port)
    sending = asyncio.create_task(peer.send([to_prober]))
    order = ProbeLinks(
        command_id="1.1.n1.1",
        node="n1",
        epoch=1,
        peers=(ProbedPeer(node="n2", host=HOST, port=silent_port),),
        task="t",
        generation=1,
    )
    prober.probe(order)
    (probe,) = (await outcome).probes
    assert (probe.condition, probe.hears_peer) == ("silent", is_heard)
    assert peer.has_heard("n1", 0.001), "both ends of a probe send"
    sending.cancel()
    peer.close()
    for writer in writers:
        writer.close()
    silent.close()
    await prober.close()


def test_datagrams_of_strangers_fill_no_memory() -> None:
    datagrams = Datagrams("n1")
    for number in range(2 * NAMES_MAX):
        datagrams.datagram_received(f"n{number}".encode(), None)
    datagrams.datagram_received(b"n" * 64, None)
    datagrams.datagram_received(b"\xff\n", None)
    assert not datagrams.has_heard("n0", 0.001) and not datagrams.has_heard("n" * 64, 0.001)
    assert datagrams.has_heard(f"n{2 * NAMES_MAX - 1}", 0.001)
    assert len(datagrams._heard_s) == NAMES_MAX
