"""Rolling upgrades in mid-training, with real parts: agents first, coordinator first, half and half, and back again.

From today's version to one with a schema more (`versions.py`). One short way is in the suite, `make upgrade` goes all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.versions import (
    SCHEMAS,
    MixedCluster,
    Upgrade,
    Version,
    make_tree,
    mixed_cluster,
)

NODES = 2
COORDINATOR, FIRST, SECOND = "coordinator", "node1", "node2"
#: The parts in the order in which they change; "kill": a worker is killed in between; "back" turns the way round.
WAYS = {
    "agents first": (FIRST, "kill", SECOND, COORDINATOR),
    "coordinator first": (COORDINATOR, "kill", FIRST, SECOND),
    "half and half": (FIRST, COORDINATOR, "kill", SECOND),
    "back again, coordinator first": (FIRST, SECOND, COORDINATOR, "kill", "back", COORDINATOR, "kill", FIRST, SECOND),
    "back again, agents first": (COORDINATOR, FIRST, SECOND, "back", FIRST, "kill", SECOND, COORDINATOR, "kill"),
    "back halfway": (COORDINATOR, FIRST, "kill", "back", COORDINATOR, "kill", FIRST),
}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


async def go(way: tuple[str, ...], before: Version, after: Version, directory: Path, trees: Path) -> None:
    writes = SCHEMAS[before if "back" in way else after]
    async with mixed_cluster(directory, trees, before, NODES, writes) as live:
        upgrade = Upgrade(live)
        assert isinstance(live.dev, MixedCluster)
        goal = after
        for step in way:
            if step == "kill":
                await upgrade.kill_a_worker()
            elif step == "back":
                goal = before
            else:
                await upgrade.change(step, goal)
        await upgrade.all_is_well()


def test_next_schema_build_succeeds(trees: Path) -> None:
    """As the source changes, its patches must."""
    tree = make_tree("next", trees)
    program = "import unicrond.service.head.daemon, unicrond.agents.shell.daemon, unicrond.replay.cli\n"
    program += "from unicrond.events.wire import schemas; print(schemas.SCHEMA)"
    env = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(SCHEMAS["next"]), done.stderr


@pytest.mark.timeout(600)
async def test_upgrade_in_mid_training_succeeds(tmp_path: Path, trees: Path) -> None:
    await go(WAYS["half and half"], "today", "next", tmp_path, trees)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
async def test_upgrade_succeeds_in_every_order(way: str, tmp_path: Path, trees: Path) -> None:
    await go(WAYS[way], "today", "next", tmp_path, trees)
