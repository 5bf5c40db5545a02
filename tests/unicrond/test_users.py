"""A task that names a user is taken where every node that may carry it runs tasks as that user."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import MiniCluster
from unicrond.core.tasks.task_validation import task_problems
from unicrond.events.vocabulary import TaskSpec


def cluster() -> MiniCluster:
    made = MiniCluster(1)
    made.add_host("n1", users=("alice", "bob"))
    made.add_host("n2", users=("bob",))
    made.add_host("n3")
    made.cordon("n3", drain=True)
    return made


@pytest.mark.parametrize(
    ("run_as", "said"),
    [
        ("", ""),
        ("bob", ""),
        ("alice", "run_as: node n2 does not run tasks as alice (allows bob); add it to --run-as there"),
        (
            "carol",
            "run_as: node n1 and 1 more does not run tasks as carol (allows alice, bob); add it to --run-as there",
        ),
    ],
)
def test_every_node_must_know_the_user(run_as: str, said: str) -> None:
    made = cluster()
    assert next(map(str, task_problems(TaskSpec(name="t", run_as=run_as), made.state)), "") == said
    quarantined = made.state.quarantined
    made.submit("t", run_as=run_as)
    assert ("t" in made.state.tasks, made.state.quarantined_messages - quarantined) == (not said, int(bool(said)))


def test_a_node_without_a_list_runs_tasks_as_its_agents_user() -> None:
    made = MiniCluster(1)
    made.add_host("n1")
    (said,) = map(str, task_problems(TaskSpec(name="t", run_as="bob"), made.state))
    assert said.startswith("run_as: node n1 does not run tasks as bob (runs all tasks as its agent's user)")


def test_a_cluster_that_is_not_there_yet_refuses_nothing() -> None:
    assert not task_problems(TaskSpec(name="t", run_as="bob"), MiniCluster(1).state)
