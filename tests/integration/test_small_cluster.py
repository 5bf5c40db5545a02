"""The whole path, with real parts: nats-server, coordinator, agents, fork servers, Megatron-core training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import chaos

UNICROND = str(Path(sys.executable).parent / "unicrond")


@pytest.mark.timeout(300)
async def test_one_sigkill_of_each_kind_heals(tmp_path: Path) -> None:
    await chaos.run(faults=4, seed=7, directory=tmp_path)


@pytest.mark.timeout(300)
def test_the_demo_heals_and_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [UNICROND, "demo", "--dir", str(tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all healed" in done.stdout
    assert "(equal)" in done.stdout
    assert "process_exit" in done.stdout and "node_lost" in done.stdout
