"""A node whose accelerator is broken works again only after a check: live, by a driver of GPUs that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live import TASK, live_cluster, members, nodes_of
from unicrond.core.nodes.isolation import IsolationPhase, phase
from unicrond.ctl.inject import inject

pytestmark = pytest.mark.timeout(600)


@pytest.mark.asyncio
async def test_broken_node_is_repaired_checked_and_readmitted(tmp_path: Path) -> None:
    ill, repaired, directory = tmp_path / "ill", tmp_path / "repaired", tmp_path / "cluster"
    directory.mkdir()
    readmission = {
        "check": ["/bin/sh", "-c", f'if test -e {ill}; then echo "$UNICRON_NODE is ill"; exit 1; fi; echo well'],
        "timeout_s": 30.0,
        "repair": ["/bin/sh", "-c", f'echo "$1 $2" >> {repaired}', "repair"],
    }
    settings = {"injection": True, "policy": {"isolation_s": 0.5}, "readmission": readmission}
    async with live_cluster(directory, nodes=3, workers=2, **settings) as live:
        await live.submit()
        before = await live.training(incidents=0)
        node = before.tasks[TASK].workers[members(before)[1]].node
        ill.touch()
        await inject(live.client).xid(48, task=TASK, rank=1)
        state = await live.until(
            "it has failed two checks",
            lambda s: s.nodes[node].isolation.probation and s.nodes[node].isolation.probation.attempts >= 2,
        )
        assert state.nodes[node].isolation.active and f"{node} is ill" in state.nodes[node].isolation.probation.last
        told = " ".join((await live.run("unicronctl", "--url", live.dev.url, "nodes")).split())
        assert "XID 48" in told and "attempts failed" in told
        away = await live.until("the others train", lambda s: s.tasks[TASK].confirmed and not s.incidents)
        assert node not in nodes_of(away)
        assert not live.events("NodeReadmitted", after=before.seq)
        ill.unlink()
        await live.until("it is back", lambda s: s.nodes[node].schedulable)
        checks = live.events("NodeChecked", after=before.seq)
        assert [check["has_passed"] for check in checks] == [False] * (len(checks) - 1) + [True]
        (readmitted,) = live.events("NodeReadmitted", after=before.seq)
        assert readmitted["reason"] == "its health check passed: well"

        again = await live.training(incidents=1)
        broken = again.tasks[TASK].workers[members(again)[1]].node
        await inject(live.client).xid(79, task=TASK, rank=1)
        # It may be out for less than a second: that it was is seen by its repair.
        await live.until(
            "it is back", lambda s: live.events("RepairEnded", after=again.seq) and s.nodes[broken].schedulable
        )
        (isolated,) = live.events("NodeIsolated", after=again.seq)
        assert isolated["node"] == broken
        assert repaired.read_text().split() == [broken, "reboot"]
        (ended,) = live.events("RepairEnded", after=again.seq)
        assert ended["has_passed"] and ended["node"] == broken
        rest = await live.until("all are in service", lambda s: not any(n.isolation.active for n in s.nodes.values()))
        assert phase(rest, rest.nodes[broken]) is IsolationPhase.IN_SERVICE
