"""Recovery by kubectl: the commands of docs/operate/kubernetes.md, as they stand there, while a task trains."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Iterator

import pytest

from tests.containers.cluster import TASK
from tests.containers.rows import PAGE
from tests.kubernetes.archive import NEXT_UNICROND, UNICROND
from tests.kubernetes.cluster import AGENTS, HEAD, Cluster, up_on
from tests.kubernetes.machine import NODES, wait_until
from tests.kubernetes.rows import keep_drill
from unicrond.events.wire.schemas import SCHEMA, spoken_schema

pytestmark = [pytest.mark.kubernetes, pytest.mark.overlay("daemonset"), pytest.mark.timeout(900)]
Record = Callable[[str, str], None]
#: Of what a command says, for the page: its end.
_LINES_MAX = 12
_DELETE = """
import asyncio
from pathlib import Path
from unicrond.events.nats.connection import Login, connect
from unicrond.events.nats.streams import api
state = Path("/var/lib/unicron/state")
async def main():
    login = Login(key=state / "keys" / "operator.key", tls_ca=state / "tls" / "ca.pem")
    somebody = await connect("tls://unicron-head:4222", name="somebody", login=login, timeout_s=10)
    await api(somebody, "STREAM.DELETE.UNICRON_EVENTS", {})
    await somebody.close()
asyncio.run(main())
"""


def commands(heading: str) -> list[list[str]]:
    """Return the blocks of commands below a heading of the page."""
    _, _, rest = PAGE.read_text().partition(f"### {heading}\n")
    assert rest, heading
    section = re.split(r"^##", rest, maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    return [[text.strip() for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]] for block in blocks]


async def run(cluster: Cluster, block: list[str]) -> str:
    """Run commands of the page in a shell, with the overlay that has this machine's sizes; return what they say."""
    outputs = []
    for command in block:
        text = command.replace("deploy/kubernetes/overlays", str(cluster.directory / "overlays"))
        print(f"\n  $ {command}", flush=True)
        outputs.append(await asyncio.to_thread(cluster.machine.call, "sh", "-c", text))
        print(f"  {outputs[-1][-400:]}", flush=True)
        cluster.transcript += [f"$ {command}", *outputs[-1].splitlines()[-_LINES_MAX:]]
    return "\n".join(outputs)


@pytest.fixture(autouse=True)
def _transcript(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep what the commands of a drill have said."""
    cluster.transcript.clear()
    yield
    if cluster.transcript:
        keep_drill(request.node.name.removeprefix("test_").replace("_", " ").capitalize(), cluster.transcript)


async def stand_still(cluster: Cluster) -> None:
    await run(cluster, commands("The head stands still")[0])


async def go_on(cluster: Cluster) -> None:
    """Have the head run again."""
    await run(cluster, commands("The head stands still")[1])
    await asyncio.to_thread(wait_until, cluster.is_live, 120, "live head")


async def test_deleted_log_is_restored(cluster: Cluster, record: Record) -> None:
    before = await cluster.train()
    watch = await cluster.watch()
    await asyncio.to_thread(cluster.inside, HEAD, "python", "-c", _DELETE)
    watch.act()
    check, restore, ready = commands("A deleted log")[0]
    await run(cluster, [check, restore])
    restored_s = time.monotonic() - watch.began_s
    await run(cluster, [ready])
    await asyncio.to_thread(wait_until, cluster.is_live, 120, "live head")
    state = await cluster.training(None)
    ended = watch.lines("WorkerExited", "NodeLost", "CoordinatorStarted")
    assert not ended, [line.summary for line in ended]
    assert state.tasks[TASK].generation == before.tasks[TASK].generation
    record(
        "the log deleted with the operator's key; [`unicrond restore`](#a-deleted-log) in the head's pod",
        f"restored after {restored_s:.0f} s, with the start of two commands; no worker ended, training goes on",
    )


async def test_lost_volume_is_restored_from_backup(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    backup, restore = commands("A lost volume")
    shutil.rmtree(cluster.volumes / "unicron-checkpoints" / "unicron-1", ignore_errors=True)
    await run(cluster, backup)
    place, agents = cluster.volumes / f"log-{HEAD}", uids(cluster)
    await stand_still(cluster)
    shutil.rmtree(place / "state")
    began_s = time.monotonic()
    await go_on_as_stranger(cluster)
    await stand_still(cluster)
    await run(cluster, restore)
    cluster.forget_client()
    await go_on(cluster)
    await cluster.until("all agents", up_on(*NODES))
    await cluster.training(None)
    assert uids(cluster) == agents
    record(
        "the head's volume lost, a head on an empty one, which no agent follows; a [backup restored](#a-lost-volume)",
        f"the task trains again {time.monotonic() - began_s:.0f} s after the loss, of it three pods of the "
        "head one after another; agents' pods stayed as they were",
    )


def uids(cluster: Cluster) -> set[str]:
    """Return the agents' pods, each by what no other pod ever has, and how often its containers have started."""
    return {
        f"{pod['metadata']['uid']} {[status['restartCount'] for status in pod['status']['containerStatuses']]}"
        for pod in cluster.pods().values()
    }


async def go_on_as_stranger(cluster: Cluster) -> None:
    """Have a head begin on the empty volume, whom nobody follows: each agent is seen to refuse its certificate."""
    before = refusals(cluster)
    await run(cluster, commands("The head stands still")[1])
    state = cluster.volumes / f"log-{HEAD}" / "state"
    await asyncio.to_thread(wait_until, (state / "log.json").exists, 60, "new log")
    cluster.forget_client()
    await asyncio.to_thread(wait_until, cluster.is_live, 60, "live head")
    have_refused = lambda: all(count > before[pod] for pod, count in refusals(cluster).items())  # noqa: E731
    await asyncio.to_thread(wait_until, have_refused, 60, "refusal of each agent")
    assert not (await cluster.state())[0].nodes, "an agent follows a head of another CA"


def refusals(cluster: Cluster) -> dict[str, int]:
    """Count by pod how often its agent has said that a certificate is not of the CA that it knows."""
    return {pod: cluster.kubectl("logs", pod, "--container", "agent").count("is not of") for pod in cluster.pods()}


async def test_log_begins_anew(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    await asyncio.to_thread(cluster.inside, HEAD, "python", "-c", _DELETE)
    await asyncio.to_thread(wait_until, lambda: not cluster.is_live(), 60, "complaint")
    shutil.rmtree(cluster.volumes / f"log-{HEAD}" / "state" / "archive")
    began_s = time.monotonic()
    await run(cluster, commands("A new log")[0])
    await asyncio.to_thread(wait_until, cluster.is_live, 120, "live head")
    await cluster.until("all agents", up_on(*NODES))
    joined_s = time.monotonic() - began_s
    await go_on(cluster)
    await cluster.train()
    record(
        "log and archive gone: [`--new-log`](#a-new-log), then taken out again",
        f"all agents have joined the new log after {joined_s:.0f} s; the task, submitted again, trains",
    )


async def test_another_ca_ends_nobody(cluster: Cluster, record: Record) -> None:
    before = await cluster.train()
    watch = await cluster.watch()
    watch.act()
    phase, finish = commands("Another CA")
    await run(cluster, phase)
    await run(cluster, [command.replace("--roll trust", "--roll certificate") for command in phase])
    await run(cluster, finish)
    pod = cluster.pod_on("n1")
    boots = await cluster.boots()
    await cluster.do("delete", "pod", pod, "--wait=false")
    await watch.whole(also=up_on("n1", boots=boots))
    state = await cluster.training(None)
    assert state.tasks[TASK].progress.iteration > before.tasks[TASK].progress.iteration
    record(
        "the CA [replaced](#another-ca) in its phases, then an agent's pod deleted",
        f"the pod's successor trusts the new CA alone and joins; {await watch.clean()}",
    )


async def test_full_volume_is_told_and_left(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    place = cluster.volumes / f"log-{HEAD}"
    await stand_still(cluster)
    mount = f"mount -t tmpfs -o size=300m,mode=777 none {place}"
    cluster.machine.call("sh", "-ec", f"cp -a {place} {place}.kept; {mount}; cp -a {place}.kept/. {place}")
    try:
        await go_on(cluster)
        seen = await fill_and_make_room(cluster)
        await stand_still(cluster)
        cluster.machine.call("sh", "-ec", f"rm -rf {place}.kept; cp -a {place} {place}.kept")
    finally:
        cluster.machine.call("umount", "-l", str(place))
    cluster.machine.call("sh", "-ec", f"cp -a {place}.kept/. {place}; rm -rf {place}.kept {place}/filling")
    await go_on(cluster)
    await cluster.training(None)
    record("the head's [volume is full](#a-full-volume); then there is room again", seen)


async def test_upgrade_over_one_schema_and_back_ends_nobody(cluster: Cluster, record: Record) -> None:
    await cluster.train()
    seconds, seen, wait_s = [], "", await min_ready_s(cluster)
    up, back = commands("Upgrading")
    for schema, image, settings, block in (
        (SCHEMA + 1, NEXT_UNICROND, f"write_schema: {SCHEMA}\n", up),
        (SCHEMA, UNICROND, f"write_schema: {SCHEMA}\n", back),
        (SCHEMA + 1, NEXT_UNICROND, "", up),
    ):
        await cluster.train()
        watch, boots = await cluster.watch(), await cluster.boots()
        cluster.write("daemonset", image, settings)
        watch.act()
        await run(cluster, block)
        seconds.append(f"{time.monotonic() - watch.began_s:.0f} s")
        await watch.whole(also=up_on(*NODES, boots=boots))
        state = await cluster.training(None)
        assert {spoken_schema(state.nodes[node].agent.version) for node in NODES} == {schema}
        seen = await watch.clean()
        assert bool(watch.lines("GreetNode")) != bool(settings), "the younger schema is for good"
    cluster.tear_down()
    record(
        "[upgrade](#upgrading) over one schema with `write_schema`, back, and up for good, in mid-training",
        f"{', '.join(seconds)}, of each {len(NODES) * wait_s} `minReadySeconds`; {seen}",
    )


async def min_ready_s(cluster: Cluster) -> int:
    """Return how long an agent's pod must be ready before the next one is replaced."""
    return int(await cluster.do("get", AGENTS[cluster.overlay], "-o", "jsonpath={.spec.minReadySeconds}"))


async def test_log_moves_to_servers_of_ones_own(cluster: Cluster, record: Record) -> None:
    before = await cluster.train()
    await asyncio.to_thread(cluster.start_servers)
    cluster.write("external-nats")
    watch = await cluster.watch()
    end, restore, go = commands("To NATS servers of your own")
    watch.act()
    await run(cluster, end)
    output = await run(cluster, restore)
    assert "are in NATS again" in output and "missing" not in output, output
    cluster.overlay = "external-nats"
    cluster.forget_client()
    await run(cluster, go)
    await cluster.until("all agents", up_on(*NODES))
    state = await cluster.training(None)
    paused_s, clean = time.monotonic() - watch.began_s, await watch.clean()
    assert state.tasks[TASK].progress.iteration > before.tasks[TASK].progress.iteration
    for head in (HEAD, "unicron-head-1"):
        await asyncio.to_thread(cluster.inside, head, "unicronctl", "status")
    cluster.tear_down()
    record(
        "the embedded log [moved to three NATS servers](#to-nats-servers-of-your-own)",
        f"no entry lost; three workers train again {paused_s:.0f} s after the first command; {clean}",
    )


async def fill_and_make_room(cluster: Cluster) -> str:
    """Have the head's volume fill up, and its ballast go, as the page says; return what was seen."""
    ballast, room = commands("A full volume")
    await run(cluster, ballast)
    await cluster.training(None)
    watch = await cluster.watch()
    fill = "dd if=/dev/zero of=/var/lib/unicron/filling bs=64k 2>/dev/null; true"
    await asyncio.to_thread(cluster.inside, HEAD, "sh", "-c", fill)
    watch.act()
    await asyncio.to_thread(wait_until, lambda: not cluster.is_live(), 120, "complaint")
    health = await asyncio.to_thread(lambda: cluster.client.health())
    told_s = time.monotonic() - watch.began_s
    await run(cluster, room)
    try:
        await asyncio.to_thread(wait_until, cluster.is_live, 60, "live head")
        by = "by itself"
    except AssertionError:
        await cluster.do("delete", "pod", HEAD)
        await asyncio.to_thread(wait_until, cluster.is_live, 120, "live head")
        by = "once the pod is deleted"
    await cluster.training(None)
    assert not watch.lines("NodeLost"), watch.said("NodeLost")
    return f"told after {told_s:.0f} s: *{health.get('trouble') or health['status']}*; it goes on {by}, no node lost"
