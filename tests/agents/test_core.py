"""The agent's core, rule by rule."""

from __future__ import annotations

import math
from typing import get_args

import msgspec
import pytest
from msgspec.structs import replace

from tests.agents.node import CONFIG, NODE, Node, Process, committed, membership, reporter, start, stop
from unicrond.agents.core.state import (
    Action,
    Append,
    Appended,
    Disconnect,
    Drain,
    Finish,
    ForkServerSaid,
    HandOver,
    LeaveNow,
    LogSeen,
    Stalled,
    TellForkServer,
    TellWorker,
    Unreadable,
    WorkerConnected,
    WorkerDisconnected,
    WorkerSaid,
)
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.messages import (
    FromWorker,
    GroupMembership,
    Hello,
    Identity,
    Inventory,
    Kill,
    ProcessExitAck,
    Quit,
    WorkerReport,
)
from unicrond.events.vocabulary import (
    CheckpointSaved,
    Checksums,
    CommandApplied,
    CommandFailed,
    ErrorReported,
    Event,
    HangSuspected,
    LayoutSpec,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    Phase,
    SnapshotStored,
    StartWorker,
    StepCommitted,
    StopRequested,
    TaskCompleted,
    TaskSpec,
    WorkerBusy,
    WorkerExited,
    WorkerJoinedGroup,
    WorkerObservation,
    WorkerPaused,
    WorkerReady,
    WorkerStarted,
    WorkerWaiting,
)
from unicrond.events.vocabulary.placements import members_of
from unicrond.events.wire.schemas import SCHEMA

SIGKILLED = 9
EXIT_0 = 0
EXIT_1 = 1 << 8


@pytest.fixture
def node() -> Node:
    """A node that is up, with nothing on it."""
    node = Node()
    node.boot()
    return node


def running(node: Node, worker: str, number: int) -> None:
    """`worker` is started and ready."""
    node.command(start(worker, number))
    node.fork()
    node.ready(worker)


def member(node: Node, worker: str, number: int, generation: int = 1) -> None:
    running(node, worker, number)
    node.tell(membership(worker.rpartition(".")[0], generation, [worker]))
    node.say(worker, regrouped(generation))


def regrouped(generation: int, iteration: int = 1) -> WorkerJoinedGroup:
    return WorkerJoinedGroup(
        **reporter("a.1"),
        generation=generation,
        iteration=iteration,
        micro_batches_assigned=0,
        duration_us=5,
        source="own",
    )


def trouble(kind: str) -> ErrorReported:
    return ErrorReported(
        **reporter("a.1"), kind=kind, generation=1, iteration=3, phase="reduce", message="m", detail="d"
    )  # type: ignore[arg-type]


# --- joining -------------------------------------------------------------------------------------


def test_new_node_joins_with_its_store(node: Node) -> None:
    (joined,) = node.of(NodeJoined)
    assert (joined.store.port, joined.slots, joined.workers, joined.domain) == (4000, 2, (), "rack7")


def test_changed_store_address_repeats_join(node: Node) -> None:
    node.boot(port=4000)
    assert len(node.of(NodeJoined)) == 1
    node.kill_fork_server()
    node.boot(port=4001)
    assert [joined.store.port for joined in node.of(NodeJoined)] == [4000, 4001]


def test_agent_adopts_workers_and_waits_for_their_hello(node: Node) -> None:
    member(node, "a.1", 1, generation=7)
    node.restart_agent()
    node.appended.clear()
    node.boot()
    assert node.of(NodeJoined) == []
    assert node.timers["adopt", ""] == CONFIG.hello_wait_s
    node.hello("a.1")
    (joined,) = node.of(NodeJoined)
    (worker,) = joined.workers
    assert (worker.worker, worker.generation) == ("a.1", 7)
    assert node.of(WorkerReady) == []


def test_silent_worker_never_delays_adoption(node: Node) -> None:
    running(node, "a.1", 1)
    node.restart_agent()
    node.appended.clear()
    node.boot()
    node.fire("adopt")
    assert [worker.worker for worker in node.of(NodeJoined)[0].workers] == ["a.1"]


def test_early_hello_ends_wait_of_adoption(node: Node) -> None:
    running(node, "a.1", 1)
    node.restart_agent()
    node.hello("a.1")
    node.appended.clear()
    node.boot()
    assert len(node.of(NodeJoined)) == 1


def test_exits_during_absence_precede_join(node: Node) -> None:
    member(node, "a.1", 1)
    node.restart_agent()
    node.appended.clear()
    node.die("a.1", SIGKILLED)
    node.boot()
    kinds = [type(event).__name__ for event in node.appended]
    assert kinds.index("WorkerExited") < kinds.index("NodeJoined")
    assert len(node.of(WorkerExited)) == 1


def test_workers_missing_from_inventory_count_as_killed(node: Node) -> None:
    running(node, "a.1", 1)
    node.restart_agent()
    node.processes.clear()
    node.appended.clear()
    node.boot(port=4001)
    (exited,) = node.of(WorkerExited)
    assert (exited.signal, exited.is_expected) == (SIGKILLED, False)
    assert node.of(NodeJoined)[0].workers == ()


@pytest.mark.parametrize("is_in_log", [False, True])
def test_exit_that_was_noted_is_told_by_the_next_agent_where_the_log_lacks_it(node: Node, is_in_log: bool) -> None:
    """The kernel ends a worker, then the whole container: the outbox is gone, and the fork server that knew."""
    member(node, "a.1", 1)
    node.die("a.1", SIGKILLED)
    if is_in_log:
        node.confirm()
    node.restart_agent()
    node.exits.clear()
    for times in (not is_in_log, 0):
        node.appended.clear()
        node.boot()
        exits = [(exited.worker, exited.signal, exited.is_expected) for exited in node.of(WorkerExited)]
        assert exits == [("a.1", SIGKILLED, False)] * times
        node.confirm()
        node.restart_agent()


def test_node_joins_after_log_identity() -> None:
    node = Node()
    node.feed(ForkServerSaid(message=Inventory(store_port=1, workers=())))
    assert node.of(NodeJoined) == []
    node.feed(LogSeen(created=""))
    assert len(node.of(NodeJoined)) == 1


def test_other_log_resets_agent(node: Node) -> None:
    member(node, "a.1", 1, generation=9)
    running(node, "a.2", 5)
    node.die("a.2", SIGKILLED)
    node.restart_agent()
    node.appended.clear()
    node.spawned.clear()
    node.log = "second"
    since_boot = node.state.memory.since_boot
    node.boot()
    assert node.state.memory.since_boot == since_boot > 0, "its memory was not lost"
    node.hello("a.1")
    assert node.processes["a.1"].quit
    assert node.of(NodeJoined)[0].workers == ()
    node.command(start("a.1", 1))
    assert "older log" in node.answers("1.1.n1.1")[0]
    node.say("a.1", committed(9, 4))
    node.die("a.1", EXIT_0)
    assert node.of(WorkerExited) == [] and node.of(StepCommitted) == [] and node.of(WorkerReady) == []
    node.command(start("a.2", 2))
    node.fork()
    assert node.spawned == ["a.2"]
    assert node.answers("1.1.n1.2") == [""]


# --- commands ------------------------------------------------------------------------------------


def test_start_is_applied_once_process_exists(node: Node) -> None:
    node.command(start("a.1", 1))
    assert node.answers("1.1.n1.1") == []
    node.fork()
    assert node.answers("1.1.n1.1") == [""]
    assert node.of(WorkerStarted)[0].pid == node.processes["a.1"].pid


def test_repeated_command_acts_once_and_is_answered_again(node: Node) -> None:
    running(node, "a.1", 1)
    node.command(start("a.1", 1))
    assert node.spawned == ["a.1"]
    assert node.answers("1.1.n1.1") == ["", ""]


def test_repeated_pending_command_is_answered_once(node: Node) -> None:
    node.command(start("a.1", 1))
    node.command(start("a.1", 1))
    node.fork()
    assert node.spawned == ["a.1"]
    assert node.answers("1.1.n1.1") == [""]


@pytest.mark.parametrize("restart", [False, True])
def test_worker_id_starts_only_once(node: Node, restart: bool) -> None:
    running(node, "a.1", 1)
    node.die("a.1", SIGKILLED)
    node.confirm()
    if restart:
        node.restart_agent()
        node.boot()
    node.command(start("a.1", 2))
    assert node.spawned == ["a.1"]
    assert node.answers("1.1.n1.2") == [""]


@pytest.mark.parametrize(("term", "epoch"), [(1, 9), (2, 4)])
@pytest.mark.parametrize("restart", [False, True])
def test_stale_command_never_acts(node: Node, term: int, epoch: int, restart: bool) -> None:
    node.command(start("a.1", 1, term=2, epoch=5), term=2)
    node.fork()
    if restart:
        node.restart_agent()
        node.boot()
    for number, order in enumerate([start("a.2", 1), stop("a.1", 2)], start=1):
        command_id = f"{term}.{epoch}.{NODE}.{number}"
        actions = node.command(type(order)(**{**_fields(order), "command_id": command_id, "epoch": epoch}), term=term)
        assert not [a for a in actions if isinstance(a, TellForkServer | TellWorker)]
        (answer,) = node.answers(command_id)
        assert answer.startswith("stale")


def _fields(order: object) -> dict[str, object]:
    return {name: getattr(order, name) for name in order.__struct_fields__}  # type: ignore[attr-defined]


def test_old_start_is_refused_and_old_stop_acts(node: Node) -> None:
    running(node, "a.1", 1)
    node.command(start("a.2", 2), age_s=CONFIG.start_max_age_s + 1)
    assert node.answers("1.1.n1.2")[0].startswith("stale")
    node.command(stop("a.1", 3), age_s=CONFIG.start_max_age_s + 1)
    assert node.processes["a.1"].quit


def test_agent_ignores_command_for_other_node(node: Node) -> None:
    order = start("a.1", 1)
    assert node.command(type(order)(**{**_fields(order), "node": "n2"})) == []


# --- slots ---------------------------------------------------------------------------------------


def test_start_fails_without_free_slot(node: Node) -> None:
    running(node, "a.1", 1)
    running(node, "a.2", 3)
    node.command(start("a.3", 5))
    assert "no free slot" in node.answers("1.1.n1.5")[0]


def test_start_waits_for_slot_of_stopping_worker(node: Node) -> None:
    running(node, "a.1", 1)
    running(node, "a.2", 3)
    node.command(stop("a.1", 5))
    node.command(start("a.3", 6))
    assert node.answers("1.1.n1.6") == []
    node.die("a.1", EXIT_0)
    node.fork()
    assert node.answers("1.1.n1.6") == [""]
    assert node.processes["a.3"].slot == 0


def test_start_wait_is_bounded(node: Node) -> None:
    running(node, "a.1", 1)
    running(node, "a.2", 3)
    node.command(stop("a.1", 5))
    node.command(start("a.3", 6))
    node.fire("wait", "a.3")
    assert "no slot became free in time" in node.answers("1.1.n1.6")[0]
    node.die("a.1", EXIT_0)
    assert node.unforked == []


def test_start_waits_for_fork_server(node: Node) -> None:
    node.kill_fork_server()
    node.command(start("a.1", 1))
    assert node.answers("1.1.n1.1") == []
    node.boot(port=4001)
    node.fork()
    assert node.answers("1.1.n1.1") == [""]


def test_spawn_is_repeated_after_reconnect(node: Node) -> None:
    node.command(start("a.1", 1))
    node.unforked.clear()
    node.boot()
    assert node.spawned == ["a.1", "a.1"]
    node.fork()
    assert node.answers("1.1.n1.1") == [""]


# --- stopping ------------------------------------------------------------------------------------


def test_stop_escalates_from_quit_to_term_to_kill(node: Node) -> None:
    running(node, "a.1", 1)
    assert any(isinstance(a, TellWorker) and isinstance(a.message, Quit) for a in node.command(stop("a.1", 3)))
    assert node.timers["stop", "a.1"] == CONFIG.grace_s
    signals = []
    for _ in range(3):
        signals += [a.message.signal for a in node.fire("stop", "a.1") if isinstance(a, TellForkServer)]  # type: ignore[union-attr]
    assert signals == [15, 9, 9]
    assert node.answers("1.1.n1.3") == []
    node.die("a.1", SIGKILLED)
    assert node.answers("1.1.n1.3") == [""]
    (exited,) = node.of(WorkerExited)
    assert exited.is_expected and exited.log_tail == ""
    assert node.of(ErrorReported) == []


def test_stop_terminates_unconnected_worker_at_once(node: Node) -> None:
    node.command(start("a.1", 1))
    node.fork()
    actions = node.command(stop("a.1", 2))
    assert Kill(worker="a.1", signal=15) in [a.message for a in actions if isinstance(a, TellForkServer)]


def test_stopping_member_gets_quit_on_connect(node: Node) -> None:
    member(node, "a.1", 1)
    node.processes["a.1"].connected = False
    node.feed(WorkerDisconnected(worker="a.1"))
    node.command(stop("a.1", 9))
    assert not node.processes["a.1"].quit
    node.hello("a.1")
    assert node.processes["a.1"].quit


def test_stop_continues_under_next_agent(node: Node) -> None:
    running(node, "a.1", 1)
    node.command(stop("a.1", 3))
    node.restart_agent()
    node.boot()
    assert ("stop", "a.1") in node.timers
    node.die("a.1", EXIT_0)
    assert node.answers("1.1.n1.3") == [""]
    assert node.of(WorkerExited)[0].is_expected


def test_stop_cancels_waiting_start(node: Node) -> None:
    node.kill_fork_server()
    node.command(start("a.1", 1))
    node.command(stop("a.1", 2))
    assert "stopped before" in node.answers("1.1.n1.1")[0]
    assert node.answers("1.1.n1.2") == [""]
    node.boot(port=4001)
    assert node.spawned == []


def test_stop_of_absent_worker_is_applied(node: Node) -> None:
    node.command(stop("a.1", 1))
    assert node.answers("1.1.n1.1") == [""]


# --- membership ----------------------------------------------------------------------------------


def test_membership_reaches_members_and_leavers_only(node: Node) -> None:
    running(node, "a.1", 1)
    running(node, "a.2", 2)
    node.tell(membership("a", 1, ["a.1"]))
    assert (node.processes["a.1"].generation, node.processes["a.2"].generation) == (1, 0)
    node.tell(membership("a", 2, ["a.2"]))
    assert (node.processes["a.1"].generation, node.processes["a.2"].generation) == (2, 2)


def test_membership_waits_for_hello_of_worker(node: Node) -> None:
    node.command(start("a.1", 1))
    node.fork()
    node.tell(membership("a", 4, ["a.1"]))
    node.hello("a.1")
    assert node.processes["a.1"].generation == 4


def test_next_agent_delivers_pending_membership(node: Node) -> None:
    member(node, "a.1", 1, generation=1)
    node.feed(WorkerDisconnected(worker="a.1"))
    node.processes["a.1"].connected = False
    node.tell(membership("a", 2, ["a.1"]))
    node.restart_agent()
    node.boot()
    node.hello("a.1")
    assert node.processes["a.1"].generation == 2


# --- what workers say ----------------------------------------------------------------------------


def test_worker_messages_become_events(node: Node) -> None:
    member(node, "a.1", 1)
    node.say("a.1", CheckpointSaved(**reporter("a.1"), iteration=2, path="/c", size_bytes=3, duration_us=4))
    node.say("a.1", trouble("connection_broken"))
    node.say("a.1", WorkerPaused(**reporter("a.1"), generation=2, iteration=5))
    node.say("a.1", TaskCompleted(**reporter("a.1"), iteration=9, loss=0.5, params_digest="x"))
    for kind in (WorkerReady, WorkerJoinedGroup, CheckpointSaved, ErrorReported, WorkerPaused, TaskCompleted):
        assert len(node.of(kind)) == 1, kind


def test_agent_ignores_messages_repeated_to_successor(node: Node) -> None:
    member(node, "a.1", 1)
    saved = CheckpointSaved(**reporter("a.1"), iteration=2, path="/c", size_bytes=3, duration_us=4)
    completed = TaskCompleted(**reporter("a.1"), iteration=9, loss=0.5, params_digest="x")
    messages = [regrouped(1), committed(1, 1), saved, completed]
    for message in messages:
        node.say("a.1", message)
    node.confirm()
    node.restart_agent()
    node.boot()
    node.hello("a.1")
    node.appended.clear()
    for message in messages:
        node.say("a.1", message)
    assert node.appended == []


def test_agent_disconnects_unknown_worker(node: Node) -> None:
    hello = Hello(worker="a.9", task="a", pid=5, generation=0, ready=False)
    assert [type(a) for a in node.feed(WorkerConnected(hello=hello))] == [Disconnect]


# --- commits -------------------------------------------------------------------------------------


def test_commits_are_reported_first_singly_then_summed(node: Node) -> None:
    member(node, "a.1", 1)
    for iteration in range(1, 6):
        node.say("a.1", committed(1, iteration))
    assert [(s.first, s.last) for s in node.of(StepCommitted)] == [(1, 1)]
    node.fire("commits", "a")
    total = node.of(StepCommitted)[-1]
    assert (total.first, total.last, total.samples, total.samples_digest) == (2, 5, 32, 2 + 3 + 4 + 5)
    assert (total.duration_us, total.micro_batches_by_rank) == (40, (16, 16))
    node.fire("commits", "a")
    assert ("commits", "a") not in node.timers


def test_commit_sum_tells_iterations_during_checkpoints_apart(node: Node) -> None:
    member(node, "a.1", 1)
    node.say("a.1", committed(1, 1))
    for iteration, is_plain in ((2, True), (3, False), (4, False)):
        node.say("a.1", msgspec.structs.replace(committed(1, iteration), is_plain=is_plain))
    node.fire("commits", "a")
    step = node.of(StepCommitted)[-1]
    assert (step.last, step.duration_us, step.not_plain, step.not_plain_us) == (4, 30, 2, 20)


def test_commit_sum_carries_newest_checksum(node: Node) -> None:
    member(node, "a.1", 1)
    node.say("a.1", committed(1, 1))
    for iteration, checksum in ((2, 5), (3, 6), (4, 0)):
        checksums = Checksums(iteration=iteration - 1, parameters=checksum, sums=7 * checksum) if checksum else None
        commit = msgspec.structs.replace(committed(1, iteration), checksums=checksums)
        node.say("a.1", commit)
    node.fire("commits", "a")
    assert [s.checksums for s in node.of(StepCommitted)] == [None, Checksums(iteration=2, parameters=6, sums=42)]


@pytest.mark.parametrize(
    "closing",
    [
        regrouped(2),
        trouble("exception"),
        WorkerPaused(**reporter("a.1"), generation=2, iteration=3),
        TaskCompleted(**reporter("a.1"), iteration=3, loss=1.0, params_digest="x"),
    ],
)
def test_worker_message_flushes_commit_sum(
    node: Node, closing: WorkerJoinedGroup | ErrorReported | WorkerPaused | TaskCompleted
) -> None:
    member(node, "a.1", 1)
    for iteration in (1, 2, 3):
        node.say("a.1", committed(1, iteration))
    node.say("a.1", closing)
    assert isinstance(node.appended[-2], StepCommitted)
    node.confirm()
    assert node.committed == {("a", 1, i): 1 for i in (1, 2, 3)}


def test_gap_or_new_generation_flushes_commit_sum(node: Node) -> None:
    member(node, "a.1", 1)
    for commit in (committed(1, 1), committed(1, 2), committed(1, 5), committed(2, 4)):
        node.say("a.1", commit)
    node.fire("commits", "a")
    assert [(s.generation, s.first, s.last) for s in node.of(StepCommitted)] == [
        (1, 1, 1),
        (1, 2, 2),
        (1, 5, 5),
        (2, 4, 4),
    ]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_nonfinite_loss_flushes_commit_sum(node: Node, loss: float) -> None:
    member(node, "a.1", 1)
    node.say("a.1", committed(1, 1))
    node.say("a.1", committed(1, 2, loss=loss))
    assert [s.last for s in node.of(StepCommitted)] == [1, 2]


def test_exit_and_handover_flush_commit_sum(node: Node) -> None:
    member(node, "a.1", 1)
    node.say("a.1", committed(1, 1))
    node.say("a.1", committed(1, 2))
    node.feed(HandOver())
    assert [s.last for s in node.of(StepCommitted)] == [1, 2]
    node.say("a.1", committed(1, 3))
    node.die("a.1", SIGKILLED)
    kinds = [type(event).__name__ for event in node.appended]
    assert kinds[-3:] == ["StepCommitted", "ErrorReported", "WorkerExited"]
    assert [s.last for s in node.of(StepCommitted)] == [1, 2, 3]


# --- exits ---------------------------------------------------------------------------------------


def test_unexpected_exit_carries_cause_and_log(node: Node) -> None:
    member(node, "a.1", 1)
    node.die("a.1", SIGKILLED, "last words")
    (error,) = node.of(ErrorReported)
    assert (error.kind, error.detail, error.generation) == ("process_exit", "last words", 1)
    assert "OOM" in error.message
    (exited,) = node.of(WorkerExited)
    assert (exited.signal, exited.exit_code, exited.is_expected, exited.log_tail) == (9, None, False, "last words")


def test_exit_before_ready_is_failed_start(node: Node) -> None:
    node.command(start("a.1", 1))
    node.fork()
    node.die("a.1", EXIT_1)
    assert node.of(ErrorReported)[0].kind == "start_failed"


def mark_in(phase: Phase) -> Mark:
    return Mark(phase, 1, 5, 0, 0, 0, 0, 0, 0)


def test_exit_0_in_mid_training_is_program_error(node: Node) -> None:
    member(node, "a.1", 1)
    node.die("a.1", EXIT_0, mark=mark_in("step"))
    (error,) = node.of(ErrorReported)
    assert (error.kind, error.iteration, error.phase) == ("left_early", 5, "step")
    assert "hook.stop(reason)" in error.message
    assert not node.of(WorkerExited)[0].is_expected


@pytest.mark.parametrize("says", ["done", "stop"])
def test_exit_0_after_completion_or_stop_is_expected(node: Node, says: str) -> None:
    member(node, "a.1", 1)
    if says == "stop":
        node.say("a.1", StopRequested(**reporter("a.1"), iteration=5, reason="enough"))
    node.die("a.1", EXIT_0, mark=mark_in("done" if says == "done" else "step"))
    assert not node.of(ErrorReported)
    assert node.of(WorkerExited)[0].is_expected


def test_busy_section_is_reported_once_it_lasts(node: Node) -> None:
    member(node, "a.1", 1)
    node.say("a.1", WorkerBusy(**reporter("a.1"), section="evaluation", limit_us=5_000_000))
    node.say("a.1", WorkerBusy(**reporter("a.1"), section="", limit_us=0))
    node.fire("busy", "a.1")
    assert not node.of(WorkerBusy), "it was over at once"
    node.say("a.1", WorkerBusy(**reporter("a.1"), section="export", limit_us=5_000_000))
    node.fire("busy", "a.1")
    node.say("a.1", WorkerBusy(**reporter("a.1"), section="", limit_us=0))
    assert [event.section for event in node.of(WorkerBusy)] == ["export", ""]


@pytest.mark.parametrize(("still_us", "waiting", "says"), [(6, 0, "data"), (4, 0, ""), (6, 1, "")])
def test_late_worker_is_reported_with_the_section_that_it_hangs_in(
    node: Node, still_us: int, waiting: int, says: str
) -> None:
    member(node, "a.1", 1)
    mark = mark_in("data")._replace(collectives_entered=waiting, section="data", section_limit_us=5)
    node.feed(Stalled(worker="a.1", mark=mark, still_us=still_us, is_stopped=False))
    (report,) = node.of(HangSuspected)
    assert (report.slow_section, report.slow_limit_us, report.section) == (says, 5 if says else 0, "")


def test_exit_repeats_no_cause_that_worker_reported(node: Node) -> None:
    member(node, "a.1", 1)
    node.say("a.1", trouble("nan_loss"))
    node.die("a.1", EXIT_1)
    assert [error.kind for error in node.of(ErrorReported)] == ["nan_loss"]


def test_symptom_leaves_exit_cause_open(node: Node) -> None:
    member(node, "a.1", 1)
    node.say("a.1", trouble("connection_broken"))
    node.die("a.1", SIGKILLED)
    assert [error.kind for error in node.of(ErrorReported)] == ["connection_broken", "process_exit"]


@pytest.mark.parametrize(("was_member", "expected"), [(True, True), (False, False)])
def test_exit_0_of_member_is_expected(node: Node, was_member: bool, expected: bool) -> None:
    if was_member:
        member(node, "a.1", 1)
    else:
        running(node, "a.1", 1)
    node.die("a.1", EXIT_0)
    assert node.of(WorkerExited)[0].is_expected is expected


def test_exit_is_acknowledged_after_append(node: Node) -> None:
    member(node, "a.1", 1)
    node.die("a.1", SIGKILLED)
    assert "a.1" in node.exits
    node.boot()  # the connection to the fork server broke: it repeats
    assert len(node.of(WorkerExited)) == 1
    (exited,) = node.of(WorkerExited)
    actions = node.feed(Appended(event=exited))
    assert [a.message for a in actions if isinstance(a, TellForkServer)] == [ProcessExitAck(worker="a.1")]


def test_exit_with_lost_acknowledgement_is_not_repeated(node: Node) -> None:
    member(node, "a.1", 1)
    node.die("a.1", SIGKILLED)
    exited = node.exits["a.1"]
    node.confirm()
    node.restart_agent()
    node.exits["a.1"] = exited
    node.boot()
    assert len(node.of(WorkerExited)) == 1
    assert node.exits == {}


def test_next_agent_reports_exit_lost_in_outbox(node: Node) -> None:
    member(node, "a.1", 1)
    node.command(stop("a.1", 3))
    node.die("a.1", SIGKILLED)
    node.restart_agent()
    node.appended.clear()
    node.boot()
    (exited,) = node.of(WorkerExited)
    assert exited.is_expected, "it was told to stop, which the agent before knew"


def test_dead_fork_server_takes_its_workers(node: Node) -> None:
    member(node, "a.1", 1)
    node.kill_fork_server()
    (exited,) = node.of(WorkerExited)
    assert (exited.signal, exited.is_expected) == (SIGKILLED, False)


# --- leaving -------------------------------------------------------------------------------------


def test_node_leaves_after_its_workers_exit(node: Node) -> None:
    member(node, "a.1", 1)
    node.feed(LeaveNow(reason="maintenance"))
    assert not node.finished and node.processes["a.1"].quit
    node.command(start("a.2", 9))
    assert "leaving" in node.answers("1.1.n1.9")[0]
    actions = node.die("a.1", EXIT_0)
    assert isinstance(actions[-1], Finish)
    assert isinstance(node.appended[-1], NodeLeft)


def test_empty_node_leaves_at_once(node: Node) -> None:
    assert isinstance(node.feed(LeaveNow(reason="x"))[-1], Finish)


def drained(node: Node) -> None:
    node.feed(Drain(reason="asked", limit_s=20.0))


def test_drained_node_waits_until_workers_move(node: Node) -> None:
    member(node, "a.1", 1)
    drained(node)
    (told,) = node.of(NodeLeaving)
    assert told.grace_us == 22_000_000 and not node.processes["a.1"].quit, "the coordinator moves it away"
    node.command(start("a.2", 9))
    assert "leaving" in node.answers("1.1.n1.9")[0]
    drained(node)
    node.command(stop("a.1", 10))
    actions = node.die("a.1", EXIT_0)
    assert isinstance(actions[-1], Finish) and isinstance(node.appended[-2], NodeLeft | CommandApplied)
    assert len(node.of(NodeLeft)) == len(node.of(NodeLeaving)) == 1


def test_drain_announcement_precedes_cancelled_starts(node: Node) -> None:
    node.kill_fork_server()
    node.command(start("a.1", 1))
    actions = node.feed(Drain(reason="asked", limit_s=20.0))
    told = [type(action.event) for action in actions if isinstance(action, Append)]
    assert told == [NodeLeaving, CommandFailed, NodeLeft] and isinstance(actions[-1], Finish)


def test_drain_deadline_terminates_and_kills_workers(node: Node) -> None:
    """What still runs then gets SIGTERM, and SIGKILL."""
    member(node, "a.1", 1)
    drained(node)
    actions = node.fire("drain")
    assert TellForkServer(message=Kill(worker="a.1", signal=15)) in actions
    assert TellForkServer(message=Kill(worker="a.1", signal=9)) in node.fire("stop", "a.1")
    assert isinstance(node.die("a.1", SIGKILLED)[-1], Finish)
    (exited,) = node.of(WorkerExited)
    assert exited.is_expected and node.of(NodeLeft)


def told_to_save(actions: list[Action]) -> list[tuple[str, int, bool]]:
    """Worker, generation and urgency of the memberships without members."""
    told = [(action.worker, action.message) for action in actions if isinstance(action, TellWorker)]
    return [(worker, m.generation, m.urgent) for worker, m in told if isinstance(m, GroupMembership) and not m.members]


def paused(node: Node, worker: str, generation: int) -> list[Action]:
    return node.say(worker, WorkerPaused(**reporter(worker), generation=generation, iteration=7))


@pytest.mark.parametrize("has_log", [False, True], ids=["no log", "nobody answers"])
def test_unanswered_drain_has_workers_save(node: Node, *, has_log: bool) -> None:
    """At the boundary; what has paused has saved, and is ended. Nothing of it is remembered or goes to the log."""
    member(node, "a.1", 1)
    running(node, "b.1", 2)
    actions = node.feed(Drain(reason="asked", limit_s=20.0, has_log=has_log))
    if has_log:
        assert told_to_save(actions) == [] and node.timers["save", "boundary"] == 5.0
        actions = node.fire("save", "boundary")
    assert told_to_save(actions) == [("a.1", 2, False)]
    assert node.processes["b.1"].quit, "it has no state"
    assert not node.processes["a.1"].quit and node.state.memory.memberships["a"].generation == 1
    paused(node, "a.1", 2)
    assert node.processes["a.1"].quit and not node.of(WorkerPaused)
    node.die("b.1", EXIT_0)
    assert isinstance(node.die("a.1", EXIT_0)[-1], Finish)
    assert all(exited.is_expected for exited in node.of(WorkerExited))


def test_leader_saves_halfway_through_unanswered_drain(node: Node) -> None:
    """Without the boundary, which the nodes that stay do not agree to. Another replica has nothing to save."""
    for number, worker in enumerate(("a.1", "a.2"), 1):
        running(node, worker, number)
    node.tell(membership("a", 1, ["a.1", "a.2"]))
    node.feed(Drain(reason="asked", limit_s=20.0, has_log=False))
    assert node.timers["save", "now"] == 10.0 < node.timers["drain", ""]
    assert told_to_save(node.fire("save", "now")) == [("a.1", 3, True)]
    assert told_to_save(node.fire("save", "late")) == []


def test_answered_drain_is_the_coordinators(node: Node) -> None:
    """Its membership names others, or nobody: then the last one out saves in time, also in a long iteration."""
    for number, worker in enumerate(("a.1", "b.1"), 1):
        member(node, worker, number)
    node.feed(Drain(reason="asked", limit_s=20.0))
    node.tell(membership("a", 2, ["a.9"]))
    node.tell(membership("b", 2, []))
    assert told_to_save(node.fire("save", "boundary")) == told_to_save(node.fire("save", "now")) == []
    assert node.timers["save", "late"] == 15.0
    paused(node, "a.1", 2)
    assert node.of(WorkerPaused) and not node.processes["a.1"].quit
    assert told_to_save(node.fire("save", "late")) == [("b.1", 4, True)]
    paused(node, "b.1", 4)
    assert node.processes["b.1"].quit


def test_agent_that_never_joined_has_workers_save(node: Node) -> None:
    """It began while the log was away."""
    member(node, "a.1", 1)
    node.restart_agent()
    node.has_fork_server = True
    node.feed(ForkServerSaid(message=node.inventory()))
    node.hello("a.1")
    node.appended.clear()
    assert told_to_save(node.feed(Drain(reason="asked", limit_s=20.0, has_log=False))) == [("a.1", 2, False)]
    paused(node, "a.1", 2)
    assert isinstance(node.die("a.1", EXIT_0)[-1], Finish) and not node.of(NodeJoined)


def test_interrupt_ends_drain(node: Node) -> None:
    member(node, "a.1", 1)
    drained(node)
    node.feed(LeaveNow(reason="now"))
    assert node.processes["a.1"].quit and isinstance(node.die("a.1", EXIT_0)[-1], Finish)


def test_unjoined_agent_joins_before_drain(node: Node) -> None:
    member(node, "a.1", 1)
    node.restart_agent()
    node.boot()
    drained(node)
    assert not node.of(NodeLeaving)
    node.hello("a.1")
    joined, leaving = [event for event in node.appended if isinstance(event, NodeJoined | NodeLeaving)][-2:]
    assert isinstance(joined, NodeJoined) and isinstance(leaving, NodeLeaving)


@pytest.mark.parametrize("agent_boot", [0, 1, 2, 3])
def test_command_applies_to_its_agent_only(agent_boot: int) -> None:
    """This one is of boot 2, in a run directory of its own."""
    node = Node(config=replace(CONFIG, agent_boot=2))
    node.boot()
    assert node.state.memory.since_boot == 2
    node.command(replace(start("a.1", 1), agent_boot=agent_boot))
    if agent_boot == 3:
        assert not node.answers("1.1.n1.1") and not node.spawned, "it is the newer one's"
    elif agent_boot == 1:
        assert node.answers("1.1.n1.1")[0].startswith("stale") and not node.spawned
    else:
        assert node.spawned == ["a.1"]


@pytest.mark.parametrize("has_come", ["not at all", "waits for a slot", "is being forked"])
def test_start_ordered_from_predecessor_is_void(node: Node, has_come: str) -> None:
    """The coordinator orders another one as soon as it reads that this agent has joined."""
    command = replace(start("a.3", 3), agent_boot=1)
    if has_come != "not at all":
        if has_come == "waits for a slot":
            running(node, "a.1", 1)
            running(node, "a.2", 2)
            node.command(stop("a.1", 4))
        else:
            node.boot()
        node.command(command)
    node.spawned.clear()
    node.unforked.clear()
    node.restart_agent()
    node.boot()
    node.command(command)
    assert node.answers(command.command_id)[0].startswith("void: it was for an agent that has ended")
    assert not node.spawned
    node.command(replace(start("a.4", 5), agent_boot=2))
    if has_come == "waits for a slot":
        node.die("a.1", EXIT_0)
    assert node.spawned == ["a.4"]


def test_start_that_predecessor_has_carried_out_is_applied(node: Node) -> None:
    command = replace(start("a.1", 1), agent_boot=1)
    node.boot()
    node.command(command)
    node.restart_agent()
    node.unforked.clear()
    node.processes["a.1"] = Process(pid=7, slot=0)  # the fork server had the order, its answer came to nobody
    node.boot()
    node.hello("a.1")
    node.command(command)
    assert set(node.answers(command.command_id)) == {""}
    (joined,) = node.of(NodeJoined)[1:]
    assert [worker.worker for worker in joined.workers] == ["a.1"]


def test_newcomer_leaves_silently_before_reading_log() -> None:
    """An older agent of its name may be at work: the log would listen to nobody any more."""
    node = Node()
    assert isinstance(node.feed(LeaveNow(reason="x"))[-1], Finish)
    assert not node.of(NodeLeft)


def test_kill_names_worker(node: Node) -> None:
    running(node, "a.1", 1)
    node.command(stop("a.1", 3))
    actions = node.fire("stop", "a.1")
    assert [a.message for a in actions if isinstance(a, TellForkServer)] == [Kill(worker="a.1", signal=15)]


def test_membership_message_carries_decision(node: Node) -> None:
    running(node, "a.1", 1)
    order = membership("a", 3, ["a.1"], urgent=True)
    (told,) = [a.message for a in node.tell(order) if isinstance(a, TellWorker)]
    assert isinstance(told, GroupMembership)
    members = members_of("a", order.seats, order.size)
    assert (told.generation, told.members, told.urgent, told.store) == (3, members, True, order.store)


OWN = WorkerWaiting(**reporter("a.1"), generation=1)
OWN_STATE = SnapshotStored(
    node=NODE, task="a", shard=0, iteration=1, generation=1, origin=NODE, size_bytes=1, duration_us=0
)


@pytest.mark.parametrize("event", [OWN, OWN_STATE])
def test_agent_appends_the_event_of_a_worker_as_it_is(node: Node, event: WorkerWaiting | SnapshotStored) -> None:
    member(node, "a.1", 1)
    node.feed(WorkerSaid(worker="a.1", message=event, now_us=0))
    assert node.of(type(event)) == [event]


@pytest.mark.parametrize(
    "event",
    [
        msgspec.structs.replace(OWN, worker="a.2"),
        msgspec.structs.replace(OWN, task="b"),
        msgspec.structs.replace(OWN, node="n9"),
        msgspec.structs.replace(OWN_STATE, task="b"),
        msgspec.structs.replace(OWN_STATE, origin="n9"),
    ],
)
def test_agent_disconnects_a_worker_that_speaks_of_another(node: Node, event: WorkerWaiting | SnapshotStored) -> None:
    member(node, "a.1", 1)
    (action,) = node.feed(WorkerSaid(worker="a.1", message=event, now_us=0))
    assert isinstance(action, Disconnect) and action.worker == "a.1" and not node.of(type(event))


def test_worker_may_send_no_event_but_those_of_its_own() -> None:
    events = {kind for kind in get_args(FromWorker) if issubclass(kind, Event)}
    assert events == set(get_args(WorkerReport))
    assert all(issubclass(kind, WorkerObservation | SnapshotStored) for kind in events)
    assert events.isdisjoint({WorkerStarted, WorkerExited, HangSuspected, StepCommitted}), (
        "these the agent knows itself"
    )


def test_unreadable_command_is_answered_once(node: Node) -> None:
    order = Unreadable(command_id="1.1.n1.7", cause="coordinator-1-9", reason="$.event: unknown")
    for _ in range(2):
        node.feed(order)
    failed = [event for event in node.appended if isinstance(event, CommandFailed)]
    assert len(failed) == 2, "the same answer to the same command"
    assert failed[0] == failed[1]
    assert (failed[0].command_id, failed[0].readable_schema) == ("1.1.n1.7", SCHEMA)
    assert failed[0].reason.endswith("$.event: unknown")


# --- users ----------------------------------------------------------------------------------------

ALICE = Identity(name="alice", uid=1001, gid=1001, groups=(1001,), home="/home/alice")
BOB = Identity(name="bob", uid=1002, gid=1002, groups=(1002,), home="/home/bob")


def separating(*users: Identity, separates: bool = True) -> Node:
    node = Node(config=msgspec.structs.replace(CONFIG, users=users))
    node.fork_at_once = False
    node.boot()
    node.feed(ForkServerSaid(message=msgspec.structs.replace(node.inventory(), separates=separates)))
    return node


def asking(run_as: str, **env: str) -> StartWorker:
    return msgspec.structs.replace(start("a.1", 1), spec=TaskSpec(name="a", run_as=run_as, env=env))


@pytest.mark.parametrize(("run_as", "user"), [("", ALICE), ("alice", ALICE), ("bob", BOB)])
def test_task_runs_as_named_or_first_user(run_as: str, user: Identity) -> None:
    node = separating(ALICE, BOB)
    joined = [event for event in node.appended if isinstance(event, NodeJoined)]
    assert joined[-1].users == ("alice", "bob")
    node.command(asking(run_as))
    assert node.unforked[0].user == user


def test_task_runs_as_agent_without_user_list(node: Node) -> None:
    node.fork_at_once = False
    node.command(asking(""))
    assert node.unforked[0].user is None


@pytest.mark.parametrize(
    ("users", "separates", "order", "why"),
    [
        ((ALICE,), True, asking("bob"), "run_as: bob is not in this node's --run-as (alice)"),
        ((), False, asking("bob"), "run_as: this node runs every task as its agent's user, not as bob"),
        ((ALICE,), False, asking(""), "the fork server is of an agent without --run-as"),
        ((ALICE,), True, asking("", LD_PRELOAD="/x"), "env.LD_PRELOAD: would load other code"),
        ((), False, asking("", UNICRON_RUN="/x"), "env.UNICRON_RUN: is not a setting of workers"),
    ],
)
def test_node_refuses_unlisted_user(users: tuple[Identity, ...], separates: bool, order: StartWorker, why: str) -> None:
    node = separating(*users, separates=separates)
    node.command(order)
    assert not node.unforked
    (failed,) = [event for event in node.appended if isinstance(event, CommandFailed)]
    assert why in failed.reason


@pytest.mark.parametrize(
    "spec",
    [
        TaskSpec(name="a", cp=2, max_workers=2),
        TaskSpec(name="a", tp=2, ep=2, etp=2, max_workers=4),
        TaskSpec(name="a", layouts=(LayoutSpec(), LayoutSpec(cp=2))),
        TaskSpec(name="a", ep=2, max_workers=2),
    ],
    ids=["cp", "etp", "in a layout", "data-parallel ranks of its own"],
)
def test_node_refuses_layout_that_its_older_fork_server_would_set_aside(node: Node, spec: TaskSpec) -> None:
    """An agent that takes over after an upgrade keeps the fork server, whose hook would train in another layout."""
    node.fork_at_once = False
    node.feed(ForkServerSaid(message=msgspec.structs.replace(node.inventory(), degrees=())))
    order = msgspec.structs.replace(start("a.1", 1), spec=spec)
    node.command(order)
    assert not node.unforked
    (failed,) = [event for event in node.appended if isinstance(event, CommandFailed)]
    assert "of an agent that does not know" in failed.reason and "drain the node, then uncordon it" in failed.reason
    node.feed(ForkServerSaid(message=node.inventory()))
    node.command(msgspec.structs.replace(order, worker="a.2", command_id="again"))
    assert [spawn.launch.worker for spawn in node.unforked] == ["a.2"]
