"""Faults that follow one node and not the program (faults/local_faults.py): who is moved, and which node pays when."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster, members
from tests.unicrond.test_hangs import corrupt
from tests.unicrond.test_program_faults import cluster_of, crash_until_over, end, poison, said, steps_of
from unicrond.core.deciding import response
from unicrond.core.faults import local_faults
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import NodeStatus, TaskStatus
from unicrond.core.state.task_parts import LocalFault, Troubles
from unicrond.display.describe import describe_object
from unicrond.events import vocabulary as v
from unicrond.views.notifications import step_notices


def place_of(cluster: MiniCluster, task: str) -> str:
    """The node of the task's one worker."""
    (worker,) = [worker for worker in cluster.state.tasks[task].workers.values() if worker.alive]
    return worker.node


def run_there(cluster: MiniCluster, task: str, bad: str) -> None:
    """The task's program raises on this node; elsewhere it trains until it is calm."""
    cluster.run()
    for _ in range(9):
        if place_of(cluster, task) != bad:
            break
        end(cluster, task)
        cluster.run()
    cluster.train(task, 10)
    cluster.run()


def faults(cluster: MiniCluster, task: str) -> set[str]:
    return set(cluster.state.tasks[task].troubles.local_faults)


# --- exceptions ------------------------------------------------------------------------------------


def test_exception_is_tried_once_on_another_node() -> None:
    """A mount is missing on one node: the program runs elsewhere, and the node isn't isolated for one task."""
    cluster = cluster_of(3)
    cluster.submit("big", max_workers=1)
    cluster.run()
    bad = place_of(cluster, "big")
    run_there(cluster, "big", bad)
    assert len(said(cluster, v.StartWorker)) == 2, "the first fault is tried elsewhere, at once"
    assert place_of(cluster, "big") != bad and faults(cluster, "big") == {bad}
    assert not said(cluster, v.NodeIsolated) and cluster.state.tasks["big"].troubles.crashes is None
    notices = [notice for step in steps_of(cluster) for notice in step_notices(step) if notice.rule == "local_fault"]
    assert [notice.title for notice in notices] == [f"task big has failed on {bad} alone"]
    assert "FileNotFoundError" in notices[0].text
    for kind, name in (("node", bad), ("task", "big")):
        assert f"fails on {bad} alone: FileNotFoundError" in str(describe_object(cluster.state, kind, name))


def test_local_fault_keeps_task_off_node_and_nobody_else() -> None:
    cluster = cluster_of(3)
    cluster.submit("big", max_workers=1)
    cluster.run()
    bad = place_of(cluster, "big")
    run_there(cluster, "big", bad)
    good = place_of(cluster, "big")
    cluster.kill_host(cluster.hosts[good])
    cluster.lose(cluster.hosts[good])
    cluster.run()
    assert place_of(cluster, "big") not in (bad, good), "there is another one"
    cluster.submit("other", max_workers=1)
    cluster.run()
    assert place_of(cluster, "other") == bad
    cluster.cordon(place_of(cluster, "big"), drain=True)
    cluster.append(v.TaskCancelled(task="other", reason="test"), "api", cluster.state.term)
    cluster.run()
    assert place_of(cluster, "big") == bad, "a bad place is better than none"
    cluster.train("big", 10)
    assert not faults(cluster, "big"), "it is calm there"


def test_exception_on_two_nodes_is_of_program() -> None:
    cluster = cluster_of(4)
    cluster.submit("typo", max_workers=1)
    cluster.run()
    assert crash_until_over(cluster, "typo") == cluster.policy.stuck_max
    task = cluster.state.tasks["typo"]
    assert task.status is TaskStatus.FAILED and not task.troubles.local_faults
    places = [event.node for event in said(cluster, v.StartWorker)]
    assert places[0] != places[1] and len(set(places)) == 2, "tried once elsewhere, then it stays"
    assert not said(cluster, v.NodeIsolated)


def test_exception_of_all_members_at_once_moves_nobody() -> None:
    cluster = cluster_of(4)
    cluster.submit("typo", max_workers=2, min_workers=2)
    cluster.run()
    before = {worker.node for worker in cluster.state.tasks["typo"].workers.values()}
    end(cluster, "typo")
    end(cluster, "typo")
    cluster.run()
    crashes = cluster.state.tasks["typo"].troubles.crashes
    assert crashes is not None and crashes.count == 1 and set(crashes.nodes) == before
    assert {worker.node for worker in cluster.state.tasks["typo"].workers.values()} == before


def test_exception_without_free_node_stays_where_it_is() -> None:
    cluster = cluster_of(2)
    cluster.submit("big", max_workers=2)
    cluster.run()
    cluster.train("big", 3)
    end(cluster, "big")
    cluster.run()
    cluster.train("big", 20)
    cluster.run()
    assert len(members(cluster)) == 2 and not cluster.state.tasks["big"].troubles.local_faults
    assert not said(cluster, v.NodeIsolated)


@pytest.mark.parametrize(("slots", "moves"), [(1, False), (2, True)])
def test_program_is_tried_elsewhere_where_all_its_workers_of_the_node_have_room(slots: int, moves: bool) -> None:
    """A plan for less moves nobody off the node, and may move others for what was measured meanwhile."""
    cluster = cluster_of(0)
    cluster.add_host("n0", slots=2)
    cluster.submit("big", max_workers=2)
    cluster.run()
    cluster.add_host("n1", slots=slots)
    cluster.run()
    cluster.train("big", 3)
    since = cluster.state.plan.epoch
    for _ in range(2):
        end(cluster, "big")
    assert (Survey(cluster.state, cluster.policy).avoided == {"big": ("n0",)}) is moves
    cluster.run()
    assert cluster.state.plan.epoch - since == moves
    assert {worker.node for worker in cluster.state.tasks["big"].workers.values()} == {"n1" if moves else "n0"}


@pytest.mark.parametrize("slots", [(1, 1), (2, 0)], ids=["apart", "together"])
def test_program_of_tensor_parallel_workers_is_tried_elsewhere_where_whole_groups_have_room(
    slots: tuple[int, int],
) -> None:
    cluster = cluster_of(0)
    cluster.add_host("n0", slots=2)
    cluster.submit("big", tp=2, min_workers=2, max_workers=2)
    cluster.run()
    for number, count in enumerate(slots, 1):
        if count:
            cluster.add_host(f"n{number}", slots=count)
    cluster.run()
    cluster.train("big", 3)
    for _ in range(2):
        end(cluster, "big")
    assert Survey(cluster.state, cluster.policy).avoided == ({"big": ("n0",)} if slots == (2, 0) else {})


def test_failed_task_with_local_fault_readmits_no_flapping_node() -> None:
    """It has trained elsewhere, and failed by something else: that says nothing for the node."""
    cluster = cluster_of(3)
    cluster.policy = replace(cluster.policy, flaps_max=2, flap_window_s=1e6, isolation_s=1e6)
    cluster.submit("big", max_workers=1)
    cluster.run()
    bad = place_of(cluster, "big")
    run_there(cluster, "big", bad)
    cluster.append(v.TaskFailed(task="big", reason="test"), "coordinator", cluster.state.term)
    for _ in range(2):
        cluster.lose(cluster.hosts[bad])
        back = v.NodeReturned(node=bad, evidence=v.Evidence(beat_seq=1, beat_at_us=1))
        cluster.append(back, "coordinator", cluster.state.term)
        cluster.run_but_isolation()
    assert [event.node for event in said(cluster, v.NodeIsolated)] == [bad]
    assert not said(cluster, v.NodeReadmitted)


@pytest.mark.parametrize("how", ["agent", "person", "forget"])
def test_local_fault_is_forgotten_when_node_is_mended(how: str) -> None:
    cluster = cluster_of(2)
    cluster.submit("big", max_workers=1)
    cluster.run()
    bad = place_of(cluster, "big")
    run_there(cluster, "big", bad)
    assert faults(cluster, "big") == {bad}
    if how == "agent":
        cluster.add_host(bad)
    elif how == "forget":
        cluster.kill_host(cluster.hosts[bad])
        cluster.lose(cluster.hosts[bad])
        asked = v.ForgetRequested(node=bad, leave=False, reason="the machine goes back")
        cluster.append(asked, "api", cluster.state.term)
        cluster.run()
    else:
        cluster.uncordon(bad)
    assert not faults(cluster, "big")


def test_tasks_that_fail_on_one_node_alone_isolate_it_never() -> None:
    """Whoever may submit could raise where he likes, and take nodes from others."""
    cluster = cluster_of(5)
    bad = ""
    for name in ("first", "second", "third"):
        others = [host for host in cluster.hosts if bad and host != bad]
        for other in others:
            cluster.cordon(other)
        cluster.submit(name, max_workers=1)
        cluster.run()
        for other in others:
            cluster.uncordon(other)
        bad = bad or place_of(cluster, name)
        assert place_of(cluster, name) == bad
        run_there(cluster, name, bad)
        assert faults(cluster, name) == {bad}
    assert not said(cluster, v.NodeIsolated)


# --- ends of unknown cause -------------------------------------------------------------------------


def killed_twice(nodes: int) -> tuple[MiniCluster, str]:
    """A task of two on so many nodes; two workers have ended by SIGKILL on the same node."""
    cluster = cluster_of(nodes)
    cluster.submit("big", max_workers=2)
    cluster.run()
    cluster.train("big", 3)
    bad = cluster.state.tasks["big"].workers[members(cluster)[1]].node
    for _ in range(2):
        (name,) = cluster.hosts[bad].processes
        cluster.kill_worker(cluster.hosts[bad], name)
        cluster.run_but_isolation()
    return cluster, bad


def test_unknown_end_is_tried_elsewhere_though_others_train() -> None:
    cluster, bad = killed_twice(3)
    assert not cluster.state.tasks["big"].workers or bad not in {
        worker.node for worker in cluster.state.tasks["big"].workers.values()
    }
    assert len(members(cluster)) == 2, "the third node has it"
    cluster.train("big", 1)
    cluster.run_but_isolation()
    assert [event.node for event in said(cluster, v.NodeIsolated)] == [bad], "it trains there"
    first_trial = next(i for i, e in enumerate(cluster.log) if isinstance(e.envelope.event, v.NodeIsolated))
    started = [i for i, e in enumerate(cluster.log) if isinstance(e.envelope.event, v.StartWorker)]
    assert started[-1] < first_trial


def test_unknown_end_without_free_node_isolates_at_once() -> None:
    cluster, bad = killed_twice(2)
    assert [event.node for event in said(cluster, v.NodeIsolated)] == [bad], "others train, and there is no other node"


# --- losses that are not finite --------------------------------------------------------------------


def nan_on(cluster: MiniCluster, task: str, node: str) -> None:
    """The next iteration's loss is no number on this node; the others make that iteration before a new worker comes."""
    (name,) = [worker.worker for worker in cluster.state.tasks[task].workers.values() if worker.node == node]
    host = cluster.hosts[node]
    cluster.report(name, "nan_loss", iteration=cluster.state.tasks[task].progress.iteration + 1)
    cluster.kill_worker(host, name)
    host.up = False
    cluster.run()
    cluster.train(task, 1)
    host.up = True
    cluster.run()


def test_loss_that_others_compute_to_a_number_is_of_node() -> None:
    cluster = cluster_of(4)
    cluster.submit("big", max_workers=3)
    cluster.run()
    cluster.train("big", 20)
    bad = cluster.state.tasks["big"].workers[members(cluster)[1]].node
    nan_on(cluster, "big", bad)
    task = cluster.state.tasks["big"]
    assert task.troubles.crashes is None and task.troubles.local_faults[bad].refuted == 1, "it is not the program's"
    assert "the same micro-batch is finite on other nodes" in local_faults.fault_text(task, bad)
    assert len(members(cluster)) == 3 and bad not in {worker.node for worker in task.workers.values()}
    assert not said(cluster, v.NodeIsolated)


def test_iteration_that_is_told_after_the_next_group_is_decided_refutes_a_loss() -> None:
    """Commits are told up to a second later: the next group, with a new worker on the node, may be decided by then."""
    cluster = cluster_of(3)
    cluster.submit("big", max_workers=3)
    cluster.run()
    cluster.train("big", 20)
    bad = cluster.state.tasks["big"].workers[members(cluster)[1]].node
    (name,) = [worker.worker for worker in cluster.state.tasks["big"].workers.values() if worker.node == bad]
    cluster.report(name, "nan_loss", iteration=21)
    cluster.kill_worker(cluster.hosts[bad], name)
    cluster.hosts[bad].up = False
    cluster.run()
    before, cluster.hosts[bad].up = cluster.state.tasks["big"].membership, True
    assert before is not None
    while cluster.state.tasks["big"].generation == before.generation:
        next(move for move in cluster.moves() if move())
    assert bad in {member.node for member in cluster.state.tasks["big"].membership.members}  # type: ignore[union-attr]
    assert not cluster.state.tasks["big"].confirmed
    lead = before.members[0]
    step = v.StepCommitted(
        node=lead.node, task="big", worker=lead.worker, generation=before.generation, first=21, last=24, samples=32,
        samples_digest=0, loss=1.0, duration_us=4000, micro_batches_by_rank=(1,),
    )  # fmt: skip
    cluster.say(cluster.hosts[lead.node], step)
    troubles = cluster.state.tasks["big"].troubles
    assert troubles.crashes is None and troubles.local_faults[bad].refuted == 1


def test_second_loss_that_others_compute_to_a_number_isolates_node() -> None:
    """No other node is free: the task comes back to it, and is calm there."""
    cluster = cluster_of(3)
    cluster.submit("big", max_workers=3)
    cluster.run()
    cluster.train("big", 20)
    bad = cluster.state.tasks["big"].workers[members(cluster)[1]].node
    nan_on(cluster, "big", bad)
    cluster.train("big", 20)
    cluster.run()
    assert len(members(cluster)) == 3 and faults(cluster, "big") == {bad} and not said(cluster, v.NodeIsolated)
    nan_on(cluster, "big", bad)
    (isolation,) = said(cluster, v.NodeIsolated)
    assert isolation.node == bad and isolation.reason.startswith("big fails here alone: ")
    assert cluster.state.tasks["big"].status is TaskStatus.ACTIVE


@pytest.mark.parametrize("nodes", [1, 2])
def test_loss_of_lone_replica_is_refuted_by_nobody(nodes: int) -> None:
    """It starts from a checkpoint: nobody has computed that micro-batch with the same parameters."""
    cluster = cluster_of(nodes)
    cluster.submit("big", max_workers=1)
    cluster.run()
    cluster.train("big", 20)
    bad = place_of(cluster, "big")
    poison(cluster, "big", iteration=21)
    cluster.train("big", 20)
    troubles = cluster.state.tasks["big"].troubles
    assert troubles.crashes is None and not any(fault.refuted for fault in troubles.local_faults.values())
    assert faults(cluster, "big") == ({bad} if nodes == 2 else set())


def test_loss_is_refuted_by_no_other_worker_of_its_node() -> None:
    """The new worker there has come before the iteration is made: it may have computed that micro-batch."""
    cluster = cluster_of(3)
    cluster.submit("big", max_workers=3)
    cluster.run()
    cluster.train("big", 20)
    poison(cluster, "big", iteration=21)
    assert len(members(cluster)) == 3
    cluster.train("big", 20)
    assert not faults(cluster, "big")


def test_loss_that_is_no_number_on_two_nodes_is_of_program() -> None:
    cluster = cluster_of(4)
    cluster.submit("nan", max_workers=2, min_workers=2)
    cluster.run()
    cluster.train("nan", 16)
    for _ in range(3):
        if cluster.state.tasks["nan"].status is not TaskStatus.ACTIVE:
            break
        poison(cluster, "nan", iteration=17)
    task = cluster.state.tasks["nan"]
    assert task.status is TaskStatus.FAILED and not task.troubles.local_faults and not task.troubles.strikes
    assert "in iteration 17 was no finite number 3 times in a row" in task.ending.reason
    assert not said(cluster, v.NodeIsolated)


# --- other bits ------------------------------------------------------------------------------------


def node_of(cluster: MiniCluster, number: int) -> str:
    """The node of a member of the task."""
    return cluster.state.tasks["big"].workers[members(cluster)[number]].node


def convict(cluster: MiniCluster, bad: str) -> None:
    """All other replicas say that the one on this node has other parameters."""
    iteration = cluster.state.tasks["big"].progress.iteration + 1
    (suspect,) = [name for name in members(cluster) if cluster.state.tasks["big"].workers[name].node == bad]
    for number, name in enumerate(members(cluster)):
        if name != suspect:
            corrupt(cluster, suspect, "checksum", reporter=number, iteration=iteration)
    cluster.run()
    cluster.train("big", 20)
    cluster.run()


def trained(nodes: int, *, check_s: float, neighbours: int = 0) -> MiniCluster:
    """A task of three replicas trains; `neighbours`: workers of another task on the first node, of three slots."""
    cluster = MiniCluster(1, check_s=check_s)
    for number in range(nodes):
        cluster.add_host(f"n{number}", 3 if neighbours and not number else 1)
    if neighbours:
        cluster.submit("other", min_workers=neighbours, max_workers=neighbours)
        cluster.run()
    cluster.submit("big", min_workers=2, max_workers=3)
    cluster.run()
    cluster.train("big", 20)
    cluster.run()
    return cluster


def test_node_of_convicted_replica_is_checked_and_comes_back() -> None:
    cluster = trained(4, check_s=60.0)
    bad = node_of(cluster, 1)
    convict(cluster, bad)
    (isolation,) = said(cluster, v.NodeIsolated)
    assert isolation.node == bad and "big: its replica has other parameters" in isolation.reason
    assert [event.node for event in said(cluster, v.CheckNode)] == [bad]
    assert [event.node for event in said(cluster, v.NodeReadmitted)] == [bad] and not faults(cluster, "big")
    assert len(members(cluster)) == 3


@pytest.mark.parametrize(
    ("check_s", "neighbours"), [(60.0, 2), (0.0, 0)], ids=["another task trains there", "there is no check"]
)
def test_first_conviction_isolates_no_node_where_somebody_pays(check_s: float, neighbours: int) -> None:
    cluster = trained(5, check_s=check_s, neighbours=neighbours)
    on = {node: {task for task, _ in cluster.state.by_node.on(node)} for node in cluster.hosts}
    (bad, *_) = [node for node, tasks in on.items() if tasks == ({"big", "other"} if neighbours else {"big"})]
    convict(cluster, bad)
    assert faults(cluster, "big") == {bad} and not said(cluster, v.NodeIsolated)
    assert bad not in {node_of(cluster, number) for number in range(3)}, "the task leaves it"


def test_node_stays_where_its_task_would_lack_workers() -> None:
    cluster = trained(3, check_s=60.0)
    spec = cluster.state.tasks["big"].spec
    task = replace(cluster.state.tasks["big"], spec=replace(spec, min_workers=3))
    cluster.state = replace(cluster.state, tasks={"big": task})
    bad = node_of(cluster, 1)
    convict(cluster, bad)
    assert not said(cluster, v.NodeIsolated) and len(members(cluster)) == 3
    convict(cluster, bad)
    assert [event.node for event in said(cluster, v.NodeIsolated)] == [bad], "not twice"


def test_program_whose_replicas_differ_anywhere_accuses_no_node() -> None:
    cluster = trained(4, check_s=60.0)
    for _ in range(4):
        nodes = [node_of(cluster, number) for number in range(len(members(cluster)))]
        convict(cluster, min(nodes, key=lambda node: node in faults(cluster, "big")))
    assert [event.node for event in said(cluster, v.NodeIsolated)] == ["n0"], (
        "the first alone, while it was the only one"
    )


def pairs() -> MiniCluster:
    """A cluster whose task trains in three replicas of two workers, each on a node of its own."""
    cluster = MiniCluster(1, check_s=0.0)
    for number in range(4):
        cluster.add_host(f"n{number}", 2)
    cluster.submit("big", tp=2, min_workers=2, max_workers=6)
    cluster.run()
    cluster.train("big", 20)
    return cluster


def test_replica_of_two_workers_on_a_node_is_convicted_once() -> None:
    cluster = pairs()
    before, bad = members(cluster), node_of(cluster, 2)
    for number, suspect in ((0, 2), (4, 2), (1, 3), (5, 3)):
        corrupt(cluster, before[suspect], "checksum", reporter=number, iteration=21)
    assert cluster.state.tasks["big"].troubles.local_faults[bad].refuted == 1
    cluster.run()
    assert not said(cluster, v.NodeIsolated)


def test_replica_on_two_nodes_accuses_neither() -> None:
    cluster = MiniCluster(1, check_s=60.0)
    for number in range(7):
        cluster.add_host(f"n{number}")
    cluster.submit("big", pp=2, min_workers=2, max_workers=6)
    cluster.run()
    cluster.train("big", 20)
    before = members(cluster)
    for number in (0, 4):
        corrupt(cluster, before[2], "checksum", reporter=number, iteration=21)
    cluster.run()
    assert before[2] not in members(cluster), "it is replaced all the same"
    assert not faults(cluster, "big") and not said(cluster, v.NodeIsolated)


def test_flipped_bits_long_apart_are_no_bad_chip() -> None:
    cluster = trained(4, check_s=0.0)
    bad = node_of(cluster, 1)
    convict(cluster, bad)
    fault = cluster.state.tasks["big"].troubles.local_faults[bad]
    assert fault.refuted == 1
    worker = replace(next(iter(cluster.state.tasks["big"].workers.values())), node=bad)
    later_us = fault.at_us + local_faults.TOGETHER_US
    for at_us, times in ((later_us, 2), (later_us + 1, 1)):
        task = local_faults.convicted(cluster.state.tasks["big"], worker, "differs", at_us)
        assert task.troubles.local_faults[bad].refuted == times


def test_conviction_alone_takes_one_node_at_a_time() -> None:
    """Two tasks accuse a node each, of which each could be spared alone."""
    cluster = MiniCluster(1, check_s=60.0)
    for number in range(8):
        cluster.add_host(f"n{number}")
    for name in ("big", "other"):
        cluster.submit(name, min_workers=3, max_workers=4)
    cluster.run()
    for name in ("big", "other"):
        cluster.train(name, 20)
    suspects = {name: members(cluster, name)[1] for name in ("big", "other")}
    for name, suspect in suspects.items():
        for number in (0, 2, 3):
            corrupt(cluster, suspect, "checksum", reporter=number, iteration=21, task=name)
    isolations = list(response.isolations(Survey(cluster.state, cluster.policy)))
    assert len(isolations) == 1


def test_accusation_beside_an_exited_worker_counts() -> None:
    """It is no member of the state's workers any more, and one of the membership still."""
    cluster = pairs()
    before, bad = members(cluster), node_of(cluster, 2)
    cluster.kill_worker(cluster.hosts[bad], before[3])
    for number in (0, 4):
        corrupt(cluster, before[2], "checksum", reporter=number, iteration=21)
    assert not cluster.state.refusals and faults(cluster, "big") == {bad}


def test_replicas_of_one_node_convict_no_other_node() -> None:
    """The one library of their node may be wrong: the third is replaced, and its node is as it was."""
    cluster = MiniCluster(1, check_s=60.0)
    for number, slots in enumerate((2, 1, 1)):
        cluster.add_host(f"n{number}", slots)
    cluster.submit("big", min_workers=2, max_workers=3)
    cluster.run()
    cluster.train("big", 20)
    nodes = [node_of(cluster, number) for number in range(3)]
    (good,) = [node for node in nodes if nodes.count(node) == 1]
    suspect = members(cluster)[nodes.index(good)]
    for number, node in enumerate(nodes):
        if node != good:
            corrupt(cluster, suspect, "checksum", reporter=number, iteration=21)
    cluster.run()
    assert suspect not in members(cluster) and not faults(cluster, "big") and not said(cluster, v.NodeIsolated)


@pytest.mark.parametrize(("later_us", "checks"), [(2 * local_faults.TOGETHER_US, 1), (local_faults.WORD_US, 2)])
def test_word_of_a_task_has_one_node_checked_a_day(later_us: int, checks: int) -> None:
    """Its workers say what its program likes: hour by hour they would send one node after the other."""
    cluster = trained(4, check_s=60.0)
    first = node_of(cluster, 1)
    convict(cluster, first)
    assert [event.node for event in said(cluster, v.NodeReadmitted)] == [first]
    cluster.now_us += later_us
    cluster.run()
    second = next(node for node in (node_of(cluster, number) for number in range(3)) if node != first)
    convict(cluster, second)
    assert [event.node for event in said(cluster, v.NodeIsolated)] == [first, second][:checks]
    assert len(members(cluster)) == 3, "its replica is replaced all the same"


def test_conviction_elsewhere_acquits_no_node_of_refuted_losses() -> None:
    cluster = cluster_of(4)
    cluster.submit("big", max_workers=3)
    cluster.run()
    cluster.train("big", 20)
    task, now_us = cluster.state.tasks["big"], cluster.state.now_us
    losses = {"n1": LocalFault(text="no finite loss", at_us=now_us, refuted=2)}
    troubles = replace(task.troubles, local_faults=losses, convictions_us={"n2": now_us})
    cluster.state = replace(cluster.state, tasks={"big": replace(task, troubles=troubles)})
    assert [node for node, _ in local_faults.accused_nodes(cluster.state)] == ["n1"]


@pytest.mark.parametrize("lost", [False, True], ids=["broken", "lost"])
def test_node_to_check_waits_for_broken_ones_and_not_for_lost_ones(lost: bool) -> None:
    cluster = trained(7, check_s=60.0)
    first, second = node_of(cluster, 0), node_of(cluster, 1)
    task, now_us = cluster.state.tasks["big"], cluster.state.now_us
    fault = LocalFault(text="its replica differs", at_us=now_us, refuted=1)
    if lost:  # of another node another task says so, and that one is away
        first = next(node for node in cluster.hosts if not cluster.state.by_node.on(node))
        other = replace(task, spec=replace(task.spec, name="a"), workers={}, membership=None)
        other = replace(other, troubles=Troubles(local_faults={first: fault}, convictions_us={first: now_us}))
        nodes = cluster.state.nodes | {first: replace(cluster.state.nodes[first], status=NodeStatus.LOST)}
        cluster.state = replace(cluster.state, nodes=nodes, tasks={"a": other, "big": task})
    troubles = Troubles(local_faults={second: fault}, convictions_us={second: now_us})
    tasks = {**cluster.state.tasks, "big": replace(task, troubles=troubles)}
    cluster.state = replace(cluster.state, tasks=tasks)
    if not lost:
        cluster.report(members(cluster)[0], "ecc_error")
    isolations = [node for node, _ in response.isolations(Survey(cluster.state, cluster.policy))]
    assert isolations == ([second] if lost else [first])


def test_losses_long_apart_are_refuted_once() -> None:
    cluster = cluster_of(3)
    cluster.submit("big", max_workers=3)
    cluster.run()
    cluster.train("big", 20)
    bad = node_of(cluster, 1)
    nan_on(cluster, "big", bad)
    cluster.train("big", 20)
    cluster.run()
    cluster.now_us += local_faults.TOGETHER_US
    nan_on(cluster, "big", bad)
    assert cluster.state.tasks["big"].troubles.local_faults[bad].refuted == 1 and not said(cluster, v.NodeIsolated)
