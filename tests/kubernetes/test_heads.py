"""The head's pod on a DaemonSet's cluster: killed, deleted, rolled; its machine dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.containers.cluster import Watch
from tests.containers.oci import cgroup_version
from tests.kubernetes.cluster import HEAD, Cluster, up_on
from tests.kubernetes.machine import NODES, wait_until

pytestmark = [pytest.mark.kubernetes, pytest.mark.overlay("daemonset"), pytest.mark.timeout(900)]
Record = Callable[[str, str], None]


async def decides_again(cluster: Cluster, watch: Watch, starts: int) -> float:
    """Return the seconds from the act until another head leads, by the log; its API answers, and no node is lost."""

    def holds() -> bool:
        return cluster.is_live() and len(watch.lines("CoordinatorStarted")) >= starts

    await asyncio.to_thread(wait_until, holds, 150, "new head")
    await cluster.training(None)
    assert not watch.lines("NodeLost"), watch.said("NodeLost")
    return watch.told("CoordinatorStarted")


async def test_head_that_ends_is_followed(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    for act, words in {
        "the head's pod deleted": ("delete", "pod", HEAD, "--wait=false"),
        "the same, `--force`": ("delete", "pod", HEAD, "--force", "--grace-period=0", "--wait=false"),
        "`kubectl rollout restart` of the head": ("rollout", "restart", "statefulset/unicron-head"),
    }.items():
        watch = await cluster.watch()
        watch.act()
        await cluster.do(*words)
        after_s = await decides_again(cluster, watch, 1)
        await asyncio.to_thread(cluster.until_rolled, "statefulset/unicron-head")
        record(act, f"the next head decides {after_s:.1f} s after it; no node lost, training goes on")


async def test_killed_server_of_head_is_replaced(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    watch = await cluster.watch()
    server = await asyncio.to_thread(server_of_head, cluster)
    assert server, "the head has no nats-server"
    watch.act()
    await asyncio.to_thread(cluster.inside, HEAD, "sh", "-c", f"kill -9 {server}")

    def is_replaced() -> bool:
        return server_of_head(cluster) not in ("", server) and cluster.is_live()

    await asyncio.to_thread(wait_until, is_replaced, 30, "live head on another server")
    live_s = time.monotonic() - watch.began_s
    await cluster.training(None)
    assert not watch.lines("NodeLost"), watch.said("NodeLost")
    record("the head's nats-server killed", f"live again after {live_s:.1f} s, no node lost")


def server_of_head(cluster: Cluster) -> str:
    """Return the process id of the head's nats-server, "" where it has none."""
    return cluster.pid_inside(HEAD, "comm", "^nats-server$")


def processes_of(node: str) -> list[int]:
    """Return all that runs in pods of a machine, by cgroups of either version."""
    place = "" if cgroup_version() == 2 else "memory/"
    processes = []
    for path in Path("/sys/fs/cgroup").glob(f"{place}unicron-kubernetes-{node}/**/cgroup.procs"):
        with contextlib.suppress(OSError):
            processes += [int(pid) for pid in path.read_text().split()]
    return [pid for pid in processes if pid > 0]


async def test_dead_machine_of_head_is_left(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    node = cluster.pods("unicron-head")[HEAD]["spec"]["nodeName"]
    machine, watch = cluster.machine, await cluster.watch()
    watch.act()
    machine.link(node, "down")
    machine.stop(f"kubelet-{node}")
    processes = processes_of(node)
    assert processes, f"no cgroup of {node} holds a process"
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    try:
        not_ready = lambda: "NotReady" in machine.kubectl("get", "node", node, "--no-headers")  # noqa: E731
        not_ready_s = await asyncio.to_thread(wait_until, not_ready, 120, "NotReady")
        machine.kubectl("taint", "node", node, taint)

        def is_elsewhere() -> bool:
            pod = cluster.pods("unicron-head").get(HEAD, {})
            return bool(pod) and pod["spec"].get("nodeName") not in (None, node) and pod["status"]["phase"] == "Running"

        await asyncio.to_thread(wait_until, is_elsewhere, 150, "new pod")
        moved_s = time.monotonic() - watch.began_s
        await asyncio.to_thread(wait_until, cluster.is_live, 150, "live head")
        live_s = max(watch.told("CoordinatorStarted"), moved_s)  # a pod that runs is seen a moment later
    finally:
        machine.link(node, "up")
        machine.restart(f"kubelet-{node}")
        machine.kubectl("taint", "node", node, f"{taint}-")
    await asyncio.to_thread(machine.until_ready)
    await cluster.until("all agents", up_on(*NODES))
    await cluster.training(None)
    record(
        "the head's machine dead; the out-of-service taint as soon as Kubernetes says NotReady",
        f"NotReady after {not_ready_s:.0f} s; the new pod runs at {moved_s:.0f} s, its head is live "
        f"{live_s - moved_s:.1f} s later; whole again once the machine is back",
    )


async def test_head_on_another_machine_waits_for_the_first(cluster: Cluster, record: Record) -> None:
    """The first one's machine is cut off and not dead: nobody may take its store, and nobody ends for that."""
    await cluster.train()
    node = cluster.pods("unicron-head")[HEAD]["spec"]["nodeName"]
    server = next(pid for pid in processes_of(node) if name_of(pid) == "nats-server")
    machine, watch = cluster.machine, await cluster.watch()
    watch.act()
    machine.link(node, "down")
    taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    try:
        not_ready = lambda: "NotReady" in machine.kubectl("get", "node", node, "--no-headers")  # noqa: E731
        await asyncio.to_thread(wait_until, not_ready, 120, "NotReady")
        machine.kubectl("taint", "node", node, taint)

        def waits() -> bool:
            return "is in use by another head" in cluster.kubectl("logs", HEAD)

        await asyncio.to_thread(wait_until, waits, 150, "head that waits")
        assert not cluster.is_live() and name_of(server) == "nats-server"
    finally:
        machine.link(node, "up")
        back_s = time.monotonic()
        machine.kubectl("taint", "node", node, f"{taint}-")
    await asyncio.to_thread(wait_until, lambda: name_of(server) != "nats-server", 90, "end of the first server")
    ended_s = time.monotonic()
    has_begun = lambda: cluster.is_live() and bool(watch.lines("CoordinatorStarted"))  # noqa: E731
    await asyncio.to_thread(wait_until, has_begun, 60, "new head")
    led_s = watch.began_s + watch.told("CoordinatorStarted")
    (status,) = cluster.pods("unicron-head")[HEAD]["status"]["containerStatuses"]
    assert not status["restartCount"], status
    await asyncio.to_thread(machine.until_ready)
    await cluster.until("all agents", up_on(*NODES))
    await cluster.training(None)
    record(
        "the head's machine cut off, not dead, and the same taint; then back",
        f"the new head waits, alive and not ready, without a restart; it leads {led_s - ended_s:.1f} s after the first "
        f"one's server has ended, {led_s - back_s:.1f} s after the machine is back",
    )


def name_of(pid: int) -> str:
    """Return the name of a process, "" where there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def command_of(pid: int) -> bytes:
    """Return the command line of a process, empty where there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
