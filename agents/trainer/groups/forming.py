"""Forming a group: its members meet in a store, connect to each other, and know which sockets are the group's.

Rules
-----
* Forming happens in a thread of its own. A newer membership supersedes the attempt: the main thread walks away, the
  thread closes whatever it still gets.
* Each member says under the attempt's prefix in the membership's store which port it listens on, and waits for all
  others to have said theirs; only then does it connect.
* Before that it says which standby group it could use instead (`standby.py`), if any. A member that has one waits for
  what the others say; where all name the same one, that is the group, and no more connections are made. Else no member
  uses one: all members read the same words, so they agree. With a standby comes its connection to the store, which
  saves as much again.
* To leave a group at once its sockets are shut down (`group.py`), so they must be known for certain, also while other
  groups form in other threads and the user's code opens sockets of its own. With gloo they are known by their ports:
  every group listens on a port of its own, an accepted connection has it on this side, one made to a member has that
  member's on the other side. A NCCL communicator is aborted, and needs none of that.
* NCCL connects at a communicator's first collective, and blocks until all members are there. So the thread makes the
  first one, on a stream of its own: the main thread's must not wait for a member that never comes. What it cannot walk
  away from is NCCL's own meeting; then the thread stays behind until NCCL gives up.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from agents.trainer.process.channel import AgentChannel
from events.vocabulary import StoreAddress

_MEET_TIMEOUT = timedelta(seconds=10)
#: How long one look for the others' words may take; it delays no member, but torch warns at the end of each.
_LOOK_AGAIN = timedelta(seconds=60)
_NO_STANDBY = "-"
_TCP_ESTABLISHED = 1
#: As gloo writes it: "Connection closed by peer [10.0.0.7]:41685".
_ADDRESS = re.compile(r"\[[0-9A-Fa-f:.%\w]+\]:(\d{1,5})\b")
_POLL_CUDA_S = 0.002
#: While a device is made, the listening socket that appears is its own.
_listening = threading.Lock()


@dataclass(frozen=True, slots=True)
class Place:
    """A member's place in a group that is to be formed. `address`: its own, to listen on."""

    store: StoreAddress
    prefix: str
    rank: int
    size: int
    address: str
    device: torch.device
    collective_timeout_s: float


class Attempt:
    """One thread's attempt at forming a group, which the main thread may walk away from. `over`: it has succeeded or
    failed."""

    def __init__(self, place: Place, channel: AgentChannel, standby: tuple[str, Attempt] | None = None) -> None:
        self._place = place
        self._channel = channel
        self._standby = standby
        self._lock = threading.Lock()
        self._abandoned = False
        self._process_group: object | None = None
        self._sockets: dict[int, str] = {}
        self._error: str | None = None
        self._server: object | None = None
        self.over = False
        threading.Thread(target=self._run, name=f"form {place.prefix}", daemon=True).start()

    @property
    def succeeded(self) -> bool:
        """Whether the group has formed."""
        with self._lock:
            return self._process_group is not None

    def server(self, address: StoreAddress) -> object:
        """A connection to the store at that address: this attempt's own, once, where it was to the same one."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None and address == self._place.store and self.over:
            return server
        return _connect_store(address)

    def take(self) -> tuple[object | None, dict[int, str], str | None]:
        """The process group, its sockets, and what went wrong; from now on a later result is closed by the thread."""
        with self._lock:
            self._abandoned = True
            process_group, self._process_group = self._process_group, None
            return process_group, self._sockets, self._error

    def abandon(self) -> None:
        """Walk away, and close what there is."""
        process_group, sockets, _ = self.take()
        if process_group is not None:
            _end(process_group, sockets)

    def _run(self) -> None:
        process_group: object | None = None
        sockets: dict[int, str] = {}
        error: str | None = None
        try:
            process_group, sockets = self._build(self._place)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            abandoned = self._abandoned
            if not abandoned:
                self._process_group, self._sockets, self._error = process_group, sockets, error
            self.over = True
        if abandoned and process_group is not None:
            _end(process_group, sockets)
        del process_group
        self._channel.wake()

    def _build(self, place: Place) -> tuple[object | None, dict[int, str]]:
        name, standby = self._standby or (_NO_STANDBY, None)
        self._server = _connect_store(place.store) if standby is None else standby.server(place.store)
        store = dist.PrefixStore(place.prefix, self._server)
        store.set(f"standby/{place.rank}", name)
        if standby is not None:
            names = self._said(store, "standby")
            if names is not None and set(names) == {name}:
                process_group, sockets, _ = standby.take()
                return process_group, sockets
        if place.device.type == "cuda":
            store.set(f"port/{place.rank}", "0")
            if self._said(store, "port") is None:
                return None, {}
            return self._connect_nccl(store, place), {}
        device, port = _listen(place.address)
        store.set(f"port/{place.rank}", str(port))
        ports = self._said(store, "port")
        if ports is None:
            return None, {}
        process_group = _connect_gloo(store, place, device)
        return process_group, _sockets_of(port, {int(said) for said in ports})

    def _connect_nccl(self, store: object, place: Place) -> object | None:
        """None where the attempt was abandoned."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=place.collective_timeout_s)
        process_group: object = dist.ProcessGroupNCCL(store, place.rank, place.size, options)
        stream, one = torch.cuda.Stream(place.device), torch.zeros(1, device=place.device)
        met = event_behind(process_group.allreduce([one]), stream)  # type: ignore[attr-defined]
        while not met.query():
            trouble = failure(process_group)
            if trouble or self._abandoned:
                _end(process_group, {})
                if trouble:
                    raise RuntimeError(trouble)
                return None
            time.sleep(_POLL_CUDA_S)  # CUDA gives no event that a thread could wait for without blocking in it
        return process_group

    def _said(self, store: object, what: str) -> list[str] | None:
        """What all members say, as soon as all have; None where the attempt was abandoned."""
        everyone = [f"{what}/{member}" for member in range(self._place.size)]
        while not self._abandoned:
            try:
                store.wait(everyone, _LOOK_AGAIN)  # type: ignore[attr-defined]
            except dist.DistStoreError:
                continue
            return [bytes(said).decode() for said in store.multi_get(everyone)]  # type: ignore[attr-defined]
        return None


def _connect_store(address: StoreAddress) -> object:
    return dist.TCPStore(address.host, address.port, None, False, _MEET_TIMEOUT)


def _connect_gloo(store: object, place: Place, device: object) -> object:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=place.collective_timeout_s)
    options._devices = [device]
    return dist.ProcessGroupGloo(store, place.rank, place.size, options)


def _listen(address: str) -> tuple[object, int]:
    """A gloo device, and the port it listens on."""
    with _listening:
        before = {name for _, name, _ in _tcp_sockets(listening=True)}
        device = dist.ProcessGroupGloo.create_device(hostname=address)
        (port,) = [found.getsockname()[1] for _, name, found in _tcp_sockets(listening=True) if name not in before]
    return device, port


def _sockets_of(own: int, ports: Collection[int]) -> dict[int, str]:
    """The sockets of the group whose members listen on these ports: descriptor -> the kernel's name."""
    return {fd: name for fd, (name, (here, there)) in _connected().items() if here == own or there in ports}


def ports_of(sockets: dict[int, str]) -> list[int]:
    """On this side of these sockets, each once; those that are gone are left out."""
    found = set()
    for fd in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
            found.add(duplicate.getsockname()[1])
    return sorted(found)


def far_ports(sockets: dict[int, str]) -> dict[int, int]:
    """On the other side of each of these sockets, by descriptor, while they are connected."""
    found = {}
    for fd in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
            found[fd] = duplicate.getpeername()[1]
    return found


def is_connected(fd: int, name: str) -> bool:
    """The socket still is what it was when it was found, and neither side has ended its connection."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}") == name:  # noqa: PTH115
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                state: int = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                return state == _TCP_ESTABLISHED
    return False


def ports_named(error: str) -> tuple[int, ...]:
    """The port of the peer that gloo's error is about, the likeliest first; none if it names none.

    Gloo writes a port's bytes in the network's order (gloo/transport/tcp/address.cc, torch 2.13): 57238 as 38623.
    """
    found = _ADDRESS.search(error)
    return (socket.ntohs(int(found[1]) & 0xFFFF), int(found[1])) if found else ()


def _connected() -> dict[int, tuple[str, tuple[int, int]]]:
    """Connected TCP sockets: descriptor -> name, ports on this side and on the other."""
    found = {}
    for fd, name, duplicate in _tcp_sockets(listening=False):
        with contextlib.suppress(OSError):
            found[fd] = (name, (duplicate.getsockname()[1], duplicate.getpeername()[1]))
    return found


def _tcp_sockets(listening: bool) -> Iterator[tuple[int, str, socket.socket]]:
    """This process's TCP sockets: descriptor, the kernel's name, a duplicate that lives until the next."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(entry)  # noqa: PTH115 (Path.readlink would normalise the name)
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as duplicate:
                if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening:
                    yield int(entry.name), name, duplicate


def event_behind(work: object, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that happens when the GPU is done with a NCCL operation. `stream`: one that nothing else waits in."""
    with torch.cuda.stream(stream):
        work.wait()  # type: ignore[attr-defined]  # queues it behind the operation; does not block
        return stream.record_event()


def failure(process_group: object) -> str:
    """What NCCL's watchdog says has gone wrong with the communicator, "" for nothing."""
    told = process_group.get_error()  # type: ignore[attr-defined]
    return "" if told.name == "SUCCESS" else f"NCCL error: {told.name.lower().replace('_', ' ')}"


def _end(process_group: object, sockets: dict[int, str]) -> None:
    """Of a group that is still unused."""
    if isinstance(process_group, dist.ProcessGroupGloo):
        shut_down(sockets)
    else:
        process_group.abort()  # type: ignore[attr-defined]


def shut_down(sockets: dict[int, str]) -> None:
    """Shut down those of the sockets that still are what they were when they were found."""
    for fd, name in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") != name:  # noqa: PTH115
                continue
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
