"""Workers and incidents move by their tables alone, and the document shows these tables."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.replay.logs import eventful
from tests.unicrond.life_diagrams import DOCUMENT, TRIGGERS, document
from tests.unicrond.test_decide import random_life, two_tasks
from unicrond.core.replayer import steps
from unicrond.core.state import incident_lifecycle as incident_life
from unicrond.core.state import worker_lifecycle as worker_life
from unicrond.core.state.incident_lifecycle import IncidentPhase, IncidentTrigger, phase
from unicrond.core.state.state import ClusterState, WorkerStatus
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Entry
from unicrond.replay.simulation import run


def workers(state: ClusterState) -> dict[str, WorkerStatus]:
    return {name: worker.status for task in state.tasks.values() for name, worker in task.workers.items()}


def phases(state: ClusterState) -> dict[str, IncidentPhase]:
    return {incident.id: phase(incident) for incident in [*state.incidents.values(), *state.closed_incidents]}


def played(seed: int) -> list[Entry]:
    """The log of one of the fuzzer's histories."""
    with run._world(seed) as world:
        run.arrange(world, run.history(seed))
        world.loop.run_until_complete(run._play(world))
        return list(world.server.entries)


def require_legal(before: ClusterState, after: ClusterState, event: v.AnyEvent) -> set[tuple[object, object, object]]:
    """The moves that `event` made; each of them stands in its table."""
    made: set[tuple[object, object, object]] = set()
    was, now = workers(before), workers(after)
    for name in was | now:
        one, other = was.get(name), now.get(name)
        if one is not other:
            row = worker_life.MOVES.get(type(event), {})
            assert one in row and row[one] is other, f"{name}: {one} -> {other} by {type(event).__name__}"
            made.add((type(event), one, other))
    was_phase, now_phase = phases(before), phases(after)
    for name in was_phase | now_phase:
        start, end = was_phase.get(name), now_phase.get(name)
        if start is not end and not (
            start is IncidentPhase.CLOSED and end is None
        ):  # the oldest closed ones are forgotten
            brought = [befalls for befalls in TRIGGERS.get(type(event), ()) if start in incident_life.MOVES[befalls]]
            found = [befalls for befalls in brought if incident_life.MOVES[befalls][start] is end]
            assert found, f"{name}: {start} -> {end} by {type(event).__name__}"
            made.update((befalls, start, end) for befalls in found)
    return made


def moves_of(entries: Sequence[Entry]) -> set[tuple[object, object, object]]:
    made: set[tuple[object, object, object]] = set()
    for step in steps(entries):
        if step.event is not None:
            made |= require_legal(step.before, step.after, step.event)
    return made


@pytest.mark.timeout(300)
def test_lives_move_only_by_tables() -> None:
    made: set[tuple[object, object, object]] = set()
    for seed in range(24):
        cluster = two_tasks(seed)
        for _ in random_life(cluster, seed):
            pass
        made |= moves_of(cluster.log)
    for seed in range(4):
        made |= moves_of(eventful(seed))
    for seed in range(18):
        made |= moves_of(played(seed))
    assert len(made) >= 30, "too little happened to show anything"


def test_life_tables_are_complete() -> None:
    """Every status can be reached and left; of each open incident all can happen that can happen to one."""
    for status in WorkerStatus:
        assert any(status in row.values() for row in worker_life.MOVES.values())
        assert any(row.get(status, status) is None for row in worker_life.MOVES.values()), status
    opened = {phase for phase in IncidentPhase if phase is not IncidentPhase.CLOSED}
    for befalls in IncidentTrigger:
        row = incident_life.MOVES[befalls]
        assert set(row) in ({None}, opened), befalls
        assert any(befalls in may for may in TRIGGERS.values()), befalls


def test_life_document_is_current() -> None:
    assert DOCUMENT.read_text() == document(), "run python -m tests.unicrond.life_diagrams"


def test_life_check_detects_illegal_move() -> None:
    """The check itself: a move that no table holds is found."""
    cluster = two_tasks(1)
    cluster.run()
    before, _, after = next(step for step in steps(cluster.log) if workers(step.before) != workers(step.after))
    with pytest.raises(AssertionError, match="by Heartbeat"):
        beat = v.Heartbeat(node="n0", agent_boot=1, beat=1, workers=0, load_milli=0, memory_free_bytes=0)
        require_legal(before, after, beat)
