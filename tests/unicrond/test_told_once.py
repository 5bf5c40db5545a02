"""Memberships that nodes read in the decision itself: small, and nothing by halves."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster, members
from unicrond.core.decide import decide
from unicrond.core.fold import fold
from unicrond.core.own_decisions import batches
from unicrond.core.rules.requests import request_problem
from unicrond.core.rules.survey import Survey
from unicrond.core.state.node_parts import AgentIdentity
from unicrond.core.state.policy import PART_BYTES, Policy, Settings, settings_of
from unicrond.core.state.state import (
    ClusterState,
    Membership,
    Node,
    NodeStatus,
    Plan,
    Task,
    TaskStatus,
    Worker,
    WorkerStatus,
)
from unicrond.core.state.task_parts import GroupHealth, TaskProgress
from unicrond.events import vocabulary as v
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.events.wire.schemas import SCHEMA, told_version
from unicrond.replay.views.verify import Divergence, Verifier, bases
from unicrond.views.view import feed_all

STORE = v.StoreAddress(host="10.0.0.1", port=1)


def cluster_of_parts(seed: int = 1, workers: int = 3) -> MiniCluster:
    """Each run of a membership is a part of its own."""
    made = MiniCluster(seed, Policy(part_bytes=1))
    for number in range(workers):
        made.add_host(f"n{number}")
    made.submit("a", max_workers=workers)
    return made


def kinds(events: list[v.AnyEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


# --- whole ----------------------------------------------------------------------------------------


def test_membership_decision_names_peers() -> None:
    made = MiniCluster(1)
    service = v.MemoryService(node="n0", host="h", port=1, token="t")
    made.add_host("n0", memory=service)
    made.submit("a")
    made.run()
    assert made.state.tasks["a"].copies.peers == (service,)


# --- nothing by halves -----------------------------------------------------------------------------


def until_parts(made: MiniCluster) -> list[v.AnyEvent]:
    """What is decided once it is a membership in parts; nothing of it is in the log."""
    for _ in range(50):
        before = len(made.log)
        events = decide(Survey(made.state, made.policy), made._solutions)
        if any(isinstance(event, v.MembershipPart) for event in events):
            return events
        assert made.decide() or len(made.log) > before
        made.obey_all()
    raise AssertionError("no membership in parts")


def test_membership_parts_precede_decision_in_own_batches() -> None:
    made = cluster_of_parts()
    events = until_parts(made)
    assert kinds(events) == ["MembershipPart", "MembershipPart", "MembershipDecided"]
    assert [kinds(batch) for batch in batches([v.TaskFailed(task="b", reason=""), *events])] == [
        ["TaskFailed"],
        ["MembershipPart", "MembershipPart"],
        ["MembershipDecided"],
    ]
    made.run()
    made.assert_whole()
    assert len(members(made, "a")) == 3


@pytest.mark.parametrize("parts", [1, 2])
def test_torn_membership_is_inert_and_next_term_decides_again(parts: int) -> None:
    made = cluster_of_parts()
    events = until_parts(made)
    for event in events[:parts]:
        made.append(event, "coordinator", made.state.term)
    task = made.state.tasks["a"]
    assert task.membership is None and task.group.membership_parts is not None
    made.take_over()
    assert made.state.tasks["a"].group.membership_parts is None
    late = made.append(events[-1], "coordinator", made.state.term)
    assert made.state.tasks["a"].membership is None and not made.state.refusals, f"entry {late.seq} is torn"
    made.run()
    made.assert_whole()
    assert len(members(made, "a")) == 3 and made.state.tasks["a"].generation == 1


def test_torn_membership_verifies() -> None:
    made = cluster_of_parts()
    events = until_parts(made)
    made._based_on = made.state.seq
    for event in events[:-1]:
        made.append(event, "coordinator", made.state.term)
    made._based_on = 0
    whole = list(made.log)
    verify(whole)
    with pytest.raises(Divergence):
        verify(whole[:-1])  # a batch is written or not
    made.take_over()
    made.run()
    verify(made.log)


def verify(log: list[RecordedEvent]) -> None:
    verifier = Verifier(bases(log))
    feed_all(verifier, log)
    verifier.finish()


def test_default_part_size_is_not_logged() -> None:
    assert "part_bytes" not in Settings(Policy(), 1.0).numbers()
    settings = Settings(Policy(part_bytes=64), 1.0)
    assert settings_of(settings.numbers()) == settings
    assert settings_of({}).policy.part_bytes == PART_BYTES


# --- size ------------------------------------------------------------------------------------------


def test_request_of_maximum_task_size_is_accepted() -> None:
    submitted = v.TaskSubmitted(spec=v.TaskSpec(name="a", max_workers=v.WORKERS_MAX, global_batch=v.WORKERS_MAX))
    assert not request_problem(ClusterState(), submitted)


def large(*, nodes: int = 512, slots: int = 8, tp: int = 8) -> ClusterState:
    """One task that trains on all slots of all nodes."""
    names = [f"gpu{number:04d}" for number in range(nodes)]
    workers = {
        f"gpt.{n + 1}": Worker(
            worker=f"gpt.{n + 1}",
            node=names[n // slots],
            replica=n // tp,
            shard=n % tp,
            status=WorkerStatus.MEMBER,
            generation=1,
            pid=n + 1,
        )
        for n in range(nodes * slots)
    }
    there = tuple(v.Member(worker=w.worker, node=w.node, replica=w.replica, shard=w.shard) for w in workers.values())
    spec = v.TaskSpec(name="gpt", tp=tp, min_workers=tp, max_workers=len(workers), global_batch=len(workers))
    membership = Membership(generation=1, members=there, joiners=(), urgent=False, store=STORE, decided_us=1)
    task = Task(
        spec=spec,
        status=TaskStatus.ACTIVE,
        submitted_seq=1,
        submitted_us=1,
        workers=workers,
        membership=membership,
        progress=TaskProgress(iteration=100, best_iteration=100),
        group=GroupHealth(),
    )
    version = told_version("test", SCHEMA)
    hosts = {
        name: Node(
            name=name,
            status=NodeStatus.UP,
            slots=slots,
            slots_max=slots,
            address="10.0.0.1",
            store=STORE,
            agent=AgentIdentity(boot=1, version=version),
            joined_us=1,
        )
        for name in names
    }
    state = ClusterState(term=1, nodes=hosts, tasks={"gpt": task}, seq=10, now_us=10)
    survey = Survey(state, Policy())
    replicas = tuple(tuple(workers[f"gpt.{n + 1 + i}"].node for i in range(tp)) for n in range(0, len(workers), tp))
    assignment = v.TaskAssignment(task="gpt", workers=len(workers), replicas=replicas, waf=1)
    return replace(state, plan=Plan(epoch=1, assignments={"gpt": assignment}, basis=survey.basis))


def after_a_fault(state: ClusterState) -> list[v.AnyEvent]:
    """What is decided at once when a worker dies."""
    exited = v.WorkerExited(
        node="gpu0100", task="gpt", worker="gpt.801", exit_code=None, signal=9, is_expected=False, log_tail=""
    )
    envelope = Envelope(producer="gpu0100", boot=1, number=1, observed_at_us=10, event=exited)
    state = fold(state, RecordedEvent(state.seq + 1, 11, envelope))
    return decide(Survey(state, Policy()), {})


def log_bytes(events: list[v.AnyEvent]) -> int:
    envelope = Envelope(producer="coordinator", boot=1, number=1, term=1, observed_at_us=10**15, event=events[0])
    return sum(len(encode(replace(envelope, event=event))) for event in events)


@pytest.mark.parametrize("tp", [1, 8])
def test_fault_at_512_nodes_writes_little(tp: int) -> None:
    told = after_a_fault(large(tp=tp))
    assert kinds(told).count("MembershipDecided") == 1
    assert log_bytes(told) < 20_000
