"""`unicronctl doctor` over three hosts whose links and mounts are broken one after the other.

    unshare -rnm python -m tests.integration.doctor_hosts DIR

Every agent has a network namespace and a mount namespace of its own (hosts.py). Prints one JSON object: what doctor
found in each situation, and the log's events while a task trained.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvloop

from tests.integration.hosts import Hosts, Namespaces, ip, members
from unicrond.agents.trainer.loop import corpus

#: The machine of the test may be busy with others.
LIMIT_S = 120
#: Whose mount of the checkpoints is its own.
APART = "n3"
_ON_ONE_MACHINE = ("--run-dir", "limits", "shared memory", "container")


class Apart(Namespaces):
    """One node has a directory of its own where the others share one."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def prefix(self, node: str) -> tuple[str, ...]:
        inside = super().prefix(node)
        if node != APART:
            return inside
        # `ip netns exec` makes a mount namespace as well
        return *inside, "sh", "-c", f'mount -t tmpfs none {self._directory} && exec "$@"', "sh"


async def doctor(api_port: int) -> list[dict[str, str]]:
    """What it finds, but for what is the same whatever the network is."""
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).parent / "unicronctl"), "--url", f"http://127.0.0.1:{api_port}", "doctor", "--json"),
        *("--timeout-s", str(LIMIT_S)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S + 200)
    return [one for one in json.loads(out) if not one["problem"].startswith(_ON_ONE_MACHINE)]


async def scenario(directory: Path) -> dict[str, Any]:
    shared, data = directory / "checkpoints", directory / "stdlib"
    shared.mkdir()
    corpus.build(data)
    told: dict[str, Any] = {}
    net = Apart(shared)
    async with Hosts(directory, net) as hosts:
        await hosts.until(lambda s: len(s.nodes) == 3)
        told["sound"] = await doctor(net.api_port)

        ip("-n", "n3", "route", "add", "blackhole", f"{net.address('n2')}/32")
        told["no route"] = await doctor(net.api_port)
        ip("-n", "n3", "route", "del", "blackhole", f"{net.address('n2')}/32")

        ip("link", "set", "n1-head", "mtu", "700")  # what is larger vanishes on its way to n1; nothing says so
        told["mtu"] = await doctor(net.api_port)
        ip("link", "set", "n1-head", "mtu", "1500")

        await hosts.submit(
            {
                "name": "t",
                "max_workers": 3,
                "global_batch": 12,
                "iterations": 1_000_000,
                "data": str(data),
                "checkpoint": {"dir": str(shared / "t"), "interval": 0},
                "model": {"layers": 1, "hidden": 32, "seq": 32},
            }
        )
        state = await hosts.until(lambda s: len(members(s)) == 3 and s.tasks["t"].progress.iteration > 5)
        before, reached = state.seq, state.tasks["t"].progress.iteration
        told["storage"] = await doctor(net.api_port)
        await hosts.until(lambda s: s.tasks["t"].progress.iteration > reached + 5)
        events = [line["envelope"]["event"]["type"] for line in await hosts.events() if line["seq"] > before]
        told["types"] = sorted(set(events))
    return told


if __name__ == "__main__":
    print(json.dumps(uvloop.run(scenario(Path(sys.argv[1])))))
