"""Two pods of one node: the newer one's login ends the older one's, which takes nothing of its successor's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.containers.cluster import NO_DAMAGE, NODES, Cluster, is_up, node_of, until
from tests.containers.pods import Pod
from unicrond.events.cli.exit_codes import SHUT_OUT

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]
Record = Callable[..., None]


async def shut_out(pod: Pod) -> None:
    """Until NATS lets its agent in no more: its key was replaced."""
    await until(lambda: "NATS refuses" in pod.probe("readinessProbe")[1], 60, "an agent that is shut out")
    assert pod.probe("livenessProbe")[0], "it ends once its workers have, and its lease"


async def test_forcibly_deleted_pod_yields_to_successor(cluster: Cluster, record: Record) -> None:
    """The API server forgets the pod at once, and its container still runs when the next one starts."""
    await cluster.start_head()
    await cluster.start_agents(*NODES)
    await cluster.train(3)
    machine = NODES[0]
    old = cluster.agents[machine]
    boot = (await cluster.state())[0].nodes[node_of(machine)].agent.boot
    watch = await cluster.watch()
    watch.act()
    new = cluster.start_agent(machine)
    whole_s = await watch.whole(also=is_up(machine, boot))
    await shut_out(old)
    assert not watch.lines("CommandFailed")
    told_s = watch.told("NodeJoined")
    code = await asyncio.to_thread(old.box.wait, 400)  # its worker is stranded for two minutes; the lease is one
    assert code == SHUT_OUT
    record("force", told=told_s, whole=whole_s, code=code)

    # The same where the machine is only cut off: its agent wakes up as the older one.
    old.remove()
    watch = await cluster.watch()
    boot = (await cluster.state())[0].nodes[node_of(machine)].agent.boot
    watch.act()
    new.cut()
    cluster.start_agent(machine)
    whole_s = await watch.whole(also=is_up(machine, boot))
    told_s = watch.told("NodeLost", "NodeJoined")
    calm = await cluster.watch()
    new.mend()
    await shut_out(new)
    await cluster.training(None, beyond=5)
    found = await calm.damage()
    # What its worker said while it was cut off arrives, and nothing follows from it.
    assert found == NO_DAMAGE | {"faults": found["faults"]} and set(found["faults"]) <= {"ErrorReported"}, found
    record("force, cut off", told=told_s, whole=whole_s)
