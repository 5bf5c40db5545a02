"""Connects workers to the agent: each asks here, and gets a connection of its own (protocol/worker_line.py)."""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from unicrond.agents.protocol import worker_line as line
from unicrond.agents.protocol.framing import frame
from unicrond.agents.protocol.messages import ConnectionOwner
from unicrond.agents.protocol.peers import agent_schema

#: A worker waits longer than this between two tries; one that asks more often gets no connection each time.
_PAUSE_S = 0.005


@dataclass(slots=True)
class _Line:
    """The fork server's end of a worker's line. `granted_s`: when the worker last got a connection to the agent."""

    parent_end: socket.socket
    owner: ConnectionOwner
    granted_s: float = 0.0


class Lines:
    """Serves the workers' requests for a connection. `agent_socket`: where the agent listens, whichever agent lives."""

    def __init__(self, agent_socket: Path, selector: selectors.BaseSelector) -> None:
        self._agent_socket = str(agent_socket)
        self._selector = selector
        self._lines: dict[int, _Line] = {}

    def serve(self, parent_end: socket.socket, owner: ConnectionOwner) -> None:
        """Answer the worker at the other end, until it closes the line."""
        opened = _Line(parent_end, owner)
        self._lines[parent_end.fileno()] = opened
        self._selector.register(parent_end, selectors.EVENT_READ, lambda _: self._answer(opened))

    def close(self) -> None:
        """Close every descriptor, in a child or at the end."""
        for worker_line in self._lines.values():
            worker_line.parent_end.close()

    def _answer(self, worker_line: _Line) -> None:
        request = line.has_request(worker_line.parent_end)
        if request is None:
            self._selector.unregister(worker_line.parent_end)
            del self._lines[worker_line.parent_end.fileno()]
            worker_line.parent_end.close()
        elif request:
            now_s = time.monotonic()
            connection = self._connected(worker_line.owner) if now_s >= worker_line.granted_s + _PAUSE_S else None
            if connection is None:
                line.deny(worker_line.parent_end)
                return
            worker_line.granted_s = now_s
            with connection:
                line.grant(worker_line.parent_end, connection, agent_schema(self._agent_socket))

    def _connected(self, owner: ConnectionOwner) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(self._agent_socket)
            connection.send(frame(owner))
        except OSError:  # no agent, or one with more connections waiting than it takes
            connection.close()
            return None
        return connection
