"""Who pays for what a program, a person or a dead agent does: no other task, and no healthy node. On a live cluster.

One cluster of four nodes lives through all of it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.integration.live import Live, live_cluster, members, nodes_of
from unicrond.core.state.state import ClusterState

in_one_loop = pytest.mark.asyncio(loop_scope="module")
pytestmark = pytest.mark.timeout(300)
NODES = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    async with live_cluster(tmp_path_factory.mktemp("innocents"), nodes=NODES, workers=2) as live:
        await live.until("all nodes are there", lambda s: len(s.nodes) == NODES)
        yield live


async def cancel(live: Live, *names: str) -> None:
    for name in names:
        await live.run("unicronctl", "--url", live.dev.url, "cancel", name)
    await live.until("they have ended", lambda s: not any(s.tasks[name].workers for name in names), may_fail=True)


def trains(state: ClusterState, task: str, workers: int) -> bool:
    """Return whether all of so many workers train, and have done so for an iteration."""
    there = task in state.tasks and len(members(state, task)) == workers and state.tasks[task].confirmed
    return there and state.tasks[task].progress.committed_generation == state.tasks[task].generation


@in_one_loop
async def test_start_ordered_from_dead_agent_is_void(live: Live) -> None:
    """Row 11: an agent is killed before it has read an order to start a worker; the next one has its run directory."""
    before, _ = await live.dev.state()
    agent = live.dev.agents["node1"].process
    assert agent is not None
    agent.send_signal(signal.SIGSTOP)
    await live.submit("all", max_workers=NODES, min_workers=NODES)
    ordered = await live.until("it is ordered", lambda s: "all" in s.tasks and "node1" in nodes_of(s, "all"))
    agent.kill()
    killed_s = time.monotonic()
    state = await live.until("all train", lambda s: trains(s, "all", NODES), may_fail=True)
    took_s = time.monotonic() - killed_s
    (void,) = [event for event in live.events("CommandFailed", after=before.seq) if event["node"] == "node1"]
    assert void["reason"].startswith("void: it was for an agent that has ended")
    assert nodes_of(ordered, "all") == nodes_of(state, "all") and took_s < 30.0, took_s
    kinds = {one.kind for one in state.closed_incidents[len(before.closed_incidents) :]}
    assert kinds <= {"node_lost"} and not live.events("NodeIsolated", after=before.seq), "no start has failed"
    troubles = state.tasks["all"].troubles
    assert troubles.crashes is None and not troubles.strikes
    await cancel(live, "all")
