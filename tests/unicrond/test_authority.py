"""What a node says changes itself, its workers, and of tasks only what its workers' places in them allow."""

from __future__ import annotations

import functools
import random
import typing

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.seeds import at_most
from tests.unicrond.cluster import MiniCluster
from unicrond.core.deciding.batch import STRAY_STOPS_MAX
from unicrond.core.fold import fold
from unicrond.core.rules.authority import AUTHORITY
from unicrond.core.state.state import ClusterState, NodeStatus, Task, TaskStatus, Worker, WorkerStatus
from unicrond.core.state.task_parts import LEADS_MAX, Lead
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.page.attention import state_alarms
from unicrond.replay.simulation.faults.boundary_events import KINDS, Edges

OBSERVATIONS = [kind for kind in KINDS if not issubclass(kind, v.Request)]
#: It carries no worker: all tasks are others' tasks to it.
IDLE = "n3"


@functools.cache
def trained() -> MiniCluster:
    """Train two tasks on three of four nodes, each with some history: a group before the present one."""
    cluster = MiniCluster(7)
    for number in range(3):
        cluster.add_host(f"n{number}", 2)
    cluster.submit("a", min_workers=1, max_workers=3, iterations=1000)
    cluster.submit("b", min_workers=2, max_workers=2, tp=2, iterations=1000)
    cluster.run()
    for task in ("a", "b"):
        cluster.train(task, 3)
    members = cluster.state.tasks["a"].membership
    assert members is not None
    victim = members.members[-1]
    cluster.kill_worker(cluster.hosts[victim.node], victim.worker)
    cluster.run()
    cluster.train("a", 2)
    cluster.add_host(IDLE, 2)
    cluster.cordon(IDLE)
    cluster.run()
    assert not cluster.state.by_node.on(IDLE)
    return cluster


def say(state: ClusterState, event: v.Observation, producer: str) -> ClusterState:
    boot, number = state.last_numbers.get(producer, (1, 0))
    envelope = Envelope(producer=producer, boot=boot, number=number + 1, observed_at_us=1, event=event)  # type: ignore[arg-type]
    return fold(state, RecordedEvent(state.seq + 1, state.now_us + 1, envelope))


def foreign(state: ClusterState, node: str) -> list[Task]:
    """Return the tasks that the node has nothing to do with."""
    return [
        task
        for task in state.tasks.values()
        if not state.by_node.of_task(node, task.name) and not any(lead.node == node for lead in task.group.leads)
    ]


@settings(deadline=None, max_examples=at_most(300))
@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["n0", "n1", "n2", IDLE, IDLE]),
    st.lists(st.sampled_from(OBSERVATIONS), min_size=4, max_size=24),
)
@example(random.Random(0), IDLE, OBSERVATIONS * 3)
def test_node_changes_no_task_that_it_does_not_carry(
    drawn: random.Random, node: str, kinds: list[type[v.Observation]]
) -> None:
    cluster = trained()
    before = state = cluster.state
    others = foreign(state, node)
    workers = [name for task in state.tasks.values() for name in task.workers]
    edges = Edges(drawn, [node], list(state.tasks), workers)
    for kind in kinds:
        envelope = edges.envelope(kind)
        if envelope is not None and envelope.producer == node:
            state = say(state, envelope.event, node)  # type: ignore[arg-type]
    for task in others:
        after = state.tasks[task.name]
        if node in task.copies.carriers:  # of what its memory holds it may speak
            after = replace(after, copies=task.copies)
        assert after == task, kinds
    assert {name: rest for name, rest in state.nodes.items() if name != node} == {
        name: rest for name, rest in before.nodes.items() if name != node
    }
    named = {task for incident in state.incidents.values() for task in incident.generations}
    assert not named & {task.name for task in others}


def test_every_observation_has_a_rule() -> None:
    assert set(AUTHORITY) == {*OBSERVATIONS, v.Heartbeat}
    assert all(typing.get_type_hints(rule)["return"] is str for rule in AUTHORITY.values())


def about(state: ClusterState, worker: str) -> dict[str, str]:
    return {"node": IDLE, "task": "a", "worker": worker}


def one_task(nodes: int, *, workers: int) -> MiniCluster:
    """Train one task of so many workers on nodes with one slot."""
    cluster = MiniCluster(3)
    for number in range(nodes):
        cluster.add_host(f"n{number}")
    cluster.submit("a", min_workers=1, max_workers=workers, iterations=1000)
    cluster.run()
    cluster.train("a", 3)
    return cluster


def committed(about: dict[str, str], generation: int, first: int, last: int) -> v.StepCommitted:
    """Return the report of a lead."""
    return v.StepCommitted(
        **about, generation=generation, first=first, last=last, samples=1, samples_digest=1, loss=1.0, duration_us=1,
        micro_batches_by_rank=(1,),
    )  # fmt: skip


LIES = {
    "completes": lambda state: v.TaskCompleted(
        **about(state, "a.999"), iteration=1000, loss=1.0, params_digest="a" * 64
    ),
    "steps": lambda state: committed(about(state, "a.999"), state.tasks["a"].generation, 6, 900),
    "accuses": lambda state: v.CorruptionSuspected(
        **about(state, "a.999"), generation=state.tasks["a"].generation, iteration=6, sign="checksum",
        suspect=state.tasks["a"].membership.members[0].worker, value=1.0, usual=1.0,
    ),
    "holds": lambda _: v.SnapshotStored(
        node=IDLE, task="a", shard=0, iteration=900, generation=1, origin=IDLE, size_bytes=1, duration_us=1
    ),
    "forgets peers": lambda _: v.PeersRemembered(node=IDLE, task="a", peers=("n0", "n9")),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_lie_is_refused_counted_and_an_alarm(lie: str) -> None:
    before = trained().state
    state = say(say(before, v.WorkerStarted(**about(before, "a.999"), pid=7), IDLE), LIES[lie](before), IDLE)
    assert state.tasks == before.tasks and state.tasks["a"].status is TaskStatus.ACTIVE
    assert state.refused_observations[IDLE].count == 1
    (alarm,) = [alarm for alarm in state_alarms(state) if alarm.name == "observations-refused"]
    assert alarm.subject == IDLE and state.refusals[-1].reason in alarm
    assert not [alarm for alarm in state_alarms(before) if alarm.name == "observations-refused"]


def test_stray_stands_beside_the_task_and_is_stopped() -> None:
    cluster = MiniCluster(3)
    for number in range(2):
        cluster.add_host(f"n{number}", 2)
    cluster.submit("a", min_workers=1, max_workers=2, iterations=1000)
    cluster.run()
    tasks = cluster.state.tasks
    node = cluster.hosts["n0"]
    cluster.say(node, v.WorkerStarted(node="n0", task="a", worker="a.999", pid=7))
    cluster.say(node, v.WorkerStarted(node="n0", task="a", worker="a.998", pid=8))
    cluster.say(node, v.WorkerStarted(node="n0", task="a", worker="a.997", pid=9))
    assert cluster.state.tasks == tasks and sorted(cluster.state.nodes["n0"].strays) == ["a.998", "a.999"], "by slots"
    cluster.run()
    orders = [entry.envelope.event for entry in cluster.log if isinstance(entry.envelope.event, v.StopWorker)]
    assert {order.worker for order in orders} == {"a.998", "a.999"} and all(order.kill for order in orders)
    assert cluster.state.tasks == tasks and len(cluster.state.nodes["n0"].strays) == 2, "until they have ended"
    cluster.say(node, v.CommandFailed(node="n0", command_id=orders[0].command_id, reason="the agent was busy"))
    cluster.run()
    again = [entry.envelope.event for entry in cluster.log if isinstance(entry.envelope.event, v.StopWorker)][-1]
    assert again.worker == orders[0].worker and again.command_id != orders[0].command_id
    for order in (again, orders[1]):
        cluster.say(node, v.CommandApplied(node="n0", command_id=order.command_id))
    assert not cluster.state.nodes["n0"].strays and cluster.state.tasks == tasks


def test_lost_worker_that_met_its_group_unheard_is_no_liar() -> None:
    """Its node was away when the group met: what it saved there is nothing that the log knows of."""
    cluster = MiniCluster(3)
    cluster.add_host("n0")
    cluster.submit("a", min_workers=1, max_workers=1, iterations=1000)
    while not cluster.state.tasks["a"].workers:
        assert cluster.decide()
    (name,) = cluster.state.tasks["a"].workers
    cluster.lose(cluster.hosts["n0"])
    before = cluster.state
    event = v.CheckpointSaved(node="n0", task="a", worker=name, iteration=3, path="/c/3", size_bytes=1, duration_us=1)
    cluster.say(cluster.hosts["n0"], event)
    assert cluster.state.tasks["a"].progress == before.tasks["a"].progress
    assert cluster.state.refused_observations == before.refused_observations


def save(worker: Worker, iteration: int) -> v.CheckpointSaved:
    about = {"node": worker.node, "task": "a", "worker": worker.worker}
    return v.CheckpointSaved(**about, iteration=iteration, path="/c", size_bytes=1, duration_us=1)


@settings(deadline=None, max_examples=at_most(40))
@given(st.randoms(use_true_random=False))
def test_saves_count_as_far_as_groups_have_committed(drawn: random.Random) -> None:
    """Workers die, nodes are lost and drained; saves of the first replica arrive late, and anybody may lie."""
    cluster = MiniCluster(drawn.randrange(1000))
    for number in range(3):
        cluster.add_host(f"n{number}", 2)
    cluster.submit("a", min_workers=1, max_workers=3, iterations=1000)
    cluster.run()
    late: list[tuple[str, int]] = []
    for _ in range(20):
        task = cluster.state.tasks["a"]
        move = drawn.choice(["train", "train", "kill", "drain", "lose", "join", "decide", "some moves"])
        host = cluster.hosts[drawn.choice(list(cluster.hosts))]
        if move == "train":
            cluster.train("a", drawn.randint(1, 5))
            task = cluster.state.tasks["a"]
            if task.confirmed and task.membership.members:
                late.append((task.membership.lead, task.progress.iteration))
        elif move == "kill" and host.processes:
            cluster.kill_worker(host, drawn.choice(list(host.processes)))
        elif move == "drain":
            cluster.cordon(host.name, drain=True)
        elif move == "lose" and cluster.state.nodes[host.name].status is NodeStatus.UP:
            cluster.lose(host)
        elif move == "join":
            cluster.add_host(host.name, 2)
            cluster.uncordon(host.name)
        elif move == "decide":
            cluster.decide()
        else:
            for _ in range(8):
                drawn.choice(cluster.moves())()
        task = cluster.state.tasks["a"]
        leads = task.membership.members[:1] if task.membership else ()
        for name, iteration in [saved for saved in late if saved[0] in task.workers and drawn.random() < 0.3]:
            state = say(cluster.state, save(task.workers[name], iteration), task.workers[name].node)
            assert not state.refused_observations, "an honest save is no lie, however late"
            reached = state.tasks["a"].progress.checkpoint_iteration
            assert reached == iteration or iteration < task.progress.checkpoint_iteration == reached
        for worker in task.workers.values():
            lie = task.progress.best_iteration + drawn.randint(1, 400)
            state = say(cluster.state, save(worker, lie), worker.node)
            if [worker.worker] != [lead.worker for lead in leads]:
                assert state.tasks["a"].progress == task.progress, "nothing of it is committed"


@pytest.mark.parametrize("has_committed", [False, True])
def test_former_member_that_saves_beyond_all_steps_lies(has_committed: bool) -> None:
    cluster = one_task(2, workers=2)
    lead = cluster.state.tasks["a"].membership.lead
    former = cluster.state.tasks["a"].workers[lead]
    cluster.cordon(former.node, drain=True)
    while not cluster.state.tasks["a"].confirmed or cluster.state.tasks["a"].is_member(lead):
        assert any(move() for move in reversed(cluster.moves()))
    if has_committed:
        cluster.train("a", 2)
    before = cluster.state
    assert before.tasks["a"].workers[lead].status is not WorkerStatus.LOST
    state = say(before, save(former, 900), former.node)
    assert state.tasks == before.tasks and (former.node in state.refused_observations) is has_committed
    state = say(before, save(former, 3), former.node)
    assert state.tasks["a"].progress.checkpoint_iteration == 3 and not state.refused_observations


@pytest.mark.parametrize("is_back", [False, True])
def test_lead_that_went_on_alone_neither_ends_the_task_nor_lies(is_back: bool) -> None:
    """It was cut off, and has done all iterations; meanwhile others have gone on without it, and committed. Once its
    node is back it is to end, and what it has said comes after that."""
    cluster = one_task(2, workers=1)
    (old,) = cluster.state.tasks["a"].workers.values()
    node = cluster.hosts[old.node]
    cluster.lose(node)
    cluster.run()
    cluster.train("a", 3)
    cluster.run()
    if is_back:
        back = v.NodeReturned(node=old.node, evidence=v.Evidence(beat_seq=9, beat_at_us=9))
        cluster.append(back, "coordinator", cluster.state.term)
        cluster.decide()
    before = cluster.state
    status = before.tasks["a"].workers[old.worker].status
    assert status is (WorkerStatus.STOPPING if is_back else WorkerStatus.LOST)
    about = {"node": old.node, "task": "a", "worker": old.worker}
    end = v.TaskCompleted(**about, iteration=1000, loss=1.0, params_digest="a" * 64)
    for word in (save(old, 900), end):
        cluster.say(node, word)
    assert cluster.state.tasks["a"] == before.tasks["a"]
    assert cluster.state.refused_observations == before.refused_observations


def test_thousand_invented_workers_are_ended_a_few_at_a_time() -> None:
    cluster = MiniCluster(3)
    cluster.add_host("n0", 1000)
    cluster.submit("a", min_workers=1, max_workers=1, iterations=1000)
    cluster.run()
    node = cluster.hosts["n0"]
    for number in range(900):
        cluster.say(node, v.WorkerStarted(node="n0", task="a", worker=f"a.{1000 + number}", pid=7))

    def orders() -> list[v.StopWorker]:
        return [entry.envelope.event for entry in cluster.log if isinstance(entry.envelope.event, v.StopWorker)]

    cluster.run()
    assert len(orders()) == STRAY_STOPS_MAX
    cluster.say(node, v.CommandApplied(node="n0", command_id=orders()[0].command_id))
    cluster.run()
    assert len(orders()) == STRAY_STOPS_MAX + 1, "the next one follows each that has ended"


def test_late_word_of_a_forgotten_lead_is_no_lie_and_changes_nothing() -> None:
    """So many groups have followed without a commit that the state knows its lead no longer."""
    cluster = one_task(2, workers=2)
    task = cluster.state.tasks["a"]
    old = Lead(generation=task.generation, worker="a.old", node="n0")
    generations = range(task.generation + 1, task.generation + 1 + LEADS_MAX)
    leads = tuple(Lead(generation=number, worker="a.new", node="n1") for number in generations)
    membership = replace(task.membership, generation=generations[-1])
    task = replace(task, membership=membership, group=replace(task.group, leads=leads))
    state = replace(cluster.state, tasks=cluster.state.tasks | {"a": task})
    step = committed({"node": old.node, "task": "a", "worker": old.worker}, old.generation, 4, 5)
    after = say(state, step, old.node)
    end = v.TaskCompleted(node="n0", task="a", worker=old.worker, iteration=1000, loss=1.0, params_digest="a" * 64)
    after = say(after, end, old.node)
    assert after.tasks["a"] == task and not after.refused_observations
    after = say(after, replace(step, generation=generations[0]), old.node)
    assert after.tasks["a"] == task and after.refused_observations["n0"].count == 1, "this one's lead is known"


def test_late_report_of_a_lead_counts_once_its_worker_is_gone() -> None:
    cluster = one_task(3, workers=3)
    task = cluster.state.tasks["a"]
    lead = task.group.leads[-1]
    cluster.kill_worker(cluster.hosts[lead.node], lead.worker)
    following = task.progress.iteration + 1
    step = committed({"node": lead.node, "task": "a", "worker": lead.worker}, task.generation, following, following)
    assert lead.worker not in cluster.state.tasks["a"].workers
    state = say(cluster.state, step, lead.node)
    assert state.tasks["a"].progress.iteration == task.progress.iteration + 1 and not state.refused_observations
    other = next(member for member in task.membership.members if member.worker != lead.worker)  # type: ignore[union-attr]
    state = say(cluster.state, replace(step, node=other.node, worker=other.worker), other.node)
    assert state.tasks["a"].progress == task.progress and state.refused_observations[other.node].count == 1
