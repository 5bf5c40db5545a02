"""A node with a key of its own lies about a task that others train: nothing of it counts, and a person is called."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from tests.integration.head import UNICROND
from tests.integration.live import TASK, live_cluster, members
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.log.subjects import headers, subject
from unicrond.events.nats.connection import Login
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Envelope

LIAR = "liar"


def lies(state: ClusterState) -> list[v.AnyObservation]:
    """Return what would complete the task, evict each of its members, and take it back, if it were believed."""
    task, invented = state.tasks[TASK], {"node": LIAR, "task": TASK, "worker": f"{TASK}.999"}
    place = {"generation": task.generation, "iteration": task.progress.iteration + 1}
    steps = v.StepCommitted(
        **invented, generation=task.generation, first=1, last=task.spec.iterations, samples=1, samples_digest=1,
        loss=1.0, duration_us=1, micro_batches_by_rank=(1,),
    )  # fmt: skip
    accusations = [
        v.CorruptionSuspected(**invented, **place, sign="checksum", suspect=suspect, value=1.0, usual=1.0)
        for suspect in members(state)
        for _ in range(6)
    ]
    stop = v.StopRequested(**invented, iteration=1, reason="all is done", has_left_loop=True)
    end = v.TaskCompleted(**invented, iteration=task.spec.iterations, loss=1.0, params_digest="a" * 64)
    return [v.WorkerStarted(**invented, pid=1), *accusations, steps, stop, end]


def standing(state: ClusterState) -> tuple[Any, ...]:
    task = state.tasks[TASK]
    return task.status, task.generation, members(state), state.nodes.keys() - {LIAR}


@pytest.mark.timeout(600)
async def test_node_that_carries_nothing_changes_nothing(tmp_path: Path) -> None:
    async with live_cluster(tmp_path, nodes=2, workers=2, keys=True) as live:
        await live.submit(iterations=10**12)
        before = await live.training(0)
        key = tmp_path / "liar.key"
        enrol = (UNICROND, "enroll", LIAR, "--out", str(key), "--config", str(live.dev.config_path))
        assert await asyncio.wait_for((await asyncio.create_subprocess_exec(*enrol)).wait(), 30) == 0
        client = Client()
        await client.connect(f"nats://127.0.0.1:{live.dev.nats_port}", **Login(key=key).options())
        joined = v.NodeJoined(
            node=LIAR, address="127.0.0.1", slots=4, store=v.StoreAddress(host="127.0.0.1", port=1), agent_boot=1,
            version="1",
        )  # fmt: skip
        for number, event in enumerate([joined, *lies(before)], start=1):
            envelope = Envelope(producer=LIAR, boot=1, number=number, observed_at_us=1, event=event)
            reply = await client.request(subject(envelope), encode(envelope), timeout=10, headers=headers(envelope))
            assert b'"seq"' in reply.data, "the log holds it"
        await client.close()
        state = await live.until("all is read", lambda s: s.last_numbers.get(LIAR, (0, 0)) == (1, number))
        assert standing(state) == standing(before)
        assert state.refused_observations[LIAR].count >= 14
        alarms = await live.run("unicronctl", "--url", live.dev.url, "alarms")
        assert f"observations-refused:{LIAR}" in alarms, alarms
        after = await live.training(None)
        assert {incident.node for incident in after.closed_incidents} <= {LIAR}, "it has no agent that beats"
        assert standing(after) == standing(before) and not any(node.isolation.active for node in after.nodes.values())
