"""Process 1 and what is below it: an agent that dies in its container, the container that dies, memory that ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from tests.containers.cluster import NODES, TASK, Cluster, is_up, node_of, until
from tests.containers.pods import MIB, Pod
from tests.integration.live import seats

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]
Record = Callable[..., None]
#: How a worker's end is told.
ENDS = ("WorkerExited", "ErrorReported", "NodeJoined", "NodeLost")


def agent_of(pod: Pod) -> int:
    """Its id outside of the container: its first process' youngest fork."""
    return max(pid for pid, command in pod.box.pids().items() if "--supervise" in command)


async def test_dead_agent_restarts_in_living_container(cluster: Cluster, record: Record) -> None:
    await cluster.start_head()
    await cluster.start_agents(*NODES)
    before = seats(await cluster.train(3))
    machine = NODES[0]
    pod = cluster.agents[machine]
    joined: list[float] = []
    said: list[str] = []
    for _ in range(3):
        boot = (await cluster.state())[0].nodes[node_of(machine)].agent.boot
        watch = await cluster.watch()
        watch.act()
        os.kill(agent_of(pod), signal.SIGKILL)
        await cluster.until("the next agent", is_up(machine, boot))
        joined.append(watch.told("NodeJoined"))
        said = watch.said("NodeJoined")
        after = await cluster.training(0, beyond=3)
        await watch.clean()
        assert seats(after) == before, "the same workers, under the same process ids"
    record("agent dies", told=max(joined), all=[round(each, 1) for each in joined], said=said)

    # Process 1 cannot be killed from inside, and what others leave behind is reaped.
    await asyncio.to_thread(pod.box.run_inside, "sh", "-c", "kill -9 1")
    for one in (pod, cluster.head):
        for _ in range(5):
            await asyncio.to_thread(one.box.run_inside, "sh", "-c", "sleep 0.2 & sleep 0.3 & exec true")
    await asyncio.sleep(1)
    for one in (pod, cluster.head):
        assert one.box.is_running()
        await until(lambda one=one: not one.box.zombies(), 20, "a container without zombies")
    record("zombies", agent=pod.box.zombies(), head=cluster.head.box.zombies())


async def test_kill_of_process_one_restarts_pod(cluster: Cluster, record: Record) -> None:
    await cluster.start_head()
    await cluster.start_agents(*NODES)
    await cluster.train(3)
    machine = NODES[0]
    pod = cluster.agents[machine]
    boot = (await cluster.state())[0].nodes[node_of(machine)].agent.boot
    watch = await cluster.watch()
    watch.act()
    pod.box.kill(signal.SIGKILL)
    assert await asyncio.to_thread(pod.box.wait, 20) == 128 + signal.SIGKILL
    await asyncio.to_thread(pod.restart)
    whole_s = await watch.whole(also=is_up(machine, boot))
    said = watch.said("WorkerExited")
    assert said and not any("OOM" in each and "not" not in each for each in said), said
    record("process 1 killed", told=watch.told(*ENDS), whole=whole_s, said=said)


async def test_worker_oom_spares_its_container(cluster: Cluster, record: Record) -> None:
    await cluster.start_head()
    await cluster.start_agents(*NODES, memory_mib=768, sizes_mib={"shm": 64})
    await cluster.train(3)
    pod = cluster.agents[NODES[1]]
    warnings = [line for line in pod.box.said().splitlines() if "/dev/shm has 64 MiB" in line]
    record("small shm", said=warnings[0].partition("shared memory: ")[2])
    watch = await cluster.watch()
    watch.act()
    (cluster.directory / "checkpoints" / "orders" / pod.name).touch()
    whole_s = await watch.whole()
    (exited,) = (line.envelope["event"] for line in watch.lines("WorkerExited"))
    assert exited["cause"] == "oom_killed", exited
    assert pod.box.is_running() and pod.box.oom_kills() == 1
    found = await watch.damage()
    assert "NodeLost" not in found["faults"], found
    record(
        "worker oom",
        told=watch.told("WorkerExited"),
        whole=whole_s,
        cause=exited["cause"],
        said=watch.said("WorkerExited"),
    )


async def test_shared_memory_oom_kills_whole_container(cluster: Cluster, record: Record) -> None:
    await cluster.start_head()
    await cluster.start_agents(*NODES, memory_mib=768, sizes_mib={"shm": 2000})
    await cluster.train(3)
    machine = NODES[2]
    pod = cluster.agents[machine]
    limit = 768 * MIB
    # A quarter of the container's limit is for states, half of it for copies of others': not of the machine's memory.
    assert f"--memory-max-bytes {limit // 8} " in next(
        c for c in pod.box.pids().values() if "unicrond.agents.fork_server" in c
    )
    warnings = [line for line in pod.box.said().splitlines() if " container: " in line]
    assert len(warnings) == 1 and "more than half of its limit of 768 MiB may lie in memory" in warnings[0]
    record("limits", limit=768, states=768 // 4, said=warnings[0].partition("container: ")[2])
    boot = (await cluster.state())[0].nodes[node_of(machine)].agent.boot
    watch = await cluster.watch()
    watch.act()
    filler = pod.box.start_inside("fallocate", "-l", "1900M", "/dev/shm/full")
    code = await asyncio.to_thread(pod.box.wait, 60)
    await asyncio.to_thread(filler.wait, 20)
    assert code == 128 + signal.SIGKILL
    (pod.directory / "shm" / "full").unlink()  # else the next container dies of it too
    await asyncio.to_thread(pod.restart)
    whole_s = await watch.whole(also=is_up(machine, boot))
    # One that the dead container was to start may still be started and ended by the next one, as expected. Where the
    # kernel takes the worker first, the agent may live long enough for the reason, and not for the exit after it.
    told = [(line.envelope["event"], line.summary) for line in watch.lines("WorkerExited", "ErrorReported")]
    ends = [(e, said) for e, said in told if e["node"] == node_of(machine) and not e.get("is_expected", False)]
    causes, said = sorted({str(e.get("cause") or e["kind"]) for e, _ in ends}), [said for _, said in ends]
    assert causes, [said for _, said in told]
    assert set(causes) <= {"oom_killed", "maybe_oom_killed", "unknown", "out_of_memory", "process_exit"}, said
    isolated = (await cluster.state())[0].nodes[node_of(machine)].isolation.active
    assert not isolated
    record("all oom", told=watch.told(*ENDS), whole=whole_s, code=code, causes=causes, said=said)
    assert (await cluster.state())[0].tasks[TASK].confirmed
