"""A rolling update of all nodes in mid-training, and another right after it: nothing fails, nothing is repeated.

The first half of it here; the whole by `make matrix`, and in containers by `make containers`."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path

import pytest

from tests.integration.live import TASK, Live, live_cluster, nodes_of
from unicrond.core.state.state import NodeStatus

NODES = 3


async def replace_agent(live: Live, node: str, *, pod: bool) -> None:
    """SIGTERM, and another agent once it has ended. `pod`: nothing of the one before is left to it."""
    agent = live.dev.agents[node]
    assert agent.process is not None
    boot = (await live.dev.state())[0].nodes[node].agent.boot
    await agent.rest()
    agent.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.05)
    agent.process.send_signal(signal.SIGTERM)  # a second one does not cut it short
    assert await asyncio.wait_for(agent.process.wait(), 120) == 128 + signal.SIGTERM, agent.output.read_text()
    # It has told the log, which the head may not have read yet.
    state = await live.until(f"{node} has left", lambda s: s.nodes[node].status is NodeStatus.LEFT)
    assert node not in nodes_of(state)
    if pod:
        shutil.rmtree(live.directory / "run" / node)
    await agent.start()
    await live.until(
        f"a new agent on {node}",
        lambda s: s.nodes[node].agent.boot > boot and s.nodes[node].status is NodeStatus.UP,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "updates", [pytest.param((True,), id="one"), pytest.param((False, True), id="two", marks=pytest.mark.matrix)]
)
async def test_rolling_updates_redo_nothing(tmp_path: Path, updates: tuple[bool, ...]) -> None:
    async with live_cluster(tmp_path, nodes=NODES, workers=NODES, agents_hand_over=False) as live:
        await live.submit()
        before = await live.training(0)
        for pod in updates:
            for node in live.dev.node_names:
                await replace_agent(live, node, pod=pod)
                await live.training(0, beyond=3)
        state = await live.training(0)
        assert len(live.events("NodeLeaving")) == len(live.events("NodeLeft")) == len(updates) * NODES
        for never in ("NodeLost", "NodeIsolated", "IncidentEscalated", "ErrorReported", "CommandFailed"):
            assert not live.events(never), never
        assert sum(step["micro_batches_repeated"] for step in live.events("StepCommitted")) == 0
        assert sum(event.get("dealt", 0) for event in live.events("WorkerJoinedGroup")) == 0
        assert all(exited["is_expected"] for exited in live.events("WorkerExited"))
        assert not state.incidents_total and not any(node.health.returns_us for node in state.nodes.values())
        assert state.ledger.failures == before.ledger.failures == 0
        assert state.tasks[TASK].progress.best_iteration > before.tasks[TASK].progress.best_iteration


async def test_departed_node_is_forgotten(tmp_path: Path) -> None:
    """`unicronctl forget --leave`: its workers move, its agent ends with 0, and nothing of it is left in the state.
    Later another machine may have its name."""
    async with live_cluster(tmp_path, nodes=NODES, workers=NODES - 1) as live:
        await live.submit()
        state = await live.training(0, beyond=3)
        node = min(nodes_of(state))
        agent = live.dev.agents[node]
        assert agent.process is not None
        await live.run("unicronctl", "--url", live.dev.url, "forget", node, "--leave", "--reason", "sold")
        assert await asyncio.wait_for(agent.process.wait(), 60) == 0, agent.output.read_text()
        await live.until(f"{node} is forgotten", lambda s: node not in s.nodes)
        state = await live.training(0, beyond=3)
        assert len(nodes_of(state)) == NODES - 1 and not state.incidents_total
        assert sum(step["micro_batches_repeated"] for step in live.events("StepCommitted")) == 0
        assert len(live.events("NodeForgotten")) == 1
        assert agent.process.returncode == 0, "it is not started again"
        await agent.start()
        state = await live.until("a new node of the name", lambda s: node in s.nodes)
        assert state.nodes[node].status is NodeStatus.UP and not state.nodes[node].cordon.active
