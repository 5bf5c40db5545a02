"""How long a task may wait without workers: whoever waits gets a turn, and the plan stays exact."""

from __future__ import annotations

from typing import Any

from tests.replay.test_verify import verify
from tests.unicrond.cluster import SECOND_US, MiniCluster, members
from unicrond.core.state.policy import Policy, Settings, settings_of
from unicrond.core.tasks.starvation import ranks
from unicrond.display.cluster_tables import turns
from unicrond.events import vocabulary as v

_HOUR_S = 3600.0


def contested(*names: str, starvation_s: float = _HOUR_S, nodes: int = 2, **weights: float) -> MiniCluster:
    """Tasks that each need all nodes."""
    cluster = MiniCluster(1, Policy(starvation_s=starvation_s))
    for number in range(nodes):
        cluster.add_host(f"n{number}")
    for name in names:
        cluster.submit(name, weight=weights.get(name, 1.0), min_workers=nodes, max_workers=nodes)
    cluster.run()
    return cluster


def running(cluster: MiniCluster) -> list[str]:
    return [name for name, task in cluster.state.tasks.items() if task.membership and task.membership.members]


def wait(cluster: MiniCluster) -> None:
    """Until the next deadline of a turn or of a wait passes, and all that follows has been done."""
    standing = {name: us for name, us in cluster.standing().items() if name.startswith(("wait:", "turn:"))}
    least_us = min(standing.values())
    cluster.now_us += least_us
    for name in sorted(name for name, us in standing.items() if us <= least_us + SECOND_US):
        cluster.append(v.DeadlineExpired(deadline_id=name), "coordinator", cluster.state.term)
    for name in cluster.state.tasks:
        cluster.train(name)
    cluster.run()


def test_lighter_task_starves_without_bound() -> None:
    cluster = contested("heavy", "light", starvation_s=0.0, heavy=2.0)
    assert running(cluster) == ["heavy"]
    assert not [name for name in cluster.standing() if name.startswith(("wait:", "turn:"))]
    assert not cluster.state.starvation_us and cluster.state.tasks["light"].turn.waits_since_us == 0


def test_starving_task_gets_turn_and_gives_it_back() -> None:
    cluster = contested("heavy", "light", heavy=2.0)
    assert running(cluster) == ["heavy"]
    wait(cluster)
    assert running(cluster) == ["light"] and ranks(cluster.state) == {"light": 4}
    assert cluster.state.plan.trigger == "task light has waited for 3600 s"
    assert "in turn: light" in cluster.state.plan.reason
    assert cluster.state.incidents_total == 0, "by plan, at a boundary"
    told = turns(cluster.state)
    assert (
        len(told) == 2 and told[0].startswith("heavy has waited since") and "light has its turn: 2 workers" in told[1]
    )
    wait(cluster)
    assert running(cluster) == ["heavy"]
    assert "the turn of task light is over" in cluster.state.plan.trigger
    assert verify(cluster.log).decisions > 10, "each is made again from the log"


def test_turns_reach_every_task_regardless_of_weight() -> None:
    names = [f"t{number}" for number in range(6)]
    cluster = contested(*names, **{name: float(10**number) for number, name in enumerate(names)})
    had: list[str] = []
    for _ in range(40):
        had += running(cluster)
        wait(cluster)
    shares = {name: had.count(name) for name in names}
    assert min(shares.values()) >= 5, shares


def test_unrunnable_task_blocks_no_turn() -> None:
    cluster = contested("heavy", "light", heavy=2.0)
    cluster.submit("huge", min_workers=9, max_workers=9, weight=100.0)
    cluster.run()
    for _ in range(8):
        wait(cluster)
        if "light" in running(cluster):
            break
    assert running(cluster) == ["light"]
    assert cluster.state.tasks["huge"].turn.waits_since_us


def test_turn_outlives_coordinator_and_keeps_length() -> None:
    cluster = contested("heavy", "light", heavy=2.0)
    wait(cluster)
    (before,) = [(name, us) for name, us in cluster.standing().items() if name.startswith("turn:")]
    cluster.now_us += 600 * SECOND_US
    cluster.take_over()
    cluster.run()
    (after,) = [(name, us) for name, us in cluster.standing().items() if name.startswith("turn:")]
    assert after[0] == before[0] and 0 <= before[1] - 600 * SECOND_US - after[1] < SECOND_US
    assert running(cluster) == ["light"]


def test_tasks_with_workers_never_wait() -> None:
    cluster = MiniCluster(1, Policy(starvation_s=_HOUR_S))
    for number in range(4):
        cluster.add_host(f"n{number}")
    cluster.submit("big", weight=5.0, max_workers=4)
    cluster.submit("small", max_workers=4)
    cluster.run()
    assert len(members(cluster, "small")) == 1, "its floor"
    assert not [name for name in cluster.standing() if name.startswith(("wait:", "turn:"))]


def test_starvation_bound_is_logged_only_if_set() -> None:
    numbers: dict[str, Any] = Settings(Policy(starvation_s=90.0), 1.0).numbers()
    assert numbers["starvation_s"] == 90.0 and settings_of(numbers).policy.starvation_s == 90.0
    assert "starvation_s" not in Settings(Policy(), 1.0).numbers()
