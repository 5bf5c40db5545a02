"""What a heartbeat tells of its host."""

from __future__ import annotations

import os
from pathlib import Path


def load_milli() -> int:
    """The load average of the last minute, in thousandths."""
    return round(os.getloadavg()[0] * 1000)


def memory_free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that could be given out without swapping (MemAvailable); 0 where the kernel does not say."""
    try:
        for line in meminfo.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
