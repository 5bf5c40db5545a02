"""The end of an agent's pod: deleted, replaced, updated; nothing fails, nothing is repeated."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.containers.cluster import NODES, Cluster, is_up, node_of

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]
Record = Callable[..., None]
#: The end of a node that is drained, and its return.
TOLD = ("NodeLeaving",)


async def replaced(cluster: Cluster, machine: str) -> tuple[int, float]:
    """The pod of that machine is deleted, and another one made: new address, empty volumes, the same name."""
    ended = await asyncio.to_thread(cluster.agents[machine].delete)
    cluster.start_agent(machine)
    return ended


async def test_deleted_agent_pod_loses_no_work(cluster: Cluster, record: Record) -> None:
    await cluster.start_head()
    await cluster.start_agents(*NODES)
    await cluster.train(3)
    machine = NODES[0]
    boot = (await cluster.state())[0].nodes[node_of(machine)].agent.boot
    address = cluster.agents[machine].address

    watch = await cluster.watch()
    watch.act()
    code, took_s = await replaced(cluster, machine)
    whole_s = await watch.whole(also=is_up(machine, boot))
    assert code == 128 + signal.SIGTERM and took_s < 30
    await watch.clean()
    state, _ = await cluster.state()
    assert state.nodes[node_of(machine)].address == cluster.agents[machine].address != address
    facts: dict[str, Any] = {"told": watch.told(*TOLD), "whole": whole_s, "pod_s": took_s, "code": code}
    record("delete", **facts, said=watch.said("NodeLeaving", "NodeLeft"))


async def test_rolling_updates_and_link_loss_isolate_no_node(cluster: Cluster, record: Record) -> None:
    await cluster.start_head()
    await cluster.start_agents(*NODES)
    await cluster.train(3)
    whole = await cluster.watch()
    for update in ("first", "second"):
        watch = await cluster.watch()
        watch.act()
        for machine in NODES:
            code, _ = await replaced(cluster, machine)
            assert code == 128 + signal.SIGTERM
            await cluster.until_ready(machine)  # the controller goes on as soon as that says so
        whole_s = await watch.whole()
        await watch.clean()
        record(f"rollout {update}", told=watch.told(*TOLD), whole=whole_s, left=len(watch.lines("NodeLeft")))
    assert len(whole.lines("NodeLeft")) == 2 * len(NODES)
    state = await cluster.training(0)
    assert state.ledger.failures == 0

    pod = cluster.agents[NODES[1]]
    watch = await cluster.watch()
    watch.act()
    pod.cut()
    await asyncio.sleep(20)
    pod.mend()
    await watch.whole(also=is_up(NODES[1]))
    found = await watch.damage()
    # What its worker said while it was cut off may arrive, and nothing follows from it.
    assert found["faults"][0] == "NodeLost" and set(found["faults"][1:]) <= {"ErrorReported"}, found
    assert (found["incidents"], found["failures"], found["flaps"]) == (1, 1, 1), found
    back_s = (watch.lines("NodeReturned")[0].recorded_at_us - watch.began_us) / 1e6
    record("link", told=watch.told("NodeLost"), back=back_s, whole=await watch.whole(), isolated=0)


async def test_interrupt_hook_and_sigterm_lose_no_work(cluster: Cluster, record: Record) -> None:
    await cluster.start_head()
    await cluster.start_agents(*NODES)
    await cluster.train(3)
    pod = cluster.agents[NODES[2]]
    watch = await cluster.watch()
    watch.act()
    done = await asyncio.to_thread(
        pod.box.run_inside, "sh", "-c", "kill -INT 1"
    )  # the preStop hook, which returns at once
    assert done.returncode == 0, done.stderr
    code, took_s = await asyncio.to_thread(pod.delete)
    cluster.start_agent(NODES[2])
    whole_s = await watch.whole(also=is_up(NODES[2]))
    found = await watch.damage()
    # SIGINT is not announced: a start may cross with the node's last words, and is refused.
    refused = [line for line in watch.lines("CommandFailed") if "the node is leaving" in line.summary]
    assert found["faults"] == ["CommandFailed"] * len(refused) and len(refused) <= 1, found
    assert not found["incidents"] and not found["failures"] and not found["flaps"], found
    assert code == 128 + signal.SIGINT
    record(
        "interrupt", told=watch.told("NodeLeft", "NodeLeaving"), whole=whole_s, pod_s=took_s, repeated=found["repeated"]
    )
