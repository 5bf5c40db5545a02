"""Tells whether another process of this machine still runs: a head that restarts asks about its predecessor.

A process id means something in one pid namespace of one boot, and only together with the time at which the process
began: ids are used again.
"""

from __future__ import annotations

import os
from pathlib import Path


def machine() -> str:
    """Return this boot of this machine and the pid namespace; "" where the kernel does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def began(pid: int) -> int | None:
    """Return when the process began, in the kernel's ticks since the boot; None where it does not run."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] == "Z" else int(after_name[19])


def is_gone(other_machine: str, pid: int, other_began: int) -> bool:
    """Return whether the process ran on this machine and has ended; False for processes of other machines."""
    return bool(other_machine) and other_machine == machine() and pid != os.getpid() and began(pid) != other_began
