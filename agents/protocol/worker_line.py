"""The line by which a worker gets a connection to its agent: a socket pair that it inherits, and no path.

Rules
-----
* The worker asks its fork server on the pair, one datagram for each connection that it wants. The fork server connects
  to the agent's socket, names the worker of that connection (`messages.ConnectionOwner`), and answers with the
  descriptor and the schema that the agent reads. Without an agent it answers with nothing.
* So a worker needs no right to the agent's directory, and cannot speak in another one's name.
"""

from __future__ import annotations

import contextlib
import socket
import struct

_ASK = b"?"
_NO_AGENT = b"-"
#: The fork server answers at once, unless the machine is halted.
_ANSWER_TIMEOUT_S = 5.0
_ANSWER_BYTES = 16


def pair() -> tuple[socket.socket, socket.socket]:
    """Make a line; return the fork server's end, which never blocks, and the worker's."""
    server_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server_end.setblocking(False)
    return server_end, worker_end


class Line:
    """The worker's end of the line. With descriptor -1 the worker has no agent."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd) if fd >= 0 else None
        if self._socket is not None:
            self._socket.settimeout(_ANSWER_TIMEOUT_S)

    def connect(self) -> tuple[socket.socket, int] | None:
        """Return a connection to the agent, and the schema that the agent reads; None where there is no agent now."""
        if self._socket is None:
            return None
        try:
            self._socket.send(_ASK)
            answer, fds, _, _ = socket.recv_fds(self._socket, _ANSWER_BYTES, 1)
        except OSError:
            return None
        connections = [socket.socket(fileno=fd) for fd in fds]
        if not connections or not answer.isdigit():
            return None
        return connections[0], int(answer)


def has_request(server_end: socket.socket) -> bool | None:
    """Return whether the worker asks for a connection; None where its end is closed."""
    try:
        return server_end.recv(_ANSWER_BYTES) == _ASK or None
    except BlockingIOError:
        return False
    except OSError:
        return None


def grant(server_end: socket.socket, connection: socket.socket, schema: int) -> None:
    """Answer with a connection. A worker that does not read its answers gets none."""
    with contextlib.suppress(OSError):
        socket.send_fds(server_end, [str(schema).encode("ascii")], [connection.fileno()])


def deny(server_end: socket.socket) -> None:
    """Answer that there is no agent."""
    with contextlib.suppress(OSError):
        server_end.send(_NO_AGENT)


def peer_uid(connection: socket.socket) -> int:
    """Return the user whose process is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
