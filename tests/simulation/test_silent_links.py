"""A pair of nodes that cannot talk to each other, among the simulated cores: one end is left, once, and soon."""

from __future__ import annotations

from itertools import pairwise

import pytest

from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.replay.simulation import run
from unicrond.replay.simulation.faults.faults import SimulatedFault

PAIR, CUT_S, LASTS_S = ("n1", "n2"), 20.0, 12.0
#: A limit is 2 s in the simulation; the log and a start come on top.
STANDSTILL_S = 3 * 2.0
#: Of these the first seven have a task with replicas on both nodes then, the last one a replica across both.
SEEDS = (2, 5, 6, 7, 13, 21, 22, 11)


def played(seed: int) -> list[RecordedEvent]:
    fault = SimulatedFault(kind="cut_peers", at_s=CUT_S, for_s=LASTS_S, nodes=PAIR, how="pair")
    outcome = run.simulate(seed, [fault])
    assert not outcome.rule, outcome.story
    with run._world(seed) as world:
        run.arrange(world, [fault])
        world.loop.run_until_complete(run._play(world))
        return [entry for entry in world.server.entries if isinstance(entry, RecordedEvent)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_task_leaves_one_end_of_a_silent_pair(seed: int) -> None:
    entries = played(seed)
    withdrawn = [entry for entry in entries if isinstance(entry.envelope.event, v.WorkersWithdrawn)]
    ends = [(entry.envelope.event.task, entry.envelope.event.node) for entry in withdrawn]
    assert ends and len({task for task, _ in ends}) == len(ends), "one end, once, of each task"
    assert all(node in PAIR for _, node in ends)
    assert not [e for e in entries if isinstance(e.envelope.event, v.NodeIsolated | v.IncidentEscalated)]
    for task, _ in ends:
        steps = [e for e in entries if isinstance(e.envelope.event, v.StepCommitted) and e.envelope.event.task == task]
        times = [entry.recorded_at_us / 1e6 for entry in steps]
        assert max(later - earlier for earlier, later in pairwise(times)) <= STANDSTILL_S
