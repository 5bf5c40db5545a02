"""Another tp and pp for a running task: handed over at a boundary, described anew, planned for."""

from __future__ import annotations

import re

import pytest

from tests.unicrond.cluster import MiniCluster, membership_of
from unicrond.core.rules.fault_targets import OrderRefused
from unicrond.core.rules.reshape_requests import ReshapeOrder, reshape_request
from unicrond.core.state.state import TaskStatus
from unicrond.core.tasks.reshaping import is_in_place, reshaped
from unicrond.display.cluster_tables import tasks_table
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary import LANES
from unicrond.events.vocabulary.shape import Shape

SEEDS = range(20)


def assert_stopped_once(cluster: MiniCluster) -> None:
    stopped = [order.worker for order in decided(cluster, v.StopWorker)]
    assert len(stopped) == len(set(stopped))


def cluster_of(seed: int, **spec: object) -> MiniCluster:
    """Two nodes of two slots, and a task on all of them."""
    cluster = MiniCluster(seed)
    for name in ("n0", "n1"):
        cluster.add_host(name, slots=2)
    cluster.submit("big", **{"max_workers": 4, **spec})
    cluster.run()
    cluster.train("big", steps=5)
    cluster.run()
    return cluster


def ask(cluster: MiniCluster, **order: object) -> v.ReshapeRequested:
    asked = reshape_request(cluster.state, cluster.state.tasks["big"], ReshapeOrder(**order))  # type: ignore[arg-type]
    cluster.append(asked, "api", cluster.state.term)
    return asked


def decided(cluster: MiniCluster, kind: type, since: int = 0) -> list:
    return [entry.envelope.event for entry in cluster.log[since:] if isinstance(entry.envelope.event, kind)]


@pytest.mark.parametrize("seed", SEEDS)
def test_reshape_hands_over_and_restarts_all_workers(seed: int) -> None:
    cluster = cluster_of(seed)
    before = len(cluster.log)
    asked = ask(cluster, tp=2)
    assert (asked.min_workers, asked.max_workers) == (2, 4)
    cluster.source = "peer"
    cluster.run()
    cluster.assert_whole()
    task = cluster.state.tasks["big"]
    assert (task.spec.tp, task.spec.pp, task.reshaping.reshape) == (2, 1, None)
    assert [(m.replica, m.shard) for m in task.membership.members] == [(4, 0), (4, 1), (5, 0), (5, 1)]
    assert all(
        worker.node == task.workers[f"big.{5 + n // 2 * 2}"].node for n, worker in enumerate(task.workers.values())
    )
    leaving, coming = decided(cluster, v.MembershipDecided, before)
    assert (membership_of(leaving).members, leaving.urgent, coming.urgent) == ((), False, True)
    assert membership_of(leaving).handover and not membership_of(coming).handover
    (reshaped,) = decided(cluster, v.TaskReshaped, before)
    assert (reshaped.tp, reshaped.pp, reshaped.max_workers) == (2, 1, 4)
    assert len(decided(cluster, v.WorkerPaused, before)) == 4, "nobody is stopped before it has left"
    assert cluster.state.incidents_total == 0
    assert "task big reshaped" in cluster.state.plan.trigger
    at = cluster.iterations["big"]
    cluster.train("big")
    assert cluster.state.tasks["big"].progress.iteration == at + 1


@pytest.mark.parametrize("seed", SEEDS)
def test_reshape_moves_workers_to_node_with_room(seed: int) -> None:
    """The stages of pp 2 stand on two nodes; tp 2 has no place there."""
    cluster = MiniCluster(seed)
    for name in ("n0", "n1"):
        cluster.add_host(name)
    cluster.submit("big", pp=2, min_workers=2, max_workers=2)
    cluster.run()
    cluster.add_host("n2", slots=2)
    cluster.run()
    ask(cluster, tp=2, pp=1)
    cluster.run()
    cluster.assert_whole()
    assert {member.node for member in cluster.state.tasks["big"].membership.members} == {"n2"}


@pytest.mark.parametrize("seed", SEEDS)
def test_reshape_survives_death_of_worker(seed: int) -> None:
    cluster = cluster_of(seed)
    ask(cluster, tp=2)
    for _ in range(cluster.random.randrange(12)):
        cluster.random.choice(cluster.moves())()
    living = [(host, worker) for host in cluster.hosts.values() for worker in host.processes]
    if living:
        cluster.kill_worker(*cluster.random.choice(living))
    if seed % 2:
        cluster.take_over()
    cluster.run()
    cluster.assert_whole()
    assert_stopped_once(cluster)
    assert cluster.state.tasks["big"].spec.tp == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_reshape_waits_until_broken_group_regroups(seed: int) -> None:
    """Who has not noticed the break would reach no boundary."""
    cluster = cluster_of(seed)
    before = len(cluster.log)
    cluster.report("big.1", "connection_broken")
    ask(cluster, tp=2)
    cluster.run()
    cluster.assert_whole()
    again, leaving, coming = decided(cluster, v.MembershipDecided, before)
    assert [len(membership_of(event).members) for event in (again, leaving, coming)] == [4, 0, 4] and again.urgent


@pytest.mark.parametrize("seed", SEEDS)
def test_reshape_survives_loss_of_node(seed: int) -> None:
    cluster = cluster_of(seed)
    ask(cluster, tp=2)
    for _ in range(cluster.random.randrange(12)):
        cluster.random.choice(cluster.moves())()
    cluster.kill_host(cluster.hosts["n1"])
    cluster.lose(cluster.hosts["n1"])
    cluster.run()
    cluster.assert_whole()
    task = cluster.state.tasks["big"]
    assert (task.spec.tp, len(task.membership.members)) == (2, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_reshape_before_start_applies_at_once(seed: int) -> None:
    cluster = MiniCluster(seed)
    cluster.add_host("n0", slots=2)
    cluster.submit("big", tp=2, min_workers=2, max_workers=2)
    for _ in range(cluster.random.randrange(10)):
        cluster.random.choice(cluster.moves())()
    ask(cluster, tp=1)
    if cluster.hosts["n0"].processes:
        cluster.kill_worker(cluster.hosts["n0"], next(iter(cluster.hosts["n0"].processes)))
    cluster.run()
    cluster.assert_whole()
    assert cluster.state.tasks["big"].spec.tp == 1
    assert_stopped_once(cluster)


@pytest.mark.parametrize("seed", SEEDS)
def test_reshape_of_bounds_moves_no_remaining_worker(seed: int) -> None:
    cluster = cluster_of(seed)
    before = {m.worker for m in cluster.state.tasks["big"].membership.members}
    mark = len(cluster.log)
    ask(cluster, max_workers=2)
    cluster.run()
    cluster.assert_whole()
    fewer = {m.worker for m in cluster.state.tasks["big"].membership.members}
    assert len(fewer) == 2 and fewer < before
    ask(cluster, max_workers=3)
    cluster.run()
    cluster.assert_whole()
    more = {m.worker for m in cluster.state.tasks["big"].membership.members}
    assert len(more) == 3 and fewer < more
    assert not any(decision.urgent for decision in decided(cluster, v.MembershipDecided, mark))
    assert all(membership_of(decision).members for decision in decided(cluster, v.MembershipDecided, mark))


def test_reshape_to_current_layout_withdraws_request() -> None:
    cluster = cluster_of(3)
    ask(cluster, tp=2)
    cluster.decide()
    assert tasks_table(cluster.state).rows[0][-1] == "changes to tp 2, pp 1"
    ask(cluster, tp=1, min_workers=1, max_workers=4)
    cluster.run()
    cluster.assert_whole()
    assert cluster.state.tasks["big"].spec.tp == 1
    assert not decided(cluster, v.TaskReshaped)


def test_reshape_drops_measurements() -> None:
    cluster = cluster_of(1, throughput={"2": 100, "4": 180})
    ask(cluster, tp=2, max_workers=2)
    cluster.run()
    task = cluster.state.tasks["big"]
    assert task.spec.throughput == {"2": 100} and not task.pace.measurements


def test_reshape_ignores_finished_task() -> None:
    cluster = cluster_of(1)
    cluster.append(v.TaskCancelled(task="big", reason="done"), "api", cluster.state.term)
    for name in ("big", "never-there"):
        late = v.ReshapeRequested(task=name, tp=2, pp=1, min_workers=2, max_workers=4, reason="late")
        cluster.append(late, "api", cluster.state.term)
    cluster.run()
    assert cluster.state.tasks["big"].status is TaskStatus.CANCELLED and cluster.state.tasks["big"].spec.tp == 1


@pytest.mark.parametrize(
    ("order", "status", "line"),
    [
        ({"tp": 3}, 400, "tp: 3 workers of a stage share a node, and no node has more than 2 slots; lower it"),
        ({"tp": 2, "pp": 3}, 400, "pp: the nodes have room for 2 stages of tp 2, not for 3; lower it, or tp"),
        ({"pp": 4}, 400, "model.layers: 2 does not divide among pp (4); use 4, or another pp"),
        ({"tp": 2, "max_workers": 3}, 400, "max_workers: 3 is not a multiple of tp * pp = 2 * 1; use 2 or 4"),
        ({"tp": 2, "min_workers": 6}, 400, "min_workers: 6 is more than max_workers (4); lower it"),
        ({"max_workers": 9}, 400, "max_workers: 9 replicas share 8 micro-batches"),
        ({"tp": 2, "min_workers": 6, "max_workers": 8}, 400, "min_workers: the nodes have room for 4; lower it"),
        ({"min_workers": 5, "max_workers": 8}, 400, "min_workers: the nodes have room for 4; lower it"),
        ({"micro_batch": 3}, 400, "micro_batch: 3 does not divide global_batch (8); use a divisor of it"),
        ({"vpp": 2}, 400, "vpp: is 2, but the built-in GPT has no virtual pipeline stages; leave it out"),
        ({"micro_batch": 1}, 409, "tp, pp: task big has tp 1, pp 1 and these bounds already; give others"),
        ({}, 409, "tp, pp: task big has tp 1, pp 1 and these bounds already; give others"),
    ],
)
def test_reshape_refuses_bad_order_in_one_line(order: dict[str, int], status: int, line: str) -> None:
    cluster = cluster_of(1)
    with pytest.raises(OrderRefused) as refusal:
        ask(cluster, **order)
    assert refusal.value.status == status and str(refusal.value).startswith(line)


def test_reshape_refuses_micro_batch_that_empties_lanes() -> None:
    cluster = cluster_of(1, accumulation="exact", env={LANES: "4"})
    with pytest.raises(OrderRefused, match="micro_batch: 2 of 4 samples do not fill the task's 4 lanes; use at most 2"):
        ask(cluster, micro_batch=4)
    ask(cluster, micro_batch=2)
    cluster.run()
    cluster.assert_whole()
    spec = cluster.state.tasks["big"].spec
    assert (spec.micro_batch, spec.lanes, spec.shape) == (2, 4, Shape())
    reasons = [event.reason for event in decided(cluster, v.MembershipDecided)]
    assert "micro_batch 1 becomes 2: all leave" in reasons


def test_reshape_to_larger_micro_batch_lowers_replica_bound() -> None:
    asked = ask(cluster_of(1), micro_batch=4)
    assert (asked.shape, asked.min_workers, asked.max_workers) == (Shape(micro_batch=4), 1, 2)


def test_reshape_applies_every_requested_size() -> None:
    cluster = cluster_of(1, entry="/train.py")
    asked = ask(cluster, tp=2, pp=2, vpp=2, ep=2, micro_batch=2)
    cluster.run()
    cluster.assert_whole()
    spec = cluster.state.tasks["big"].spec
    assert (spec.cut, spec.micro_batch) == (asked.shape.cut, 2) == (Shape(2, 2, 2, 2), 2)
    with pytest.raises(OrderRefused, match="task big has tp 2, pp 2, vpp 2, ep 2 and these bounds already"):
        ask(cluster, max_workers=4)


def test_handover_deadline_allows_full_save() -> None:
    cluster = cluster_of(1)
    cluster.append(v.NodeCordoned(node="n1", drain=True, reason="repair"), "api", cluster.state.term)
    while cluster.decide():
        pass
    ((some_leave, usual_us),) = cluster.standing().items()
    assert cluster.state.tasks["big"].membership.members and some_leave.startswith("meet:big#")
    cluster.run()
    ask(cluster, tp=2)
    while cluster.decide():
        pass
    ((all_leave, length_us),) = cluster.standing().items()
    assert not cluster.state.tasks["big"].membership.members and all_leave.startswith("regroup:big#")
    assert length_us == 10 * usual_us == 600_000_000


@pytest.mark.parametrize("away", ["lost", "cordoned", "drained"])
def test_reshape_ignores_room_on_absent_node(away: str) -> None:
    cluster = cluster_of(1, min_workers=2)
    if away == "lost":
        cluster.kill_host(cluster.hosts["n1"])
        cluster.lose(cluster.hosts["n1"])
    else:
        cordoned = v.NodeCordoned(node="n1", drain=away == "drained", reason="repair")
        cluster.append(cordoned, "api", cluster.state.term)
    with pytest.raises(OrderRefused, match=r"^min_workers: the nodes have room for 2; lower it"):
        ask(cluster, tp=2, min_workers=4)
    with pytest.raises(OrderRefused, match=r"^pp: the nodes have room for 1 stages of tp 2, not for 2"):
        ask(cluster, tp=2, pp=2)
    assert ask(cluster, tp=2).min_workers == 2


def test_reshape_without_growth_needs_no_room() -> None:
    cluster = cluster_of(1, min_workers=4)
    cluster.kill_host(cluster.hosts["n1"])
    cluster.lose(cluster.hosts["n1"])
    assert ask(cluster, min_workers=4, max_workers=8).min_workers == 4
    assert ask(cluster, min_workers=3).min_workers == 3


def test_reshape_refuses_tp_that_does_not_divide_heads() -> None:
    cluster = MiniCluster(1)
    cluster.add_host("n0", slots=3)
    cluster.submit("big", max_workers=3)
    cluster.run()
    with pytest.raises(
        OrderRefused, match=r"^model\.heads: 4 does not divide among tp \(3\); use 3 or 6, or another tp"
    ):
        ask(cluster, tp=3)


def test_reshape_of_iterations_and_rate_restarts_workers() -> None:
    cluster = cluster_of(1)
    before = len(cluster.log)
    asked = ask(cluster, iterations=500, lr=1e-4)
    assert (asked.tp, asked.pp, asked.max_workers) == (1, 1, 4)
    cluster.source = "peer"
    cluster.run()
    cluster.assert_whole()
    task = cluster.state.tasks["big"]
    assert (task.spec.iterations, task.spec.optimizer.lr, task.reshaping.reshape) == (500, 1e-4, None)
    leaving, _ = decided(cluster, v.MembershipDecided, before)
    assert leaving.reason == "iterations 1000000 becomes 500; learning rate 0.001 becomes 0.0001: all leave"
    assert all(order.spec == task.spec for order in decided(cluster, v.StartWorkers, before))
    assert {worker.worker for worker in task.workers.values()} == {f"big.{number}" for number in (5, 6, 7, 8)}


@pytest.mark.parametrize(
    ("entry", "order", "status", "line"),
    [
        ("gpt", {"iterations": 3}, 409, "iterations: 5 are committed already; give more, or cancel the task"),
        ("gpt", {"lr": 1e-3}, 409, "iterations, lr: task big has these already; give others"),
        ("gpt", {"lr": 1e-9}, 400, "optimizer.min_lr: 1e-05 is more than lr (1e-09); lower it"),
        ("/srv/own.py", {"lr": 1e-4}, 400, "lr: only the script knows its learning rate"),
    ],
)
def test_reshape_refuses_fields_that_task_lacks(entry: str, order: dict[str, float], status: int, line: str) -> None:
    cluster = cluster_of(1, entry=entry, optimizer=v.OptimizerSpec(min_lr=1e-5))
    with pytest.raises(OrderRefused, match=re.escape(line)) as refused:
        ask(cluster, **order)
    assert refused.value.status == status


def test_reshape_edits_megatron_command_line() -> None:
    words = (
        "pretrain_gpt.py --lr 1e-3 --lr-decay-style cosine --train-iters 50 --use-checkpoint-opt_param-scheduler --bf16"
    )
    spec = v.TaskSpec(name="lm", entry="megatron-lm", args=tuple(words.split()), iterations=50)
    asked = v.ReshapeRequested(task="lm", tp=1, pp=1, min_workers=1, max_workers=1, reason="", iterations=70, lr=2.5e-5)
    of = reshaped(spec, asked)
    assert of.iterations == 70 and not is_in_place(spec, asked)
    assert " ".join(of.args) == (
        "pretrain_gpt.py --lr-decay-style cosine --bf16 --train-iters 70 --lr 2.5e-05 --override-opt_param-scheduler"
    )
    assert reshaped(of, asked) == of
