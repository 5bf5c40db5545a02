"""The ledger against an accountant who looks at the whole log afterwards, and the identity of costs."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from tests.replay.golden import LOGS
from tests.seeds import at_most
from tests.unicrond.cluster import SECOND_US
from tests.unicrond.stories import random_life, states_of, trained
from unicrond.core.state.state import ClusterState, Incident, Task, TaskStatus
from unicrond.core.state.work_ledger import ZERO, Ledger, open_books
from unicrond.core.worth.costs import costs_at, plus, settle
from unicrond.core.worth.waf import linear_flops, waf
from unicrond.events.log.segments import read_entries


def standing(task: Task) -> bool:
    """The paper's T has somebody to run on: a whole group, or the one before a planned change."""
    if task.membership is None or not task.membership.members:
        return False
    alive = all(m.worker in task.workers and task.workers[m.worker].can_train for m in task.membership.members)
    return alive and (task.confirmed or not task.membership.urgent)


def stopped_by(state: ClusterState, task: Task) -> list[Incident]:
    hit = [i for i in state.incidents.values() if task.name in i.generations]
    return [i for i in hit if i.generations[task.name] >= task.generation] or ([] if standing(task) else hit)


def accountant(states: list[ClusterState]) -> dict[str, int]:
    """Every interval between two entries by itself; detection by hindsight, once all incidents are known."""
    totals: dict[str, int] = defaultdict(int)
    # Per task: the stretches of work, [from, to, rate, whether it repeats]; cut where a fault had occurred.
    runs: dict[str, list[list[int]]] = defaultdict(list)
    rate: dict[str, int] = {}
    had: dict[str, int] = {}
    end_us = states[-1].now_us
    for at, (state, after) in enumerate(pairwise([*states, states[-1]])):
        until_us = after.now_us if at < len(states) - 1 else end_us
        lasted_us, linear = until_us - state.now_us, linear_flops(state)
        healthy, achieved = 0, 0
        for task in state.tasks.values():
            if task.status is not TaskStatus.ACTIVE:
                rate.pop(task.name, None)
                had.pop(task.name, None)
                continue
            healthy += waf(task, state.plan.healthy.get(task.name, 0), linear)
            incidents = stopped_by(state, task)
            if incidents:
                if task.name not in had:
                    had[task.name] = rate.get(task.name, 0)
                rate[task.name] = 0
                totals["transition"] += had[task.name] * lasted_us
                achieved += had[task.name]
                hit = [i for i in state.incidents.values() if task.name in i.generations]
                left_us = min(i.occurred_us for i in [i for i in hit if not i.resumed_us] or hit)
                run = runs[task.name]
                if had[task.name] and run and left_us < run[-1][1]:
                    lost_from_us = max(left_us, run[-1][0])
                    totals["detection"] += run[-1][2] * (run[-1][1] - lost_from_us)
                    run[-1][1] = lost_from_us
                continue
            had.pop(task.name, None)
            members = len(task.membership.members) if task.membership else 0
            if not standing(task):
                now = 0
            elif task.confirmed:
                now = waf(task, members, linear)
            else:
                now = rate.get(task.name, 0)
            achieved += now
            run, repeats = runs[task.name], bool(now and task.progress.repeats_until)
            if rate.get(task.name) != now or not run or run[-1][1] != state.now_us or run[-1][3] != repeats:
                run.append([state.now_us, state.now_us, now, repeats])
            rate[task.name] = now
            run[-1][1] = until_us
        totals["failure_free"] += max(healthy, achieved) * lasted_us
    for since, to, flops, repeats in [stretch for run in runs.values() for stretch in run]:
        totals["repeated" if repeats else "delivered"] += (to - since) * flops
    return totals


def assert_identity(ledger: Ledger) -> None:
    losses = ledger.detection + ledger.transition + ledger.repeated + ledger.sub_health
    assert ledger.delivered + losses == ledger.failure_free
    assert not open_books(ledger)


def assert_as_the_accountant_says(states: list[ClusterState]) -> Ledger:
    ledger = settle(states[-1].ledger, states[-1].now_us)
    assert_identity(ledger)
    expected = accountant(states)
    for part in ("failure_free", "delivered", "detection", "transition", "repeated"):
        assert int(getattr(ledger, part)) == expected[part], part
    return ledger


@pytest.mark.parametrize("seed", range(at_most(60)))
def test_ledger_accounts_every_microsecond(seed: int) -> None:
    cluster = trained(seed)
    for _ in random_life(cluster, seed, falls=bool(seed % 2)):
        assert_identity(cluster.state.ledger)
    assert_as_the_accountant_says(states_of(list(cluster.log)))


def test_story_faults_cost_something() -> None:
    """Or the test above would say nothing."""
    spent: dict[str, int] = defaultdict(int)
    for seed in range(20):
        cluster = trained(seed)
        for _ in random_life(cluster, seed, falls=True):
            pass
        for part in ("delivered", "detection", "transition", "repeated", "sub_health"):
            spent[part] += int(getattr(cluster.state.ledger, part)) != 0
    assert all(count >= 10 for count in spent.values()), spent


def test_golden_log_matches_accountant() -> None:
    assert_as_the_accountant_says(states_of(list(read_entries(LOGS[1]))))


def test_killed_worker_costs_task_until_it_resumes() -> None:
    cluster = trained(1)
    cluster.train("big")
    before = cluster.state
    rate = before.ledger.accounts["big"].rate
    assert rate == waf(before.tasks["big"], 3, linear_flops(before)) > 0
    victim = before.tasks["big"].membership.members[1]
    cluster.kill_worker(cluster.hosts[victim.node], victim.worker)
    died_us = cluster.now_us
    cluster.now_us += 2 * SECOND_US
    cluster.run()
    (closed,) = cluster.state.closed_incidents
    assert closed.transition_us > 2 * SECOND_US and closed.detected_us == died_us
    # What is charged is what the task did not achieve, to the microsecond.
    assert closed.transition_flop == rate * closed.transition_us / SECOND_US
    assert closed.detection_flop == rate * closed.detection_us / SECOND_US


def test_late_node_loss_subtracts_silence_from_delivered() -> None:
    cluster = trained(2)
    cluster.now_us += 10 * SECOND_US
    host = cluster.hosts[cluster.state.tasks["big"].membership.members[1].node]
    rate = cluster.state.ledger.accounts["big"].rate
    cluster.kill_host(host)
    cluster.lose(host)  # its last beat was a second ago
    cluster.run()
    (closed,) = cluster.state.closed_incidents
    assert closed.detection_us >= SECOND_US
    assert closed.detection_flop == rate * closed.detection_us / SECOND_US
    assert closed.sub_health_flops == cluster.state.plan.waf_if_healthy - cluster.state.plan.waf > 0


def test_lost_node_inherits_cost_of_dead_worker() -> None:
    cluster = trained(4)
    cluster.train("big")
    victim = cluster.state.tasks["big"].membership.members[1]
    host, rate = cluster.hosts[victim.node], cluster.state.ledger.accounts["big"].rate
    cluster.kill_worker(host, victim.worker)
    died_us = cluster.now_us
    cluster.now_us += 5 * SECOND_US
    cluster.kill_host(host)
    cluster.lose(host)
    cluster.run()
    (closed,) = cluster.state.closed_incidents
    assert closed.kind == "node_lost" and closed.detected_us == died_us
    assert closed.transition_flop == rate * closed.transition_us / SECOND_US > 5 * rate
    assert closed.detection_flop * SECOND_US == cluster.state.ledger.detection


def test_training_without_faults_loses_nothing() -> None:
    cluster = trained(3)
    now_us = cluster.now_us
    start, end = costs_at(cluster.state, now_us), costs_at(cluster.state, now_us + 3600 * SECOND_US)
    assert end.failure_free_flop - start.failure_free_flop == 3600 * cluster.state.plan.waf_if_healthy
    assert end.delivered_flop - start.delivered_flop == 3600 * cluster.state.plan.waf
    assert end.sub_health_flop == start.sub_health_flop


def test_ledger_sum_stays_exact_beyond_decimal() -> None:
    assert int(plus(plus(ZERO, 10**40), 1)) == 10**40 + 1
