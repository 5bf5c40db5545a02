"""Links that really go down, between hosts on one machine (see hosts.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.samples import expected_digest, samples_in_corpus


def namespaces_allowed() -> bool:
    try:
        return subprocess.run(["unshare", "-rnm", "ip", "link"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


#: One of the two always runs; `make matrix` runs both where it can.
HOW = {
    "namespaces": [pytest.mark.skipif(not namespaces_allowed(), reason="the kernel forbids network namespaces here")],
    "proxies": [pytest.mark.matrix] if namespaces_allowed() else [],
}
IN = {"namespaces": ("unshare", "-rnm"), "proxies": ()}


def run(how: str, kind: str, directory: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*IN[how], sys.executable, "-m", "tests.integration.hosts", how, kind, str(directory)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    logs = "".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(directory.glob("*.log")))
    assert done.returncode == 0, done.stderr[-3000:] + logs
    return [entry["envelope"]["event"] | {"seq": entry["seq"]} for entry in json.loads(done.stdout)]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", [pytest.param("link", marks=pytest.mark.matrix), "bus"])
@pytest.mark.parametrize("how", [pytest.param(how, marks=marks) for how, marks in HOW.items()])
def test_isolated_node_is_lost_once_and_commits_nothing(how: str, kind: str, tmp_path: Path) -> None:
    events = run(how, kind, tmp_path)
    assert [e["node"] for e in events if e["type"] == "NodeLost"] == ["n3"]
    assert len([e for e in events if e["type"] in ("NodeReturned", "NodeJoined") and e["node"] == "n3"]) == 2
    assert len([e for e in events if e["type"] == "TransitionCompleted"]) == 1

    commits = [e for e in events if e["type"] == "StepCommitted"]
    decided = {e["generation"]: e["seq"] for e in events if e["type"] == "MembershipDecided"}
    windows = samples_in_corpus(tmp_path / "stdlib", 32)
    seen: dict[int, int] = {}
    for commit in commits:
        digest, count = expected_digest(1234, commit["first"], commit["last"], 12, windows)
        assert (commit["samples_digest"], commit["samples"]) == (digest, count)
        for iteration in range(commit["first"], commit["last"] + 1):
            # An iteration that a new lead repeats is the same commit, told again under its own generation.
            assert seen.setdefault(iteration, commit["generation"]) == commit["generation"], f"{iteration} twice"
    assert sorted(seen) == list(range(1, max(seen) + 1)), "an iteration is missing"
    generations = [seen[iteration] for iteration in sorted(seen)]
    assert generations == sorted(generations), "a step was committed under an older membership than one before it"
    assert set(generations) <= set(decided)
