"""Agents that run and cannot work: alive, and not ready, with the reason."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.containers.cluster import NODES, Cluster, node_of, until
from tests.containers.pods import Pod
from unicrond.events.trust.keys import make_key, write_key
from unicrond.events.trust.logins import agent_login

pytestmark = [pytest.mark.containers, pytest.mark.timeout(300)]
Record = Callable[..., None]


async def why_not(pod: Pod, words: str) -> str:
    """Alive all the time; what the readiness probe says once it names the reason."""
    await until(lambda: words in pod.probe("readinessProbe")[1], 60, f"{words!r} from the probe")
    for _ in range(5):
        assert pod.box.is_running() and (await asyncio.to_thread(pod.probe, "livenessProbe"))[0]
        is_ready, why = await asyncio.to_thread(pod.probe, "readinessProbe")
        assert not is_ready
        await asyncio.sleep(1)
    return why


async def test_agents_without_login_or_torch_are_alive_and_unready(
    cluster: Cluster, directory: Path, record: Record
) -> None:
    await cluster.start_head()
    strange = directory / "checkpoints" / "strange.key"
    write_key(strange, make_key(agent_login(node_of(NODES[0]))))
    os.chown(strange, 10001, 10001)
    broken = directory / "checkpoints" / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('no torch here')\n")

    refused = cluster.start_agent(NODES[0], env={"UNICRON_AGENT_KEY": "/checkpoints/strange.key"})
    helpless = cluster.start_agent(NODES[1], env={"PYTHONPATH": "/checkpoints/broken"})
    said = [await why_not(refused, "NATS refuses"), await why_not(helpless, "fork server")]
    assert not (await cluster.state())[0].nodes
    record("cannot work", said=[why[:90] for why in said])
