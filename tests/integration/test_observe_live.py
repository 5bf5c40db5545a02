"""Mode observe on a live cluster: nothing is taken out or moved, what died is restarted, and heal does the rest."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.live import TASK, live_cluster, members, nodes_of, seats
from unicrond.ctl.inject import inject

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("nodes", "workers"), [(3, 2), pytest.param(8, 5, marks=pytest.mark.matrix)])
@pytest.mark.asyncio
async def test_observed_cluster_only_restarts_what_died(tmp_path: Path, nodes: int, workers: int) -> None:
    settings = {"injection": True, "policy": {"isolation_s": 3600.0}}
    async with live_cluster(tmp_path, nodes=nodes, workers=workers, **settings) as live:
        ctl = ("unicronctl", "--url", live.dev.url)
        await live.submit()
        before = await live.until("it trains", lambda s: TASK in s.tasks and s.tasks[TASK].progress.iteration > 3)
        await live.run(*ctl, "mode", "observe", "--reason", "first week")
        place = nodes_of(before)
        node = before.tasks[TASK].workers[members(before)[-1]].node

        await inject(live.client).xid(48, task=TASK, rank=workers - 1)
        state = await live.until(
            "its isolation is held", lambda s: s.holds and not s.incidents and s.tasks[TASK].confirmed
        )
        assert not state.nodes[node].isolation.active and nodes_of(state) == place
        name, (_, pid) = next(iter(seats(state).items()))
        os.kill(pid, signal.SIGKILL)
        state = await live.until(
            "what died is back in its place",
            lambda s: name not in s.tasks[TASK].workers and len(members(s)) == workers and s.tasks[TASK].confirmed,
        )
        assert nodes_of(state) == place
        status = await live.run(*ctl, "status")
        assert "mode         observe" in status and f"node {node} is not isolated" in status, status
        print(status)
        print(await live.run(*ctl, "story", "--since", "1h"))
        assert not live.events("NodeIsolated")

        await live.run(*ctl, "mode", "heal")
        state = await live.until("the rest is done", lambda s: s.nodes[node].isolation.active)
        assert not state.holds
        await live.until("it trains elsewhere", lambda s: len(members(s)) == workers and node not in nodes_of(s))
        (told,) = [event for event in live.events("DecisionHeld") if event["action"] == "isolation"]
        assert told["node"] == node
