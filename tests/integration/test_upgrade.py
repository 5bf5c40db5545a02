"""Rolling upgrades in mid-training, with real parts: agents first, coordinator first, half and half, and back again.

From the last version that refuses what it does not know (a commit of this repository's history) to today's, and from
today's to one with a schema more (`versions.py`). One short way is in the suite, `make upgrade` goes all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.versions import (
    OLD,
    SCHEMAS,
    MixedCluster,
    Upgrade,
    Version,
    has_history,
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
STEPS: tuple[tuple[Version, Version], ...] = (("old", "today"), ("today", "next"))


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


async def go(way: tuple[str, ...], before: Version, after: Version, directory: Path, trees: Path) -> None:
    if "old" in (before, after) and not has_history():
        pytest.skip(f"commit {OLD} is not here: no old version to upgrade from (a clone with its history has it)")
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


def test_the_build_with_one_schema_more_can_be_made(trees: Path) -> None:
    """As the source changes, its patches must."""
    tree = make_tree("next", trees)
    program = "import unicrond.service.daemon, agents.daemon, replay.cli, events.schemas; print(events.schemas.SCHEMA)"
    env = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(SCHEMAS["next"]), done.stderr


@pytest.mark.timeout(300)
async def test_an_upgrade_in_mid_training(tmp_path: Path, trees: Path) -> None:
    await go(WAYS["half and half"], "old", "today", tmp_path, trees)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("before", "after"), STEPS)
@pytest.mark.parametrize("way", WAYS)
async def test_every_way(way: str, before: Version, after: Version, tmp_path: Path, trees: Path) -> None:
    await go(WAYS[way], before, after, tmp_path, trees)
