"""The other overlays: what each adds to `daemonset`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.containers.cluster import TASK
from tests.kubernetes.cluster import AGENTS, Cluster, up_on
from tests.kubernetes.machine import API, NODES, wait_until
from tests.kubernetes.test_heads import name_of, processes_of

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]
Record = Callable[[str, str], None]
STATEFUL = tuple(f"unicron-agent-{index}" for index in range(3))


@pytest.mark.overlay("node-object")
async def test_cordon_and_drain_of_machine_reach_cluster(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    machine, watch = cluster.machine, await cluster.watch()
    watch.act()
    try:
        await asyncio.to_thread(machine.kubectl, "cordon", "n1")
        await watch.whole(workers=2, also=lambda state: state.nodes["n1"].cordon.active)
        told_s = watch.told("MachineReported")
    finally:
        await asyncio.to_thread(machine.kubectl, "uncordon", "n1")
    await cluster.until("no cordon", lambda state: not state.nodes["n1"].cordon.active)
    await cluster.training(None)
    record(
        "`kubectl cordon`, which this overlay takes for a drain, and `uncordon`",
        f"drained after {told_s:.1f} s, three workers again after the uncordon; {await watch.clean()}",
    )


@pytest.mark.overlay("node-object")
async def test_taint_of_machine_that_will_go_drains_its_node(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    machine, watch, taint = cluster.machine, await cluster.watch(), "aws-node-termination-handler/spot-itn"
    watch.act()
    try:
        await asyncio.to_thread(machine.kubectl, "taint", "node", "n1", f"{taint}=soon:NoSchedule")
        drained_s = await watch.whole(workers=2, also=lambda state: state.nodes["n1"].cordon.active)
    finally:
        await asyncio.to_thread(machine.kubectl, "taint", "node", "n1", f"{taint}-")
    await cluster.until("no cordon", lambda state: not state.nodes["n1"].cordon.active)
    await cluster.training(None)
    record(
        f"a spot notice (taint `{taint}`) at a machine, taken back",
        f"drained after {drained_s:.1f} s, three workers again afterwards; {await watch.clean()}",
    )


@pytest.mark.overlay("node-object")
async def test_drain_and_return_are_events_of_node(cluster: Cluster, record: Record) -> None:
    told = await asyncio.to_thread(events_of, cluster, "n1", {"UnicronInService"})
    assert {"UnicronDraining", "UnicronCordoned"} & set(told)
    record("then `kubectl describe node`", f"Events: {', '.join(told)}")


def events_of(cluster: Cluster, node: str, expected: set[str]) -> list[str]:
    """Return the reasons of our events about a machine, once those that are expected are there."""
    told: set[str] = set()

    def are_there() -> bool:
        items = json.loads(cluster.machine.kubectl("get", "events", "--all-namespaces", "-o", "json"))["items"]
        about = [item for item in items if item["involvedObject"] == item["involvedObject"] | {"name": node}]
        told.update(item["reason"] for item in about)
        return expected <= told

    wait_until(are_there, 30, f"events {expected}")
    return sorted(reason for reason in told if reason.startswith("Unicron"))


@pytest.mark.overlay("node-object")
async def test_agent_changes_the_object_of_its_own_machine_alone(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    machine = cluster.machine
    token = cluster.inside(cluster.pod_on("n1"), "cat", "/var/run/secrets/kubernetes.io/serviceaccount/token")
    ca = machine.directory / "pki" / "ca.crt"
    login = ("--kubeconfig=/dev/null", f"--server={API}", f"--certificate-authority={ca}", f"--token={token}")
    taint = json.dumps({"spec": {"taints": [{"key": "unicron.dev/tried", "effect": "PreferNoSchedule"}]}})
    refused = {
        ("patch", "node", "n2", "--patch", taint): "changes the object of its own machine alone",
        (
            "patch",
            "node",
            "n1",
            "--patch",
            json.dumps({"spec": {"unschedulable": True}}),
        ): "taints and conditions alone",
        ("label", "node", "n1", "tried=yes"): "changes taints and conditions alone",
        ("delete", "node", "n1"): "forbidden",
        ("get", "secrets"): "forbidden",
    }
    for words, sentence in refused.items():
        with pytest.raises(AssertionError, match=sentence):
            await asyncio.to_thread(machine.kubectl, *login, *words)
    await asyncio.to_thread(machine.kubectl, *login, "patch", "node", "n1", "--patch", taint)
    await asyncio.to_thread(machine.kubectl, "taint", "node", "n1", "unicron.dev/tried-")
    record(
        "the token of an agent's pod: another machine's object, `unschedulable`, labels, a deletion, secrets",
        "refused, each in the policy's or Kubernetes' words; a taint of its own machine passes",
    )


@pytest.mark.overlay("node-object")
async def test_silent_kubelet_cordons_its_machine(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    watch = await cluster.watch()
    watch.act()
    cluster.machine.stop("kubelet-n1")
    try:
        state = await cluster.until("a cordon", lambda state: state.nodes["n1"].cordon.active)
        told_s = time.monotonic() - watch.began_s
    finally:
        cluster.machine.go_on("kubelet-n1")
    await cluster.until("no cordon", lambda state: not state.nodes["n1"].cordon.active)
    state = await cluster.training(None)
    assert not watch.lines("NodeLost") and not state.incidents
    record(
        "a machine's kubelet silent, and back",
        f"cordoned after {told_s:.0f} s, its worker trains on; back in service afterwards",
    )


@pytest.mark.overlay("node-object")
async def test_isolation_is_seen_at_machine(cluster: Cluster, record: Record) -> None:
    """The machine flaps: its link goes down until its node is isolated."""
    await cluster.train()
    machine, node, watch = cluster.machine, cluster.machine_without_head(), await cluster.watch()
    for _ in range(6):
        machine.link(node, "down")
        try:
            await cluster.until("the loss", lambda state: not up_on(node)(state))
        finally:
            machine.link(node, "up")
        state = await cluster.until("the return", up_on(node))
        if state.nodes[node].isolation.active:
            break

    def marks() -> tuple[bool, bool]:
        found = json.loads(machine.kubectl("get", "node", node, "-o", "json"))
        conditions = {each["type"]: each["status"] for each in found["status"]["conditions"]}
        taints = {each["key"] for each in found["spec"].get("taints", ())}
        return "unicron.dev/isolated" in taints, conditions.get("UnicronIsolated") == "True"

    await asyncio.to_thread(wait_until, lambda: marks() == (True, True), 30, "taint and condition")
    marked_s = time.time() - watch.lines("NodeIsolated")[0].recorded_at_us / 1e6
    cuts = len(watch.lines("NodeLost"))
    await cluster.until("the readmission", lambda state: not state.nodes[node].isolation.active)
    await asyncio.to_thread(wait_until, lambda: marks() == (False, False), 30, "end of taint and condition")
    told = await asyncio.to_thread(events_of, cluster, node, {"UnicronIsolated", "UnicronReadmitted"})
    readmitted_s = time.time() - watch.lines("NodeReadmitted")[0].recorded_at_us / 1e6
    await cluster.training(None)
    record(
        f"a machine's link is down {cuts} times, for some seconds: its node is isolated, and readmitted",
        f"taint `unicron.dev/isolated` and condition `UnicronIsolated` {marked_s:.1f} s after the isolation, gone "
        f"{readmitted_s:.1f} s after the readmission; Events: {', '.join(told)}",
    )


@pytest.mark.overlay("statefulset")
async def test_pods_of_statefulset_are_replaced_and_scaled(cluster: Cluster, record: Record) -> None:
    await cluster.do("scale", "statefulset/unicron-agent", "--replicas=3")
    await asyncio.to_thread(cluster.until_rolled, "statefulset/unicron-agent")
    await cluster.train()
    watch = await cluster.watch()
    before = (await cluster.state())[0].nodes[STATEFUL[1]].agent.boot
    watch.act()
    await cluster.do("delete", "pod", STATEFUL[1], "--wait=false")
    deleted_s = await watch.whole(also=up_on(STATEFUL[1], boots={STATEFUL[1]: before}))
    record(
        "StatefulSet: `kubectl delete pod` of an agent",
        f"told at {watch.told('NodeLeaving'):.1f} s, whole after {deleted_s:.1f} s; {await watch.clean()}",
    )
    watch = await cluster.watch()
    watch.act()
    await cluster.do("scale", "statefulset/unicron-agent", "--replicas=1")
    down_s = await watch.whole(workers=1)
    await watch.clean()
    watch = await cluster.watch()
    watch.act()
    await cluster.do("scale", "statefulset/unicron-agent", "--replicas=3")
    up_s = await watch.whole(workers=3)
    record(
        "StatefulSet: scaled from 3 to 1 and back",
        f"one trains on after {down_s:.1f} s, three again after {up_s:.1f} s; no incident, nothing repeated",
    )


@pytest.mark.overlay("statefulset")
async def test_drained_machine_of_statefulset_gives_its_pods_away(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    node = cluster.pods()[STATEFUL[2]]["spec"]["nodeName"]
    watch = await cluster.watch()
    watch.act()
    words = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
    try:
        await asyncio.to_thread(cluster.machine.kubectl, *words)
        whole_s = await watch.whole(also=up_on(*STATEFUL))
    finally:
        cluster.machine.kubectl("uncordon", node)
    record(
        "StatefulSet: `kubectl drain` of a machine",
        f"its pods run elsewhere, whole after {whole_s:.1f} s; {await watch.clean()}",
    )


@pytest.mark.overlay("external-nats")
async def test_second_head_leads_and_passes_writes_on(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    leader = cluster.client.health()["heads"]["leader"]["api"].partition(".")[0]
    watch = await cluster.watch()
    watch.act()
    await cluster.do("delete", "pod", leader, "--force", "--grace-period=0", "--wait=false")

    def other_leads() -> bool:
        return cluster.is_live() and bool(watch.lines("CoordinatorStarted"))

    await asyncio.to_thread(wait_until, other_leads, 60, "another leader")
    led_s = (watch.lines("CoordinatorStarted")[0].recorded_at_us - watch.began_us) / 1e6
    await asyncio.to_thread(cluster.until_rolled, "statefulset/unicron-head")
    await cluster.training(None)
    assert not watch.lines("NodeLost")
    for head in ("unicron-head-0", "unicron-head-1"):
        await asyncio.to_thread(cluster.inside, head, "unicronctl", "cordon", "n0", "--reason", f"asked {head}")
        await cluster.until("a cordon", lambda state: state.nodes["n0"].cordon.active)
        await asyncio.to_thread(cluster.inside, head, "unicronctl", "uncordon", "n0")
        await cluster.until("no cordon", lambda state: not state.nodes["n0"].cordon.active)
    record(
        "`external-nats`: the head that leads deleted by force; then `unicronctl cordon` in either head's pod",
        f"the other one leads after {led_s:.1f} s, no node lost; both take the order",
    )


@pytest.mark.overlay("external-nats")
async def test_servers_that_stand_still_lose_nobody(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    watch, away_s = await cluster.watch(), 60
    servers = [pid for node in NODES for pid in processes_of(node) if name_of(pid) == "nats-server"]
    assert len(servers) == 3, servers
    watch.act()
    try:
        for pid in servers:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(away_s)
    finally:
        for pid in servers:
            os.kill(pid, signal.SIGCONT)
        back_s = time.monotonic()
    await asyncio.to_thread(wait_until, cluster.is_live, 60, "live head")
    live_s = time.monotonic() - back_s
    for what in ("statefulset/unicron-head", AGENTS["external-nats"]):
        await asyncio.to_thread(cluster.until_rolled, what)
    await cluster.training(None)
    assert not watch.lines("NodeLost", "WorkerExited") and not cluster.restarts(), watch.said()
    record(
        f"`external-nats`: all three servers stand still for {away_s} s",
        f"live again {live_s:.1f} s after they go on; no node lost, no container restarted; {await watch.clean()}",
    )


@pytest.mark.overlay("external-nats")
async def test_lost_server_of_three_costs_nothing(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    watch = await cluster.watch()
    watch.act()
    await cluster.do("delete", "pod", "nats-1", "--force", "--grace-period=0")
    await asyncio.to_thread(cluster.until_rolled, "statefulset/nats")
    state = await cluster.training(None)
    assert not watch.lines("NodeLost", "WorkerExited"), watch.said()
    assert not state.incidents
    record(
        "`external-nats`: one NATS server of three deleted by force, its store with it",
        f"no node lost, training goes on; {await watch.clean()}",
    )


@pytest.mark.overlay("external-nats")
async def test_empty_store_becomes_no_new_log(cluster: Cluster, record: Record) -> None:
    """All servers lose their stores while no head runs: whoever knows the log waits until it is restored."""
    before = await cluster.train()
    leader = cluster.client.health()["heads"]["leader"]["api"].partition(".")[0]
    heads = ("unicron-head-0", "unicron-head-1")
    await cluster.do("delete", "pod", *heads)
    await cluster.do("delete", "pod", "--selector", "app=nats", "--wait=false")
    await asyncio.to_thread(cluster.until_rolled, "statefulset/nats")

    def wait_for_a_person() -> bool:
        return all("this head knows" in cluster.kubectl("logs", head) for head in heads)

    began_s = time.monotonic()
    await asyncio.to_thread(wait_until, wait_for_a_person, 120, "heads that wait")
    told_s = time.monotonic() - began_s
    assert not cluster.is_live()
    words = ("unicrond", "restore", "--config", "/etc/unicron/config/unicron.yaml")
    await asyncio.to_thread(cluster.inside, leader, *words)
    await asyncio.to_thread(wait_until, cluster.is_live, 120, "live head")
    for what in ("statefulset/unicron-head", AGENTS["external-nats"]):
        await asyncio.to_thread(cluster.until_rolled, what)
    state = await cluster.training(None)
    assert state.tasks[TASK].progress.iteration > before.tasks[TASK].progress.iteration
    record(
        "`external-nats`: three empty stores and two new heads; then `unicrond restore` in the pod of the one that led",
        f"both heads wait, and say so {told_s:.1f} s after the servers are back; no new log; then the task trains on",
    )


@pytest.mark.overlay("jobset")
@pytest.mark.parametrize("act", ["`kubectl delete pod`", "eviction by the API"])
async def test_index_of_jobset_is_made_anew(cluster: Cluster, record: Record, act: str) -> None:
    await cluster.train()
    node = "unicron-agent-agents-0-1"
    (pod,) = (name for name in cluster.pods() if name.startswith(f"{node}-"))
    before = (await cluster.state())[0].nodes[node].agent.boot
    watch = await cluster.watch()
    watch.act()
    await (cluster.evict(pod) if "eviction" in act else cluster.do("delete", "pod", pod, "--wait=false"))
    whole_s = await watch.whole(also=up_on(node, boots={node: before}))
    status = json.loads(await cluster.do("get", "jobset", "unicron-agent", "-o", "json"))["status"]
    assert not status.get("restarts"), status
    record(
        f"JobSet: {act} of an index",
        f"told at {watch.told('NodeLeaving'):.1f} s, whole after {whole_s:.1f} s, the JobSet restarted nothing else; "
        f"{await watch.clean()}",
    )
