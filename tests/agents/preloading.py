"""A worker function for preloaders: prints what it finds, and what it is."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.agents.entries import serve  # noqa: F401
from unicrond.agents.protocol.messages import Launch


def run(launch: Launch) -> None:
    theirs = sys.modules.get("theirs")
    facts = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "sid": os.getsid(0),
        "uid": os.getuid(),
        "preloaded by": getattr(theirs, "pid", 0),
        "imported as": getattr(theirs, "uid", -1),
        "fds": sorted(name for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").exists()),  # noqa: PTH208
        "given": [str(launch.line_fd), launch.mark.rpartition("/")[2], launch.memory.rpartition("/")[2]],
        "cgroup": Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition("/")[2],
        "cwd": str(Path.cwd()),
        "colour": os.environ.get("COLOUR", ""),
        "no new privileges": "NoNewPrivs:\t1" in Path("/proc/self/status").read_text(),
    }
    print(json.dumps(facts), flush=True)
    if launch.spec.entry == "wait":
        while True:
            signal.pause()
