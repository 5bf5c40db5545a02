"""The drill of deploy/nats (drill.py), where the kernel allows network namespaces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_hosts import namespaces_allowed


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.skipif(not namespaces_allowed(), reason="the kernel forbids network namespaces here")
def test_drill_loses_nothing_acknowledged(tmp_path: Path) -> None:
    command = ["unshare", "-rnm", sys.executable, "-m", "tests.integration.drill", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    logs = "".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:] + logs
