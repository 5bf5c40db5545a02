"""Pods that are deleted at random moments of their first seconds, on a cluster whose task trains on."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.kubernetes.cluster import AGENTS, HEAD, Cluster, up_on
from tests.kubernetes.machine import NODES
from unicrond.core.state.state import NodeStatus

pytestmark = [pytest.mark.kubernetes, pytest.mark.overlay("daemonset"), pytest.mark.timeout(1500)]
Record = Callable[[str, str], None]
FIRST_S, END_S = 3.0, 10.0
AGENTS_COUNT, HEADS_COUNT = 51, 10


async def _next(cluster: Cluster, app: str, node: str, old: str, *, runs: bool) -> dict[str, Any]:
    """Return the pod that follows another one (by uid) on a machine, "" for any, once it is there; `runs`: once its own
    container does."""
    words = ("get", "pods", "--selector", f"app={app}", "-o", "json")
    if node:
        words = (*words, "--field-selector", f"spec.nodeName={node}")
    while True:
        for pod in json.loads(await cluster.do(*words))["items"]:
            statuses = pod["status"].get("containerStatuses", ())
            is_there = not runs or any("running" in status["state"] for status in statuses)
            if pod["metadata"]["uid"] != old and "deletionTimestamp" not in pod["metadata"] and is_there:
                found: dict[str, Any] = pod
                return found
        await asyncio.sleep(0.1)


async def _deletions(cluster: Cluster, app: str, node: str, count: int) -> list[float]:
    """Delete one pod after another within its first seconds, from when it is there and from when its own container runs
    by turns; return the seconds that each took to end."""
    seconds: list[float] = []
    old = (await _next(cluster, app, node, "", runs=False))["metadata"]
    await cluster.do("delete", "pod", old["name"])
    for number in range(count):
        pod = (await _next(cluster, app, node, old["uid"], runs=number % 2 == 1))["metadata"]
        await asyncio.sleep(random.uniform(0.0, FIRST_S))
        began_s = time.monotonic()
        await cluster.do("delete", "pod", pod["name"])  # returns once it is gone
        seconds.append(time.monotonic() - began_s)
        old = pod
    return seconds


async def test_pods_obey_in_their_first_moments(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    boots = await cluster.boots()
    watch = await cluster.watch()
    watch.act()
    lists = await asyncio.gather(
        *(_deletions(cluster, "unicron-agent", node, AGENTS_COUNT // len(NODES)) for node in NODES)
    )
    seconds = [end_s for ends in lists for end_s in ends]
    await asyncio.to_thread(cluster.until_rolled, AGENTS["daemonset"])
    state = await cluster.until("all agents", up_on(*NODES, boots=boots))
    joined, left = len(watch.lines("NodeJoined")), len(watch.lines("NodeLeft"))
    # Of those that had not joined some say all the same that they leave.
    assert not watch.lines("NodeLost") and joined <= left, watch.said("NodeJoined", "NodeLeft", "NodeLost")
    assert {name for name, node in state.nodes.items() if node.status is NodeStatus.UP} == {*NODES}
    await cluster.training(None)
    head_seconds = await _deletions(cluster, "unicron-head", "", HEADS_COUNT)
    await asyncio.to_thread(cluster.until_rolled, "statefulset/unicron-head")
    await cluster.training(None)
    assert not watch.lines("NodeLost"), watch.said("NodeLost")
    slowest_s = max(*seconds, *head_seconds)
    assert slowest_s <= END_S, sorted(seconds + head_seconds)
    record(
        f"{len(seconds)} agents' pods and {len(head_seconds)} of `{HEAD}`, each deleted at a random moment of its "
        f"first {FIRST_S:g} s, or of its own container's",
        f"gone after {slowest_s:.1f} s at most; {joined - len(NODES)} of them had joined by then, and left in order; "
        "no node lost; the task trains again",
    )
