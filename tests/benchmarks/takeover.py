"""How long two heads take to change over, with the state of 4 and of 2,000 nodes; one publisher speaks for the nodes.

    python -m tests.benchmarks.takeover --repetitions 10 --nodes 4 2000 --out takeover.jsonl

`killed`: SIGKILL of the head that leads, on one NATS server that answers all the time (goal 3 s).
`left`: SIGTERM of the head that leads (goal 0.5 s).
`log`: SIGKILL of the head together with the server that leads the event stream, of three; from the moment at which the
log takes an append again and the heads' lease, a stream of its own, answers (goal 3 s).

In each case a worker dies at that moment. Measured: until the other head has claimed its term, and until its first
decision, the membership without that worker, stands in the log. Servers sync each write to disk. Each repetition ends
with two heads again. Fails where a node is lost or a second takeover happens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.nats_cluster import NatsCluster, nats_cluster
from tests.integration.two_heads import HeadProcess, Publisher, is_claim, is_decision, publisher, story, two_heads
from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Login
from unicrond.events.nats.lease import NatsLease
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api

#: No deadline of a worker that nobody plays may pass meanwhile, and no node is to blame for what happens to its worker.
POLICY = {"worker_start_s": 3600.0, "regroup_s": 3600.0, "strikes_max": 1000, "stuck_max": 1000}
TASKS = {4: 1, 2000: 20}


class Site(NamedTuple):
    nodes: Publisher
    heads: list[HeadProcess]
    nats: NatsCluster | None


@asynccontextmanager
async def site(directory: Path, nodes: int, *, is_cluster: bool) -> AsyncIterator[Site]:
    cluster = story(nodes, TASKS.get(nodes, max(1, nodes // 100)))
    if is_cluster:
        async with nats_cluster(directory / "nats", sync="always") as nats:
            section: dict[str, Any] = {
                "url": ",".join(nats.urls), "nkey_seed": str(nats.seed), "tls_ca": str(nats.ca), "replicas": 3,
            }  # fmt: skip
            async with _running(directory, cluster, nats.urls, section, nats.login, 3) as (told, heads):
                yield Site(told, heads, nats)
        return
    server = EmbeddedServer(directory / "nats")
    await server.start()
    try:
        async with _running(directory, cluster, [server.url], {"url": server.url}, None, 1) as (told, heads):
            yield Site(told, heads, None)
    finally:
        await server.stop()


@asynccontextmanager
async def _running(
    directory: Path, cluster: Any, urls: Sequence[str], section: dict[str, Any], login: Login | None, replicas: int
) -> AsyncIterator[tuple[Publisher, list[HeadProcess]]]:
    async with publisher(urls, cluster, login, replicas) as told, two_heads(directory, section, policy=POLICY) as heads:
        yield told, heads


async def once(site: Site, how: str, number: int) -> dict[str, float]:
    """Seconds to the claim and to the first decision; the heads change places."""
    one, two = site.heads
    nodes = site.nodes
    term = int((await two.health())["term"])
    before = await nodes.log.last_seq()
    server = ""
    if site.nats is not None and how == "log":
        server = await site.nats.leader(nodes.connection, EVENT_STREAM)
    began_s = time.monotonic()
    if how == "left":
        one.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)  # else it may still decide itself
    else:
        one.process.kill()
    if server and site.nats is not None:
        await site.nats.kill(server)
    claiming = asyncio.create_task(nodes.after(before, is_claim(term + 1)))
    seq, _ = await asyncio.gather(nodes.lose_worker(number), _lease_answers(nodes))
    answers_s = time.monotonic()
    since_s = answers_s if how == "log" else began_s
    _, claimed_s = await claiming
    _, decided_s = await nodes.after(max(seq, before), is_decision(term + 1))
    await two.leads()
    await one.process.wait()
    if server and site.nats is not None:
        await site.nats.start(server)
        await _is_whole(site)
    await one.start("--standby")
    await one.stands_by()
    site.heads.reverse()
    assert int((await two.health())["term"]) == term + 1, "more than one takeover"
    return {"away_s": answers_s - began_s, "claimed_s": claimed_s - since_s, "decided_s": decided_s - since_s}


async def _lease_answers(nodes: Publisher) -> None:
    lease = NatsLease(nodes.connection)
    while True:
        try:
            await lease.look()
            return
        except LogUnavailable:
            await asyncio.sleep(0.02)


async def _is_whole(site: Site) -> None:
    async with asyncio.timeout(120):
        while True:
            cluster = (await api(site.nodes.connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["cluster"]
            peers = cluster.get("replicas") or []
            if cluster.get("leader") and len(peers) == 2 and all(peer["current"] for peer in peers):
                return
            await asyncio.sleep(0.1)


async def measure(nodes: int, how: str, repetitions: int) -> list[dict[str, float]]:
    """Each time another worker dies, and one must be left: with few nodes this takes several sites."""
    runs: list[dict[str, float]] = []
    while len(runs) < repetitions:
        with tempfile.TemporaryDirectory(prefix="unicron-takeover-") as scratch:
            runs += await _on_one_site(Path(scratch), nodes, how, min(repetitions - len(runs), nodes - 1))
    return runs


async def _on_one_site(directory: Path, nodes: int, how: str, repetitions: int) -> list[dict[str, float]]:
    async with site(directory, nodes, is_cluster=how == "log") as at:
        runs = []
        for number in range(repetitions):
            runs.append(await once(at, how, number))
            await asyncio.sleep(1.0)
        state = await at.nodes.state()
        lost = [
            incident
            for incident in (*state.closed_incidents, *state.incidents.values())
            if incident.kind == "node_lost"
        ]
        assert not lost, lost
        return runs


def report(nodes: int, how: str, runs: Sequence[dict[str, float]]) -> str:
    columns = []
    for name in ("claimed_s", "decided_s"):
        values = [run[name] for run in runs]
        median = statistics.median(values)
        columns.append(f"{name[:-2]} median {median:5.2f} s, {min(values):5.2f} to {max(values):5.2f}")
    away = f", log away {statistics.median(run['away_s'] for run in runs):4.1f} s" if how == "log" else ""
    return f"{nodes:5} nodes, {how:6} {'; '.join(columns)}{away}"


async def main(options: argparse.Namespace) -> None:
    for nodes in options.nodes:
        for how in options.how:
            runs = await measure(nodes, how, options.repetitions)
            print(report(nodes, how, runs), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps({"nodes": nodes, "how": how, "runs": runs}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 2000])
    parser.add_argument("--how", nargs="+", choices=("killed", "left", "log"), default=["killed", "left", "log"])
    parser.add_argument("--out", type=Path)
    asyncio.run(main(parser.parse_args()))
