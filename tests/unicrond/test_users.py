"""A task that names a user is taken where every node that may carry it runs tasks as that user."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import MiniCluster
from unicrond.core.rules.requests import user_problem
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
    assert user_problem(made.state, TaskSpec(name="t", run_as=run_as)) == said
    quarantined = made.state.quarantined_messages
    made.submit("t", run_as=run_as)
    assert ("t" in made.state.tasks, made.state.quarantined_messages - quarantined) == (not said, int(bool(said)))


def test_a_node_without_a_list_runs_tasks_as_its_agents_user() -> None:
    made = MiniCluster(1)
    made.add_host("n1")
    said = user_problem(made.state, TaskSpec(name="t", run_as="bob"))
    assert said.startswith("run_as: node n1 does not run tasks as bob (runs all tasks as its agent's user)")


def test_a_cluster_that_is_not_there_yet_refuses_nothing() -> None:
    assert user_problem(MiniCluster(1).state, TaskSpec(name="t", run_as="bob")) == ""
