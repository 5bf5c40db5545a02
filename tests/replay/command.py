"""The command as people run it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def unicron_replay(
    *arguments: object, hash_seed: str = "random", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `unicron-replay` to its end (at most four minutes)."""
    return subprocess.run(
        [sys.executable, "-m", "unicrond.replay.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, **environment},
    )
