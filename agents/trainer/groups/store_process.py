"""Serves the node's rendezvous store: a TCPStore server in a process of its own, forked beforehand.

A TCPStore server brings threads, so it lives neither in the fork server (which must be able to fork) nor
in a rank (whose death would take the meeting place of the survivors with it).
"""

from __future__ import annotations

import signal
import socket
from datetime import timedelta
from typing import NoReturn


def serve(listener: socket.socket) -> NoReturn:
    """Serve a TCPStore on `listener` (bound and listening already), until the process is killed."""
    from torch.distributed import TCPStore

    host, port = listener.getsockname()[:2]
    _store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),  # the store owns the descriptor from here on
    )
    while True:
        signal.pause()
