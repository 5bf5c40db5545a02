"""Injects ordered faults into a whole node: its death, its network, its GPUs.

Rules
-----
* kill: the fork server (workers and store die with it), then this process, by SIGKILL.
* drop_network: every link but loopback goes down, and up again after `seconds` (0: never). Only in a network namespace
  of the agent's own: elsewhere it would cut off the machine, people included.
* xid: handed to the watch over the accelerators (accelerators/), which treats it as if the driver had reported it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from unicrond.events.vocabulary import Fault

logger = logging.getLogger("unicrond.agents")

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_IFREQ = struct.Struct("16sh22x")
_WHOLE_RANGE = ["0", "0", "4294967295"]


class NodeFaults:
    """Injects faults into this node. `kill_fork_server` ends it by SIGKILL. `report_xid(code, worker)` returns why it
    cannot, or ""."""

    def __init__(
        self, kill_fork_server: Callable[[], None], report_xid: Callable[[int, str], str] | None = None
    ) -> None:
        self._kill_fork_server = kill_fork_server
        self._report_xid = report_xid

    def inject(self, fault: Fault) -> str:
        """Inject the fault; return why that is impossible, or "". Does not return from a kill. Needs a running loop."""
        logger.warning("ordered fault on this node: %s", fault.kind)
        match fault.kind:
            case "kill":
                self._kill_fork_server()
                os.kill(os.getpid(), signal.SIGKILL)
                return ""
            case "drop_network":
                return self._drop_network(fault.seconds)
            case "xid":
                report = self._report_xid
                return report(fault.xid, fault.worker) if report else "xid: no accelerator is watched here"
            case _:
                return f"{fault.kind} is a worker's fault, and no worker is named"

    def _drop_network(self, seconds: float) -> str:
        if not is_in_own_namespace():
            return "drop_network: the agent has no network namespace of its own; start it in one (unshare -rn)"
        try:
            names = [name for _, name in socket.if_nameindex() if name != "lo" and set_link(name, up=False)]
        except OSError as error:
            return f"drop_network: cannot set a link down: {error.strerror}"
        if not names:
            return "drop_network: this namespace has no link that is up"
        if seconds:
            asyncio.get_running_loop().call_later(seconds, _restore, names)
        return ""


def _restore(names: list[str]) -> None:
    for name in names:
        try:
            set_link(name, up=True)
        except OSError as error:
            logger.error("cannot set the link %s up again: %s", name, error.strerror)
    logger.warning("the network is back: %s", ", ".join(names))


def is_in_own_namespace() -> bool:
    """Return whether this process's network is not the machine's (or container's), as far as that can be told."""
    namespace = Path("/proc/self/ns/net").readlink()
    try:
        return namespace != Path("/proc/1/ns/net").readlink()
    except OSError:
        # An agent that may not look lives in a user namespace, and may touch only that namespace's links.
        return Path("/proc/self/uid_map").read_text().split() != _WHOLE_RANGE


def set_link(name: str, *, up: bool) -> bool:
    """Set a network interface up or down; return whether that changed anything. Raise OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        _, flags = _IFREQ.unpack(fcntl.ioctl(handle, _SIOCGIFFLAGS, _IFREQ.pack(name.encode(), 0)))
        new_flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        if new_flags == flags:
            return False
        fcntl.ioctl(handle, _SIOCSIFFLAGS, _IFREQ.pack(name.encode(), new_flags))
        return True
