"""The table's questions are the coordinator's: what an event does is stated once, and learning moves nobody."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import SECOND_US, MiniCluster
from tests.unicrond.stories import random_life, states_of, trained
from unicrond.core.decide import decide
from unicrond.core.deciding.plans import _placed
from unicrond.core.planning.placement import place
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.situation import NextEvent, NodeArrival, NodeLoss, TaskEnd
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import Planner
from unicrond.core.rules.estimates import CALM_US, REPORTS_MIN
from unicrond.core.rules.plan_problems import healthy_problem_of, problem_of, situation_of
from unicrond.core.rules.survey import Survey, worker_mtbf_us
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, NodeStatus, TaskStatus
from unicrond.core.state.task_parts import WARM_UP, Pace
from unicrond.core.state.work import LINEAR_FLOPS, iteration_flop
from unicrond.core.worth.waf import linear_flops, throughput
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.shape import Shape


def event_between(before: ClusterState, after: ClusterState) -> NextEvent | None:
    """What has happened in the planner's words, if it is one thing that the table foresees."""

    def usable(state: ClusterState) -> dict[str, int]:
        return {node.name: node.slots for node in state.nodes.values() if node.schedulable}

    def active(state: ClusterState) -> list[str]:
        return [task.name for task in state.tasks.values() if task.status is TaskStatus.ACTIVE]

    if any(node.cordon.active for state in (before, after) for node in state.nodes.values()):
        return None  # a cordoned node is used less and less: nobody foresees that
    was, now, tasks = usable(before), usable(after), active(after)
    gone = [name for name in was if name not in now]
    come = [name for name in now if name not in was]
    ended = [name for name in active(before) if name not in tasks]
    if len(gone) + len(come) + len(ended) != 1 or len(tasks) + len(ended) != len(active(before)):
        return None
    if gone:
        return NodeLoss(gone[0])
    return NodeArrival(now[come[0]]) if come else TaskEnd(ended[0])


def test_plan_table_matches_problems_of_coordinator() -> None:
    """Random lives: wherever one foreseen event happens, the coordinator's problem is the table's, and its plan too."""
    seen: Counter[str] = Counter()
    for seed in range(80):
        cluster = trained(seed, nodes=5, slots=seed % 2 + 1)
        cluster.submit("late", max_workers=2, throughput={"1": 3 * 10**9, "2": 5 * 10**9})
        cluster.run()
        for _ in random_life(cluster, seed):
            if cluster.random.random() < 0.1 and cluster.state.tasks["late"].status is TaskStatus.ACTIVE:
                cluster.append(v.TaskCancelled(task="late", reason="test"), "api", cluster.state.term)
        for before, after in pairwise(states_of(list(cluster.log))):
            event = event_between(before, after)
            situation = (
                situation_of(Survey(before, cluster.policy))
                if event is not None and not Survey(after, cluster.policy).fresh
                else None
            )
            if situation is not None and event is not None:
                problem = problem_of(Survey(after, cluster.policy))
                assert situation.after(event) == problem, (seed, event)
                if event not in situation.expected():
                    continue  # the first node of its size
                answer = Planner().refresh(situation).answer(problem)
                assert answer is not None and answer.workers == solve(problem).workers
                seen[type(event).__name__] += 1
    assert min(seen["NodeLoss"], seen["NodeArrival"], seen["TaskEnd"]) >= 10, seen


def test_foresight_waits_until_last_event_is_planned() -> None:
    cluster = trained(1)
    assert situation_of(Survey(cluster.state, cluster.policy)) is not None
    cluster.kill_host(cluster.hosts["n0"])
    cluster.lose(cluster.hosts["n0"])
    assert situation_of(Survey(cluster.state, cluster.policy)) is None


def test_lost_node_leaves_healthy_problem_unchanged() -> None:
    cluster = trained(1)
    healthy = healthy_problem_of(Survey(cluster.state, Policy()))
    assert healthy.workers == 4
    cluster.kill_host(cluster.hosts["n0"])
    cluster.lose(cluster.hosts["n0"])
    assert healthy_problem_of(Survey(cluster.state, Policy())) == healthy
    cluster.run()
    assert healthy_problem_of(Survey(cluster.state, Policy())) == healthy
    assert cluster.state.plan.waf_if_healthy == solve(healthy).waf > cluster.state.plan.waf
    cluster.say(cluster.hosts["n1"], v.NodeLeft(node="n1", reason="for good"))
    assert healthy_problem_of(Survey(cluster.state, Policy())).workers == 3


# --- what is learnt ------------------------------------------------------------------------------


def steps(cluster: MiniCluster, task: str, count: int, step_us: int) -> None:
    """The group commits, each step in so much time."""
    membership = cluster.state.tasks[task].membership
    assert membership is not None
    lead = membership.members[0]
    for _ in range(count):
        at = cluster.iterations[task] = cluster.iterations.get(task, 0) + 1
        step = v.StepCommitted(
            node=lead.node, task=task, worker=lead.worker, generation=membership.generation, first=at, last=at,
            samples=8, samples_digest=0, loss=1.0, duration_us=step_us, micro_batches_by_rank=(1,),
        )  # fmt: skip
        cluster.say(cluster.hosts[lead.node], step)


def told(cluster: MiniCluster, kind: type) -> list:
    return [entry.envelope.event for entry in cluster.log if isinstance(entry.envelope.event, kind)]


def test_measured_times_correct_throughput_and_move_no_worker() -> None:
    cluster = trained(1)
    epoch = cluster.state.plan.epoch
    task = cluster.state.tasks["big"]
    assert throughput(task, linear_flops(cluster.state))(3) == 3 * LINEAR_FLOPS
    steps(cluster, "big", WARM_UP + REPORTS_MIN - 1, 2000)
    cluster.run()
    assert not told(cluster, v.ThroughputCorrected), "too few reports to believe"
    steps(cluster, "big", 1, 2_000_000)  # one straggler does not count
    cluster.run()
    (correction,) = told(cluster, v.ThroughputCorrected)
    assert correction.workers == 3 and correction.flops == iteration_flop(task.spec) * 500
    task = cluster.state.tasks["big"]
    assert throughput(task)(3) == correction.flops
    assert throughput(task)(1) == pytest.approx(correction.flops / 3, abs=1), "the shape stays a line, now in FLOP/s"
    assert cluster.state.plan.epoch == epoch
    assert cluster.state.ledger.accounts["big"].rate == 2 * correction.flops
    # Nothing is known of the other task: its workers are worth what one of big's is, not 10**9.
    assert throughput(cluster.state.tasks["small"], linear_flops(cluster.state))(1) == correction.flops // 3
    steps(cluster, "big", 20, 2060)
    cluster.run()
    assert len(told(cluster, v.ThroughputCorrected)) == 1, "3 % are not worth a word"
    steps(cluster, "big", 20, 2500)
    cluster.run()
    assert len(told(cluster, v.ThroughputCorrected)) == 1, "the last word is younger than ten minutes"
    cluster.now_us += CALM_US
    steps(cluster, "big", 1, 2500)
    cluster.run()
    assert told(cluster, v.ThroughputCorrected)[-1].flops == iteration_flop(task.spec) * 400


def test_next_plan_uses_measurements() -> None:
    """Ten times faster than a table says: on the next event the workers go there."""
    cluster = MiniCluster(1)
    for number in range(4):
        cluster.add_host(f"n{number}")
    table = {str(workers): workers * 10**9 for workers in (1, 2, 3)}
    cluster.submit("first", weight=1.1, max_workers=3, throughput=table)
    cluster.submit("second", max_workers=3, throughput=table)
    cluster.run()
    assert [a.workers for a in cluster.state.plan.assignments.values()] == [3, 1]
    fast_us = iteration_flop(cluster.state.tasks["second"].spec) * 1_000_000 // (10 * 10**9)
    steps(cluster, "second", 20, fast_us)
    cluster.run()
    assert [a.workers for a in cluster.state.plan.assignments.values()] == [3, 1]
    cluster.add_host("n4")
    cluster.run()
    assert [a.workers for a in cluster.state.plan.assignments.values()] == [2, 3]


def test_correction_interpolates_between_measured_sizes() -> None:
    spec = v.TaskSpec(name="a", max_workers=8, throughput={str(w): w * 1000 for w in range(1, 9)})
    cluster = trained(1)
    task = cluster.state.tasks["big"]
    task = replace(task, spec=spec, pace=Pace(measurements={"2": 4000, "6": 6000}))  # twice as fast, then as expected
    known = {workers: throughput(task)(workers) for workers in range(1, 9)}
    assert known == {1: 2000, 2: 4000, 3: 5250, 4: 6000, 5: 6250, 6: 6000, 7: 7000, 8: 8000}


def test_failure_rate_is_learnt_from_log() -> None:
    cluster = trained(1)
    configured_us = int(Policy().worker_mtbf_s * SECOND_US)
    assert worker_mtbf_us(cluster.state, cluster.policy) == configured_us
    victim = cluster.state.tasks["big"].membership.members[1]  # type: ignore[union-attr]
    cluster.now_us += 3600 * SECOND_US
    cluster.kill_worker(cluster.hosts[victim.node], victim.worker)
    cluster.run()
    (estimate,) = told(cluster, v.FailureRateEstimated)
    assert estimate.failures == 1
    # Four workers for an hour, and the configured time as if it had been seen.
    assert estimate.worker_mtbf_us == pytest.approx((configured_us + 4 * 3600 * SECOND_US) / 2, rel=1e-4)
    assert worker_mtbf_us(cluster.state, cluster.policy) == estimate.worker_mtbf_us
    workers = sum(node.slots for node in cluster.state.nodes.values() if node.status is NodeStatus.UP)
    assert problem_of(Survey(cluster.state, cluster.policy)).d_running_us == estimate.worker_mtbf_us // workers


def test_task_learns_own_transition_time() -> None:
    cluster = trained(1)
    assert {t.d_transition_us for t in problem_of(Survey(cluster.state, cluster.policy)).tasks} == {None}
    times = []
    for seconds in (4, 8):
        victim = cluster.state.tasks["big"].membership.members[1]  # type: ignore[union-attr]
        cluster.kill_worker(cluster.hosts[victim.node], victim.worker)
        cluster.now_us += seconds * SECOND_US
        cluster.run()
        cluster.train("big")
        times.append(cluster.state.closed_incidents[-1].transition_us)
    big, small = problem_of(Survey(cluster.state, cluster.policy)).tasks
    assert big.d_transition_us == (3 * times[0] + times[1]) // 4
    assert small.d_transition_us is None


def test_churn_term_is_off_by_default() -> None:
    assert problem_of(Survey(ClusterState(), Policy())).churn_us == 0
    cluster = trained(1)
    policy = Policy(churn_s=2.5)
    situation = situation_of(Survey(cluster.state, policy))
    assert problem_of(Survey(cluster.state, policy)).churn_us == 2_500_000 and situation is not None
    assert situation.churn_us == 2_500_000


def test_learning_is_idempotent() -> None:
    cluster = trained(1)
    steps(cluster, "big", 20, 5000)
    cluster.run()
    assert told(cluster, v.ThroughputCorrected)
    assert decide(Survey(cluster.state, cluster.policy), {}) == []


def test_unseatable_task_blocks_no_other() -> None:
    cluster = MiniCluster(1)
    cluster.add_host("n0")
    cluster.add_host("n1")
    cluster.submit("wide", weight=9.0, min_workers=2, max_workers=2, tp=2)
    cluster.submit("narrow", max_workers=2)
    cluster.run()
    assert cluster.state.plan.workers == {"wide": 0, "narrow": 2}
    cluster.add_host("n2", slots=2)
    cluster.run()
    assert cluster.state.plan.workers["wide"] == 2


@pytest.mark.parametrize("slots", [1, 2])
def test_newcomer_gets_no_seat_on_cordoned_node(slots: int) -> None:
    """Nothing starts there: whoever left for it would leave for nothing."""
    cluster = MiniCluster(1)
    for number in range(2):
        cluster.add_host(f"n{number}", slots=slots)
    cluster.submit("large", max_workers=2 * slots)
    cluster.run()
    cluster.train("large", 2)
    for name in ("n0", "n1"):
        cluster.cordon(name)
    cluster.submit("small", max_workers=1)
    cluster.run()
    shares = cluster.state.plan.assignments
    assert (shares["large"].workers, shares["small"].workers) == (2 * slots, 0)
    cluster.uncordon("n0")
    cluster.run()
    shares = cluster.state.plan.assignments
    assert (shares["large"].workers, shares["small"].workers) == (2 * slots - 1, 1), "it may have one of the open seats"


def test_residents_stay_where_a_task_shrinks_for_another() -> None:
    """The newcomer needs an open seat, so the worker that leaves is one of the open node."""
    cluster = MiniCluster(1)
    for number in range(2):
        cluster.add_host(f"n{number}", slots=2)
    cluster.submit("large", max_workers=4)
    cluster.run()
    cluster.train("large", 2)
    cluster.cordon("n0")
    cluster.submit("small", max_workers=1)
    cluster.run()
    shares = cluster.state.plan.assignments
    assert sorted(shares["large"].replicas) == [("n0",), ("n0",), ("n1",)]
    assert shares["small"].replicas == (("n1",),)


def test_plan_beside_cordoned_nodes_has_seats_for_all() -> None:
    """Random clusters with replicas of one or more workers: whatever comes, ends or dies while nodes are cordoned."""
    plans = 0
    for seed in range(100):
        cluster = cordoned_cluster(seed)
        for number in range(3):
            step, names = cluster.random.randrange(3), [task.name for task in cluster.state.active]
            if step == 0:
                submit_any(cluster, f"new{number}")
            elif step == 1 and names:
                cluster.append(
                    v.TaskCancelled(task=cluster.random.choice(names), reason="test"), "api", cluster.state.term
                )
            else:
                living = [w for name in names for w in cluster.state.tasks[name].workers.values() if w.alive]
                for worker in cluster.random.sample(living, min(1, len(living))):
                    cluster.kill_worker(cluster.hosts[worker.node], worker.worker)
            begin = len(cluster.log)
            cluster.run()
            adopted = [entry.envelope.event for entry in list(cluster.log)[begin:]]
            reasons = [event.reason for event in adopted if isinstance(event, v.PlanAdopted)]
            assert all("no seat" not in reason for reason in reasons), (seed, reasons)
            plans += len(reasons)
    assert plans > 150


def submit_any(cluster: MiniCluster, name: str) -> None:
    """Submit a task of random size."""
    rng = cluster.random
    tp, pp = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2)))
    size, weight = tp * pp, float(rng.randint(1, 9))
    cluster.submit(name, tp=tp, pp=pp, min_workers=size, max_workers=size * rng.randint(1, 4), weight=weight)


def cordoned_cluster(seed: int) -> MiniCluster:
    """Return a cluster of random nodes and tasks, which train, some of its nodes cordoned."""
    cluster = MiniCluster(seed)
    for number in range(cluster.random.randint(2, 6)):
        cluster.add_host(f"n{number}", slots=cluster.random.choice((1, 2, 4)))
    for number in range(cluster.random.randint(1, 4)):
        submit_any(cluster, f"t{number}")
    cluster.run()
    for name, workers in cluster.state.plan.workers.items():
        if workers:
            cluster.train(name, 2)
    for name in cluster.random.sample(list(cluster.hosts), cluster.random.randint(1, len(cluster.hosts))):
        cluster.cordon(name)
    cluster.run()
    return cluster


def test_fewest_workers_move_where_another_needs_a_node() -> None:
    """A group of four needs the node of a pair, and the pair the seat of a single worker. To place all anew would move
    another group of four as well."""
    shapes = {"big": Shape(4), "pair": Shape(2), "ones": Shape(), "rest": Shape(4)}
    slots = {"a": 4, "n1": 4, "n2": 3, "n3": 2}
    current: dict[str, tuple[tuple[str, ...], ...]] = {
        "big": (),
        "pair": (("n1", "n1"),),
        "ones": (("n2",), ("n2",), ("n3",)),
        "rest": (("a",) * 4,),
    }
    counts = {"big": 1, "pair": 1, "ones": 3, "rest": 1}
    survey: Any = SimpleNamespace(
        barred_pairs=(),
        nodes=SimpleNamespace(cordoned=[]),
        failing=(),
        avoided={},
        held_nodes=(),
        state=SimpleNamespace(
            tasks={name: SimpleNamespace(spec=v.TaskSpec(name=name, max_workers=4)) for name in counts}
        ),
    )
    solution = Solution(Problem(13, 1, 1, (), seats=((2, 1), (3, 1), (4, 2))), ())
    assert place(counts, shapes, slots, current).short == {"big": 1}
    assert place(counts, shapes, slots, {}).replicas["rest"] != current["rest"]
    placement = _placed(survey, solution, slots, (counts, shapes, current), ({}, {}))
    assert placement.replicas["big"] == (("n1",) * 4,) and placement.replicas["rest"] == current["rest"]
    assert (Counter(placement.replicas["ones"]) - Counter(current["ones"])).total() == 1
