"""`unicronctl reshape` with all real parts: a task in training gets another tp and pp, then another size, in place."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.replay.command import unicron_replay
from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.ctl.client import ApiError, Client
from unicrond.ctl.main import main as unicronctl
from unicrond.local.dev import DevCluster, small_cluster

TIMEOUT_S = 180.0
TASK = {
    "model": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16},
    "global_batch": 8,
    "iterations": 1_000_000,
    "checkpoint": {"interval": 0, "memory_interval": 100_000},  # nothing but the handover is ever saved
}


async def until(dev: DevCluster, what: str, holds: Callable[[Task], object], name: str = "big") -> ClusterState:
    deadline, state = time.monotonic() + TIMEOUT_S, ClusterState()
    while time.monotonic() < deadline:
        with contextlib.suppress(ApiError):
            state, _ = await dev.state()
            task = state.tasks.get(name)  # the API answers a submission before it is folded
            assert task is None or (task.status is TaskStatus.ACTIVE and not state.incidents_total), (
                state.closed_incidents
            )
            if task is not None and holds(task):
                return state
        await asyncio.sleep(0.05)
    raise AssertionError(f"waited {TIMEOUT_S:g} s for: {what}; {state.tasks}")


def trains(task: Task, form: tuple[int, int, int], beyond: int) -> bool:
    """With that tp, pp and number of workers, past iteration `beyond`."""
    members = task.membership.members if task.membership else ()
    as_asked = (task.spec.tp, task.spec.pp, len(members)) == form and task.reshaping.reshape is None
    return (
        as_asked
        and task.confirmed
        and task.progress.committed_generation == task.generation
        and task.progress.iteration > beyond
    )


def told(client: Client, kind: str) -> list[dict[str, Any]]:
    return [event.envelope["event"] for event in client.events() if event.type == kind]


async def reshape(dev: DevCluster, *flags: str) -> None:
    assert await asyncio.to_thread(unicronctl, ["--url", dev.url, "reshape", "big", *flags]) == 0


async def check_story(dev: DevCluster, reshapes: list[tuple[int, int, int]]) -> None:
    """By the log: no iteration is missing or done twice, state came from memory, every decision can be made again."""
    client = Client(dev.url)
    steps = [step for step in told(client, "StepCommitted") if step["task"] == "big"]
    ran = [(step["first"], step["last"]) for step in steps]
    assert ran[0][0] == 1 and all(last + 1 == first for (_, last), (first, _) in pairwise(ran))
    assert sum(step["micro_batches_repeated"] for step in steps) == 0
    assert all(step["samples"] == 8 * (step["last"] - step["first"] + 1) for step in steps)
    taken = [event for event in told(client, "StateLoaded") if event["resharded_from"]]
    assert {event["source"] for event in taken} == {"peer"} and not told(client, "CheckpointSaved")
    assert [(e["tp"], e["pp"], e["max_workers"]) for e in told(client, "TaskReshaped")] == reshapes
    verified = await asyncio.to_thread(unicron_replay, "verify", "--nats", dev.nats_url)
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.timeout(600)
async def test_reshape_command_changes_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with small_cluster(tmp_path, nodes=1, slots=2, heartbeat_s=2.0) as dev:
        await dev.submit({**TASK, "name": "big", "max_workers": 2, "env": {"XDG_CACHE_HOME": str(tmp_path / "cache")}})
        await until(dev, "two replicas train", lambda task: trains(task, (1, 1, 2), 5))
        await reshape(dev, "--tp", "2")
        await until(dev, "one of two workers", lambda task: trains(task, (2, 1, 2), 10))
        await check_story(dev, [(2, 1, 2)])
        assert unicronctl(["--url", dev.url, "reshape", "big", "--tp", "4"]) == 1
        assert "tp: 4 workers of a stage share a node, and no node has more than 2 slots" in capsys.readouterr().err


@pytest.mark.matrix
@pytest.mark.timeout(600)
async def test_task_reshapes_repeatedly(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, nodes=2, slots=2, heartbeat_s=2.0) as dev:
        env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        await dev.submit({**TASK, "name": "big", "max_workers": 4, "env": env})
        await until(dev, "four replicas train", lambda task: trains(task, (1, 1, 4), 10))
        await reshape(dev, "--tp", "2")
        state = await until(dev, "tp 2", lambda task: trains(task, (2, 1, 4), 15))
        at = state.tasks["big"].progress.iteration
        await reshape(dev, "--tp", "1", "--pp", "2", "--reason", "one GPU is small")
        state = await until(dev, "pp 2", lambda task: trains(task, (1, 2, 4), at + 5))
        stay, at = state.tasks["big"].membership, state.tasks["big"].progress.iteration
        assert stay is not None
        await reshape(dev, "--max-workers", "2")
        state = await until(dev, "one replica of the two", lambda task: trains(task, (1, 2, 2), at + 5))
        left, at = state.tasks["big"].membership, state.tasks["big"].progress.iteration
        assert left is not None and {m.worker for m in left.members} < {m.worker for m in stay.members}
        await reshape(dev, "--max-workers", "4")
        state = await until(dev, "two replicas", lambda task: trains(task, (1, 2, 4), at + 5))
        again = state.tasks["big"].membership
        assert again is not None and {m.worker for m in left.members} < {m.worker for m in again.members}

        # Another task is worth more: half of the workers move to it, and come back when it ends.
        at = state.tasks["big"].progress.iteration
        await dev.submit({**TASK, "name": "other", "weight": 9, "max_workers": 2, "env": env})
        state = await until(dev, "big makes room", lambda task: trains(task, (1, 2, 2), at + 5))
        left = state.tasks["big"].membership
        assert left is not None and {m.worker for m in left.members} < {m.worker for m in again.members}
        await until(dev, "other trains", lambda task: task.progress.iteration > 5 and len(task.workers) == 2, "other")
        at = state.tasks["big"].progress.iteration
        assert await asyncio.to_thread(unicronctl, ["--url", dev.url, "cancel", "other"]) == 0
        state = await until(dev, "big has all again", lambda task: trains(task, (1, 2, 4), at + 5))
        again = state.tasks["big"].membership
        assert again is not None and {m.worker for m in left.members} < {m.worker for m in again.members}

        await check_story(dev, [(2, 1, 4), (1, 2, 4), (1, 2, 2), (1, 2, 4)])
        client = Client(dev.url)
        taken = [event["resharded_from"] for event in told(client, "StateLoaded") if event["resharded_from"]]
        assert set(taken) == {"tp 1, pp 1", "tp 2, pp 1"}
        assert told(client, "TaskReshaped")[1]["reason"] == "one GPU is small"
        reasons = [event["reason"] for event in told(client, "MembershipDecided")]
        assert any(reason == "tp 1, pp 1 becomes tp 2, pp 1: all leave" for reason in reasons)
