"""The place of an agent's run directory, for every program that asks the agent: such a program loads nothing else of
it."""

from __future__ import annotations

import os
from pathlib import Path

PROBE_SOCKET = "probe.sock"


def default_run_dir(node: str) -> Path:
    """Return $XDG_RUNTIME_DIR/unicron/<node>, or /tmp/unicron-<uid>/<node> where that variable is not set."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "unicron" if runtime else Path(f"/tmp/unicron-{os.getuid()}")
    return base / node
