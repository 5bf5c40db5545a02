"""Runs the node's rendezvous store as a child of the fork server, on a port that outlives it.

The listening socket belongs to the fork server: a store that dies is replaced on the same port, after a growing pause.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

logger = logging.getLogger("unicrond.agents.fork_server")

_PAUSE_MIN_S = 0.05
_PAUSE_MAX_S = 5.0
_BACKLOG = 1024


class StoreProcess:
    """The process of the rendezvous store, a torch TCPStore. `fork(child)` forks and returns the pid. `serve`: called
    in the child, never here."""

    def __init__(
        self,
        address: str,
        serve: Callable[[socket.socket], object],
        fork: Callable[[Callable[[], object]], int],
    ) -> None:
        self.listener = listen_tcp(address)
        self.pid = 0
        self._serve = serve
        self._fork = fork
        self._forked_s = 0.0
        self._pause_s = _PAUSE_MIN_S

    @property
    def port(self) -> int:
        """Return the port on which the store listens."""
        return int(self.listener.getsockname()[1])

    def start(self) -> None:
        """Fork a store."""
        self._forked_s = time.monotonic()
        self.pid = self._fork(lambda: self._serve(self.listener))

    def due_s(self) -> float | None:
        """Return when the next one is to be forked, by the monotonic clock; None while one lives."""
        return None if self.pid else self._forked_s + self._pause_s

    def revive(self) -> None:
        """Fork the next one when it is time."""
        if not self.pid and time.monotonic() - self._forked_s >= self._pause_s:
            self.start()

    def ended(self, status: int) -> None:
        """Note the store's death; the next one waits for the longer, the shorter this one lived."""
        lived_s = time.monotonic() - self._forked_s
        self.pid = 0
        self._pause_s = _PAUSE_MIN_S if lived_s > _PAUSE_MAX_S else min(self._pause_s * 2, _PAUSE_MAX_S)
        self._forked_s = time.monotonic()
        logger.error(
            "the rendezvous store ended (status %d) after %.1f s; another takes its port in %.2f s. "
            "Groups that were forming there time out and form again",
            status,
            lived_s,
            self._pause_s,
        )


def listen_tcp(address: str) -> socket.socket:
    """Listen on a free port of `address`. Raise SystemExit with a reason where this node does not have that address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
    except OSError as error:
        listener.close()
        reason = f"address: cannot listen on {address}: {error.strerror}; give an address of this node"
        raise SystemExit(reason) from None
    listener.listen(_BACKLOG)
    return listener
