"""Whose the other end of a connection is, in groups of any size."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator

import pytest

from unicrond.agents.trainer.groups.socket_peers import ConnectionEnds, address, mark

SIZE = 100
RANK = 40


class Mesh:
    """The connections of one member of a large group: those after it made theirs to it, it made its to those before
    it. `mine`: its sockets; `theirs[m]`: member m's end."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.listeners = [socket.create_server(("127.0.0.1", 0), backlog=size) for _ in range(size)]
        self.mine: dict[int, socket.socket] = {}
        self.theirs: dict[int, socket.socket] = {}
        for member in range(size):
            if member != rank:
                accepts, connects = (member, rank) if member < rank else (rank, member)
                made = socket.create_connection(self.listeners[accepts].getsockname())
                accepted, _ = self.listeners[accepts].accept()
                self.mine[member], self.theirs[member] = (made, accepted) if connects == rank else (accepted, made)

    @property
    def listening(self) -> list[str]:
        return [address(listener.getsockname()) for listener in self.listeners]

    def ends(self) -> ConnectionEnds:
        return ConnectionEnds(names(self.mine.values()), self.listening, self.rank)

    def heard(self, ends: ConnectionEnds) -> list[int]:
        """What all members tell this one."""
        told = [
            ConnectionEnds(names([end]), self.listening, member).own_marks()[self.rank]
            for member, end in sorted(self.theirs.items())
        ]
        return [*told[: self.rank], ends.own_marks()[self.rank], *told[self.rank :]]

    def close(self) -> None:
        for one in (*self.listeners, *self.mine.values(), *self.theirs.values()):
            one.close()


def names(sockets: Iterable[socket.socket]) -> dict[int, str]:
    return {one.fileno(): os.readlink(f"/proc/self/fd/{one.fileno()}") for one in sockets}  # noqa: PTH115


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with contextlib.closing(Mesh(RANK, SIZE)) as made:
        yield made


def test_connection_ends_identify_each_member(mesh: Mesh) -> None:
    ends = mesh.ends()
    told = ends.own_marks()
    assert [member for member, one in enumerate(told) if one] == list(range(RANK)), "it made those to members before it"
    # Two of them may leave by one port: Linux gives it again to a connection that goes elsewhere.
    assert told[:RANK] == [mark(address(mesh.mine[member].getsockname())) for member in range(RANK)]
    mesh.theirs[7].close()
    mesh.theirs[90].close()
    assert ends.lost_members() == [7], "where 90 comes from, 90 has yet to tell"


def test_connection_ends_name_lost_members(mesh: Mesh) -> None:
    ends = mesh.ends()
    ends.learn(mesh.heard(ends))
    assert ends.lost_members() == []
    for member in (3, 64, 99):
        mesh.theirs[member].close()
    assert ends.lost_members() == [3, 64, 99]


@pytest.mark.parametrize("member", [3, 99])
def test_connection_ends_name_member_in_error(mesh: Mesh, member: int) -> None:
    ends = mesh.ends()
    ends.learn(mesh.heard(ends))
    host, port = mesh.mine[member].getpeername()
    mesh.theirs[member].close()
    assert ends.find_member(f"Connection closed by peer [{host}]:{socket.ntohs(port)}") == member
    assert ends.find_member("Connection closed by peer [10.0.0.1]:7") is None
    assert ends.find_member("Application timeout caused pair closure") is None


def test_connection_ends_without_addresses_know_nothing(mesh: Mesh) -> None:
    ends = ConnectionEnds(names(mesh.mine.values()))
    mesh.theirs[3].close()
    assert not ends
    assert (ends.own_marks(), ends.lost_members()) == ([], [])


def test_connection_marks_are_distinct() -> None:
    every = {mark(f"10.0.{high}.{low} {port}") for high in range(4) for low in range(50) for port in range(50)}
    assert len(every) == 4 * 50 * 50
    assert all(0 < one < 1 << 63 for one in every)
    assert address(("fe80::1%eth0", 7, 0, 2)) == address(("fe80::1%eth7", 7, 0, 3)) == "fe80::1 7"
