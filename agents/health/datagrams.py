"""Datagrams between agents: which way of a silent link is cut.

Rules
-----
* No connection tells: one that gets no answer may have lost its question or the answer. So each end of a probe sends
  its name, a datagram every EVERY_S for as long as the probe lasts, to the port at which the other's agent answers
  probes, and says whether it hears the other's.
* Nothing is answered. What a datagram says is for people alone: whoever forges one changes no decision.
* Where datagrams do not pass at all (a firewall), neither end hears the other, and no way is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterable

from unicrond.events.vocabulary import ProbedPeer

logger = logging.getLogger("unicrond.agents")

EVERY_S = 0.1
NAME_MAX_BYTES = 63
#: Names that are remembered at once.
NAMES_MAX = 1024


class Datagrams(asyncio.DatagramProtocol):
    """Sends the node's name to others, and remembers whose came when."""

    def __init__(self, node: str) -> None:
        self._name = node.encode()
        self._heard_s: dict[str, float] = {}
        self._transport: asyncio.DatagramTransport | None = None

    async def serve(self, address: str, port: int) -> None:
        """Receive datagrams at the address from now on, if that is possible."""
        try:
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(address, port))
        except OSError as error:
            logger.warning(
                "no datagrams at %s (%s): the way of a silent link that is cut stays unknown", address, error
            )

    def close(self) -> None:
        """Send and receive no more."""
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, _: object) -> None:
        """Note whose name has come."""
        if len(data) > NAME_MAX_BYTES:
            return
        name = data.decode("ascii", errors="replace")
        self._heard_s.pop(name, None)
        self._heard_s[name] = time.monotonic()
        if len(self._heard_s) > NAMES_MAX:
            del self._heard_s[next(iter(self._heard_s))]

    def has_heard(self, node: str, since_s: float) -> bool:
        """Return whether the node's name has come since then, by the monotonic clock."""
        return self._heard_s.get(node, 0.0) >= since_s

    async def send(self, peers: Iterable[ProbedPeer]) -> None:
        """Send the name to the peers again and again, until this is cancelled."""
        transport = self._transport
        if transport is None:
            return
        places = [place for place in await asyncio.gather(*map(_place, peers)) if place is not None]
        while True:
            for place in places:
                with contextlib.suppress(OSError):
                    transport.sendto(self._name, place)
            await asyncio.sleep(EVERY_S)


async def _place(peer: ProbedPeer) -> tuple[str, int] | None:
    """Return the peer's address in numbers."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(peer.host, peer.port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    host, port = addresses[0][4][:2]
    return str(host), int(port)
