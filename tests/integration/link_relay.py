"""Links between hosts of network namespaces, whose packets a process carries: it delays, limits and drops them.

    python -m tests.integration.link_relay NODE=ADDRESS... [--pair NODE NODE]...

Runs where the namespaces were made (hosts.py). Each pair gets a point-to-point device in both namespaces with a route
to the other's address. Commands come on standard input, a JSON object a line: `{"from": "n1", "to": "n2", "delay_s":
0.03, "bytes_per_s": 375000, "loss": 0.05, "cut": false}`; each replaces what was said of that way before. Prints
`ready` when the devices stand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import random
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LIBC, _CLONE_NEWNET = ctypes.CDLL(None), 0x40000000
_PACKET_BYTES = 65536
#: What waits for a limited way at most: more is dropped, as by a switch.
_QUEUE_S = 0.3


@dataclass
class Way:
    """One direction of a link. `free_s`: when a limited one has sent what was given to it."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    loss: float = 0.0
    cut: bool = False
    free_s: float = 0.0

    def set(self, **fields: Any) -> None:
        """Replace what was said before."""
        self.delay_s, self.bytes_per_s, self.loss, self.cut = 0.0, 0.0, 0.0, False
        for name, value in fields.items():
            setattr(self, name, value)


def open_device(namespace: str, device: str, address: str, peer: str) -> int:
    """Make the device in the namespace, route the peer's address to it, and return its descriptor."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _LIBC.setns(there, _CLONE_NEWNET)
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH14x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        subprocess.run(["ip", "link", "set", device, "up"], check=True)
        subprocess.run(["ip", "route", "add", f"{peer}/32", "dev", device, "src", address], check=True)
    finally:
        _LIBC.setns(here, _CLONE_NEWNET)
        os.close(here)
        os.close(there)
    return descriptor


def carry(loop: asyncio.AbstractEventLoop, source: int, target: int, way: Way, chance: random.Random) -> None:
    """Carry what has come from one device to the other, as the way allows."""
    while True:
        try:
            packet = os.read(source, _PACKET_BYTES)
        except BlockingIOError:
            return
        if way.cut or (way.loss and chance.random() < way.loss):
            continue
        after_s = way.delay_s
        if way.bytes_per_s:
            now = loop.time()
            if way.free_s - now > _QUEUE_S:
                continue
            way.free_s = max(now, way.free_s) + len(packet) / way.bytes_per_s
            after_s += way.free_s - now
        if after_s:
            loop.call_later(after_s, deliver, target, packet)
        else:
            deliver(target, packet)


def deliver(target: int, packet: bytes) -> None:
    """Hand a packet over; one that finds no room is lost."""
    with contextlib.suppress(OSError):
        os.write(target, packet)


async def relay(addresses: dict[str, str], pairs: list[tuple[str, str]]) -> None:
    """Carry packets without end."""
    loop, chance = asyncio.get_running_loop(), random.Random(1)
    ways: dict[tuple[str, str], Way] = {}
    for first, second in pairs:
        ends = {
            node: open_device(node, f"to-{peer}", addresses[node], addresses[peer])
            for node, peer in ((first, second), (second, first))
        }
        for node, peer in ((first, second), (second, first)):
            way = ways[node, peer] = Way()
            loop.add_reader(ends[node], carry, loop, ends[node], ends[peer], way, chance)
    print("ready", flush=True)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        fields = json.loads(line)
        ways[fields.pop("from"), fields.pop("to")].set(**fields)
        print("done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", nargs="+")
    parser.add_argument("--pair", nargs=2, action="append", required=True)
    asked = parser.parse_args()
    addresses = dict(node.split("=") for node in asked.nodes)
    asyncio.run(relay(addresses, [tuple(pair) for pair in asked.pair]))


class Relay:
    """A relay for the pairs, between the namespaces' nodes."""

    def __init__(self, addresses: dict[str, str], pairs: list[tuple[str, str]], log: Path) -> None:
        self._addresses, self._pairs, self._log = addresses, pairs, log
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Relay:
        nodes = [f"{node}={address}" for node, address in self._addresses.items()]
        pairs = [part for pair in self._pairs for part in ("--pair", *pair)]
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.integration.link_relay", *nodes, *pairs),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"ready\n", self._log.read_text()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.terminate()
        await self._process.wait()

    async def set(self, node: str, peer: str, *, both: bool = True, **fields: Any) -> None:
        """Say how packets fare from `node` to `peer`, and back."""
        assert self._process.stdin is not None and self._process.stdout is not None
        for source, target in ((node, peer), (peer, node))[: 2 if both else 1]:
            self._process.stdin.write(json.dumps({"from": source, "to": target, **fields}).encode() + b"\n")
            await self._process.stdout.readline()


if __name__ == "__main__":
    main()
