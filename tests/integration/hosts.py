"""Several hosts on one machine, whose links can be cut.

    unshare -rnm python -m tests.integration.hosts namespaces link|bus DIR
    python -m tests.integration.hosts proxies link|bus DIR

`namespaces`: every agent in a network namespace of its own, joined by a bridge. Links are real, and nothing outside is
touched. `proxies`: where the kernel forbids that, a TCP proxy stands between the node and NATS, and the connections to
its peers fall silent (socket filters, `disobedient_gpt.py`).

`link`: a node's links go down, then up. The node is lost once, comes back once, training goes on.
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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import uvloop
import yaml

from tests.integration.disobedient_gpt import order
from tests.integration.tcp_proxy import Proxy, proxy_to
from unicrond.agents.trainer.loop import corpus
from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import from_json
from unicrond.ctl.inject import inject
from unicrond.events.trust.keys import load_or_create_key, write_private
from unicrond.events.trust.logins import agent_login
from unicrond.local.dev import HANG_FLOOR_S, SupervisedProcess, free_port

NODES = ("n1", "n2", "n3")
CUT = "n3"
#: A node is lost after two of them and half a second: a busy machine may keep an agent waiting for longer than 1.5 s.
HEARTBEAT_S = 1.0
TOKEN = "unicron_of_the_test"
#: For so long a link is down: longer than it takes to find that out.
DOWN_S = 10.0
ENTRY = Path(__file__).with_name("disobedient_gpt.py")


class Network(Protocol):
    """Where the head listens, how a node reaches it, and how the links of CUT are cut."""

    head: str
    nats_port: int
    api_port: int
    nodes: tuple[str, ...]

    def prefix(self, node: str) -> tuple[str, ...]:
        """What a command on that node begins with."""

    def address(self, node: str) -> str: ...

    def nats_url(self, node: str) -> str: ...

    async def cut(self, kind: str) -> None: ...

    async def mend(self, kind: str) -> None: ...


class Namespaces:
    """In here we are root of a network of our own."""

    head = "10.77.0.254"
    nats_port = 4222
    api_port = 7470

    def __init__(self, nodes: tuple[str, ...] = NODES) -> None:
        """A bridge with the head's address, and per node a namespace on a veth pair."""
        self.nodes = nodes
        subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
        Path("/run/netns").mkdir()
        ip("link", "set", "lo", "up")
        ip("link", "add", "br0", "type", "bridge")
        ip("addr", "add", f"{self.head}/24", "dev", "br0")
        ip("link", "set", "br0", "gso_max_segs", "1")
        ip("link", "set", "br0", "up")
        for node in nodes:
            ip("netns", "add", node)
            ip("link", "add", f"{node}-head", "type", "veth", "peer", "name", "eth0", "netns", node)
            ip("link", "set", f"{node}-head", "master", "br0")
            ip("link", "set", f"{node}-head", "up")
            # As between real hosts no packet is larger than the MTU: the kernel would carry many in one piece, past
            # every port of the bridge, whatever its MTU (is_skb_forwardable lets all GSO packets through).
            ip("-n", node, "link", "set", "eth0", "gso_max_segs", "1")
            ip("-n", node, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "eth0", "up")
            ip("-n", node, "link", "set", "lo", "up")

    def prefix(self, node: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", node)

    def address(self, node: str) -> str:
        return f"10.77.0.{self.nodes.index(node) + 1}"

    def nats_url(self, node: str) -> str:
        return f"nats://{self.head}:{self.nats_port}"

    async def cut(self, kind: str) -> None:
        if kind == "link":
            await inject(f"http://127.0.0.1:{self.api_port}").drop_network(node=CUT, seconds=DOWN_S)
        else:
            # Packets to and from the head vanish; the peers stay within reach.
            ip("-n", CUT, "route", "add", "blackhole", f"{self.head}/32")

    async def mend(self, kind: str) -> None:
        if kind == "bus":
            ip("-n", CUT, "route", "del", "blackhole", f"{self.head}/32")


class Proxies:
    """All on loopback."""

    head = "127.0.0.1"
    nodes = NODES

    def __init__(self, proxy: Proxy, nats_port: int, orders: Path) -> None:
        self.nats_port = nats_port
        self.api_port = free_port()
        self._proxy = proxy
        self._orders = orders

    def prefix(self, node: str) -> tuple[str, ...]:
        return ()

    def address(self, node: str) -> str:
        return self.head

    def nats_url(self, node: str) -> str:
        return f"nats://{self.head}:{self._proxy.port if node == CUT else self.nats_port}"

    async def cut(self, kind: str) -> None:
        self._proxy.cut()
        if kind == "link":
            order(self._orders, CUT, "silence")

    async def mend(self, kind: str) -> None:
        if kind == "link":
            (self._orders / CUT).unlink()
        self._proxy.mend()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@asynccontextmanager
async def network(how: str, orders: Path) -> AsyncIterator[Network]:
    if how == "namespaces":
        yield Namespaces()
        return
    port = free_port()
    async with proxy_to("127.0.0.1", port) as proxy:
        yield Proxies(proxy, port, orders)


class Hosts:
    """The head, and one agent on each node."""

    def __init__(self, directory: Path, net: Network, policy: dict[str, float] | None = None) -> None:
        self.directory = directory
        self._api = f"http://127.0.0.1:{net.api_port}"
        self._session: aiohttp.ClientSession
        self._keys = directory / "keys"
        config = {
            "state_dir": str(directory / "state"),
            "checkpoint_dir": str(directory / "checkpoints"),
            "heartbeat_s": HEARTBEAT_S,
            "injection": True,
            "policy": policy or {},
            "nats": {"host": net.head, "port": net.nats_port, "auth": "keys"},
            "tls": "off",  # not what is tried here
            "api": {"port": net.api_port},
        }
        (directory / "unicron.yaml").write_text(yaml.safe_dump(config))
        (directory / "state").mkdir()
        write_private(directory / "state" / "operator.token", TOKEN)  # as the head would make it
        scripts = Path(sys.executable).parent
        env = os.environ | {"PYTHONUNBUFFERED": "1", "UNICRON_HANG_FLOOR_S": HANG_FLOOR_S}
        self.coordinator = SupervisedProcess(
            "coordinator",
            [str(scripts / "unicrond"), "run", "--config", str(directory / "unicron.yaml")],
            directory / "coordinator.log",
            env,
        )
        self.agents = {
            node: SupervisedProcess(
                node,
                [
                    *(*net.prefix(node), str(scripts / "unicron-agent")),
                    *("--nats", net.nats_url(node), "--key", str(self._keys / f"{agent_login(node)}.key")),
                    *("--node", node, "--slots", "1", "--address", net.address(node)),
                    *("--run-dir", str(directory / node), "--heartbeat-s", str(HEARTBEAT_S)),
                ],
                directory / f"{node}.log",
                env,
            )
            for node in net.nodes
        }

    async def __aenter__(self) -> Hosts:
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})
        await self.coordinator.start()
        await self.until(lambda s: s.term > 0)
        for node in self.agents:
            key = load_or_create_key(self._keys, agent_login(node)).user.key
            async with self._session.post(f"{self._api}/v1/nodes/{node}/enroll", json={"key": key}) as response:
                assert response.status == 202, await response.text()
        await asyncio.gather(*(agent.start() for agent in self.agents.values()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(agent.stop() for agent in self.agents.values()))
        await self.coordinator.stop()
        await self._session.close()

    async def state(self) -> ClusterState:
        async with self._session.get(self._api + "/v1/state", raise_for_status=True) as response:
            return from_json((await response.json())["state"])

    async def submit(self, spec: dict[str, Any]) -> None:
        async with self._session.post(self._api + "/v1/tasks", data=json.dumps(spec)) as response:
            assert response.status == 201, await response.text()

    async def events(self) -> list[dict[str, Any]]:
        async with self._session.get(self._api + "/v1/events") as response:
            lines = (await response.text()).splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]

    async def until(self, holds: Callable[[ClusterState], bool], timeout_s: float = 180.0) -> ClusterState:
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


async def scenario(how: str, kind: str, directory: Path) -> list[dict[str, Any]]:
    orders, data = directory / "orders", directory / "stdlib"
    orders.mkdir()
    corpus.build(data)
    async with network(how, orders) as net, Hosts(directory, net) as hosts:
        await hosts.submit(
            {
                "name": "t",
                "max_workers": 3,
                "global_batch": 12,
                "micro_batch": 2,
                "iterations": 1_000_000,
                "entry": str(ENTRY),
                "args": [str(orders)],
                "data": str(data),
                "env": {"UNICRON_BUCKET_BYTES": "16384"},
                "model": {"layers": 1, "hidden": 32, "seq": 32},
            }
        )
        state = await hosts.until(lambda s: len(members(s)) == 3 and s.tasks["t"].progress.iteration > 5)
        await net.cut(kind)
        reached = state.tasks["t"].progress.iteration
        await hosts.until(
            lambda s: sorted(members(s)) == ["n1", "n2"] and s.tasks["t"].progress.iteration > reached + 1
        )
        await net.mend(kind)
        state = await hosts.until(lambda s: sorted(members(s)) == ["n1", "n2", "n3"] and not s.incidents)
        reached = state.tasks["t"].progress.iteration
        await hosts.until(lambda s: s.tasks["t"].progress.iteration > reached + 5)
        return await hosts.events()


def main() -> None:
    how, kind, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    print(json.dumps(uvloop.run(scenario(how, kind, directory))))


if __name__ == "__main__":
    main()
