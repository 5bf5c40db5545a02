"""Nodes with GPUs of two types, with all real parts: a task is on one type, and goes to the other when its node dies.

There is no GPU here: the agents are told the types (`--gpu-type`), and the task's file says how much faster one is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.integration.test_layouts_cluster import decides_again, task_of, told_again, until
from tests.integration.test_reshape_cluster import trains
from unicrond.core.state.state import Task
from unicrond.ctl.client import Client
from unicrond.local.dev import DevCluster

GPUS = [{"gpu": "h100-80g", "layouts": [{"tp": 1, "throughput": {"1": 3 * 10**9, "2": 6 * 10**9}}]}]


def nodes_of(task: Task) -> set[str]:
    return {member.node for member in task.membership.members} if task.membership else set()


@pytest.mark.matrix
@pytest.mark.timeout(300)
async def test_task_moves_to_other_gpu_type_when_node_dies(tmp_path: Path) -> None:
    dev = DevCluster(tmp_path, nodes=2, slots=2, api_port=0, heartbeat_s=1.0)
    dev.agents["node1"].command += ["--gpu-type", "a100-80g"]
    dev.agents["node2"].command += ["--gpu-type", "h100-80g"]
    try:
        await dev.start()
        client = Client(dev.url)
        types = {"node1": "a100-80g", "node2": "h100-80g"}
        async with asyncio.timeout(30):
            while {node.name: node.gpu for node in (await dev.state())[0].nodes.values()} != types:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        table = {"1": 10**9, "2": 2 * 10**9}
        await dev.submit(task_of(tmp_path, min_workers=1, max_workers=4, throughput=table, gpus=GPUS))
        task = await until(dev, "it trains on the better type", lambda task: trains(task, (1, 1, 2), 12))
        assert nodes_of(task) == {"node2"}, "four workers on both types would be more, and are not one type"
        at = task.progress.iteration
        await dev.kill_node("node2")
        task = await until(dev, "it trains on the other", lambda task: trains(task, (1, 1, 2), at + 3))
        assert nodes_of(task) == {"node1"}
        at = task.progress.iteration
        await dev.bring_back("node2")
        task = await until(dev, "it trains on", lambda task: task.progress.iteration > at + 5)
        assert len(nodes_of(task)) == 1
        state, _ = await dev.state()
        assert told_again(client) == sum(one.iterations_lost for one in state.closed_incidents) <= 5, (
            "a capture every 5 iterations"
        )
        await decides_again(dev)
    finally:
        await dev.stop()
