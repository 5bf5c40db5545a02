"""Agents end while nobody answers them: workers save first, and the task goes on where it was, to the same bits."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.integration.live import HEARTBEAT_S, TASK, Live
from unicrond.core.state.state import TaskStatus
from unicrond.local.dev import DevCluster

NODES = 2
#: More than are made while this process, on a busy machine, has no processor between a look and a kill.
ITERATIONS = 240
#: Time for a busy machine to save in; where all is saved sooner, nobody waits for its end.
GRACE_S = 20
_COMMITTED = re.compile(r"committed iterations? (?:\d+-)?(\d+), loss")


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    """Two nodes whose agents drain them at SIGTERM, within a short grace."""
    dev = DevCluster(tmp_path, NODES, 1, 0, HEARTBEAT_S, agents_hand_over=False)
    for agent in dev.agents.values():
        agent.env |= {"UNICRON_AGENT_GRACE_S": str(GRACE_S)}
    try:
        await dev.start()
        yield Live(dev, NODES)
    finally:
        await dev.stop()


async def lose_log(dev: DevCluster, server: psutil.Process) -> None:
    """The head is dead, and its server with it."""
    await dev.coordinator.rest()
    assert dev.coordinator.process is not None
    dev.coordinator.process.kill()
    await dev.coordinator.process.wait()
    server.kill()
    await asyncio.to_thread(psutil.wait_procs, [server], 20)


async def end_agents(dev: DevCluster) -> None:
    """SIGTERM to all of them at once; nothing of theirs is left, the states in memory neither."""
    for agent in dev.agents.values():
        await agent.rest()
        assert agent.process is not None
        agent.process.send_signal(signal.SIGTERM)
    for agent in dev.agents.values():
        assert agent.process is not None
        assert await agent.process.wait() == 128 + signal.SIGTERM, agent.output.read_text()
    assert not [process for node in dev.node_names for process in dev.processes_of(node)]


async def params_digest(live: Live, task: str) -> str:
    """The parameters after its last iteration."""
    await live.until("the task is complete", lambda s: task in s.tasks and s.tasks[task].status is TaskStatus.COMPLETED)
    (done,) = [event for event in live.events("TaskCompleted") if event["task"] == task]
    return str(done["params_digest"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["killed", pytest.param("silent", marks=pytest.mark.matrix)])
async def test_agents_without_log_save_before_they_end(live: Live, how: str) -> None:
    """`silent`: the server stands still, and so do its connections: the drain is not answered."""
    await live.submit(iterations=ITERATIONS)
    await live.until("the task trains", lambda s: TASK in s.tasks and s.tasks[TASK].progress.iteration > 1)
    server = psutil.Process(int((live.dev.state_dir / "nats" / "nats-server.pid").read_text()))
    if how == "killed":
        await lose_log(live.dev, server)
    else:
        server.suspend()
    await end_agents(live.dev)

    said = "".join(agent.output.read_text() for agent in live.dev.agents.values())
    trained = max(int(found[1]) for found in _COMMITTED.finditer(said))
    (saved,) = (live.directory / "checkpoints" / TASK).glob("iteration-*")
    assert saved.name == f"iteration-{trained:08d}" and trained < ITERATIONS, "nothing is repeated"

    if how == "killed":
        await live.dev.coordinator.start()
    else:
        server.resume()
    for agent in live.dev.agents.values():
        await agent.start()
    digest = await params_digest(live, TASK)
    sources = [(event["source"], event["iteration"]) for event in live.events("StateLoaded")]
    assert sources == [("init", 0), ("checkpoint", trained)]
    await live.submit("reference", iterations=ITERATIONS)
    assert await params_digest(live, "reference") == digest
