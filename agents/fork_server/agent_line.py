"""The fork server's connection to its agent: it serves the newest connection alone.

Without an agent the socket is kept where the next one looks for it, and the lease runs.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from unicrond.agents.host.paths import BoundPath
from unicrond.agents.protocol.framing import BadFrame, Unframer, frame
from unicrond.agents.protocol.messages import FromForkServer, ToForkServer
from unicrond.agents.protocol.worker_line import peer_uid

logger = logging.getLogger("unicrond.agents.fork_server")

_CHUNK_BYTES = 65536
#: How often the socket is checked while no agent is connected: somebody may have unlinked it.
_LOOK_EVERY_S = 1.0


class Retired(Exception):
    """The fork server is to end; the text says why."""


@dataclass(slots=True)
class _Agent:
    """The present connection, with what has come and what is to be sent."""

    connection: socket.socket
    incoming: Unframer[ToForkServer]
    outgoing: bytearray


class AgentLine:
    """The connection to the newest agent. `greeting()` returns the messages that a new agent receives first;
    `handle(message)` carries out a message of the agent."""

    def __init__(
        self,
        path: Path,
        lease_s: float,
        selector: selectors.BaseSelector,
        greeting: Callable[[], Iterable[FromForkServer]],
        handle: Callable[[ToForkServer], None],
    ) -> None:
        self._path = path
        self._lease_s = lease_s
        self._selector = selector
        self._greeting = greeting
        self._handle = handle
        self._agent: _Agent | None = None
        self._agentless_since_s = time.monotonic()
        self._listener = listen_unix(path)
        self._bound = BoundPath(path)

    def open(self) -> None:
        """Let agents connect from now on."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def due_s(self) -> list[float]:
        """Return the times of the next looks, by the monotonic clock; empty: only messages matter."""
        if self._agent is not None:
            return []
        return [self._agentless_since_s + self._lease_s, time.monotonic() + _LOOK_EVERY_S]

    def look(self) -> None:
        """Raise Retired when the lease is over without an agent."""
        if self._agent is None and time.monotonic() - self._agentless_since_s >= self._lease_s:
            raise Retired(f"no agent for {self._lease_s:g} s")
        self._stay_bound()

    def send(self, message: FromForkServer) -> None:
        """Send a message to the agent, if there is one."""
        if self._agent is not None:
            self._agent.outgoing += frame(message)
            self._flush()

    def drop(self, reason: str) -> None:
        """End the connection."""
        agent = self._agent
        if agent is None:
            return
        logger.info("the agent is gone: %s", reason)
        self._agent = None
        self._agentless_since_s = time.monotonic()
        self._selector.unregister(agent.connection)
        agent.connection.close()

    def close(self) -> None:
        """Close all sockets, in a child or at the end."""
        self._listener.close()
        if self._agent is not None:
            self._agent.connection.close()

    def _accept(self, _: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            logger.warning("cannot accept an agent's connection: %s", error)
            return
        if (uid := peer_uid(connection)) != os.getuid():
            logger.warning("refused a connection of uid %d: it is not this user's", uid)
            connection.close()
            return
        self.drop("a newer agent has connected")
        connection.setblocking(False)
        self._agent = _Agent(connection, Unframer(ToForkServer), bytearray())
        self._selector.register(connection, selectors.EVENT_READ, self._talk)
        for message in self._greeting():
            self.send(message)

    def _stay_bound(self) -> None:
        """Bind the socket again where it is lost and no agent is connected: the next agent must find it, or the workers
        end with the lease."""
        if self._agent is not None or self._bound.holds():
            return
        try:
            listener = listen_unix(self._path)
            self._bound = BoundPath(self._path)
        except OSError as error:
            logger.error("%s is gone and cannot be bound again: %s", self._path, error)
            return
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        logger.warning("%s was gone: bound it again", self._path)

    def _flush(self) -> None:
        agent = self._agent
        if agent is None:
            return
        try:
            while agent.outgoing:
                del agent.outgoing[: agent.connection.send(agent.outgoing)]
        except BlockingIOError:
            pass
        except OSError as error:
            self.drop(f"{error.strerror}")
            return
        event_mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if agent.outgoing else 0)
        self._selector.modify(agent.connection, event_mask, self._talk)

    def _talk(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        agent = self._agent
        if agent is None or not events & selectors.EVENT_READ:
            return
        try:
            data = agent.connection.recv(_CHUNK_BYTES)
            messages = agent.incoming.feed(data)
        except BlockingIOError:
            return
        except BadFrame as error:
            self.drop(f"bad frame: {error}")
            return
        except OSError as error:
            self.drop(f"{error.strerror}")
            return
        for message in messages:
            self._handle(message)
        if not data:
            self.drop("the agent closed the connection")


def listen_unix(path: Path) -> socket.socket:
    """Listen at `path`, for this user alone. Raise OSError."""
    path.unlink(missing_ok=True)  # ours by the lock: a leftover of one that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(8)
    listener.setblocking(False)
    return listener
