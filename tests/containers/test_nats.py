"""NATS outside of the head's pod: not there yet, away, back with an empty store; and a head that stands by."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.containers.cluster import NODES, SECRETS, Cluster, configuration, until
from tests.containers.image import Image
from tests.containers.pods import Pod

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]
Record = Callable[..., None]
PART = "head-external-nats"
SERVER = ("nats-server", "--jetstream", "--store_dir", "/var/lib/unicron/nats", "--user", "unicron", "--pass")
NATS = {"UNICRON_AGENT_NATS": "nats://nats:4222"}
AWAY_S = 40


def server(cluster: Cluster) -> Pod:
    pod = Pod(cluster.machines, "head", "nats-0", args=[*SERVER, SECRETS["nats-password"].strip()])
    cluster.machines.point("nats", pod.address)
    pod.start()
    return pod


async def kept_alive(pods: list[Pod], seconds: float) -> int:
    """Nothing is restarted by its liveness probe for so long; how often it was asked."""
    ends_s, asked = time.monotonic() + seconds, 0
    while time.monotonic() < ends_s:
        for pod in pods:
            is_alive, why = await asyncio.to_thread(pod.probe, "livenessProbe")
            assert pod.box.is_running() and is_alive, f"{pod.name}: {why}"
            asked += 1
        await asyncio.sleep(1)
    return asked


async def kill(pod: Pod) -> None:
    pod.box.kill(signal.SIGKILL)
    await asyncio.to_thread(pod.box.wait, 20)


async def test_nats_pod_starts_late_leaves_and_returns(image: Image, directory: Path, record: Record) -> None:
    async with Cluster(image, directory, configuration(PART, replicas=1)) as cluster:
        cluster.lead_to(cluster.new_head(PART))
        head = cluster.head
        await until(lambda: head.probe("livenessProbe")[0], 30, "a head that lives")
        asked = await kept_alive([head], 20)
        is_ready, why = await asyncio.to_thread(head.probe, "readinessProbe")
        assert not is_ready and "no NATS at" in why, why
        nats = server(cluster)
        ready_s = await until(lambda: head.probe("readinessProbe")[0], 60, "a head that has found NATS")
        record("started without NATS", whole=ready_s, live_probes=asked, said=why)

        await cluster.start_agents(*NODES[:2], env=NATS)
        await cluster.train(2)
        everyone = [head, *cluster.agents.values()]
        watch = await cluster.watch()
        await kill(nats)
        watch.act()
        unready_s = await until(
            lambda: not any(pod.probe("readinessProbe")[0] for pod in everyone), 30, "pods that wait"
        )
        asked = await kept_alive(everyone, AWAY_S)
        await asyncio.to_thread(nats.restart)
        watch.act()
        ready_s = await until(lambda: all(pod.probe("readinessProbe")[0] for pod in everyone), 60, "pods that work")
        await cluster.training(0, beyond=5)
        await watch.clean()
        record("NATS away", told=unready_s, whole=ready_s, live_probes=asked, away=AWAY_S)

        # It comes back with an empty store: nothing is made anew, all wait for a person, who brings the store back.
        await kill(nats)
        store = directory / "log" / "nats"
        store.rename(directory / "kept")
        await asyncio.to_thread(nats.restart)
        watch.act()
        waiting = [(head, "NATS has no event log"), *((pod, "log is gone") for pod in cluster.agents.values())]
        told_s = await until(
            lambda: all(words in pod.probe("readinessProbe")[1] for pod, words in waiting), 60, "pods that say so"
        )
        asked = await kept_alive(everyone, 15)
        answers = [await asyncio.to_thread(pod.probe, "readinessProbe") for pod in everyone]
        assert not any(is_ready for is_ready, _ in answers), answers
        assert not [*(directory / "log" / "nats").glob("jetstream/*/streams/*")], "somebody has made a stream"
        await kill(nats)
        shutil.rmtree(directory / "log" / "nats")
        (directory / "kept").rename(store)
        await asyncio.to_thread(nats.restart)
        watch.act()
        ready_s = await until(lambda: all(pod.probe("readinessProbe")[0] for pod in everyone), 90, "pods that work")
        await cluster.training(0, beyond=5)
        await watch.clean()
        record("NATS empty", told=told_s, whole=ready_s, live_probes=asked, said=[words for _, words in answers])


async def test_standby_head_pod_takes_over(image: Image, directory: Path, record: Record) -> None:
    async with Cluster(image, directory, configuration(PART, replicas=1)) as cluster:
        server(cluster)
        await cluster.start_head(PART)
        await cluster.start_agents(*NODES[:2], env=NATS)
        await cluster.train(2)
        first, second = cluster.head, cluster.new_head(PART)
        await until(lambda: second.probe("readinessProbe")[0], 60, "a head that stands by")
        watch = await cluster.watch()
        watch.act()
        await kill(first)
        cluster.lead_to(second)
        await until(lambda: bool(watch.lines("CoordinatorStarted")), 60, "the head that has taken over")
        told_s = watch.told("CoordinatorStarted")
        await cluster.training(0, beyond=5)
        await watch.clean()
        record("standby", whole=told_s)
        assert os.getpid() == 1
