"""Kubernetes' own parts away: DNS, API server, kubelet, kube-proxy, containerd. Nobody is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.kubernetes.cluster import HEAD, Cluster
from tests.kubernetes.test_heads import decides_again

pytestmark = [pytest.mark.kubernetes, pytest.mark.overlay("daemonset"), pytest.mark.timeout(900)]
Record = Callable[[str, str], None]


async def test_head_deleted_while_names_are_silent_loses_nobody(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    watch = await cluster.watch()
    cluster.machine.stop("coredns")
    try:
        watch.act()
        await cluster.do("delete", "pod", HEAD, "--wait=false")
        after_s = await decides_again(cluster, watch, 1)
        await asyncio.sleep(max(60 - after_s, 0))
    finally:
        cluster.machine.go_on("coredns")
    await cluster.training(None)
    assert not watch.lines("NodeLost"), watch.said("NodeLost")
    record(
        "DNS silent for 60 s, the head's pod deleted in it",
        f"the next head decides {after_s:.1f} s after the deletion; no node lost, training goes on",
    )


@pytest.mark.parametrize("seconds", [120])
async def test_api_server_that_stands_still_changes_nothing(cluster: Cluster, record: Record, seconds: int) -> None:
    await cluster.train()
    watch = await cluster.watch()
    cluster.machine.stop("kube-apiserver")
    try:
        await asyncio.sleep(seconds)
    finally:
        cluster.machine.go_on("kube-apiserver")
    await asyncio.to_thread(cluster.machine.until_ready)
    await cluster.training(None)
    told = watch.lines("NodeLost", "NodeCordoned", "NodeLeaving", "CoordinatorStarted")
    assert not told, [line.summary for line in told]
    record(f"the API server stands still for {seconds} s", "no node lost or cordoned, training goes on")


async def test_restarted_daemons_of_machine_change_nothing(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    watch = await cluster.watch()
    for name in ("kubelet", "kube-proxy", "containerd"):
        cluster.machine.restart(f"{name}-n1")
        await asyncio.sleep(5)
    await asyncio.to_thread(cluster.machine.until_ready)
    await cluster.training(None)
    told = watch.lines("NodeLost", "NodeCordoned", "NodeLeaving", "WorkerExited")
    assert not told, [line.summary for line in told]
    record("kubelet, kube-proxy and containerd of a machine killed and started again", "nothing follows from it")
