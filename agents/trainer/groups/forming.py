"""Forms a group: its members meet in a store, connect to each other, and find out which sockets are the group's.

Rules
-----
* Forming happens in a thread of its own. A newer membership supersedes the attempt: the main thread walks away, the
  thread closes whatever it still gets.
* Each member says under the attempt's prefix in the membership's store (`store_messages.py`) which port it listens on,
  and waits for all others to have said theirs; only then does it connect.
* Gloo would have each member read of every other, in the store, an address and a number for each member: n * n reads of
  n numbers. Here each says its own once (`gloo_store_messages.py`), and gloo asks no store but that. Where a member's
  hook is older (its port has no sign), gloo has the store itself, as that hook expects.
* Members of a task with fixed sums must make the same sums. A hook before lanes summed integers there: it says its port
  without `_LANES`, and no group forms with it.
* Before that it says which standby group it could use instead (`standby.py`), if any. A member that has one waits for
  what the others say; where all name the same one, that is the group, and no more connections are made. Else no member
  uses one: all members read the same words, so they agree.
* To leave a group at once its sockets are shut down (`group.py`), so they must be known for certain, also while other
  groups form in other threads and the user's code opens sockets of its own. With gloo they are known by their ports:
  every group listens on a port of its own, an accepted connection has it on this side, one made to a member has that
  member's on the other side. A NCCL communicator is aborted, and needs none of that.
* NCCL connects at a communicator's first collective, and blocks until all members are there. So the thread connects
  it, and makes the first collective on a stream of its own: the main thread's must not wait for a member that never
  comes. What it cannot walk away from is NCCL's own meeting; then the thread stays behind until NCCL gives up. (It is
  connected by name, so that what one member gives another goes through this communicator too; torch would else make
  one for each pair, in the main thread.)
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from unicrond.agents.trainer.groups.gloo_store_messages import GlooStore
from unicrond.agents.trainer.groups.rendezvous_store import StoreConnections
from unicrond.agents.trainer.groups.socket_peers import address
from unicrond.agents.trainer.groups.store_messages import StoreExchange
from unicrond.agents.trainer.process.channel import AgentChannel
from unicrond.events.vocabulary import StoreAddress

_NO_STANDBY = "-"
#: Before the port of a member that reads `gloo_words`. (Older hooks read the port without it.)
_SIGN = "+"
#: Before the port of a member that sums by lanes (`lifecycle/lanes.py`): a zero, which older hooks read over.
_LANES = _SIGN + "0"
#: Likewise of one whose gradients are divided in their backward (`megatron/runs.py`), with lanes or without.
_DIVIDED = _LANES + "0"
_ORDER_MISMATCH = (
    "have an older hook, which adds gradients up in another order: have their nodes leave and join, or submit the task"
    " with numerics: follow"
)
_FP16_MISMATCH = "have an older hook, which does not divide fp16 gradients: have their nodes leave and join"
_POLL_CUDA_S = 0.002
#: While a device is made, the listening socket that appears is its own.
_listening = threading.Lock()


class SumsMismatch(RuntimeError):
    """A member has another version of the hook, which adds gradients up in another order, or others."""


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """A member's place in a group that is to be formed. `address`: its own, to listen on. `lanes`: the task's sums are
    fixed; `divided`: they are of gradients that were divided in their backward."""

    store: StoreAddress
    prefix: str
    rank: int
    size: int
    address: str
    device: torch.device
    collective_timeout_s: float
    lanes: bool = False
    divided: bool = False


@dataclass(frozen=True, slots=True)
class FormedGroup:
    """A torch process group that is connected. `sockets`: descriptor -> the kernel's name; `listening`: see
    `ConnectionEnds`; both empty with NCCL."""

    process_group: object
    sockets: dict[int, str] = field(default_factory=dict)
    listening: Sequence[str] = ()

    def end(self) -> None:
        """Leave it, while it is unused."""
        if isinstance(self.process_group, dist.ProcessGroupGloo):
            shut_down(self.sockets)
        else:
            self.process_group.abort()  # type: ignore[attr-defined]


class Attempt:
    """One thread's attempt at forming a group, which the main thread may walk away from. `over`: it has succeeded or
    failed."""

    def __init__(
        self, place: GroupPlacement, channel: AgentChannel, standby: tuple[str, Attempt] | None = None,
        stores: StoreConnections | None = None,
    ) -> None:  # fmt: skip
        self._place = place
        self._channel = channel
        self._standby = standby
        self._stores = stores or StoreConnections()
        self._lock = threading.Lock()
        self._abandoned = False
        self._formed: FormedGroup | None = None
        self._error: str | None = None
        #: It can never succeed.
        self.fatal: SumsMismatch | None = None
        #: What is left to do in the store when the main thread goes on.
        self._tidy: Callable[[], None] = lambda: None
        self.over = False
        self._thread = threading.Thread(target=self._run, name=f"form {place.prefix}", daemon=True)
        self._thread.start()

    @property
    def succeeded(self) -> bool:
        """Return whether the group has formed."""
        with self._lock:
            return self._formed is not None

    def claim(self) -> tuple[FormedGroup | None, str | None]:
        """Return the group, and what went wrong; from now on the thread closes a later result itself."""
        with self._lock:
            self._abandoned = True
            formed, self._formed = self._formed, None
            return formed, self._error

    def abandon(self) -> None:
        """Walk away, and close what there is."""
        formed, _ = self.claim()
        if formed is not None:
            formed.end()

    def _run(self) -> None:
        formed: FormedGroup | None = None
        error: str | None = None
        try:
            server = self._stores.acquire(self._place.store)
            formed = self._build(self._place, server)
        except SumsMismatch as failure:
            self.fatal, error = failure.with_traceback(None), str(failure)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            abandoned = self._abandoned
            if not abandoned:
                self._formed, self._error = formed, error
            self.over = True
        if abandoned and formed is not None:
            formed.end()
        is_formed = formed is not None
        del formed
        self._channel.wake()
        if is_formed:
            with contextlib.suppress(RuntimeError):
                self._tidy()
                if self._place.device.type != "cuda":  # NCCL goes on using it
                    self._stores.release(self._place.store, server)

    def _build(self, place: GroupPlacement, server: object) -> FormedGroup | None:
        """Form the group; return None where the attempt was abandoned. Raises SumsMismatch."""
        name, standby = self._standby or (_NO_STANDBY, None)
        store = dist.PrefixStore(place.prefix, server)
        words = StoreExchange(store, place.rank, place.size, lambda: self._abandoned)
        words.publish("standby", name)
        if standby is not None:
            names = words.collect("standby")
            if names is not None and set(names) == {name.encode()}:
                return standby.claim()[0]
        cuda = place.device.type == "cuda"
        device, listening = (None, " 0") if cuda else _listen(place.address)
        own_port = listening.rpartition(" ")[2]
        mark = _DIVIDED if place.divided else _LANES if place.lanes else _SIGN
        words.publish("port", mark + own_port)
        ports = words.collect("port")
        if ports is None:
            return None
        outdated = [
            rank for rank, port in enumerate(ports) if mark != _SIGN and not port.startswith(mark.encode())
        ]  # a sum of what both have computed would be neither's
        if outdated:
            text = _FP16_MISMATCH if place.divided else _ORDER_MISMATCH
            raise SumsMismatch(f"members {', '.join(map(str, outdated))} of the group {text}")
        alike = all(port.startswith(_SIGN.encode()) for port in ports)
        if alike:
            self._tidy = words.withdraw
        if cuda:
            return self._connect_nccl(store, place)
        gloo_store = GlooStore(words, place.size, listening) if alike else None
        process_group = _connect_gloo(store if gloo_store is None else gloo_store, place, device)
        sockets = _sockets_of(int(own_port), {int(port) for port in ports})
        return FormedGroup(process_group, sockets, gloo_store.listening if gloo_store is not None else ())

    def _connect_nccl(self, store: object, place: GroupPlacement) -> FormedGroup | None:
        """Connect with NCCL; return None where the attempt was abandoned."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=place.collective_timeout_s)
        process_group: object = dist.ProcessGroupNCCL(store, place.rank, place.size, options)
        process_group.eager_connect_single_device(place.device)  # type: ignore[attr-defined]
        formed = FormedGroup(process_group)
        stream, tensor = torch.cuda.Stream(place.device), torch.zeros(1, device=place.device)
        event = event_after(process_group.allreduce([tensor]), stream)  # type: ignore[attr-defined]
        while not event.query():
            trouble = nccl_error(process_group)
            if trouble or self._abandoned:
                formed.end()
                if trouble:
                    raise RuntimeError(trouble)
                return None
            time.sleep(_POLL_CUDA_S)  # CUDA gives no event that a thread could wait for without blocking in it
        return formed


def _connect_gloo(store: object, place: GroupPlacement, device: object) -> object:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=place.collective_timeout_s)
    options._devices = [device]
    return dist.ProcessGroupGloo(store, place.rank, place.size, options)


def _listen(host: str) -> tuple[object, str]:
    """Return a gloo device, and the address that it listens on."""
    with _listening:
        earlier_names = {name for _, name, _ in _tcp_sockets(listening=True)}
        device = dist.ProcessGroupGloo.create_device(hostname=host)
        new = [
            duplicate.getsockname() for _, name, duplicate in _tcp_sockets(listening=True) if name not in earlier_names
        ]
    (listens,) = new
    return device, address(listens)


def _sockets_of(port: int, ports: Collection[int]) -> dict[int, str]:
    """Return the sockets of the group whose members listen on these ports: descriptor -> the kernel's name."""
    return {fd: name for fd, (name, (near, far)) in _connected().items() if near == port or far in ports}


def _connected() -> dict[int, tuple[str, tuple[int, int]]]:
    """Return the connected TCP sockets: descriptor -> name, ports on this side and on the other."""
    sockets = {}
    for fd, name, duplicate in _tcp_sockets(listening=False):
        with contextlib.suppress(OSError):
            sockets[fd] = (name, (duplicate.getsockname()[1], duplicate.getpeername()[1]))
    return sockets


def _tcp_sockets(listening: bool) -> Iterator[tuple[int, str, socket.socket]]:
    """Yield this process's TCP sockets: descriptor, the kernel's name, a duplicate that lives until the next."""
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


def event_after(work: object, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event that happens when the GPU is done with a NCCL operation. `stream`: one that nothing else waits
    in."""
    with torch.cuda.stream(stream):
        work.wait()  # type: ignore[attr-defined]  # queues it behind the operation; does not block
        return stream.record_event()


def nccl_error(process_group: object) -> str:
    """Return what NCCL's watchdog says has gone wrong with the communicator, "" for nothing."""
    error = process_group.get_error()  # type: ignore[attr-defined]
    return "" if error.name == "SUCCESS" else f"NCCL error: {error.name.lower().replace('_', ' ')}"


def shut_down(sockets: dict[int, str]) -> None:
    """Shut down those of the sockets that still are what they were when they were found."""
    for fd, name in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") != name:  # noqa: PTH115
                continue
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
