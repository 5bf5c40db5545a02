"""Open tasks (core/state/open_tasks.py): the index is what a fresh one is, and nobody looks at the ended ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster
from unicrond.core.decide import decide, needed_solves
from unicrond.core.rules.deadlines import deadlines
from unicrond.core.rules.survey import Survey
from unicrond.core.state.changes import with_task
from unicrond.core.state.open_tasks import OpenTasks
from unicrond.core.state.ordered_map import OrderedMap
from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.core.state.state_bytes import decode, digest, encode
from unicrond.core.state.task_parts import LocalFault, Troubles
from unicrond.events import vocabulary as v

ENDED = 300


def many_ended() -> ClusterState:
    """The state of a cluster in which a task trains, after many that have ended."""
    cluster = MiniCluster(1)
    for number in range(4):
        cluster.add_host(f"n{number}")
    cluster.submit("done", max_workers=2)
    cluster.run()
    cluster.append(v.TaskCancelled(task="done", reason="enough"), "api", 1)
    cluster.submit("t", max_workers=4)
    cluster.run()
    cluster.train("t", 3)
    cluster.run()
    state, done = cluster.state, cluster.state.tasks["done"]
    for number in range(ENDED):
        state = with_task(state, replace(done, spec=replace(done.spec, name=f"e{number}")))
    cluster.state = state
    cluster.run()
    return cluster.state


class Unread(OrderedMap[Task]):
    """Tasks that nobody may look through."""

    def values(self) -> Any:
        raise AssertionError("somebody looks at all tasks")

    items = values

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("somebody looks at all tasks")


def test_decisions_look_at_no_ended_task() -> None:
    """Each cost every decision 2 us, and a cluster may end a thousand a day."""
    state = many_ended()
    policy = MiniCluster(1).policy
    before = Survey(state, policy)
    decide(before, {})
    index, on_node = state.open_tasks_cache, state.by_node
    assert isinstance(state.tasks, OrderedMap) and index is not None and index.names == ("t",)
    unread = Unread._of(state.tasks._chunks, state.tasks._places, len(state.tasks))
    index.tasks = on_node.tasks = unread
    state = replace(state, tasks=unread, open_tasks_cache=index, by_node_cache=on_node)
    survey = Survey(state, policy, before)
    deadlines(survey)
    needed_solves(survey)
    assert not decide(survey, {})


def test_state_with_many_tasks_keeps_all_of_them_in_bytes() -> None:
    state = many_ended()
    again = decode(encode(state))
    assert digest(again) == digest(state) and list(again.tasks) == list(state.tasks) and len(again.tasks) == ENDED + 2
    assert isinstance(again.tasks, OrderedMap), "it changes as cheaply as before"


def task_of(name: str, status: TaskStatus, local: bool) -> Task:
    troubles = Troubles(local_faults={"n1": LocalFault(text="no mount", at_us=1)} if local else {})
    return Task(spec=v.TaskSpec(name=name), status=status, submitted_seq=1, submitted_us=1, troubles=troubles)


CHANGES = st.lists(
    st.tuples(st.integers(0, 200), st.sampled_from([TaskStatus.ACTIVE, TaskStatus.FAILED]), st.booleans()),
    max_size=60,
)


@given(start=st.sampled_from([0, 3, 127, 160]), changes=CHANGES)
def test_index_is_what_a_fresh_one_is(start: int, changes: list[tuple[int, TaskStatus, bool]]) -> None:
    """However often somebody looked in between, and across the size at which the map changes its kind."""
    state = ClusterState()
    for number in range(start):
        state = with_task(state, task_of(f"t{number}", TaskStatus.COMPLETED, local=False))
    for place, (number, status, local) in enumerate(changes):
        before, state = state, with_task(state, task_of(f"t{number}", status, local=local))
        if place % 3:
            assert [task.name for task in state.open_tasks] == list(OpenTasks(state.tasks).names)
        else:
            assert before.open_tasks is not None
    assert [task.name for task in state.open_tasks] == list(OpenTasks(state.tasks).names)
    assert state.active == [task for task in state.tasks.values() if task.status is TaskStatus.ACTIVE]
