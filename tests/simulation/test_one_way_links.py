"""A node whose link to the log carries one way only, among the simulated cores: it alone is lost, and soon."""

from __future__ import annotations

import pytest

from unicrond.core.nodes.liveness import GRACE_US
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.replay.simulation import run
from unicrond.replay.simulation.cluster.world import HEARTBEAT_S
from unicrond.replay.simulation.faults.faults import SimulatedFault

NODE, CUT_S, LASTS_S = "n1", 20.0, 12.0
#: Two heartbeats and half a second of silence after the last beat, and the way of the verdict into the log. Of a node
#: that hears nothing three beats are said first: the one on its way when the link is cut comes back no more.
LOST_WITHIN_S = {"is_heard": 2 * HEARTBEAT_S + GRACE_US / 1e6 + 0.5, "hears": 3 * HEARTBEAT_S + 0.5}
SEEDS = (2, 3, 5, 6, 13, 21)


def losses(seed: int, how: str) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
    """Play it; return when which nodes were lost, and when which came back."""
    fault = SimulatedFault(kind="cut_log", at_s=CUT_S, for_s=LASTS_S, nodes=(NODE,), how=how)
    outcome = run.simulate(seed, [fault])
    assert not outcome.rule, outcome.story
    with run._world(seed) as world:
        run.arrange(world, [fault])
        start_us = world.log_clock.wall_us()
        world.loop.run_until_complete(run._play(world))
        entries = [entry for entry in world.server.entries if isinstance(entry, RecordedEvent)]
    since = [((e.recorded_at_us - start_us) / 1e6 - CUT_S, e.envelope.event) for e in entries]
    lost = [
        (s, name) for s, event in since if isinstance(event, v.NodeLost | v.NodesLost) for name in event.nodes_named()
    ]
    back = [(s, event.node) for s, event in since if isinstance(event, v.NodeReturned | v.NodeJoined) and s > 0]
    return lost, back


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["hears", "is_heard"])
@pytest.mark.parametrize("seed", SEEDS)
def test_node_of_a_one_way_link_alone_is_lost_and_comes_back(seed: int, how: str) -> None:
    lost, back = losses(seed, how)
    assert [name for _, name in lost] == [NODE]
    assert 0 < lost[0][0] <= LOST_WITHIN_S[how]
    assert back and back[0][1] == NODE and back[0][0] >= LASTS_S
