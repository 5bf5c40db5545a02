"""Agents' pods of a DaemonSet: deleted, evicted, rolled, killed; and nothing else fails."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from tests.kubernetes.cluster import AGENTS, NAMESPACE, Cluster, cpu_s, up_on
from tests.kubernetes.test_heads import command_of, processes_of

pytestmark = [pytest.mark.kubernetes, pytest.mark.overlay("daemonset"), pytest.mark.timeout(900)]
Record = Callable[[str, str], None]
#: Minutes after which an overlay has settled.
_STANDS_S = 300.0
TOLD = ("NodeLeaving", "NodeLost", "WorkerExited", "ErrorReported", "NodeJoined")


async def test_overlay_daemonset_is_ready(whole_cluster: Cluster, record: Record) -> None:
    if whole_cluster.overlay:
        whole_cluster.tear_down()
    whole_cluster.make_volumes("daemonset")
    before_s, began_s = cpu_s(), time.monotonic()
    await asyncio.to_thread(whole_cluster.apply_in_order, "daemonset")
    applied_s = time.monotonic() - began_s
    await whole_cluster.train()
    trained_s, taken_s = time.monotonic() - began_s, cpu_s() - before_s
    await asyncio.to_thread(whole_cluster.until_rolled, AGENTS["daemonset"])
    assert not whole_cluster.restarts()
    record(
        "`kubectl apply -k` of `daemonset` on three machines, as the README has it, and a task at once",
        f"the head ready, `unicron-ca` made and agents applied after {applied_s:.0f} s; three workers have committed "
        f"five iterations {trained_s:.0f} s after the first command, with {taken_s:.0f} s of CPU in pods; 0 restarts",
    )


async def test_overlay_that_stands_has_no_warning(cluster: Cluster, record: Record) -> None:
    """Since its namespace was made: nothing of its start either."""
    await cluster.train()
    space = json.loads(await cluster.do("get", "namespace", NAMESPACE, "-o", "json"))
    born_s = datetime.fromisoformat(space["metadata"]["creationTimestamp"]).timestamp()
    await asyncio.sleep(max(born_s + _STANDS_S - time.time(), 0.0))
    events = json.loads(await cluster.do("get", "events", "-o", "json"))["items"]
    warnings = [f"{event['reason']} {event['message']}" for event in events if event["type"] != "Normal"]
    assert events and not warnings, warnings
    record(
        f"`daemonset` stands for {_STANDS_S / 60:.0f} minutes, then `kubectl get events`",
        f"{len(events)} events, none of them a warning",
    )


@pytest.mark.parametrize("words", [("--wait=false",), ("--force", "--grace-period=0", "--wait=false")])
async def test_deleted_pod_loses_no_work(cluster: Cluster, record: Record, words: tuple[str, ...]) -> None:
    await cluster.train()
    before, pod = await cluster.boots(), cluster.pod_on("n1")
    watch = await cluster.watch()
    watch.act()
    await cluster.do("delete", "pod", pod, *words)
    whole_s = await watch.whole(also=up_on("n1", boots=before))
    is_forced = "--force" in words
    record(
        f"`kubectl delete pod{' --force' if is_forced else ''}` of an agent",
        f"told at {watch.told(*TOLD):.1f} s, whole after {whole_s:.1f} s; {await watch.clean()}",
    )


async def test_evicted_pod_loses_no_work(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    before, pod = await cluster.boots(), cluster.pod_on("n2")
    watch = await cluster.watch()
    watch.act()
    await cluster.evict(pod)
    whole_s = await watch.whole(also=up_on("n2", boots=before))
    record(
        "eviction by the API: a DaemonSet's pod",
        f"told at {watch.told(*TOLD):.1f} s, whole after {whole_s:.1f} s; {await watch.clean()}",
    )


async def test_killed_worker_and_agent_are_replaced_in_place(cluster: Cluster, record: Record) -> None:
    state = await cluster.train()
    (pid,) = (worker.pid for worker in state.tasks["big"].workers.values() if worker.node == "n1")
    watch = await cluster.watch()
    watch.act()
    await asyncio.to_thread(cluster.inside, cluster.pod_on("n1"), "sh", "-c", f"kill -9 {pid}")
    whole_s = await watch.whole()
    record("`kill -9` of a worker", f"told at {watch.told(*TOLD):.1f} s, whole after {whole_s:.1f} s")

    await cluster.train()
    before, watch = await cluster.boots(), await cluster.watch()
    pod = cluster.pod_on("n1")
    agent = cluster.pid_inside(pod, "cmdline", "[-]-supervise")
    assert agent, "no agent runs there"
    watch.act()
    await asyncio.to_thread(cluster.inside, pod, "sh", "-c", f"kill -9 {agent}")
    state = await cluster.until("the next agent", up_on("n1", boots=before))
    joined_s = watch.told("NodeJoined")
    record(
        "the agent killed in its container",
        f"the next one has joined after {joined_s:.1f} s, with the same worker; {await watch.clean()}",
    )


async def test_killed_first_process_is_followed_in_place(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    before, watch = await cluster.boots(), await cluster.watch()
    (first,) = (pid for pid in processes_of("n1") if b"/enter\0unicron-agent\0" in command_of(pid))
    watch.act()
    os.kill(first, signal.SIGKILL)
    whole_s = await watch.whole(also=up_on("n1", boots=before))
    (said,) = watch.said("WorkerExited")
    record(
        "process 1 of an agent's container killed from outside",
        f"told at {watch.told('WorkerExited'):.1f} s, whole after {whole_s:.1f} s: *{said}*",
    )


async def test_lost_machine_is_healed(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    node, watch = cluster.machine_without_head(), await cluster.watch()
    watch.act()
    cluster.machine.link(node, "down")
    try:
        await cluster.until("the loss", lambda state: not up_on(node)(state))
        rest_s = await watch.whole(workers=2)
        await asyncio.sleep(20 - rest_s if rest_s < 20 else 0)
    finally:
        cluster.machine.link(node, "up")
    back_s = await watch.whole(also=up_on(node))
    state = await cluster.training(None)
    assert not any(node.isolation.active for node in state.nodes.values())
    record(
        "an agent's machine away for 20 s",
        f"lost at {watch.told('NodeLost'):.1f} s, the others train on at {rest_s:.1f} s; all three {back_s:.1f} s "
        "after the act, not isolated",
    )


async def test_worker_over_the_memory_limit_ends_alone(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    pod, restarts, watch = cluster.pod_on("n1"), cluster.restarts(), await cluster.watch()
    watch.act()
    (cluster.volumes / "unicron-checkpoints" / "orders" / pod).touch()
    whole_s = await watch.whole()
    (exited,) = (line.envelope["event"] for line in watch.lines("WorkerExited"))
    assert exited["cause"] == "oom_killed", exited
    assert not watch.lines("NodeLost", "NodeIsolated") and cluster.restarts() == restarts
    record(
        "a worker eats up to its container's limit",
        f"told at {watch.told('WorkerExited'):.1f} s as `oom_killed`, whole after {whole_s:.1f} s; nothing else ended",
    )


async def test_worker_gets_nothing_by_the_files_of_its_pod(cluster: Cluster, record: Record) -> None:
    """All that the agent's user may read, the agent's key among it, tried against the log, the API and Kubernetes."""
    await cluster.train()
    watch = await cluster.watch()
    watch.act()
    shutil.copy(Path(__file__).with_name("thief.py"), cluster.volumes / "unicron-checkpoints")
    words = ("python", "-P", "/checkpoints/thief.py", "n1", "n2")
    text = await asyncio.to_thread(cluster.inside, cluster.pod_on("n1"), *words)
    tries = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    print(text)
    assert len(tries) == 18 and all(outcome.startswith("refused") for outcome in tries.values()), text
    await watch.clean()
    record(
        "a worker tries what its pod's files allow: the agent's key, the CA (`tests/kubernetes/thief.py`)",
        f"{len(tries)} tries, all refused: others' observations, decisions, commands, the log, another node's name, "
        "the API, Kubernetes; training goes on",
    )
