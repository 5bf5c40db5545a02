"""Addresses of this machine's network interfaces."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yield interface and address: the first IPv4 address of each interface, and all IPv6 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in _IF_INET6.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, str(ipaddress.ip_address(bytes.fromhex(digits)))


def interface_of(address: str) -> str:
    """Return the interface that has this address, "" where it is unknown; loopback's for all addresses of loopback."""
    try:
        target = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if target.is_loopback:
        return "lo"
    return next((name for name, candidate in interface_addresses() if ipaddress.ip_address(candidate) == target), "")
