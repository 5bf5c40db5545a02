"""Where an agent's run directory is, for all that ask it: a program that only asks loads nothing else of the agent."""

from __future__ import annotations

import os
from pathlib import Path

PROBE_SOCKET = "probe.sock"


def default_run_dir(node: str) -> Path:
    """$XDG_RUNTIME_DIR/unicron/<node>, or /tmp/unicron-<uid>/<node> where there is none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "unicron" if runtime else Path(f"/tmp/unicron-{os.getuid()}")
    return base / node
