"""Two heads as processes on one nats-server: one takes over from the other, and people and nodes need not be told."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

from tests.integration.head import UNICROND, ctl
from tests.integration.two_heads import HeadProcess, is_decision, publisher, story, two_heads
from unicrond.events.nats.server import EmbeddedServer

NODES = 4


async def test_killed_or_leaving_head_is_succeeded_once(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    nats = {"url": nats_server.url}
    cluster = story(NODES, 1)
    async with publisher(nats_server.url, cluster) as nodes, two_heads(tmp_path, nats) as (one, two):
        told = await two.health()
        assert told["heads"]["leader"]["process"].endswith(f":{one.process.pid}") and not told["leads"]
        async with asyncio.timeout(60):
            while len((await one.health())["heads"]["standing_by"]) != 1:  # noqa: ASYNC110 - it offers no event
                await asyncio.sleep(0.1)
        term = int(told["term"])
        # What people ask of the one that stands by, they are told whom to ask; given both, they need not care.
        both = f"{two.url},{one.url}"
        assert f"at {one.url}" in await asyncio.to_thread(ctl, both, "status")
        refused = await asyncio.to_thread(_ctl_fails, two.url, "cordon", "n1")
        assert f"this head stands by; ask the one that leads, {told['heads']['leader']['process']}" in refused
        await asyncio.to_thread(ctl, both, "cordon", "n1")
        await asyncio.to_thread(ctl, both, "uncordon", "n1")

        one.process.kill()
        seq = await nodes.lose_worker(1)
        await nodes.after(seq, is_decision(term + 1))
        await two.leads()
        await asyncio.to_thread(ctl, both, "cordon", "n1")
        await one.process.wait()
        await one.start()  # as systemd does
        await one.stands_by()

        await two.end(signal.SIGTERM)
        await one.leads()
        seq = await nodes.lose_worker(2)
        await nodes.after(seq, is_decision(term + 2))
        state = await nodes.state()
        assert state.term == term + 2, "two takeovers, and no more"
        assert not [one for one in (*state.closed_incidents, *state.incidents.values()) if one.kind == "node_lost"]
        assert [node.status for node in state.nodes.values()] == ["up"] * NODES


async def test_fenced_head_stands_by_and_keeps_server(tmp_path: Path) -> None:
    """The first has the embedded server; the second leads on it."""
    one = HeadProcess("head1", tmp_path, {"port": 0})
    await one.start()
    try:
        await one.leads()
        server = EmbeddedServer(tmp_path / "head1" / "nats")
        assert await server.adopt()
        two = HeadProcess("head2", tmp_path, {"url": server.url})
        await two.start("--standby")
        await two.stands_by()
        try:
            one.process.kill()
            await two.leads()
            await one.process.wait()
            await one.start()
            await one.stands_by()
            await one.end(signal.SIGINT)
            assert server.is_running(), "another head leads on it"
            assert (await two.health())["status"] == "live"
            assert "nats-server stays: another head uses it" in one.output.read_text()
            await one.start()
            await one.stands_by()
        finally:
            await two.end(signal.SIGINT)
        await one.leads()
    finally:
        await one.end(signal.SIGINT)
    assert not server.is_running(), "no other head uses it"


def test_standby_head_needs_shared_log(tmp_path: Path) -> None:
    path = tmp_path / "unicron.yaml"
    path.write_text(f"state_dir: {tmp_path / 'state'}\n")
    done = subprocess.run(
        [UNICROND, "run", "--config", str(path), "--standby"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("unicrond: --standby: ") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "state").exists()


def _ctl_fails(url: str, *arguments: str) -> str:
    command = [str(Path(UNICROND).with_name("unicronctl")), "--url", url, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr
