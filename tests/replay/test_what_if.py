"""A fork decides with the coordinator's own planner, and only what was changed makes a difference."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.replay.command import unicron_replay
from tests.replay.logs import troubled, write_log
from tests.unicrond.cluster import MiniCluster
from unicrond.core.rules.invariants import check
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import digest
from unicrond.core.state.task_parts import Pace
from unicrond.events import vocabulary as v
from unicrond.views.what_if import ClusterChanges, WhatIfError, WhatIfOutcome, changes_of, waf_of, what_if, with_changes


def two_tasks() -> ClusterState:
    """big (weight 2) and small share four workers: 3 and 1."""
    cluster = MiniCluster(1)
    for number in range(4):
        cluster.add_host(f"n{number}")
    cluster.submit("big", weight=2.0, max_workers=3)
    cluster.submit("small", max_workers=3)
    cluster.run()
    return cluster.state


def unchanged_and(changes: ClusterChanges) -> tuple[WhatIfOutcome, WhatIfOutcome]:
    state = two_tasks()
    return what_if(state, Policy(), ClusterChanges()), what_if(state, Policy(), changes)


def workers(state: ClusterState, changes: ClusterChanges) -> dict[str, int]:
    forked = what_if(state, Policy(), changes)
    check(forked.state)
    return {name: assignment.workers for name, assignment in forked.plan.assignments.items()}


def test_whatif_without_changes_keeps_plan() -> None:
    state = two_tasks()
    without, forked = what_if(state, Policy(), ClusterChanges()), what_if(state, Policy(), ClusterChanges())
    assert without == forked
    assert without.plan.assignments == state.plan.assignments
    assert [type(event) for event in without.decisions] == [v.PlanAdopted]


def test_whatif_gives_workers_to_heavier_task() -> None:
    state = two_tasks()
    assert workers(state, ClusterChanges()) == {"big": 3, "small": 1}
    assert workers(state, ClusterChanges(set={"tasks.small.weight": "9"})) == {"big": 1, "small": 3}


def test_whatif_removes_and_adds_nodes() -> None:
    state = two_tasks()
    before = digest(state)
    assert sum(workers(state, ClusterChanges(lose=("n0", "n1"))).values()) == 2
    assert workers(state, ClusterChanges(add_nodes=1)) == {"big": 3, "small": 2}
    assert workers(state, ClusterChanges(add_nodes=1, slots=8)) == {"big": 3, "small": 3}
    assert workers(state, ClusterChanges(lose=("n3",), add_nodes=1)) == {"big": 3, "small": 1}
    assert digest(state) == before


def test_whatif_starts_workers_on_added_nodes() -> None:
    forked = what_if(two_tasks(), Policy(), ClusterChanges(add_nodes=2))
    started = [event.node for event in forked.decisions if isinstance(event, v.StartWorker)]
    assert started and all(node.startswith("new-") for node in started)


def test_whatif_values_both_plans_by_changed_settings() -> None:
    without, forked = unchanged_and(ClusterChanges(set={"tasks.small.weight": "9"}))
    before, after = waf_of(forked.state, without.plan), waf_of(forked.state, forked.plan)
    assert sum(after.values()) > sum(before.values())
    assert before["small"] * 3 == after["small"]


def test_whatif_plan_value_matches_its_waf() -> None:
    """One task is measured, of the other nothing is known: one of its workers is worth what one of the first's is."""
    state = two_tasks()
    big = msgspec.structs.replace(state.tasks["big"], pace=Pace(measurements={"3": 9 * 10**9}))
    without = what_if(msgspec.structs.replace(state, tasks=state.tasks | {"big": big}), Policy(), ClusterChanges())
    assert sum(waf_of(without.state, without.plan).values()) == without.plan.waf > 9 * 10**9


def test_whatif_values_surplus_workers_as_zero() -> None:
    without, forked = unchanged_and(ClusterChanges(set={"tasks.big.max_workers": "2"}))
    before, after = waf_of(forked.state, without.plan), waf_of(forked.state, forked.plan)
    assert before["big"] == after["big"] > 0


def test_whatif_changes_policy_field() -> None:
    state = two_tasks()
    _, policy = with_changes(
        state, Policy(), ClusterChanges(set={"policy.worker_mtbf_s": "60", "policy.strikes_max": "5"})
    )
    assert (policy.worker_mtbf_s, policy.strikes_max) == (60.0, 5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (ClusterChanges(set={"tasks.big.wheight": "1"}), "no such field; did you mean weight?"),
        (ClusterChanges(set={"tasks.huge.weight": "1"}), "huge is not active; choose from big, small"),
        (ClusterChanges(set={"tasks.big.weight": "much"}), "set: tasks.big.weight=much"),
        (ClusterChanges(set={"tasks.big.min_workers": "7"}), "set: tasks.big.m"),
        (ClusterChanges(set={"policy.strikes_max": "0"}), "Expected `int` >= 1"),
        (ClusterChanges(set={"tasks.big.name": "huge"}), "a task's name identifies it in the log"),
        (ClusterChanges(set={"weather.x": "1"}), "give tasks.TASK.FIELD or policy.FIELD"),
        (ClusterChanges(lose=("n9",)), "lose: n9 is not a node that is up; "),
        (ClusterChanges(lose=("n1", "n1")), "lose: n1 is not a node that is up; "),
    ],
)
def test_whatif_names_impossible_change(changes: ClusterChanges, told: str) -> None:
    with pytest.raises(WhatIfError) as caught:
        what_if(two_tasks(), Policy(), changes)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(6))
def test_whatif_is_sound_at_any_entry(seed: int) -> None:
    log = troubled(seed).log
    from unicrond.core.replayer import replay
    from unicrond.events.log.point import AtSeq

    for seq in range(10, len(log), 23):
        state = replay(log, AtSeq(seq))
        without, forked = (what_if(state, Policy(), changes_of({"add_nodes": number})) for number in (0, 1))
        check(forked.state)
        assert forked.plan.waf >= without.plan.waf


def test_whatif_command_prints_forked_plan(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.bin", list(troubled(4).log))
    done = unicron_replay("whatif", "--log", log, "--set", "tasks.small.weight=9", "--add-nodes", "2", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["waf_with"] > said["waf_without"] and said["tasks"]["small"]["workers_with"] == 3
    done = unicron_replay("whatif", "--log", log, "--at", "60", "--lose", "n0", "--set", "policy.transition_s=1")
    assert done.returncode in (0, 2) and (
        "WAF what if" in done.stdout or "lose: n0 is not a node that is up" in done.stderr
    )
    done = unicron_replay("whatif", "--log", log, "--set", "weight=9")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
