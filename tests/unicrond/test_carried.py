"""What is carried along with a state says what counting everything anew would say, after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.replay.logs import eventful
from unicrond.core.replayer import steps
from unicrond.core.rules.invariants import InvariantError, check
from unicrond.core.rules.survey import Survey, of_nodes
from unicrond.core.state import ordered_map
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, NodeStatus, Tally, Task, WorkerStatus
from unicrond.core.state.workers_by_node import ByNode
from unicrond.core.tasks.reconcile import all_in, staffing
from unicrond.events.vocabulary import WorkerJoinedGroup
from unicrond.events.wire.envelope import RecordedEvent

COUNTS = Tally._COUNTS


@pytest.fixture(params=[2, 8, ordered_map.SMALL])
def states(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ClusterState]]:
    """Those of a log in which nearly everything happens; in maps of several chunks, too."""
    monkeypatch.setattr(ordered_map, "SMALL", request.param)
    monkeypatch.setattr(ordered_map, "CHUNK", max(1, request.param // 2))
    found = []
    for _, _, state in steps(eventful(5)):
        _ = state.by_node, [task.tally for task in state.tasks.values()]
        found.append(state)
    yield found


def test_generation_by_leader_report_matches_each_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each member had said for itself what its lead says for it."""
    monkeypatch.setattr(ordered_map, "SMALL", 2)
    joined, vouched = dict[str, int](), 0
    for before, entry, state in steps(eventful(5)):
        event = entry.envelope.event if isinstance(entry, RecordedEvent) and state.tasks is not before.tasks else None
        if isinstance(event, WorkerJoinedGroup):
            task = state.tasks[event.task]
            assert task.membership is not None
            joined[event.worker] = max(event.generation, joined.get(event.worker, 0))
            if task.group.lead_confirmed and event.worker == task.membership.lead:
                spoken_for = task.membership.spoken_for & {*task.workers}
                joined.update(dict.fromkeys(spoken_for, task.generation))
                vouched += len(spoken_for - {event.worker})
        for task in state.tasks.values():
            for worker in task.workers.values():
                assert task.generation_of(worker) == joined.get(worker.worker, 0), state.seq
    assert vouched > 3


def leavers(task: Task) -> list[str]:
    """As `Task.leavers`, by a look at everything."""
    members = [member.worker for member in task.membership.members] if task.membership else []
    return [w.worker for w in task.workers.values() if w.status is WorkerStatus.MEMBER and w.worker not in members]


def test_tally_matches_full_count(states: list[ClusterState]) -> None:
    for state in states:
        for task in state.tasks.values():
            anew = Tally(task.workers, task.membership, None)
            assert [getattr(task.tally, name) for name in COUNTS] == [getattr(anew, name) for name in COUNTS]
            members = task.membership.members if task.membership else ()
            there = [task.workers.get(member.worker) for member in members]
            assert task.confirmed == (task.membership is not None and all(w and task.has_joined(w) for w in there))
            assert task.all_able == all(w and w.can_train for w in there)
            assert [worker.worker for worker in task.leavers] == leavers(task)
            assert task.at_rest == all(w.status is WorkerStatus.LOST for w in task.workers.values())
            assert all_in(task) == (
                set(task.workers) == {member.worker for member in members}
                and all(w.status is WorkerStatus.MEMBER and task.has_joined(w) for w in task.workers.values())
            )


def test_node_index_matches_task_workers(states: list[ClusterState]) -> None:
    for state in states:
        anew = ByNode(state.tasks)
        for node in state.nodes:
            here = [(t.name, w.worker) for t in state.tasks.values() for w in t.workers.values() if w.node == node]
            assert list(state.by_node.on(node)) == list(anew.on(node)) == sorted(here)
            for task in state.tasks:
                assert state.by_node.of_task(node, task) == [worker for name, worker in here if name == task]


def test_incremental_survey_matches_new_survey(states: list[ClusterState]) -> None:
    survey = None
    for state in states:
        survey = Survey(state, Policy(), survey)
        anew = Survey(state, Policy())
        assert survey.nodes == of_nodes(state.nodes) == anew.nodes
        assert survey.capacity == anew.capacity and survey.basis == anew.basis and survey.fresh == anew.fresh
        for task in state.tasks.values():
            told, plain = survey.staffing(task), staffing(task, state.plan.assignments.get(task.name))
            assert told.missing == plain.missing and told.fits == plain.fits and told.starting == plain.starting
            for part in ("replicas", "surplus", "broken"):
                mine, its = getattr(told, part), getattr(plain, part)
                assert {n: [w.worker for w in ws] for n, ws in mine.items()} == {
                    n: [w.worker for w in ws] for n, ws in its.items()
                }
            assert survey.settled(task) == (plain.fits and all_in(task))


def test_incremental_check_matches_full_check(states: list[ClusterState]) -> None:
    before = ClusterState()
    for state in states:
        check(state)
        check(state, before)
        before = state
    crowded = next(
        (state, name)
        for state in reversed(states)
        for name, node in state.nodes.items()
        if node.status is NodeStatus.UP and any(task.workers for task in state.tasks.values())
    )
    state, name = crowded
    task = next(task for task in state.tasks.values() if task.workers)
    worker = next(iter(task.workers.values()))
    many = {
        f"{task.name}.{n}": replace(worker, worker=f"{task.name}.{n}", node=name, replica=n) for n in range(900, 2100)
    }
    broken = replace(
        state, tasks=state.tasks | {task.name: replace(task, workers=ordered_map.put_all(task.workers, many))}
    )
    count = Counter(w.node for t in broken.tasks.values() for w in t.workers.values())[name]
    for since in (None, state):
        with pytest.raises(InvariantError, match=f"{name}: {count} workers on"):
            check(broken, since)
