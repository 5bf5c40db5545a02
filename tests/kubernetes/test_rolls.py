"""Head and agents of each overlay made anew, twice in a row, as a new image has it: nothing else follows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.kubernetes.cluster import AGENTS, Cluster, up_on
from tests.kubernetes.machine import NODES
from tests.kubernetes.test_recovery import min_ready_s
from unicrond.core.state.state import ClusterState, NodeStatus

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]
Record = Callable[[str, str], None]
HEAD_SET = "statefulset/unicron-head"


async def _roll(cluster: Cluster) -> None:
    """Have Kubernetes replace all pods, and wait for it."""
    agents = AGENTS[cluster.overlay]
    if cluster.overlay == "jobset":  # its template cannot change: it is made anew as a whole
        await cluster.do("delete", agents, "--cascade=foreground")
        await asyncio.to_thread(cluster.apply, cluster.overlay)
        await cluster.do("rollout", "restart", HEAD_SET)
    else:
        await cluster.do("rollout", "restart", HEAD_SET, agents)
    for what in (HEAD_SET, agents):
        await asyncio.to_thread(cluster.until_rolled, what)


@pytest.mark.parametrize(
    "overlay", [pytest.param(overlay, marks=pytest.mark.overlay(overlay)) for overlay in AGENTS], ids=[*AGENTS]
)
async def test_two_rolling_updates_lose_no_work(cluster: Cluster, record: Record, overlay: str) -> None:
    if overlay == "statefulset":
        await cluster.do("scale", AGENTS[overlay], f"--replicas={len(NODES)}")
    await cluster.train()
    await cluster.until("a node for each machine", lambda state: len(up(state)) == len(NODES))
    watch, seconds = await cluster.watch(), []
    watch.act()
    for _ in range(2):
        nodes, boots, began_s = up((await cluster.state())[0]), await cluster.boots(), time.monotonic()
        await _roll(cluster)
        seconds.append(f"{(time.monotonic() - began_s) / len(NODES):.1f}")
        await watch.whole(also=up_on(*nodes, boots=boots))
    act, waits = "the JobSet deleted and applied anew, the head rolled", ""
    if overlay != "jobset":
        act = "`kubectl rollout restart` of head and agents"
        waits = f", of which {await min_ready_s(cluster)} are `minReadySeconds`"
    record(
        f"`{overlay}`: {act}, twice in a row",
        f"{' and '.join(seconds)} s an agent's pod{waits}; {await watch.clean()}",
    )


def up(state: ClusterState) -> list[str]:
    """Return the nodes whose agents are there."""
    return [name for name, node in state.nodes.items() if node.status is NodeStatus.UP]
