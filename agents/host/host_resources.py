"""The resources of this agent's host: the machine's, or less where its container is limited to less."""

from __future__ import annotations

import os
from pathlib import Path

from unicrond.agents.host import container


def load_milli() -> int:
    """Return the load average of the last minute, in thousandths. It is the machine's: the kernel keeps none for a
    container."""
    return round(os.getloadavg()[0] * 1000)


def memory_total_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory that may be used: the host's (MemTotal), or the container's limit if that is less; 0 where the
    kernel does not say."""
    return _less(_meminfo_bytes("MemTotal:", meminfo), container.memory_limit_bytes())


def memory_free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory that could be given out without swapping (MemAvailable), or up to the container's limit if that
    is less; 0 where the kernel does not say."""
    return _less(_meminfo_bytes("MemAvailable:", meminfo), container.memory_free_bytes())


def _less(of_host: int, of_container: int | None) -> int:
    if of_container is None:
        return of_host
    return min(of_host, of_container) if of_host else of_container


def _meminfo_bytes(field: str, meminfo: Path) -> int:
    try:
        for line in meminfo.read_text("ascii").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
