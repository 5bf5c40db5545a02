"""Cases that run as a program in namespaces of their own: whether this machine has them, and one run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

Result = TypeVar("Result")

UNSHARE = ("unshare", "-rnm")


def succeeds(argv: Sequence[str]) -> bool:
    """Return whether the program ends with 0 in new namespaces; False where there are none."""
    try:
        return subprocess.run([*UNSHARE, *argv], capture_output=True, timeout=60, check=False).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def run_case(module: str, case: str, directory: Path, result: type[Result]) -> Result:
    """Run one case of the module in new namespaces; return what its last line says. Fail with the end of its logs."""
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-m", module, case, str(directory)],
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    logs = "".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(directory.glob("*.log")))
    assert done.returncode == 0, done.stderr[-3000:] + logs
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=result)
