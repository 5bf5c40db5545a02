"""The node's rendezvous store, a torch TCPStore: its server, and a member's connection to it.

Rules
-----
* A TCPStore server brings threads, so it lives neither in the fork server (which must be able to fork) nor in a rank
  (whose death would take the meeting place of the survivors with it): it has a process of its own, forked beforehand.
* The next membership most often names the same store. To connect anew costs a round and, in torch 2.13 (socket.cpp), a
  question to the name service. So one connection is kept, while no meeting uses it. A store that has been replaced on
  its port has ended it: then a new one is made.
"""

from __future__ import annotations

import signal
import socket
import threading
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from unicrond.events.vocabulary import StoreAddress

_MEET_TIMEOUT = timedelta(seconds=10)


def serve(listener: socket.socket) -> NoReturn:
    """Serve a TCPStore on `listener` (bound and listening already), until the process is killed."""
    host, port = listener.getsockname()[:2]
    _store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),  # the store owns the descriptor from here on
    )
    while True:
        signal.pause()


class StoreConnections:
    """A member's connection to the rendezvous store, kept from one meeting to the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: tuple[StoreAddress, object] | None = None

    def acquire(self, address: StoreAddress) -> object:
        """Return a connection to the store at that address, for one meeting. Raises dist.DistError."""
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None and idle[0] == address and _answers(idle[1]):
            return idle[1]
        return dist.TCPStore(address.host, address.port, None, False, _MEET_TIMEOUT)

    def release(self, address: StoreAddress, server: object) -> None:
        """Keep the connection: the meeting is over, and nothing waits in it."""
        with self._lock:
            self._idle = address, server


def _answers(server: object) -> bool:
    try:
        server.check(["-"])  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True
