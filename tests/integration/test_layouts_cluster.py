"""Layouts that the plan chooses, with all real parts: a node dies, a task comes, and nobody asks for a reshape.

The phases are short: what is measured on a machine of two cores would soon tell the plan that small replicas are best.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live import printed_by
from tests.integration.test_reshape_cluster import TASK, told, trains
from tests.replay.command import unicron_replay
from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.ctl.client import ApiError, Client
from unicrond.ctl.inject import inject
from unicrond.local.dev import DevCluster, small_cluster

TIMEOUT_S = 180.0
#: Captures in memory now and then: where a shard is lost the rest is put together from these.
SAVING = {**TASK, "checkpoint": {"interval": 0, "memory_interval": 5}}
#: Pairs are much the better on four workers; on two singles are, whose micro-batches are larger.
BY_TABLE = [
    {"tp": 2, "throughput": {"2": 10**9, "4": 4 * 10**9}},
    {"tp": 1, "micro_batch": 2, "throughput": {"1": 8 * 10**8, "2": 16 * 10**8, "3": 17 * 10**8}},
]


async def until(
    dev: DevCluster, what: str, holds: Callable[[Task], object], name: str = "big", timeout_s: float = TIMEOUT_S
) -> Task:
    deadline, state = time.monotonic() + timeout_s, ClusterState()
    while time.monotonic() < deadline:
        with contextlib.suppress(ApiError):
            state, _ = await dev.state()
            task = state.tasks.get(name)
            assert task is None or task.status is TaskStatus.ACTIVE, task
            if task is not None and holds(task):
                return task
        await asyncio.sleep(0.05)
    raise AssertionError(f"waited {timeout_s:g} s for: {what}; {state.tasks}")


async def decides_again(dev: DevCluster) -> None:
    verified = await asyncio.to_thread(unicron_replay, "verify", "--nats", dev.nats_url)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def told_again(client: Client, task: str = "big") -> int:
    """How many iterations were reported twice. Each has all its samples; none is missing but what a lead whose node
    died had done in its last second or two: its agent had not told it (`AgentConfig.commit_interval_s`)."""
    steps = [step for step in told(client, "StepCommitted") if step["task"] == task]
    pace_us = min(step["duration_us"] / (step["last"] - step["first"] + 1) for step in steps)
    reached, twice, node = 0, 0, ""
    for step in steps:
        gap = max(0, step["first"] - (reached + 1))
        assert not gap or (step["node"] != node and gap * pace_us <= 2_000_000), (reached, step)
        assert step["samples"] == 8 * (step["last"] - step["first"] + 1)
        twice += 0 if gap else reached + 1 - step["first"]
        reached, node = step["last"], step["node"]
    return twice


def newest_copy(client: Client, lost_node: str, task: str = "big") -> int:
    """The newest iteration of which other nodes had told that they keep every shard, when that node was lost."""
    shards: dict[int, set[int]] = {}
    whole = 0
    for event in client.events():
        body = event.envelope["event"]
        if event.type == "NodeLost" and body["node"] == lost_node:
            break
        if event.type == "SnapshotStored" and body["task"] == task and body["node"] != lost_node:
            kept = shards.setdefault(body["iteration"], set())
            kept.add(body["shard"])
            whole = max(whole, body["iteration"]) if len(kept) == body["shards"] else whole
    return whole


def task_of(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {**SAVING, "name": "big", "env": {"XDG_CACHE_HOME": str(tmp_path / "cache")}, **more}


@pytest.mark.timeout(600)
async def test_node_loss_moves_task_to_best_layout_and_back(tmp_path: Path) -> None:
    """tp 2 on 2 nodes of 2 slots: two pairs, then two singles, then two pairs. No step is lost."""
    async with small_cluster(tmp_path, nodes=2, slots=2, heartbeat_s=2.0) as dev:
        await dev.submit(task_of(tmp_path, tp=2, min_workers=1, max_workers=4, layouts=BY_TABLE))
        task = await until(dev, "two pairs train", lambda task: trains(task, (2, 1, 4), 3))
        at, node = task.progress.iteration, task.membership.members[0].node  # type: ignore[union-attr]
        await dev.kill_node(node)
        task = await until(dev, "two singles train", lambda task: trains(task, (1, 1, 2), at + 2))
        at = task.progress.iteration
        assert task.spec.micro_batch == 2
        await dev.bring_back(node)
        task = await until(dev, "two pairs train again", lambda task: trains(task, (2, 1, 4), at + 2))
        assert task.spec.micro_batch == 1
        client = Client(dev.url)
        reshapes = [(e["tp"], e["plan"] > 0) for e in told(client, "TaskReshaped")]
        assert reshapes[-2:] == [(1, True), (2, True)], "before these the nodes came one by one"
        assert told(client, "ReshapeRequested") == []
        assert told_again(client) <= 1, "the lead died, and the next one told of the step that it did not know was told"
        state, _ = await dev.state()
        assert [one.iterations_lost for one in state.closed_incidents] == [0]
        assert [one.micro_batches_lost for one in state.closed_incidents] == [0], (
            "the surviving pair has finished the iteration"
        )
        assert all(one.micro_batches_repeated <= 4 for one in state.closed_incidents), (
            "what the other pair was dealt, at most"
        )
        await decides_again(dev)


@pytest.mark.matrix
@pytest.mark.timeout(600)
async def test_pipeline_that_loses_stage_continues_without_stages(tmp_path: Path) -> None:
    """pp 2 on two nodes: what is left of the state lies in memory, and one worker puts it together."""
    async with small_cluster(tmp_path, nodes=2, slots=1, heartbeat_s=1.0) as dev:
        layouts = [{"pp": 2, "throughput": {"2": 4 * 10**9}}, {"pp": 1, "throughput": {"1": 10**9}}]
        await dev.submit(task_of(tmp_path, pp=2, min_workers=1, max_workers=2, layouts=layouts))
        task = await until(dev, "two stages train", lambda task: trains(task, (1, 2, 2), 12))
        at, node = task.progress.iteration, task.membership.members[1].node  # type: ignore[union-attr]
        await dev.kill_node(node)
        await until(dev, "one worker trains", lambda task: trains(task, (1, 1, 1), at + 3))
        await dev.bring_back(node)
        await until(dev, "both nodes train", lambda task: len(task.workers) == 2 and task.confirmed)
        client = Client(dev.url)
        # Where the nodes join one by one, it begins with one stage.
        taken = [event for event in told(client, "StateLoaded") if event["resharded_from"] == "tp 1, pp 2"]
        assert taken and taken[0]["source"] in ("memory", "peer")
        state, _ = await dev.state()
        lost = sum(one.iterations_lost for one in state.closed_incidents)
        assert taken[0]["iteration"] >= newest_copy(client, node) > 0
        assert told_again(client) == lost <= 10, "a capture is kept every five iterations, the newest may be on its way"
        await decides_again(dev)


@pytest.mark.timeout(600)
async def test_rank_that_hangs_inside_its_replica_is_named(tmp_path: Path) -> None:
    """By gloo's flight recorders: its neighbour waits for it in a collective of the program's, which no mark tells."""
    async with small_cluster(tmp_path, nodes=2, slots=2, heartbeat_s=2.0, settings={"injection": True}) as dev:
        await dev.submit(task_of(tmp_path, tp=2, min_workers=4, max_workers=4))
        task = await until(dev, "two pairs train", lambda task: trains(task, (2, 1, 4), 8))
        assert task.membership is not None
        culprit = task.membership.members[3]
        assert (culprit.shard, culprit.replica != task.membership.members[0].replica) == (1, True)
        await inject(dev.url).hang(task="big", rank=3).during("forward")
        at = task.progress.iteration
        await until(dev, "two pairs train again", lambda task: trains(task, (2, 1, 4), at + 8) and task.generation > 1)
        state, _ = await dev.state()
        (incident,) = state.closed_incidents
        assert incident.kind == "hang"
        page = await printed_by("unicronctl", "--url", dev.url, "story", "incident", incident.id)
        lines = [line.strip() for line in page.splitlines() if line.startswith("  in replica")]
        assert lines == [
            f"in replica {culprit.replica} rank 1 did not begin what the others wait in: {culprit.worker}"
        ], page


@pytest.mark.matrix
@pytest.mark.timeout(600)
async def test_reshape_frees_worker_for_other_task(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, nodes=2, slots=2, heartbeat_s=2.0) as dev:
        layouts = [{"tp": 2}, {"tp": 1}]
        await dev.submit(task_of(tmp_path, tp=2, min_workers=1, max_workers=4, layouts=layouts))
        task = await until(dev, "two pairs train", lambda task: trains(task, (2, 1, 4), 3))
        at = task.progress.iteration
        await dev.submit(task_of(tmp_path, name="small", weight=5))
        await until(dev, "small trains", lambda task: task.progress.iteration > 2, "small")
        await until(dev, "three singles train", lambda task: trains(task, (1, 1, 3), at + 2))
        client = Client(dev.url)
        assert [(e["task"], e["tp"]) for e in told(client, "TaskReshaped")] == [("big", 1)]
        assert told_again(client) == 0
        await decides_again(dev)


@pytest.mark.matrix
@pytest.mark.timeout(600)
async def test_plan_chooses_micro_batch_size(tmp_path: Path) -> None:
    """Two workers do better with small ones, one alone with large ones; tp and pp stay."""
    layouts = [
        {"throughput": {"1": 8 * 10**8, "2": 4 * 10**9}},
        {"micro_batch": 2, "throughput": {"1": 2 * 10**9, "2": 25 * 10**8}},
    ]
    async with small_cluster(tmp_path, nodes=2, slots=1, heartbeat_s=1.0) as dev:
        await dev.submit(task_of(tmp_path, max_workers=2, layouts=layouts))
        task = await until(dev, "two train", lambda task: trains(task, (1, 1, 2), 3) and task.spec.micro_batch == 1)
        at, node = task.progress.iteration, task.membership.members[0].node  # type: ignore[union-attr]
        await dev.kill_node(node)
        await until(dev, "one trains", lambda task: trains(task, (1, 1, 1), at + 2) and task.spec.micro_batch == 2)
        await dev.bring_back(node)
        await until(dev, "two train again", lambda task: trains(task, (1, 1, 2), at + 2) and task.spec.micro_batch == 1)
        client = Client(dev.url)
        reshapes = [(e["micro_batch"], e["plan"] > 0) for e in told(client, "TaskReshaped")]
        assert reshapes[-2:] == [(2, True), (1, True)]
        assert told_again(client) <= 1, "the lead died, and the next one told of the step that it did not know was told"
        assert not any(e["resharded_from"] for e in told(client, "StateLoaded")), "the cut is the same"
        await decides_again(dev)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["all leave", "state taken"])
async def test_reshape_survives_killed_worker(tmp_path: Path, moment: str) -> None:
    """As it is told to hand over, or as the first of the new ones has put the state together."""
    kinds = {"all leave": "MembershipDecided", "state taken": "StateLoaded"}

    async with small_cluster(tmp_path, nodes=2, slots=2, heartbeat_s=1.0) as dev:
        client = Client(dev.url)

        async def happens(since: int) -> None:
            deadline = time.monotonic() + TIMEOUT_S
            while time.monotonic() < deadline:
                new = await asyncio.to_thread(lambda: list(client.events(since)))
                if any(event.type == kinds[moment] and moment in told_as(event.envelope["event"]) for event in new):
                    return
                await asyncio.sleep(0.005)
            raise AssertionError(f"waited {TIMEOUT_S:g} s for: {moment}")

        def told_as(event: dict[str, Any]) -> str:
            return str(event["reason"]) if "reason" in event else "state taken" * bool(event["resharded_from"])

        await dev.submit(task_of(tmp_path, tp=2, min_workers=1, max_workers=4, layouts=BY_TABLE))
        task = await until(dev, "two pairs train", lambda task: trains(task, (2, 1, 4), 12))
        state, _ = await dev.state()
        at, node = task.progress.iteration, task.membership.members[0].node  # type: ignore[union-attr]
        await dev.kill_node(node)
        await happens(state.seq)
        state, _ = await dev.state()
        living = [(name, w.pid) for name, w in state.tasks["big"].workers.items() if w.pid and w.node != node]
        with contextlib.suppress(ProcessLookupError):
            os.kill(living[0][1], signal.SIGKILL)
        await until(dev, "two singles train", lambda task: trains(task, (1, 1, 2), at + 2))
        state, _ = await dev.state()
        lost = sum(one.iterations_lost for one in state.closed_incidents)
        assert lost <= 10, "a capture is kept every five iterations, the newest may be on its way"
        put_together = [event["iteration"] for event in told(client, "StateLoaded") if event["resharded_from"]]
        assert max(put_together) >= newest_copy(client, node) > 0
        assert told_again(client) <= lost + 1
        (killed,) = [e for e in told(client, "WorkerExited") if e["worker"] == living[0][0]]
        assert killed["signal"] == signal.SIGKILL, "it had not ended by itself"
        await decides_again(dev)
