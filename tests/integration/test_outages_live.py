"""Nodes of one domain that die at once on a live cluster: one incident, nobody pays, and they come back as one."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.live import TASK, Live, members, nodes_of, seats
from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.local.dev import DevCluster

pytestmark = pytest.mark.timeout(600)

OTHER = "small"


async def kill(dev: DevCluster, nodes: list[str]) -> None:
    """SIGKILL for everything on these nodes, as when their power fails."""
    for node in nodes:
        await dev.agents[node].rest()
    for process in [process for node in nodes for process in dev.processes_of(node)]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def trains(state: ClusterState, task: str, workers: int, beyond: int) -> bool:
    """So many members, all in the newest group, have committed past that iteration in it."""
    found = state.tasks.get(task)
    if found is None or not found.confirmed or len(members(state, task)) != workers:
        return False
    return found.progress.committed_generation == found.generation and found.progress.iteration > beyond


@pytest.mark.matrix
@pytest.mark.parametrize(("nodes", "rack", "big", "small"), [(5, 2, 3, 1), (8, 4, 5, 2)])
@pytest.mark.asyncio
async def test_rack_that_loses_power_costs_nobody_else_and_comes_back_as_one(
    tmp_path: Path, nodes: int, rack: int, big: int, small: int
) -> None:
    dev = DevCluster(tmp_path, nodes=nodes, slots=1, api_port=0, heartbeat_s=1.0)
    lost = dev.node_names[:rack]
    for name in dev.node_names:
        dev.agents[name].command += ["--domain", "rack7" if name in lost else "rack8"]
    live = Live(dev, big)
    try:
        await dev.start()
        await live.until("all have joined", lambda s: len(s.nodes) == nodes)
        await live.submit()
        await live.until("the first trains", lambda s: trains(s, TASK, big, 3))
        await live.submit(OTHER, max_workers=small)
        before = await live.until("both train", lambda s: trains(s, OTHER, small, 3))
        assert set(lost) < nodes_of(before) and nodes_of(before, OTHER).isdisjoint(lost)
        since = before.seq

        died_s = time.monotonic()
        await kill(dev, lost)
        state = await live.until("it is one incident", lambda s: s.outages)
        seen_s = time.monotonic()
        (outage,) = state.outages.values()
        assert outage.domain == "rack7" and sorted(outage.away) == lost
        at = state.tasks[TASK].progress.iteration
        state = await live.until("the survivors train", lambda s: trains(s, TASK, big - rack, at))
        healed_s = time.monotonic()
        status = await live.run("unicronctl", "--url", dev.url, "status")
        assert f"{rack} nodes of rack7 are away together" in status and "nothing takes their place" in status, status

        back_s = time.monotonic()
        for name in lost:
            await dev.bring_back(name)
        await live.until(
            "all are up", lambda s: all(s.nodes[name].status is NodeStatus.UP for name in lost) and not s.outages
        )
        joined_s = time.monotonic()
        at = state.tasks[TASK].progress.iteration
        state = await live.until("all train again", lambda s: trains(s, TASK, big, at) and not s.incidents)
        whole_s = time.monotonic()

        assert nodes_of(state) == nodes_of(before) and seats(state, OTHER) == seats(before, OTHER)
        assert state.tasks[OTHER].generation == before.tasks[OTHER].generation
        assert [incident.kind for incident in state.closed_incidents] == ["domain_lost"]
        assert state.ledger.failures == 1
        assert not live.events("PlanAdopted", "NodeIsolated", "DecisionHeld", after=since)
        decided = [event for event in live.events("MembershipDecided", after=since) if not event["urgent"]]
        assert [event["reason"] for event in decided] == [f"plan {before.plan.epoch}: {rack} join, 0 leave"]
        (healed,) = live.events("TransitionCompleted", after=since)
        assert f"{rack} of {rack} nodes are back" in healed["reason"]
        print(await live.run("unicronctl", "--url", dev.url, "story", "incident", healed["incident"]))
        print(
            f"{rack} of {nodes} nodes: found after {seen_s - died_s:.1f} s, survivors train after"
            f" {healed_s - died_s:.1f} s; all joined {joined_s - back_s:.1f} s after the start of their agents,"
            f" the whole group trains {whole_s - joined_s:.1f} s later"
        )
    finally:
        await dev.stop()
