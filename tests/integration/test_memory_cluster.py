"""States in memory with all real parts: coordinator, nats-server, agents, fork servers, a GPT with a single worker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.test_layouts_cluster import newest_copy
from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.local.dev import DevCluster, small_cluster

TASK = {
    "name": "solo",
    "model": {"layers": 1, "hidden": 32, "heads": 2, "seq": 16},
    "global_batch": 4,
    "iterations": 1_000_000,
    "checkpoint": {"interval": 0, "memory_interval": 20},  # storage has nothing: whatever comes back was in memory
}


async def until(cluster: DevCluster, what: str, holds: Callable[[ClusterState], object]) -> ClusterState:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        state, _ = await cluster.state()
        if holds(state):
            return state
        await asyncio.sleep(0.05)
    raise AssertionError(f"waited for this in vain: {what}; {state.tasks} {state.incidents}")


async def events(cluster: DevCluster, kind: str) -> list[dict[str, Any]]:
    records = await asyncio.to_thread(lambda: list(cluster.client.events(0)))
    return [record.envelope["event"] for record in records if record.type == kind]


def copied(state: ClusterState, above: int = 0) -> bool:
    """Two nodes that are up keep the state, one as a copy of the other's."""
    task = state.tasks.get("solo")
    kept = [k for k in task.copies.holdings.values() if k.iteration > above] if task else []
    up = {k.node for k in kept if state.nodes[k.node].status is NodeStatus.UP}
    return len(up) >= 2 and any(k.origin != k.node for k in kept)


def trains(state: ClusterState, workers: int, above: int) -> bool:
    task = state.tasks.get("solo")
    return task is not None and len(task.workers) == workers and task.progress.iteration > above


def healed(state: ClusterState, incidents: int) -> bool:
    task = state.tasks["solo"]
    return state.incidents_total >= incidents and not state.incidents and task.confirmed and bool(task.workers)


@pytest.mark.timeout(600)
async def test_state_survives_loss_of_process_agent_and_node(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, nodes=3, heartbeat_s=2.0) as cluster:
        await cluster.submit({**TASK, "env": {"XDG_CACHE_HOME": str(tmp_path / "cache")}})
        state = await until(cluster, "the state is kept on two nodes", copied)

        # 1. The process, and with it the last replica: from this node's memory.
        (worker,) = state.tasks["solo"].workers.values()
        os.kill(worker.pid, signal.SIGKILL)
        state = await until(cluster, "the worker is replaced", lambda s: healed(s, 1))
        taken = await events(cluster, "StateLoaded")
        assert [event["source"] for event in taken] == ["init", "memory"]
        assert taken[-1]["iteration"] > 0 and taken[-1]["saved_us"] > 0
        assert state.closed_incidents[-1].iterations_lost <= 40 and state.closed_incidents[-1].state_from == "memory"
        closed = (await events(cluster, "TransitionCompleted"))[-1]
        assert re.search(
            r"no replica survived: \d+ iterations(, \d+ finished micro-batches)? lost, "
            r"state from memory of a member's node$",
            closed["reason"],
        )
        decided = (await events(cluster, "MembershipDecided"))[-1]
        assert "start from the memory of" in decided["reason"] and worker.node in decided["reason"]

        # 2. The agent alone: what it kept is still there, and the next one says so.
        agent = cluster.agents[worker.node].process
        assert agent is not None
        joined = state.nodes[worker.node].joined_us
        agent.kill()
        await until(cluster, "the next agent joins", lambda s: s.nodes[worker.node].joined_us > joined)
        state = await until(
            cluster,
            "the next agent says what it keeps",
            lambda s: any(k.node == worker.node for k in s.tasks["solo"].copies.holdings.values()),
        )

        # 3. The node: from the copy.
        state = await until(
            cluster,
            "the new state of the only worker is copied",  # on a busy machine its node may have seemed lost
            lambda s: copied(s, taken[-1]["iteration"]) and healed(s, 1) and len(s.tasks["solo"].workers) == 1,
        )
        before, incidents = state.tasks["solo"].progress.iteration, state.incidents_total
        (worker,) = state.tasks["solo"].workers.values()
        await cluster.kill_node(worker.node)
        state = await until(
            cluster,
            "another node trains on",
            lambda s: healed(s, incidents + 1) and s.tasks["solo"].progress.iteration > before,
        )
        membership = state.tasks["solo"].membership
        assert membership is not None
        (mover,) = membership.members
        assert mover.node != worker.node
        taken = await events(cluster, "StateLoaded")
        assert taken[-1]["source"] in ("memory", "peer"), "where the copy was, or from there"
        kept = await asyncio.to_thread(newest_copy, cluster.client, worker.node, "solo")
        assert taken[-1]["iteration"] >= kept > 0

        # 4. The task ends: the memory is free again.
        url, reason = f"{cluster.url}/v1/tasks/solo/cancel", json.dumps({"reason": "done"})
        async with aiohttp.ClientSession() as session, session.post(url, data=reason) as answer:
            assert answer.status < 300
        await until(
            cluster,
            "nobody who can hear it keeps anything of it",
            lambda s: all(kept.node == worker.node for kept in s.tasks["solo"].copies.holdings.values()),
        )
        for node in set(cluster.node_names) - {worker.node}:
            await no_memory(cluster, node)


@pytest.mark.matrix
@pytest.mark.timeout(600)
async def test_sharded_state_survives_loss_of_worker_and_node(tmp_path: Path) -> None:
    """Sharded optimizer state: the other holders of the parts are on other nodes, so no state is ever read back."""
    async with small_cluster(tmp_path, nodes=3, heartbeat_s=2.0) as cluster:
        env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        await cluster.submit({**TASK, "max_workers": 3, "optimizer": {"distributed": True}, "env": env})
        state = await until(cluster, "three workers train", lambda s: trains(s, 3, 20))
        worker = next(iter(state.tasks["solo"].workers.values()))
        os.kill(worker.pid, signal.SIGKILL)
        state = await until(cluster, "the worker is replaced", lambda s: healed(s, 1) and trains(s, 3, 20))
        before = state.tasks["solo"].progress.iteration
        await until(cluster, "it goes on", lambda s: s.tasks["solo"].progress.iteration > before + 20)
        await cluster.kill_node(state.tasks["solo"].membership.members[0].node)  # type: ignore[union-attr]
        state = await until(
            cluster, "two go on", lambda s: healed(s, 2) and s.tasks["solo"].progress.iteration > before + 40
        )
        assert {event["source"] for event in await events(cluster, "StateLoaded")} <= {"init", "replica"}
        assert all(not incident.iterations_lost for incident in state.closed_incidents)


def held(cluster: DevCluster, node: str) -> list[str]:
    """Memory of the task that the node's processes have open."""
    fds = [fd for process in cluster.processes_of(node) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
    return [target for fd in fds if "unicron solo" in (target := _target(fd))]


async def no_memory(cluster: DevCluster, node: str) -> None:
    deadline = time.monotonic() + 60
    while found := held(cluster, node):
        assert time.monotonic() < deadline, f"{node} still holds {found}"
        await asyncio.sleep(0.05)


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)  # noqa: PTH115
    except OSError:
        return ""
