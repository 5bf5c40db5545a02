"""The cluster of `make kubernetes`, its overlays, and the rows of its table."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.integration.installation import ROOT
from tests.kubernetes.cluster import Cluster, running_cluster
from tests.kubernetes.machine import missing
from tests.kubernetes.rows import ROWS


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    with running_cluster() as cluster:
        yield cluster
        if cluster.overlay:
            cluster.keep_events()


@pytest.fixture
def cluster(whole_cluster: Cluster, request: pytest.FixtureRequest) -> Cluster:
    """With the overlay that the test's mark names: an earlier test's, where it is the same."""
    (overlay,) = request.node.get_closest_marker("overlay").args
    if whole_cluster.overlay != overlay:
        if whole_cluster.overlay:
            whole_cluster.tear_down()
        whole_cluster.make_volumes(overlay)
        whole_cluster.set_up(overlay)
    return whole_cluster


@pytest.fixture(scope="session")
def record() -> Callable[[str, str], None]:
    """Return what keeps a row of the table: the act, and what was seen."""
    words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    def keep(act: str, seen: str) -> None:
        rows: dict[str, dict[str, Any]] = json.loads(ROWS.read_text()) if ROWS.exists() else {}
        rows[act] = {
            "seen": seen,
            "day": f"{datetime.now(UTC):%Y-%m-%d}",
            "commit": commit,
            "load": round(os.getloadavg()[0]),
        }
        ROWS.parent.mkdir(parents=True, exist_ok=True)
        ROWS.write_text(json.dumps(rows, indent=1))
        print(f"\n  {act}: {seen}", flush=True)

    return keep
