"""`unicronctl doctor` finds broken links and mounts of real agents, and does not disturb training (doctor_hosts.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_hosts import IN, namespaces_allowed


@pytest.mark.matrix
@pytest.mark.timeout(1800)  # each of the four looks ends by itself; on an idle machine all take a minute
@pytest.mark.skipif(not namespaces_allowed(), reason="the kernel forbids network namespaces here")
def test_doctor_finds_problems_on_three_hosts(tmp_path: Path) -> None:
    done = subprocess.run(
        [*IN["namespaces"], sys.executable, "-m", "tests.integration.doctor_hosts", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, done.stderr[-3000:] + logs
    told = json.loads(done.stdout)
    assert told["sound"] == []

    (route,) = told["no route"]
    assert route["about"] == "n2, n3" and route["problem"].startswith("do not reach each other (")
    assert "route" in route["fix"]

    links = {one["about"]: one for one in told["mtu"]}
    assert set(links) == {"n1, n2", "n1, n3"}, told["mtu"]
    assert all("connect, but a sum of 4 MiB between them fails" in one["problem"] for one in links.values())
    assert all("ping -M do" in one["fix"] for one in links.values())

    (storage,) = told["storage"]
    assert storage["about"] == "task t" and storage["problem"].startswith("n3 does not see what n1 writes to ")
    # The pace of a task that has just begun is being learnt, whoever looks.
    assert set(told["types"]) <= {"StepCommitted", "SnapshotStored", "ThroughputCorrected"}, "training has not noticed"
