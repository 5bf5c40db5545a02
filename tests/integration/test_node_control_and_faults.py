"""Draining a node and ordering faults, with real training: a drain loses nothing, an order strikes whom it names."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from unicrond.client import Client, Refused
from unicrond.dev import DevCluster, small_cluster
from unicrond.inject import inject
from unicrond.state import ClusterState, Severity, TaskStatus

TASK = "big"
WORKERS = 3
TIMEOUT_S = 90.0


async def submit(dev: DevCluster) -> None:
    """A task that leaves one of the four nodes idle."""
    await dev.submit(
        {
            "name": TASK,
            "max_workers": WORKERS,
            "model": {"layers": 1, "hidden": 32, "heads": 2, "seq": 32, "vocab": 256},
            "env": {"XDG_CACHE_HOME": str(dev.directory / "cache")},
            "global_batch": 12,
            "iterations": 1_000_000,
            "checkpoint": {"interval": 50},
        }
    )


async def until(dev: DevCluster, what: str, holds: Callable[[ClusterState], object]) -> ClusterState:
    """The first state in which `holds`; the API is asked again and again, as a person would."""
    deadline, state = time.monotonic() + TIMEOUT_S, ClusterState()
    while time.monotonic() < deadline:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            state, _ = await dev.state()
            assert all(task.status is TaskStatus.ACTIVE for task in state.tasks.values())
            if holds(state):
                return state
        await asyncio.sleep(0.05)
    told = [f"{i.id} {i.kind} {i.worker}: {i.message}" for i in (*state.closed, *state.incidents.values())]
    raise AssertionError(f"waited {TIMEOUT_S:g} s for: {what}; {told}")


def members(state: ClusterState) -> list[str]:
    membership = state.tasks[TASK].membership
    return [member.worker for member in membership.members] if membership else []


async def whole(dev: DevCluster, incidents: int) -> ClusterState:
    """Three members train, past where they were, and so many incidents are closed."""
    reached: list[int] = []

    def holds(state: ClusterState) -> bool:
        task = state.tasks.get(TASK)
        if task is None or not task.confirmed or state.incidents or len(state.closed) != incidents:
            return False
        if len(members(state)) != WORKERS or task.committed_generation != task.generation:
            return False
        reached.append(task.iteration)
        return task.iteration > reached[0] + 10

    return await until(dev, f"{WORKERS} members train, {incidents} incidents are closed", holds)


def committed(client: Client) -> list[dict[str, Any]]:
    """Every StepCommitted of the log."""
    return [event.envelope["event"] for event in client.events() if event.type == "StepCommitted"]


def nodes_used(state: ClusterState) -> set[str]:
    return {worker.node for worker in state.tasks[TASK].workers.values()}


@pytest.mark.timeout(240)
async def test_drain_and_ordered_faults(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, nodes=4, settings={"injection": True}) as dev:
        client = Client(dev.url)
        await submit(dev)
        state = await whole(dev, incidents=0)

        node = state.tasks[TASK].workers[members(state)[0]].node
        client.cordon(node, drain=True, reason="new fan")
        await until(dev, "the node is empty", lambda s: node not in nodes_used(s))
        state = await whole(dev, incidents=0)
        assert state.incidents_total == 0 and node not in nodes_used(state)
        steps = committed(client)
        told = {iteration for step in steps for iteration in range(step["first"], step["last"] + 1)}
        assert told == set(range(1, max(told) + 1)), "no iteration is missing"
        assert sum(step["redone"] for step in steps) == 0, "nothing was computed again"
        client.uncordon(node, reason="done")
        await until(dev, "the node may have workers", lambda s: s.nodes[node].schedulable)

        victim, iteration = members(state)[1], state.tasks[TASK].iteration + 40
        answer = await inject(dev).nan(task=TASK, rank=1).at_iteration(iteration)
        assert answer["worker"] == victim
        state = await whole(dev, incidents=1)
        spoilt = state.closed[0]
        assert (spoilt.kind, spoilt.worker, spoilt.severity) == ("nan_loss", victim, Severity.SEV2)
        assert f"iteration {iteration}" in spoilt.place and victim not in members(state)

        victim = members(state)[2]
        await inject(dev).kill(task=TASK, rank=2).during("reduce")
        state = await whole(dev, incidents=2)
        assert (state.closed[1].kind, state.closed[1].worker) == ("process_exit", victim)

        node = state.tasks[TASK].workers[members(state)[0]].node
        with pytest.raises(Refused, match="at_iteration: 1 is past"):
            inject(client).exception(task=TASK).at_iteration(1).now()
        inject(client).kill(node=node).now()
        state = await whole(dev, incidents=3)
        assert (state.closed[2].kind, state.closed[2].severity) == ("node_lost", Severity.SEV1)
        assert not state.injections

        # The fake driver's word, by the way that a real one's takes.
        victim = members(state)[1]
        await inject(dev).xid(94, task=TASK, rank=1)
        state = await whole(dev, incidents=4)
        contained = state.closed[3]
        assert (contained.kind, contained.worker, contained.severity) == ("gpu_fault", victim, Severity.SEV2)
        assert "XID 94" in contained.message and victim not in members(state)
        node = state.tasks[TASK].workers[members(state)[0]].node
        await inject(dev).xid(79, node=node)
        state = await whole(dev, incidents=5)
        broken = state.closed[4]
        assert (broken.kind, broken.node, broken.severity) == ("gpu_broken", node, Severity.SEV1)
        assert state.nodes[node].isolations == 1 and node not in nodes_used(state)
