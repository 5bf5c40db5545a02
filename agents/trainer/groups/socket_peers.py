"""Finds out to which member each of a group's TCP connections leads.

Rules
-----
* Of two ends one is at fault, and often only the other notices: so each member must know whose it was.
* The member that made a connection sees at its other end where its peer listens. The one that accepted it sees where it
  came from, which only the peer knows: so each tells each peer, once, its own end of the connection to it. That is one
  number from each to each, however many members there are.
* Addresses travel as marks: 63 bits of a digest, which two addresses of a group do not share.
* What has ended is looked for only when a group breaks.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from hashlib import blake2b

_TCP_ESTABLISHED = 1
#: As gloo writes it: "Connection closed by peer [10.0.0.7]:41685".
_ADDRESS = re.compile(r"\[([0-9A-Fa-f:.]+)(?:%\w+)?\]:(\d{1,5})\b")


class ConnectionEnds:
    """The ends of the connections of member `rank`. `sockets`: descriptor -> the kernel's name; `listening`: the
    addresses that the members listen on, in rank order, () where they are not known: then nothing is."""

    def __init__(self, sockets: dict[int, str], listening: Sequence[str] = (), rank: int = 0) -> None:
        self._sockets = sockets
        self._listening = listening
        near: dict[int, str] = {}
        self._far: dict[int, str] = {}
        for fd in sockets if listening else ():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
                self._far[fd], near[fd] = address(duplicate.getpeername()), address(duplicate.getsockname())
        members = {listens: member for member, listens in enumerate(listening) if member != rank}
        self._ranks = {fd: members[far] for fd, far in self._far.items() if far in members}
        self._near = {member: near[fd] for fd, member in self._ranks.items()}

    def __bool__(self) -> bool:
        return bool(self._listening)

    def own_marks(self) -> list[int]:
        """Return, for each member, the mark of this side of the connection that was made to it from here; else 0."""
        return [mark(self._near[member]) if member in self._near else 0 for member in range(len(self._listening))]

    def learn(self, marks: Sequence[int]) -> None:
        """Learn what each member has told of its connection to this one."""
        members = {peer_mark: member for member, peer_mark in enumerate(marks) if peer_mark}
        for fd, far in self._far.items():
            if fd not in self._ranks and mark(far) in members:
                self._ranks[fd] = members[mark(far)]

    def lost_members(self) -> list[int]:
        """Return the members to whom connections have ended, while the sockets are open."""
        return sorted({member for fd, member in self._ranks.items() if not is_connected(fd, self._sockets[fd])})

    def find_member(self, error: str) -> int | None:
        """Return the member that gloo's error is about; None where it names none that is known."""
        for named_address in parse_addresses(error):
            for fd, far in self._far.items():
                if far == named_address and fd in self._ranks:
                    return self._ranks[fd]
        return None


def address(name: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return a socket's address without its scope, which each host numbers for itself."""
    return f"{name[0].partition('%')[0]} {name[1]}"


def mark(address: str) -> int:
    """Return a positive number of 63 bits for the address."""
    return int.from_bytes(blake2b(address.encode(), digest_size=8).digest()) >> 1 or 1


def is_connected(fd: int, name: str) -> bool:
    """Return whether the socket still is what it was when it was found, and neither side has ended its connection."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}") == name:  # noqa: PTH115
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                state: int = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                return state == _TCP_ESTABLISHED
    return False


def parse_addresses(error: str) -> tuple[str, ...]:
    """Return the address of the peer that gloo's error is about, the likeliest first; none if it names none.

    Gloo writes a port's bytes in the network's order (gloo/transport/tcp/address.cc, torch 2.13): 57238 as 38623.
    """
    match = _ADDRESS.search(error)
    if match is None:
        return ()
    host, port = match[1], int(match[2]) & 0xFFFF
    return (f"{host} {socket.ntohs(port)}", f"{host} {port}")
