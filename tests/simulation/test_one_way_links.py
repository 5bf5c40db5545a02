"""Links that carry one way only, among the simulated cores: who hears nothing is lost alone, and soon; nobody is
accused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster
from unicrond.core.folding import nodes
from unicrond.core.nodes.liveness import GRACE_US, Liveness
from unicrond.core.state.state import NodeStatus
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.replay.simulation import run
from unicrond.replay.simulation.checks.one_way import OneWayRecord, Way, cut_ways_accuse_nobody
from unicrond.replay.simulation.cluster.world import HEARTBEAT_S
from unicrond.replay.simulation.faults.faults import SimulatedFault
from unicrond.replay.simulation.mutants.table import MUTANTS

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


@pytest.mark.parametrize(("pick", "way"), [(0, ("n1", "n2")), (1, ("n2", "n1"))])
def test_way_that_is_cut_between_two_nodes_is_named(pick: int, way: tuple[str, str]) -> None:
    fault = SimulatedFault(kind="cut_peers", at_s=CUT_S, for_s=LASTS_S, nodes=("n1", "n2"), how="one_way", pick=pick)
    with run._world(2) as world:
        run.arrange(world, [fault])
        world.loop.run_until_complete(run._play(world))
        assert world.checker.violation is None
        ways = {link.cut_way for state in world.checker.states for link in state.links.values() if link.is_silent}
    assert ways == {way}


@pytest.mark.parametrize(
    ("mutant", "owner", "attribute", "rule"),
    [
        ("believe_the_deaf", v.Heartbeat, "echo_lag", "deaf_nodes_are_lost"),
        ("blame_returns", nodes, "_count_return", "cut_ways_accuse_nobody"),
        ("ignore_returns", Liveness, "_beats_again", "cut_ways_heal"),
    ],
)
def test_bug_about_one_way_links_is_caught_by_its_rule(
    monkeypatch: pytest.MonkeyPatch, mutant: str, owner: object, attribute: str, rule: str
) -> None:
    monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # the mutant stays in this test
    MUTANTS[mutant].apply()
    fault = SimulatedFault(kind="cut_log", at_s=CUT_S, for_s=LASTS_S, nodes=(NODE,), how="hears")
    assert run.simulate(2, [fault]).rule == rule


class Looks:
    """Looks at three nodes that are up, of which n0 is deaf; the rules that break."""

    def __init__(self) -> None:
        cluster = MiniCluster(3)
        for number in range(3):
            cluster.add_host(f"n{number}")
        cluster.run()
        self.state, self.record, self.now_s = cluster.state, OneWayRecord(), 0.0

    def at(self, ways: Mapping[str, Way], for_s: float, *, judges: bool = True) -> set[str]:
        broken = set()
        for _ in range(int(for_s * 4)):
            self.now_s += 0.25
            looks = self.record.at_look(self.state, ways, self.now_s, judges=judges)
            broken |= {rule for rule, story in looks if story}
        return broken


SOUND: dict[str, Way] = {"n0": "sound", "n1": "sound", "n2": "sound"}
DEAF = SOUND | {"n0": "deaf"}


def test_node_may_be_deaf_for_no_longer_than_its_beats_take() -> None:
    looks = Looks()
    assert not looks.at(SOUND, 10.0) and not looks.at(DEAF, 3.5)
    assert looks.at(DEAF, 0.5) == {"deaf_nodes_are_lost"}


@pytest.mark.parametrize(
    ("ways", "judges"),
    [
        pytest.param(DEAF | {"n1": "deaf"}, True, id="not alone"),
        pytest.param(DEAF | {"n1": "bad"}, True, id="another one is silent"),
        pytest.param(DEAF, False, id="no head judges"),
        pytest.param(SOUND | {"n0": "bad"}, True, id="it is not heard"),
    ],
)
def test_deaf_node_is_judged_where_nothing_else_is_wrong(ways: Mapping[str, Way], judges: bool) -> None:
    looks = Looks()
    assert not looks.at(SOUND, 10.0) and not looks.at(ways, 30.0, judges=judges)


@pytest.mark.parametrize("alone", [True, False])
def test_node_is_back_soon_after_its_link_where_nothing_else_fails(alone: bool) -> None:
    looks = Looks()
    looks.record.alone = alone
    up = looks.state
    lost = replace(up.nodes["n0"], status=NodeStatus.LOST)
    assert not looks.at(SOUND, 10.0)
    looks.state = replace(up, nodes=up.nodes | {"n0": lost})
    assert not looks.at(DEAF, 10.0) and not looks.at(SOUND, 5.0)
    assert looks.at(SOUND, 0.5) == ({"cut_ways_heal"} if alone else set())


def test_link_that_carries_one_way_accuses_nobody() -> None:
    looks = Looks()
    isolated = v.NodeIsolated(node="n0", reason="flapping", until_us=1)
    for alone in (True, False):
        looks.record.alone = alone
        assert any(story for _, story in looks.record.on_entry(isolated)) is alone
    assert "fails" in cut_ways_accuse_nobody(v.TaskFailed(task="a", reason="stuck"))
