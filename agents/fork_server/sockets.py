"""Sockets of the fork server: where its agent connects, and where the rendezvous store listens."""

from __future__ import annotations

import socket
from pathlib import Path

_STORE_BACKLOG = 1024


def listen_unix(path: Path) -> socket.socket:
    """Listen at `path`, for this user alone. Raise OSError."""
    path.unlink(missing_ok=True)  # ours by the lock: a leftover of one that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(8)
    listener.setblocking(False)
    return listener


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
    listener.listen(_STORE_BACKLOG)
    return listener
