"""NCCL, one rank per device: a communicator with a dead or hung member is aborted, the next one formed, nothing lost.

With two devices two replicas, and every point of an iteration; with three or more three, and a regroup's points too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.conftest import ENV
from tests.gpu.devices import COUNT, missing
from tests.integration.kill_chain import ACTIONS, POINTS, VICTIMS, WITHIN, Cell
from tests.integration.regroup_rig import ForkServer
from tests.integration.test_kill_matrix import Reference, chains, check, failure_free_digests, possible
from unicrond.events.vocabulary import WorkerJoinedGroup

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800), pytest.mark.skipif(bool(missing(2)), reason=missing(2))]

SIZE = 3 if COUNT >= 3 else 2
CHANGES: dict[str, object] = {"backend": "nccl", "env": ENV}
CELLS = [
    cell
    for point in (POINTS if SIZE == 3 else (*WITHIN, "saving"))
    for action in ACTIONS
    for victim in VICTIMS
    if possible(cell := Cell(action, point, victim), "dp")
]


@pytest.fixture(scope="module")
def reference(server: ForkServer, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return failure_free_digests(server, data, tmp_path_factory, **CHANGES)


@pytest.mark.parametrize("cells", chains(CELLS, 8), ids=lambda cells: f"{cells[0].point}..{cells[-1].point}")
def test_nccl_survives_kill_matrix(
    server: ForkServer, data: Path, tmp_path: Path, reference: Reference, cells: list[Cell],
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    """A peer that is killed or stopped inside a collective leaves the others' kernels spinning: only an abort ends
    them. Nobody may take longer for it than the abort's own bound, and the bits are those of a run without faults."""
    run = check(server, tmp_path, data, "dp", cells, reference, size=SIZE, **CHANGES)
    regroups_ms = [
        said.duration_us / 1e3 for said in run.rig.of(WorkerJoinedGroup) if isinstance(said, WorkerJoinedGroup)
    ]
    record_property("regroup_ms_median", round(statistics.median(regroups_ms), 1))
    record_property("regroup_ms_max", round(max(regroups_ms), 1))
    assert not [said for _, said in run.rig.said if "cannot be aborted" in str(said)]
