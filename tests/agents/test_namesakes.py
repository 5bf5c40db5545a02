"""Two agents of one name: who started first ends, and who started later waits for that."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.processes import has_ended
from tests.agents.test_daemon import AgentProcess, Coordinator, agent, coordinator
from unicrond.agents.shell.duplicate_agent import DuplicateAgents, is_shut_out
from unicrond.events.cli.exit_codes import SUPERSEDED
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.vocabulary import NodeJoined, NodeLeft, StoreAddress, WorkerStarted
from unicrond.events.wire.envelope import Envelope

__all__ = ["agent", "coordinator"]  # fixtures


def test_later_boot_is_newer_agent() -> None:
    one = DuplicateAgents(boot=10, previous_boot=7, heartbeat_s=1.0)
    for boot in (10, 7, 3):
        one.note_beat(boot, 100.0)
    assert one.newer == 0
    one.note_beat(12, 100.0)
    one.note_beat(11, 101.0)
    assert one.newer == 12 and one.outrun == 0


def test_older_agent_counts_while_its_beats_arrive() -> None:
    one = DuplicateAgents(boot=10, previous_boot=7, heartbeat_s=1.0)
    one.note_beat(7, 100.0)
    assert not one.is_older_there(100.0), "its own predecessor in the run directory is dead"
    one.note_logged(5, 100.0)
    assert one.is_older_there(102.0) and not one.is_older_there(102.5)
    one.note_beat(5, 102.0)
    assert one.is_older_there(104.0)


def test_logged_boot_alone_is_no_live_agent() -> None:
    one = DuplicateAgents(boot=10, previous_boot=0, heartbeat_s=1.0)
    one.note_logged(12, 100.0)
    assert (one.newer, one.outrun) == (0, 12)


def test_message_without_a_boot_is_no_agent() -> None:
    """Another node can have an answer of NATS delivered where joins are heard: nobody waits for it."""
    one = DuplicateAgents(boot=10, previous_boot=7, heartbeat_s=1.0)
    one.note_logged(0, 100.0)
    assert not one.is_older_there(100.0) and (one.newer, one.outrun) == (0, 0)


@pytest.mark.parametrize(
    ("denied_s", "workers", "ends"), [(None, 0, False), (59.9, 0, False), (60.0, 0, True), (600.0, 1, False)]
)
def test_refused_key_ends_agent_without_workers(denied_s: float | None, workers: int, *, ends: bool) -> None:
    assert is_shut_out(denied_s, 60.0, workers) is ends


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """Another machine's run directory."""
    path = Path(tempfile.mkdtemp(prefix="un"))
    yield path
    shutil.rmtree(path)


async def test_older_agent_ends_with_workers_and_newer_serves(
    agent: AgentProcess, coordinator: Coordinator, elsewhere: Path, nats_server: EmbeddedServer
) -> None:
    older_boot = (await coordinator.until(NodeJoined)).agent_boot
    await coordinator.start("a.1")
    pid = (await coordinator.until(WorkerStarted, worker="a.1")).pid
    fork_server = agent.fork_server()
    newer = AgentProcess(nats_server.url, elsewhere)
    try:
        joined = await coordinator.until(NodeJoined)
        assert joined.agent_boot > older_boot and not joined.workers
        assert await asyncio.to_thread(agent.process.wait, 20) == SUPERSEDED
        assert has_ended(pid) and has_ended(fork_server), "its workers end with it"
        (said,) = [line for line in agent.log().splitlines() if "CRITICAL" in line]
        assert f"a newer agent of the name n1 is at work (boot {joined.agent_boot}" in said
        assert "waiting until it ends" in newer.log()
        await coordinator.start("b.1")
        await coordinator.until(WorkerStarted, worker="b.1")
        newer.process.send_signal(signal.SIGINT)
        await coordinator.until(NodeLeft)
        assert newer.process.wait(20) == 130
    finally:
        newer.end()
    agent.start()  # a person has seen to it
    assert (await coordinator.until(NodeJoined)).agent_boot > joined.agent_boot


async def test_newer_agent_keeps_workers_of_shared_directory(
    agent: AgentProcess, coordinator: Coordinator, nats_server: EmbeddedServer
) -> None:
    await coordinator.until(NodeJoined)
    await coordinator.start("a.1")
    pid = (await coordinator.until(WorkerStarted, worker="a.1")).pid
    older = agent.process
    (agent.run_dir / "agent.lock").unlink()  # else the second one is refused
    agent.start()
    joined = await coordinator.until(NodeJoined)
    assert [worker.pid for worker in joined.workers] == [pid]
    assert await asyncio.to_thread(older.wait, 20) == SUPERSEDED
    assert not has_ended(pid, 0)
    assert "keeps the workers" in agent.log()


async def test_agent_passes_unused_later_boot(
    nats_server: EmbeddedServer, nats_connection: Connection, run_dir: Path, coordinator: Coordinator
) -> None:
    """The run directory was lost, and the clock is behind."""
    later = time.time_ns() // 1000 + 3_600_000_000
    joined = NodeJoined(
        node="n1", address="10.0.0.1", slots=1, store=StoreAddress(host="h", port=1), agent_boot=later, version="1"
    )
    await coordinator.log.append([Envelope(producer="n1", boot=later, number=1, observed_at_us=1, event=joined)])
    await coordinator.until(NodeJoined)
    agent = AgentProcess(nats_server.url, run_dir)
    try:
        assert await asyncio.to_thread(agent.process.wait, 20) == 1
        assert f"the log holds a later boot of n1 ({later}" in agent.log()
        agent.start()
        assert (await coordinator.until(NodeJoined)).agent_boot == later + 1
    finally:
        agent.end()
