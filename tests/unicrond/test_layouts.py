"""Layouts that the plan chooses: by itself, at the price of a reshape, and back again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster, membership_of
from unicrond.core.planning.situation import NodeArrival, NodeLoss, TaskEnd
from unicrond.core.planning.table import Planner
from unicrond.core.replayer import replay
from unicrond.core.rules.fault_targets import OrderRefused
from unicrond.core.rules.plan_problems import problem_of, situation_of
from unicrond.core.rules.reshape_requests import ReshapeOrder, reshape_request
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import Task, TaskStatus
from unicrond.core.state.state_bytes import digest
from unicrond.core.state.task_parts import Pace
from unicrond.core.tasks.reshaping import layout_key, most_workers, reshaped
from unicrond.core.tasks.task_rules import spec_faults
from unicrond.core.worth.waf import flops_of, waf
from unicrond.display.cluster_tables import plan_table
from unicrond.display.plan_explanation import explain_layouts
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary import LayoutSpec
from unicrond.events.vocabulary.shape import Shape
from unicrond.views.plan_preview import foreseen
from unicrond.views.what_if import ClusterChanges, what_if

SEEDS = range(12)
#: tp 2 is much the faster; tp 1 goes anywhere.
PAIRS = LayoutSpec(tp=2, throughput={"2": 300, "4": 600})
SINGLES = LayoutSpec(tp=1, throughput={"1": 100, "2": 200, "3": 290, "4": 380})
TABLES = {"throughput": PAIRS.throughput, "layouts": (PAIRS, SINGLES)}


def cluster_of(seed: int, *slots: int, policy: Policy | None = None, **spec: object) -> MiniCluster:
    """Nodes of so many slots, and a task in pairs."""
    cluster = MiniCluster(seed, policy)
    for n, count in enumerate(slots):
        cluster.add_host(f"n{n}", slots=count)
    cluster.submit("big", **{"tp": 2, "min_workers": 1, "max_workers": 4, **TABLES, **spec})
    cluster.run()
    cluster.assert_whole()
    cluster.train("big", steps=5)
    return cluster


def layout(cluster: MiniCluster) -> tuple[int, int, int]:
    """tp, pp, and how many members."""
    task = cluster.state.tasks["big"]
    assert task.membership is not None
    size = task.spec.replica_workers
    replicas = {member.replica for member in task.membership.members}
    assert len(task.membership.members) == size * len(replicas)
    return task.spec.tp, task.spec.pp, len(task.membership.members)


def lose(cluster: MiniCluster, name: str) -> None:
    cluster.kill_host(cluster.hosts[name])
    cluster.lose(cluster.hosts[name])


def decided(cluster: MiniCluster, kind: type, since: int = 0) -> list:
    return [entry.envelope.event for entry in cluster.log[since:] if isinstance(entry.envelope.event, kind)]


@pytest.mark.parametrize("seed", SEEDS)
def test_layout_shrinks_on_node_loss_and_returns(seed: int) -> None:
    cluster = cluster_of(seed, 2, 1)
    assert layout(cluster) == (2, 1, 2)
    before = len(cluster.log)
    lose(cluster, "n0")
    cluster.run()
    cluster.assert_whole()
    assert layout(cluster) == (1, 1, 1)
    (chosen,) = decided(cluster, v.TaskReshaped, before)
    assert (chosen.tp, chosen.plan) == (1, cluster.state.plan.epoch)
    assert cluster.state.plan.assignments["big"].tp == 1
    at = cluster.iterations["big"]
    cluster.train("big")
    cluster.add_host("n0", slots=2)
    cluster.run()
    cluster.assert_whole()
    assert layout(cluster) == (2, 1, 2)
    cluster.train("big")
    assert cluster.state.tasks["big"].progress.iteration == at + 2
    assert "in tp 2, pp 1" in cluster.state.plan.reason


def test_layout_sets_micro_batch() -> None:
    layouts = (replace(PAIRS, micro_batch=1), replace(SINGLES, micro_batch=4))
    cluster = cluster_of(1, 2, 1, layouts=layouts)
    spec = cluster.state.tasks["big"].spec
    assert spec.micro_batch == 1
    assert [most_workers(spec, one.shape) for one in layouts] == [4, 2], "no more replicas than micro-batches"
    (fault,) = spec_faults(replace(spec, layouts=(*layouts, LayoutSpec(pp=2))))
    assert str(fault) == "layouts: say micro_batch in some and not in others; give it in all or in none"
    lose(cluster, "n0")
    cluster.run()
    cluster.assert_whole()
    assert (layout(cluster), cluster.state.tasks["big"].spec.micro_batch) == ((1, 1, 1), 4)
    cluster.add_host("n0", slots=2)
    cluster.run()
    cluster.assert_whole()
    assert (layout(cluster), cluster.state.tasks["big"].spec.micro_batch) == ((2, 1, 2), 1)


@pytest.mark.parametrize("seed", SEEDS[:4])
@pytest.mark.parametrize("other", [{"vpp": 2}, {"micro_batch": 2}], ids=["stages", "micro-batches"])
def test_layout_change_covers_single_size(other: dict[str, int], seed: int) -> None:
    """One is the best on four workers, the other on two. What was measured belongs to its own."""
    four = LayoutSpec(pp=2, throughput={"2": 100, "4": 400}, micro_batch=int("micro_batch" in other))
    two = replace(four, throughput={"2": 150, "4": 300}, **other)
    tables = {"throughput": four.throughput, "layouts": (four, two)}
    cluster = cluster_of(seed, 2, 2, tp=1, pp=2, min_workers=2, entry="/train.py", **tables)
    corrected = v.ThroughputCorrected(task="big", workers=4, flops=200, iteration_us=1, reports=8, reason="")
    cluster.append(corrected, "coordinator", cluster.state.term)
    before, was = len(cluster.log), cluster.state.tasks["big"]
    assert was.spec.shape == cluster.state.plan.assignments["big"].shape == four.shape
    assert not decided(cluster, v.TaskReshaped), "it has begun in what the first plan chose"
    lose(cluster, "n0")
    cluster.run()
    cluster.assert_whole()
    task = cluster.state.tasks["big"]
    assert task.spec.shape == cluster.state.plan.assignments["big"].shape == two.shape
    assert (task.spec.vpp, task.spec.micro_batch) == (other.get("vpp", 0), other.get("micro_batch", 1))
    assert not {*task.member_names} & {*was.member_names}, "a worker has its layout from its birth"
    assert [event.shape for event in decided(cluster, v.TaskReshaped, before)] == [two.shape]
    assert (task.pace.measurements, task.pace.other_layouts) == ({}, {layout_key(four.shape): {"4": 200}})
    assert flops_of(task)(2) == 75, "presumed, by the ratio that the other has"
    cluster.submit("small", max_workers=1, weight=1e-9)
    cluster.run()
    assert cluster.state.plan.assignments["big"].shape == two.shape, "a plan that leaves it alone says so"
    cluster.append(v.TaskCancelled(task="small", reason=""), "api", cluster.state.term)
    cluster.train("big")
    cluster.add_host("n0", slots=2)
    cluster.run()
    cluster.assert_whole()
    task = cluster.state.tasks["big"]
    assert (task.spec.shape, task.pace.measurements, task.pace.other_layouts) == (four.shape, {"4": 200}, {})
    assert len(decided(cluster, v.TaskReshaped, before)) == 2
    assert "reshaped" not in cluster.state.plan.trigger
    asked = reshape_request(cluster.state, task, ReshapeOrder(**other))
    cluster.append(asked, "api", cluster.state.term)
    cluster.run()
    cluster.assert_whole()
    spec = cluster.state.tasks["big"].spec
    assert (spec.vpp or 1, spec.micro_batch, spec.layouts) == (two.vpp, two.micro_batch or 1, ())
    assert "task big reshaped" in cluster.state.plan.trigger


def test_nearest_measured_layout_compares_all_sizes() -> None:
    layouts = tuple(LayoutSpec(pp=2, vpp=vpp, throughput={"2": 100}) for vpp in (1, 2, 4))
    spec = v.TaskSpec(name="big", pp=2, min_workers=2, max_workers=2, layouts=layouts, throughput={"2": 100})
    pace = Pace(measurements={"2": 50}, other_layouts={layout_key(layouts[1].shape): {"2": 80}})
    task = Task(spec=spec, status=TaskStatus.ACTIVE, submitted_seq=1, submitted_us=1, pace=pace)
    assert flops_of(task, shape=layouts[2].shape)(2) == 80


@pytest.mark.parametrize("seed", SEEDS)
def test_survivors_hand_over_before_exit(seed: int) -> None:
    """Two pairs; one node of three slots is left, and the table says that three singles beat a pair."""
    pairs = replace(PAIRS, throughput={"2": 150, "4": 600})
    cluster = cluster_of(seed, 3, 2, throughput=pairs.throughput, layouts=(pairs, SINGLES))
    assert layout(cluster) == (2, 1, 4)
    before = len(cluster.log)
    lose(cluster, "n1")
    cluster.run()
    cluster.assert_whole()
    assert layout(cluster) == (1, 1, 3)
    leaving = [membership_of(event) for event in decided(cluster, v.MembershipDecided, before)]
    assert [told.handover for told in leaving if not told.members] == [True]
    stopped = [order.worker for order in decided(cluster, v.StopWorker, before)]
    assert len(stopped) == len(set(stopped))


@pytest.mark.parametrize("seed", SEEDS)
def test_reshape_survives_any_death(seed: int) -> None:
    cluster = cluster_of(seed, 2, 2, 1)
    lose(cluster, "n0")
    for _ in range(cluster.random.randrange(14)):
        cluster.random.choice(cluster.moves())()
    living = [(host, worker) for host in cluster.hosts.values() if host.up for worker in host.processes]
    if seed % 3 == 2:
        lose(cluster, "n1")
    elif living:
        cluster.kill_worker(*cluster.random.choice(living))
    if seed % 2:
        cluster.take_over()
    cluster.run()
    cluster.assert_whole()
    assert layout(cluster)[2] == (1 if seed % 3 == 2 else 2)
    cluster.add_host("n0", slots=2)
    cluster.run()
    cluster.assert_whole()
    at = cluster.state.tasks["big"].progress.iteration
    cluster.train("big")
    assert cluster.state.tasks["big"].progress.iteration > at


def test_newer_plan_reverts_layout() -> None:
    """The node is there again before anybody has left."""
    cluster = cluster_of(1, 2, 3, layouts=(PAIRS, replace(SINGLES, throughput={"3": 500})), max_workers=4)
    lose(cluster, "n0")
    while cluster.decide():
        pass
    task = cluster.state.tasks["big"]
    assert task.reshaping.plan == cluster.state.plan.epoch and task.reshaping.reshape.tp == 1
    lose(cluster, "n1")
    cluster.add_host("n0", slots=2)
    cluster.run()
    cluster.assert_whole()
    assert layout(cluster) == (2, 1, 2) and not cluster.state.tasks["big"].reshaping.plan


def test_empty_plan_reverts_layout() -> None:
    cluster = cluster_of(1, 2, 3, layouts=(PAIRS, replace(SINGLES, throughput={"3": 500})), max_workers=4)
    lose(cluster, "n0")
    while cluster.decide():
        pass
    assert cluster.state.tasks["big"].reshaping.plan
    lose(cluster, "n1")
    cluster.run()
    reshaping = cluster.state.tasks["big"].reshaping
    assert (reshaping.reshape, reshaping.plan) == (None, 0)
    assert decided(cluster, v.TaskReshaped) == []


@pytest.mark.parametrize(("worker_mtbf_s", "tp"), [(1e7, 2), (40.0, 1)])
def test_layout_returns_only_if_worthwhile(worker_mtbf_s: float, tp: int) -> None:
    """Where the next failure is near, the better layout is not worth its reshape."""
    near = (replace(SINGLES, throughput={"1": 100, "2": 200}), replace(PAIRS, throughput={"2": 210}))
    policy = Policy(worker_mtbf_s=worker_mtbf_s)
    spec = {"tp": 1, "throughput": near[0].throughput, "layouts": near, "max_workers": 2}
    cluster = cluster_of(1, 1, policy=policy, **spec)
    assert layout(cluster) == (1, 1, 1)
    cluster.add_host("n1", slots=1)
    cluster.run()
    assert layout(cluster) == (1, 1, 2)
    cluster.add_host("n2", slots=2)
    cluster.run()
    cluster.assert_whole()
    assert layout(cluster)[0] == tp


@pytest.mark.parametrize("seed", SEEDS)
def test_reshape_frees_worker_for_other_task(seed: int) -> None:
    """big needs two workers as a pair, one as a single; small has waited for one."""
    pairs, singles = replace(PAIRS, throughput={"2": 210}), replace(SINGLES, throughput={"1": 200})
    cluster = cluster_of(seed, 2, max_workers=2, throughput=pairs.throughput, layouts=(pairs, singles))
    assert layout(cluster) == (2, 1, 2)
    cluster.submit("small", throughput={"1": 100})
    cluster.run()
    cluster.assert_whole()
    assert layout(cluster) == (1, 1, 1)
    assert cluster.state.plan.workers == {"big": 1, "small": 1}


def test_manual_reshape_overrides_layouts_of_plan() -> None:
    cluster = cluster_of(1, 2, 2)
    asked = reshape_request(cluster.state, cluster.state.tasks["big"], ReshapeOrder(tp=1))
    cluster.append(asked, "api", cluster.state.term)
    cluster.run()
    cluster.assert_whole()
    assert layout(cluster) == (1, 1, 4), "slower, but asked for"
    assert cluster.state.tasks["big"].spec.layouts == ()
    with pytest.raises(OrderRefused, match=r"^tp: 3 workers of a stage"):
        reshape_request(cluster.state, cluster.state.tasks["big"], ReshapeOrder(tp=3))


def test_manual_reshape_to_current_layout_stops_no_plan() -> None:
    cluster = cluster_of(1, 2, 1)
    lose(cluster, "n0")
    while cluster.decide():
        pass
    cluster.append(
        v.ReshapeRequested(task="big", tp=2, pp=1, min_workers=1, max_workers=4, reason=""), "api", cluster.state.term
    )
    cluster.run()
    cluster.assert_whole()
    assert layout(cluster) == (1, 1, 1)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_withdrawn_reshape_keeps_layout_of_plan(seed: int) -> None:
    """Or workers of the present layout were started for the other's places, and stopped, without end."""
    pairs = replace(PAIRS, throughput={"2": 150, "4": 600})
    cluster = cluster_of(seed, 3, 2, throughput=pairs.throughput, layouts=(pairs, SINGLES))
    lose(cluster, "n1")
    while cluster.decide():
        pass
    assert cluster.state.tasks["big"].reshaping.plan == cluster.state.plan.epoch
    for most in (2, 4):
        wish = v.ReshapeRequested(task="big", tp=2, pp=1, min_workers=1, max_workers=most, reason="")
        cluster.append(wish, "api", cluster.state.term)
    cluster.run()
    cluster.assert_whole()
    assert layout(cluster) == (1, 1, 3)


def test_reshape_of_bounds_leaves_layout_to_plan() -> None:
    cluster = cluster_of(1, 2, 2)
    asked = reshape_request(cluster.state, cluster.state.tasks["big"], ReshapeOrder(max_workers=3))
    cluster.append(asked, "api", cluster.state.term)
    cluster.run()
    cluster.assert_whole()
    assert layout(cluster) == (2, 1, 2)
    assert [len(one.throughput) for one in cluster.state.tasks["big"].spec.layouts] == [1, 3]


def test_measurement_in_one_layout_corrects_others() -> None:
    cluster = cluster_of(1, 2, 1)
    task = cluster.state.tasks["big"]
    assert [flops_of(task, shape=Shape(1, 1))(n) for n in (1, 2, 3)] == [100, 200, 290]
    corrected = v.ThroughputCorrected(task="big", workers=2, flops=150, iteration_us=1, reports=8, reason="")
    cluster.append(corrected, "coordinator", cluster.state.term)
    task = cluster.state.tasks["big"]
    assert [flops_of(task, shape=Shape(1, 1))(n) for n in (1, 2, 3)] == [50, 100, 145]
    assert waf(task, 2) == 150 and waf(task, 1, shape=Shape(1, 1)) == 50
    lose(cluster, "n0")
    cluster.run()
    task = cluster.state.tasks["big"]
    assert (task.pace.measurements, task.pace.other_layouts) == ({}, {"2x1": {"2": 150}})
    assert [flops_of(task)(n) for n in (1, 2)] == [50, 100]
    cluster.add_host("n0", slots=2)
    cluster.run()
    task = cluster.state.tasks["big"]
    assert (task.pace.measurements, task.pace.other_layouts) == ({"2": 150}, {})


def test_measured_reshape_time_becomes_its_price() -> None:
    cluster = cluster_of(1, 2, 1)
    (task,) = problem_of(Survey(cluster.state, cluster.policy)).tasks
    assert task.prices.reshape_us == 3 * 5_000_000, "three transitions, until one was seen"
    lose(cluster, "n0")
    cluster.run()
    took_us = cluster.state.tasks["big"].pace.reshape_us
    assert 0 < took_us < 5_000_000
    (task,) = problem_of(Survey(cluster.state, cluster.policy)).tasks
    assert task.prices.reshape_us == took_us
    assert (task.shape, task.shape_of(1)) == (Shape(1, 1), Shape(2, 1))


def test_curves_are_recomputed_only_after_learning() -> None:
    cluster = cluster_of(1, 2, 2)
    survey = Survey(cluster.state, cluster.policy)
    assert survey.points_to_make == 2 + 4, "two counts of pairs, four of singles"
    survey.make_curves()
    assert survey.points_to_make == 0 == Survey(cluster.state, cluster.policy, survey).points_to_make
    corrected = v.ThroughputCorrected(task="big", workers=4, flops=150, iteration_us=1, reports=8, reason="")
    cluster.append(corrected, "coordinator", cluster.state.term)
    assert Survey(cluster.state, cluster.policy, survey).points_to_make == 6


@pytest.mark.parametrize("seed", SEEDS)
def test_foresight_matches_problem_of_each_event(seed: int) -> None:
    """The table answers the very problems that come, seats and layouts among them."""
    for event, happen in (
        (NodeLoss("n0"), lambda cluster: lose(cluster, "n0")),
        (NodeArrival(2), lambda cluster: cluster.add_host("n9", slots=2)),
    ):
        cluster = cluster_of(seed, 2, 2, 1)
        cluster.submit("small", max_workers=1)
        cluster.run()
        situation = situation_of(Survey(cluster.state, cluster.policy))
        assert situation is not None and situation.after(event).seats
        happen(cluster)
        assert situation.after(event) == problem_of(Survey(cluster.state, cluster.policy))
    cluster.run()
    situation = situation_of(Survey(cluster.state, cluster.policy))
    assert situation is not None
    cluster.append(v.TaskCancelled(task="small", reason="done"), "api", cluster.state.term)
    assert situation.after(TaskEnd("small")) == problem_of(Survey(cluster.state, cluster.policy))


def test_two_half_free_nodes_seat_no_pair() -> None:
    """Six slots on two nodes: a third pair would add up, and finds no seat."""
    cluster = MiniCluster(1)
    for name in ("n0", "n1"):
        cluster.add_host(name, slots=3)
    cluster.submit("big", tp=2, min_workers=2, max_workers=6)
    cluster.submit("small", weight=0.5, min_workers=1, max_workers=2)
    cluster.run()
    cluster.assert_whole()
    assert cluster.state.plan.workers == {"big": 4, "small": 2}
    assert "no seat" not in cluster.state.plan.reason


def test_replay_reaches_same_state() -> None:
    cluster = cluster_of(1, 2, 1)
    lose(cluster, "n0")
    cluster.run()
    state = replay(cluster.log)
    assert digest(state) == digest(cluster.state)


def test_reshape_description_survives_round_trip() -> None:
    spec = v.TaskSpec(name="a", tp=2, min_workers=1, max_workers=4, **TABLES)
    there = v.TaskReshaped(task="a", tp=1, pp=1, min_workers=1, max_workers=4, reason="", plan=3)
    gone = reshaped(spec, there)
    assert (gone.tp, gone.throughput, gone.layouts) == (1, SINGLES.throughput, spec.layouts)
    assert reshaped(gone, replace(there, tp=2)) == spec
    assert reshaped(spec, replace(there, plan=0)).layouts == ()


def test_plan_explains_worth_of_other_layouts() -> None:
    cluster = cluster_of(1, 2, 1)
    assert explain_layouts(cluster.state) == ("big on 2 workers in tp 2, pp 1: 300 FLOP/s; in tp 1, pp 1 200 FLOP/s")
    rows = plan_table(cluster.state)
    assert (rows.headers[-1], rows.rows[0][-1]) == ("layout", "tp 2, pp 1")
    then = what_if(cluster.state, cluster.policy, ClusterChanges(lose=("n0",)))
    assert [(one.workers, one.tp, one.pp) for one in then.plan.assignments.values()] == [(1, 1, 1)]
    lose(cluster, "n0")
    cluster.run()
    assert explain_layouts(cluster.state) == "big on 1 worker in tp 1, pp 1: 100 FLOP/s; in tp 2, pp 1 nothing"


def test_plan_table_names_next_layout() -> None:
    cluster = cluster_of(1, 2, 1)
    situation = situation_of(Survey(cluster.state, cluster.policy))
    assert situation is not None
    rows = {(row.event, row.subject): row for row in foreseen(Planner().refresh(situation))}
    lost = rows["node lost", "n0"]
    assert (lost.workers, lost.layouts) == ({"big": 1}, {"big": "tp 1, pp 1"})
    assert rows["node lost", "n1"].layouts == {"big": "tp 2, pp 1"}


def test_task_on_cordoned_node_keeps_its_layout() -> None:
    """For another one all workers would leave, and none would start again on that node: another's worker may take the
    place that is left."""
    cluster = cluster_of(1, 2, 2)

    def shapes() -> list[Shape]:
        (problem,) = problem_of(Survey(cluster.state, cluster.policy)).tasks
        return [option.shape for option in problem.alternatives]

    assert shapes() == [SINGLES.shape]
    cluster.cordon("n0")
    cluster.run()
    assert shapes() == [] and layout(cluster) == (2, 1, 4)
    assert situation_of(Survey(cluster.state, cluster.policy)) is None, "the loss of that node would change it"
    cluster.uncordon("n0")
    cluster.run()
    assert shapes() == [SINGLES.shape] and layout(cluster) == (2, 1, 4)
