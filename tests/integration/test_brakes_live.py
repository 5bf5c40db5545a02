"""Brakes on a live cluster: beyond them no more nodes are taken out, the task trains on, and a person is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live import TASK, live_cluster, members, nodes_of
from unicrond.ctl.inject import inject

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("nodes", "workers", "most"), [(5, 2, 1), pytest.param(8, 5, 2, marks=pytest.mark.matrix)])
@pytest.mark.asyncio
async def test_share_holds_and_person_releases_it(tmp_path: Path, nodes: int, workers: int, most: int) -> None:
    settings = {"injection": True, "policy": {"isolation_s": 3600.0}}
    async with live_cluster(tmp_path, nodes=nodes, workers=workers, **settings) as live:
        await live.submit()
        state = await live.until("it trains", lambda s: TASK in s.tasks and s.tasks[TASK].progress.iteration > 3)
        broken = []
        for number in range(most + 1):
            victim = state.tasks[TASK].workers[members(state)[-1]].node
            broken.append(victim)
            await inject(live.client).xid(48, task=TASK, rank=workers - 1)
            state = await live.until(
                f"{victim} is judged, and {workers} members train elsewhere",
                lambda s, n=number, node=victim: (
                    (s.nodes[node].isolation.active if n < most else s.holds)
                    and s.tasks[TASK].confirmed
                    and len(members(s)) == workers
                    and not s.incidents
                    and node not in nodes_of(s)
                ),
            )
        held = broken[-1]
        assert sorted(node.name for node in state.nodes.values() if node.isolation.active) == sorted(broken[:-1])
        (told,) = live.events("DecisionHeld")
        assert told["node"] == held and told["limit"] == "isolated_share"
        status = await live.run("unicronctl", "--url", live.dev.url, "status")
        assert f"node {held} is not isolated" in status and "ALARM" in status, status
        print(status)
        await live.run("unicronctl", "--url", live.dev.url, "uncordon", broken[0])
        state = await live.until(f"{held} is isolated", lambda s: s.nodes[held].isolation.active)
        assert not state.holds and len(live.events("NodeIsolated")) == most + 1
