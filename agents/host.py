"""What a heartbeat tells of its host."""

from __future__ import annotations

import os
from pathlib import Path


def load_milli() -> int:
    """The load average of the last minute, in thousandths."""
    return round(os.getloadavg()[0] * 1000)


def memory_total_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The host's memory (MemTotal); 0 where the kernel does not say."""
    return _meminfo_bytes("MemTotal:", meminfo)


def memory_free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that could be given out without swapping (MemAvailable); 0 where the kernel does not say."""
    return _meminfo_bytes("MemAvailable:", meminfo)


def _meminfo_bytes(field: str, meminfo: Path) -> int:
    try:
        for line in meminfo.read_text("ascii").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
