"""The node's Node object: what it says becomes a cordon or a drain, and an isolation becomes a taint and a condition.
Against a stand-in for the API server (kubernetes_api.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agents.kubernetes_api import StandIn, account, stand_in
from tests.agents.node import Node
from tests.agents.processes import TIMEOUT_S
from tests.agents.test_daemon import AgentProcess, Coordinator, coordinator
from tests.unicrond.cluster import MiniCluster
from unicrond.agents.core.state import ForkServerSaid, LogSeen, MachineSaw
from unicrond.agents.kubernetes import keeper
from unicrond.agents.kubernetes.api import NodeApi
from unicrond.agents.kubernetes.node_object import CONDITION, TAINT, Hold, hold_of, taint_patch
from unicrond.agents.protocol.messages import Inventory
from unicrond.agents.shell.cli import parse
from unicrond.events import vocabulary as v
from unicrond.events.host.kubernetes_account import KubernetesError, in_cluster_url
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.wire.envelope import Envelope

__all__ = ["coordinator"]  # a fixture


def node(taints: list[dict[str, str]] | None = None, ready: str = "True", **spec: Any) -> dict[str, Any]:
    conditions = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready, "reason": "Why"}]
    return {"spec": {"taints": taints, **spec}, "status": {"conditions": conditions}}


OUT_OF_SERVICE = [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute", "value": "nodeshutdown"}]


@pytest.mark.parametrize(
    ("found", "hold", "words"),
    [
        (node(), "", ""),
        ({}, "", ""),
        (node(unschedulable=True), "cordon", "is cordoned"),
        (node(ready="False"), "cordon", "not ready: Why"),
        (node(ready="Unknown"), "cordon", "not ready"),
        (node(OUT_OF_SERVICE), "drain", "out-of-service=nodeshutdown"),
        (node(OUT_OF_SERVICE, unschedulable=True), "drain", "out-of-service"),
        (node([{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]), "drain", "karpenter"),
        (node([{"key": "maintenance", "effect": "NoExecute"}]), "drain", "maintenance"),
        (node([{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]), "", ""),
        (node([{"key": TAINT, "effect": "NoSchedule"}]), "", ""),
        (node([{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}], ready="Unknown"), "cordon", "ready"),
    ],
)
def test_node_object_maps_to_hold(found: dict[str, Any], hold: str, words: str) -> None:
    said = hold_of(found, "cordon")
    assert said.hold == hold and words in said.reason


def test_cordon_may_mean_drain() -> None:
    assert hold_of(node(unschedulable=True), "drain").hold == "drain"
    assert hold_of(node(ready="False"), "drain").hold == "cordon"


def test_taint_patch_keeps_foreign_taints() -> None:
    found = node(OUT_OF_SERVICE) | {"metadata": {"resourceVersion": "7"}}
    patch = taint_patch(found, isolated=True)
    assert [taint["key"] for taint in patch["spec"]["taints"]] == [OUT_OF_SERVICE[0]["key"], TAINT]
    assert patch["metadata"] == {"resourceVersion": "7"}
    ours = node([{"key": TAINT, "effect": "NoSchedule"}])
    assert taint_patch(ours, isolated=False)["spec"] == {"taints": None}


def test_api_server_url_comes_from_environment() -> None:
    assert in_cluster_url({}) == ""
    assert in_cluster_url({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "https://10.0.0.1:443"
    ours = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert in_cluster_url(ours) == "https://[fd00::1]:6443"


def test_kubernetes_flag_needs_url_outside_cluster(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    flags = ["--nats", "nats://h:1", "--node", "n1", "--slots", "1", "--kubernetes-node", "gpu07"]
    with pytest.raises(SystemExit):
        parse(flags)
    assert "give --kubernetes-url" in capsys.readouterr().err
    found = parse([*flags, "--kubernetes-url", "https://api:6443/"]).kubernetes
    assert found is not None and found.url == "https://api:6443" and found.cordon_means == "cordon"


# --- the API ---------------------------------------------------------------------------------------


async def test_kubernetes_refusal_is_one_line(tmp_path: Path) -> None:
    async with stand_in("gpu07") as server:
        for name, token, words in (
            ("gpu07", "wrong", "401 Unauthorized"),
            ("gpu08", "", 'nodes "gpu08" is forbidden'),
        ):
            account(tmp_path)
            if token:
                (tmp_path / "token").write_text(token)
            api = NodeApi(server.url, name, tmp_path)
            with pytest.raises(KubernetesError, match=words):
                await api.get()
            await api.close()
        api = NodeApi("http://127.0.0.1:1", "gpu07", tmp_path)
        with pytest.raises(KubernetesError, match="does not answer"):
            await api.get()
        await api.close()
        (tmp_path / "token").unlink()
        with pytest.raises(KubernetesError, match=r"cannot read .*token"):
            await NodeApi(server.url, "gpu07", tmp_path).get()


NONSENSE = [
    b"<html>",
    b"[]",
    b'"no object"',
    b"\xff",
    b'{"spec": []}',
    b'{"spec": {"taints": ["maintenance"]}}',
    b'{"spec": {"taints": {"key": "a"}}}',
    b'{"status": {"conditions": [7]}}',
    b'{"metadata": {"resourceVersion": 7}}',
    b"[" * 100_000,
]
WATCHED = [b'{"type": "MODIFIED", "object": %b}' % one for one in NONSENSE]


@pytest.mark.parametrize("says", [*NONSENSE, *WATCHED, b'{"type": "ERROR", "object": []}', b'{"type": 7}'])
async def test_kubernetes_nonsense_is_one_line(tmp_path: Path, says: bytes) -> None:
    async with stand_in("gpu07") as server:
        server.says = says
        api = NodeApi(server.url, "gpu07", account(tmp_path))
        with pytest.raises(KubernetesError, match="cannot be read"):
            if says in NONSENSE:
                await api.get()
            _ = [found async for found in api.watch("1")]
        await api.close()


# --- the agent's core, and the fold ----------------------------------------------------------------


def test_machine_report_follows_change_and_join() -> None:
    agent = Node()
    cordon = MachineSaw(hold="cordon", reason="the machine is cordoned")
    agent.feed(MachineSaw(hold="", reason=""))
    agent.feed(cordon)
    assert agent.of(v.MachineReported) == [], "it has not joined"
    agent.feed(LogSeen(created="first"))
    agent.feed(ForkServerSaid(message=Inventory(store_port=4000, workers=())))
    assert [said.hold for said in agent.of(v.MachineReported)] == ["cordon"]
    agent.feed(cordon)
    agent.feed(MachineSaw(hold="", reason=""))
    assert [said.hold for said in agent.of(v.MachineReported)] == ["cordon", ""]


def reported(cluster: MiniCluster, hold: Any) -> None:
    cluster.say(cluster.hosts["n0"], v.MachineReported(node="n0", hold=hold, reason="the machine is cordoned"))
    cluster.run()


def test_machine_hold_and_manual_cordon_combine() -> None:
    cluster = MiniCluster(0)
    for name in ("n0", "n1"):
        cluster.add_host(name)
    cluster.submit("t", min_workers=1, max_workers=2)
    cluster.run()
    reported(cluster, "drain")
    found = cluster.state.nodes["n0"]
    assert (found.cordon.active, found.cordon.draining, found.cordon.reason) == (
        True,
        True,
        "machine: the machine is cordoned",
    )
    assert not cluster.hosts["n0"].processes and cluster.state.incidents_total == 0
    reported(cluster, "cordon")
    assert not cluster.state.nodes["n0"].cordon.draining
    reported(cluster, "")
    assert not cluster.state.nodes["n0"].cordon.active and len(cluster.hosts["n0"].processes) == 1
    cluster.cordon("n0", drain=True)
    reported(cluster, "")
    assert cluster.state.nodes["n0"].cordon.draining, "what a person has said stays"
    reported(cluster, "cordon")
    assert not cluster.state.nodes["n0"].cordon.reason.startswith("machine: ")


# --- the agent, live -------------------------------------------------------------------------------


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110  # another process does it
            await asyncio.sleep(0.02)


async def decide(coordinator: Coordinator, event: v.AnyDecision) -> None:
    coordinator.number += 1
    await coordinator.log.append(
        [
            Envelope(
                producer="coordinator",
                boot=1,
                number=coordinator.number,
                term=1,
                observed_at_us=time.time_ns() // 1000,
                event=event,
            )
        ]
    )


async def test_agent_syncs_node_object_and_cluster(
    nats_server: EmbeddedServer, coordinator: Coordinator, run_dir: Path, tmp_path: Path
) -> None:
    async with stand_in("gpu07") as server:
        flags = ["--kubernetes-node", "gpu07", "--kubernetes-url", server.url]
        await coordinator.take_over()
        agent = AgentProcess(
            nats_server.url, run_dir, "--hand-over", *flags, "--kubernetes-account", str(account(tmp_path))
        )
        try:
            await coordinator.until(v.NodeJoined)
            assert (await coordinator.until(v.MachineReported)).hold == ""
            server.change(unschedulable=True)
            assert (await coordinator.until(v.MachineReported)).hold == "cordon"
            server.change(unschedulable=None, taints=[*server.node["spec"]["taints"], *OUT_OF_SERVICE])
            drained = await coordinator.until(v.MachineReported)
            assert drained.hold == "drain" and "out-of-service" in drained.reason
            server.change(taints=server.node["spec"]["taints"][:1])
            assert (await coordinator.until(v.MachineReported)).hold == ""
            server.ready("False")
            assert (await coordinator.until(v.MachineReported)).hold == "cordon"
            server.ready("True")
            assert (await coordinator.until(v.MachineReported)).hold == ""

            await decide(coordinator, v.NodeIsolated(node="n1", until_us=None, reason="a GPU is broken"))
            await until(lambda: TAINT in server.taints and server.condition(CONDITION))
            condition = server.condition(CONDITION)
            assert condition is not None and condition["status"] == "True"
            assert condition["message"] == "a GPU is broken"
            assert server.taints == ["nvidia.com/gpu", TAINT], "others' stay"
            assert server.condition("Ready"), "others' stay"
            await decide(coordinator, v.NodeReadmitted(node="n1", reason="its health check passed"))
            await until(lambda: TAINT not in server.taints)
            await until(lambda: (server.condition(CONDITION) or {}).get("status") == "False")
            await until(lambda: server.events and server.events[-1][0] == "UnicronReadmitted")
            assert server.events == [
                ("UnicronCordoned", "Normal"),
                ("UnicronDraining", "Normal"),
                ("UnicronInService", "Normal"),
                ("UnicronCordoned", "Normal"),
                ("UnicronInService", "Normal"),
                ("UnicronIsolated", "Warning"),
                ("UnicronReadmitted", "Normal"),
            ]

            server.refuses = 403
            server.ready("True")  # ends the watch
            await until(lambda: "cannot read this machine's Node object" in agent.log())
            assert agent.process.poll() is None, "it works on"
            server.refuses, server.says = 0, b'{"spec": []}'
            await until(lambda: "the API server's answer cannot be read" in agent.log())
            assert agent.process.poll() is None, "it works on"
            server.says = None
            server.change(unschedulable=True)
            assert (await coordinator.until(v.MachineReported)).hold == "cordon"
            asked = {path for _, path in server.asked}
            events = "/api/v1/namespaces/default/events"
            assert asked == {"/api/v1/nodes", "/api/v1/nodes/gpu07", "/api/v1/nodes/gpu07/status", events}
        finally:
            agent.end()


async def test_outage_of_api_server_cordons_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it every machine is Unknown until its kubelet is heard again. A kubelet that stays silent is one machine's
    trouble, and an Event that is refused is nobody's."""
    monkeypatch.setattr(keeper, "UNKNOWN_S", 3.0)  # longer than a busy machine takes for the next lines
    holds: list[str] = []
    async with stand_in("gpu07") as server:
        server.refuses_events = 403
        api = NodeApi(server.url, "gpu07", account(tmp_path))
        node_keeper = keeper.KubernetesNode(api, "n1", "cordon", lambda place: holds.append(place.hold))
        reading = asyncio.create_task(node_keeper._read())
        telling = asyncio.create_task(node_keeper._tell_events())
        try:
            await until(lambda: holds == [""])
            server.ready("Unknown")
            await until(lambda: len(holds) == 2)
            server.ready("True")
            await until(lambda: len(holds) == 3)
            await asyncio.sleep(3.3)
            assert holds == ["", "", ""], "told within seconds of the outage's end, and nobody was cordoned"
            monkeypatch.setattr(keeper, "UNKNOWN_S", 0.5)
            server.ready("Unknown")
            await until(lambda: holds[-1] == "cordon")
            server.change(unschedulable=None)  # something else of it changes
            await until(lambda: len(holds) == 6)
            assert holds[-1] == "cordon"
            server.ready("True")
            await until(lambda: holds[-1] == "")
            server.ready("Unknown")
            server.change(taints=OUT_OF_SERVICE)
            await until(lambda: holds[-1] == "drain")  # at once: a person's
            await asyncio.sleep(0.7)
            assert holds[-1] == "drain"
            assert not telling.done() and not reading.done() and not server.events
        finally:
            for task in (reading, telling):
                task.cancel()
            await asyncio.gather(reading, telling, return_exceptions=True)
            await api.close()


def test_free_node_object_maps_to_no_hold() -> None:
    assert hold_of(StandIn("gpu07").node, "drain") == Hold("", "")
