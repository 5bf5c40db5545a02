"""Programs that other users of this machine can run: for tests that run tasks as users of their own, as root."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from unicrond.agents.host.prctl import CAP_SETGID, CAP_SETUID, capabilities

ROOT = Path(__file__).resolve().parents[1]
#: A user that every Linux has, and that owns nothing.
USER = "nobody"
_OPEN = """
set -e
inside=$(mktemp -d); mount --bind "$1" "$inside"; mount -t tmpfs -o mode=755 none "$0"; mkdir -p "$1"
mount --bind "$inside" "$1"; umount -l "$inside"; rmdir "$inside"; shift; exec "$@"
"""

needs_root = pytest.mark.skipif(
    not {CAP_SETUID, CAP_SETGID} <= capabilities(), reason="only root can run tasks as other users"
)


def _can_run(*prefix: str) -> bool:
    code = f"from unicrond.agents.host.task_users import identities; identities([{USER!r}])"
    tried = subprocess.run([*prefix, sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    return tried.returncode == 0


@cache
def opened() -> tuple[str, ...]:
    """What to write before a command so that USER can run this Python: nothing, or a mount namespace in which the
    directory that is closed to others (as /root is) shows the Python in it alone. Skips where neither does."""
    if _can_run():
        return ()
    home = Path(os.path.realpath(sys.base_prefix))
    for closed in reversed(home.parents):
        if not closed.stat().st_mode & 0o001:
            prefix = ("unshare", "--mount", "sh", "-c", _OPEN, str(closed), str(home))
            if _can_run(*prefix):
                return prefix
            break
    pytest.skip(f"user {USER} cannot run {sys.executable}: it lies in a directory that is closed to others")
