"""The workers' lines: each asks here for a connection to the agent, and gets one that is its own (protocol/line.py)."""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from agents.protocol import line
from agents.protocol.framing import frame
from agents.protocol.messages import Connected
from agents.protocol.peers import agent_schema

#: A worker waits longer than this between two tries; what asks more often gets no connection each time.
_PAUSE_S = 0.005


@dataclass(slots=True)
class _Line:
    ours: socket.socket
    whose: Connected
    granted_s: float = 0.0


class Lines:
    """`agent_socket`: where the agent listens, whichever lives."""

    def __init__(self, agent_socket: Path, selector: selectors.BaseSelector) -> None:
        self._agent_socket = str(agent_socket)
        self._selector = selector
        self._lines: dict[int, _Line] = {}

    def serve(self, ours: socket.socket, whose: Connected) -> None:
        """Answer the worker at the other end, until it closes it."""
        opened = _Line(ours, whose)
        self._lines[ours.fileno()] = opened
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._answer(opened))

    def close(self) -> None:
        """In a child, or at the end: every descriptor."""
        for one in self._lines.values():
            one.ours.close()

    def _answer(self, one: _Line) -> None:
        wanted = line.asked(one.ours)
        if wanted is None:
            self._selector.unregister(one.ours)
            del self._lines[one.ours.fileno()]
            one.ours.close()
        elif wanted:
            now_s = time.monotonic()
            connection = self._connected(one.whose) if now_s >= one.granted_s + _PAUSE_S else None
            if connection is None:
                line.deny(one.ours)
                return
            one.granted_s = now_s
            with connection:
                line.grant(one.ours, connection, agent_schema(self._agent_socket))

    def _connected(self, whose: Connected) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(self._agent_socket)
            connection.send(frame(whose))
        except OSError:  # no agent, or one with more connections waiting than it takes
            connection.close()
            return None
        return connection
