"""A task that names a user is taken where every node that may carry it runs tasks as that user."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import MiniCluster
from unicrond.core.tasks.task_validation import storage_problems, task_problems
from unicrond.events.vocabulary import CheckpointSpec, TaskSpec


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
def test_task_user_must_exist_on_every_node(run_as: str, said: str) -> None:
    made = cluster()
    assert next(map(str, task_problems(TaskSpec(name="t", run_as=run_as), made.state)), "") == said
    quarantined = made.state.quarantined_messages
    made.submit("t", run_as=run_as)
    assert ("t" in made.state.tasks, made.state.quarantined_messages - quarantined) == (
        not said,
        int(bool(said)),
    )


def test_node_without_user_list_runs_as_agent_user() -> None:
    made = MiniCluster(1)
    made.add_host("n1")
    (said,) = map(str, task_problems(TaskSpec(name="t", run_as="bob"), made.state))
    assert said.startswith("run_as: node n1 does not run tasks as bob (runs all tasks as its agent's user)")


@pytest.mark.parametrize("drain", [False, True])
def test_checkpoints_go_to_a_store_that_every_node_reaches(drain: bool) -> None:
    """An agent that is older, or lacks the packages, says nothing of stores; a node that is cordoned does not count."""
    made, spec = MiniCluster(1), TaskSpec(name="t", checkpoint=CheckpointSpec(dir="s3://bucket/t"))
    made.add_host("n1", object_stores=("s3",))
    made.add_host("n2")
    (fault,) = map(str, storage_problems(spec, made.state))
    assert fault.startswith("checkpoint.dir: node n2 cannot write to s3://; install unicrond[object-store] there")
    assert not list(storage_problems(TaskSpec(name="t", checkpoint=CheckpointSpec(dir="/ckpt")), made.state))
    made.submit("t", checkpoint=spec.checkpoint)
    assert "t" in made.state.tasks, "what the log has taken before stays"
    made.cordon("n2", drain=drain)
    assert not list(storage_problems(spec, made.state))


def test_empty_cluster_accepts_any_user() -> None:
    assert not task_problems(TaskSpec(name="t", run_as="bob"), MiniCluster(1).state)
