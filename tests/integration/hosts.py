"""Several hosts on one machine: every agent in a network namespace of its own, joined by a bridge.

Runs itself inside `unshare -rnm`, so links are real and can be taken away, and nothing outside is touched:

    python -m tests.integration.hosts link|bus DIR

`link`: a node's only link goes down, then up. The node is lost once, comes back once, training goes on.
`bus`: a node is cut from NATS but not from its peers. It commits nothing under the old membership.
Prints one JSON object: the events of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
import yaml

from unicrond.dev import Part
from unicrond.state import ClusterState

NODES = ("n1", "n2", "n3")
HEAD = "10.77.0.254"
API = "http://127.0.0.1:7470"
HEARTBEAT_S = 0.5


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def build_network() -> None:
    """A bridge with the head's address, and per node a namespace on a veth pair."""
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    Path("/run/netns").mkdir()
    ip("link", "set", "lo", "up")
    ip("link", "add", "br0", "type", "bridge")
    ip("addr", "add", f"{HEAD}/24", "dev", "br0")
    ip("link", "set", "br0", "up")
    for number, node in enumerate(NODES, 1):
        ip("netns", "add", node)
        ip("link", "add", f"{node}-head", "type", "veth", "peer", "name", "eth0", "netns", node)
        ip("link", "set", f"{node}-head", "master", "br0")
        ip("link", "set", f"{node}-head", "up")
        ip("-n", node, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        ip("-n", node, "link", "set", "eth0", "up")
        ip("-n", node, "link", "set", "lo", "up")


class Hosts:
    """The head in the outer namespace, one agent in each inner one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._session: aiohttp.ClientSession
        password = directory / "password"
        password.write_text("secret")
        config = {
            "state_dir": str(directory / "state"),
            "checkpoint_dir": str(directory / "checkpoints"),
            "heartbeat_s": HEARTBEAT_S,
            "nats": {"host": HEAD, "user": "unicron", "password_file": str(password)},
        }
        (directory / "unicron.yaml").write_text(yaml.safe_dump(config))
        scripts = Path(sys.executable).parent
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        self.coordinator = Part(
            "coordinator",
            [str(scripts / "unicrond"), "run", "--config", str(directory / "unicron.yaml")],
            directory / "coordinator.log",
            env,
        )
        self.agents = {
            node: Part(
                node,
                [
                    *("ip", "netns", "exec", node, str(scripts / "unicron-agent")),
                    *("--nats", f"nats://{HEAD}:4222", "--user", "unicron", "--password-file", str(password)),
                    *("--node", node, "--slots", "1", "--address", f"10.77.0.{number}"),
                    *("--run-dir", str(directory / node), "--heartbeat-s", str(HEARTBEAT_S)),
                ],
                directory / f"{node}.log",
                env,
            )
            for number, node in enumerate(NODES, 1)
        }

    async def __aenter__(self) -> Hosts:
        self._session = aiohttp.ClientSession()
        await self.coordinator.start()
        await self.until(lambda s: s.term > 0)
        await asyncio.gather(*(agent.start() for agent in self.agents.values()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(agent.stop() for agent in self.agents.values()))
        await self.coordinator.stop()
        await self._session.close()

    async def state(self) -> ClusterState:
        async with self._session.get(API + "/v1/state") as response:
            return msgspec.convert((await response.json())["state"], ClusterState)

    async def submit(self, spec: dict[str, Any]) -> None:
        async with self._session.post(API + "/v1/tasks", data=json.dumps(spec)) as response:
            assert response.status == 201, await response.text()

    async def events(self) -> list[dict[str, Any]]:
        async with self._session.get(API + "/v1/events") as response:
            lines = (await response.text()).splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]

    async def until(self, holds: Callable[[ClusterState], bool], timeout_s: float = 60.0) -> ClusterState:
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    state = await self.state()
                    if holds(state):
                        return state
                await asyncio.sleep(0.05)


def members(state: ClusterState) -> list[str]:
    task = state.tasks.get("t")
    if task is None or task.membership is None or not task.confirmed or task.leavers:
        return []
    return [member.node for member in task.membership.members]


async def scenario(kind: str, directory: Path) -> list[dict[str, Any]]:
    async with Hosts(directory) as hosts:
        await hosts.submit(
            {
                "name": "t",
                "max_workers": 3,
                "global_batch": 12,
                "micro_batch": 2,
                "iterations": 1_000_000,
                "env": {"XDG_CACHE_HOME": str(directory / "cache")},
                "model": {"layers": 1, "hidden": 32, "seq": 32},
            }
        )
        state = await hosts.until(lambda s: len(members(s)) == 3 and s.tasks["t"].iteration > 5)
        if kind == "link":
            ip("link", "set", "n3-head", "down")
        else:
            # Packets to and from the head vanish; the peers stay within reach.
            ip("-n", "n3", "route", "add", "blackhole", f"{HEAD}/32")
        reached = state.tasks["t"].iteration
        await hosts.until(lambda s: sorted(members(s)) == ["n1", "n2"] and s.tasks["t"].iteration > reached + 5)
        if kind == "link":
            ip("link", "set", "n3-head", "up")
        else:
            ip("-n", "n3", "route", "del", "blackhole", f"{HEAD}/32")
        state = await hosts.until(lambda s: sorted(members(s)) == ["n1", "n2", "n3"] and not s.incidents, 90.0)
        reached = state.tasks["t"].iteration
        await hosts.until(lambda s: s.tasks["t"].iteration > reached + 5)
        return await hosts.events()


def main() -> None:
    kind, directory = sys.argv[1], Path(sys.argv[2])
    build_network()
    print(json.dumps(uvloop.run(scenario(kind, directory))))


if __name__ == "__main__":
    main()
