"""Planned departures of nodes whose workers train: by a time, in a window, before a failure. Nothing is repeated.

By `make matrix`: units and the simulation have each rule, and two parts wait for a time on purpose.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.live import TASK, live_cluster, nodes_of
from unicrond.ctl.inject import inject

#: A time is near three minutes before it: what a start and a meeting may take.
POLICY = {"worker_start_s": 120.0, "regroup_s": 60.0, "isolation_s": 1.0}
NEAR_S = 180.0
READMISSION = {"check": ["true"], "timeout_s": 30.0}


@pytest.mark.matrix
@pytest.mark.timeout(600)
async def test_planned_departures_redo_nothing(tmp_path: Path) -> None:
    settings = {"policy": POLICY, "readmission": READMISSION, "injection": True}
    async with live_cluster(tmp_path, nodes=3, workers=3, **settings) as live:
        await live.submit()
        await live.training(0)

        drained = live.client.cordon("node1", drain=True, reason="test", by={"in_s": NEAR_S + 8.0})
        kept = await live.until("the node is to be empty", lambda s: s.nodes["node1"].cordon.empty_by_us)
        assert (
            drained["empty_by_us"] == kept.nodes["node1"].cordon.empty_by_us and not kept.nodes["node1"].cordon.draining
        )
        state = await live.until("it is empty", lambda s: "node1" not in nodes_of(s))
        assert state.nodes["node1"].cordon.draining and not state.nodes["node1"].cordon.overdue
        assert time.time_ns() // 1000 < drained["empty_by_us"]
        live.client.uncordon("node1", "test")
        await live.training(0, beyond=3)

        window = f"w{live.client.maintain(['node1', 'node2'], {'in_s': NEAR_S + 8.0}, 600.0, 'test')['seq']}"
        await live.until("the window is planned", lambda s: window in s.windows and not s.windows[window].near)
        state = await live.until("both are empty", lambda s: nodes_of(s) == {"node3"})
        assert state.nodes["node1"].cordon.window == state.nodes["node2"].cordon.window == window
        live.client.cancel_maintenance(window, "test")
        await live.training(0, beyond=3)

        await inject(live.client).xid(92, task=TASK, rank=1)
        state = await live.until("a node is isolated", lambda s: any(n.isolation.active for n in s.nodes.values()))
        (node,) = [node for node in state.nodes.values() if node.isolation.active]
        assert "its failure is expected" in node.reason and "XID 92" in node.reason
        state = await live.training(0, beyond=3)

        assert len(live.events("NodeIsolated")) == len(live.events("NodeChecked")) == len(live.events("NodeReadmitted"))
        for never in ("NodeLost", "IncidentEscalated", "ErrorReported", "CommandFailed", "TransitionCompleted"):
            assert not live.events(never), never
        assert not any(decided["urgent"] for decided in live.events("MembershipDecided")[1:])
        assert not any(stop.get("kill") for stop in live.events("StopWorker"))
        assert sum(step["micro_batches_repeated"] for step in live.events("StepCommitted")) == 0
        assert sum(event.get("micro_batches_assigned", 0) for event in live.events("WorkerJoinedGroup")) == 0
        assert {event["source"] for event in live.events("WorkerJoinedGroup")} <= {"own", "replica", "init"}
        assert all(exited["is_expected"] for exited in live.events("WorkerExited"))
        assert not state.incidents_total and state.ledger.failures == 0
        await live.run("unicron-replay", "verify", "--nats", live.dev.nats_url)
