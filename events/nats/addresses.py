"""The addresses of a connection's servers, also while no name server answers.

Rules
-----
* Names are looked up as ever. Only while none of them can be, the address that worked last is tried.
* A lookup that hangs occupies a thread: of each name there is one at a time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

LOOKUP_S = 1.0


class Servers(NamedTuple):
    """Where to connect. `tls_name`: the name that the server's certificate has to have; "": that of its URL."""

    urls: list[str]
    tls_name: str = ""


class Addresses:
    """The addresses of the servers with these URLs."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        self._fallback: Servers | None = None
        self._lookups: dict[str, asyncio.Task[bool]] = {}

    def note_connected(self, url: str, address: str) -> None:
        """Record that the server of this URL answers at the address."""
        parts = urlsplit(url)
        if not address or parts.hostname is None or _is_address(parts.hostname):
            return
        host = f"[{address}]" if ":" in address else address
        user, at, _ = parts.netloc.rpartition("@")
        port = f":{parts.port}" if parts.port else ""
        self._fallback = Servers([parts._replace(netloc=f"{user}{at}{host}{port}").geturl()], parts.hostname)

    async def servers(self) -> Servers:
        """Return where to connect now."""
        if self._fallback is None:
            return Servers(self._urls)
        answers = await asyncio.gather(*(self._has_address(urlsplit(url).hostname or "") for url in self._urls))
        if urls := [url for url, answer in zip(self._urls, answers, strict=True) if answer]:
            return Servers(urls)
        logger.warning("no address of %s is to be had: trying the one that worked last, %s", *self._fallback[::-1])
        return self._fallback

    async def _has_address(self, host: str) -> bool:
        """Return whether the name can be looked up now."""
        if _is_address(host):
            return True
        lookup = self._lookups.get(host)
        if lookup is None:
            lookup = asyncio.create_task(_look_up(host), name=f"look up {host}")
        await asyncio.wait({lookup}, timeout=LOOKUP_S)
        if not lookup.done():
            self._lookups[host] = lookup
            return False
        self._lookups.pop(host, None)
        return lookup.result()


async def _look_up(host: str) -> bool:
    try:
        return bool(await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
