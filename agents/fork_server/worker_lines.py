"""The workers' lines: each worker asks here for a connection to the agent, and gets one to itself
(protocol/worker_line.py)."""

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
    ours: socket.socket
    owner: ConnectionOwner
    granted_s: float = 0.0


class Lines:
    """Serves the workers' lines. `agent_socket`: where the agent listens, whichever agent lives."""

    def __init__(self, agent_socket: Path, selector: selectors.BaseSelector) -> None:
        self._agent_socket = str(agent_socket)
        self._selector = selector
        self._lines: dict[int, _Line] = {}

    def serve(self, ours: socket.socket, owner: ConnectionOwner) -> None:
        """Answer the worker at the other end, until it closes the line."""
        opened = _Line(ours, owner)
        self._lines[ours.fileno()] = opened
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._answer(opened))

    def close(self) -> None:
        """Close every descriptor, in a child or at the end."""
        for worker_line in self._lines.values():
            worker_line.ours.close()

    def _answer(self, worker_line: _Line) -> None:
        request = line.has_request(worker_line.ours)
        if request is None:
            self._selector.unregister(worker_line.ours)
            del self._lines[worker_line.ours.fileno()]
            worker_line.ours.close()
        elif request:
            now_s = time.monotonic()
            connection = self._connected(worker_line.owner) if now_s >= worker_line.granted_s + _PAUSE_S else None
            if connection is None:
                line.deny(worker_line.ours)
                return
            worker_line.granted_s = now_s
            with connection:
                line.grant(worker_line.ours, connection, agent_schema(self._agent_socket))

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
