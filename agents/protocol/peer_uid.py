"""Asks the kernel which user's process is at the other end of a Unix socket."""

from __future__ import annotations

import socket
import struct


def peer_uid(connection: socket.socket) -> int:
    """Return the user whose process is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
