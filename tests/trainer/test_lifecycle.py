"""The lifecycle, driven by hand: no process, no group, no clock."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from unicrond.agents.protocol.messages import GroupMembership, IterationCommitted, Launch
from unicrond.agents.trainer import lifecycle
from unicrond.agents.trainer.groups.shard_group import ALL_REPORT_MAX, report_after_s
from unicrond.agents.trainer.lifecycle import MemberState, run
from unicrond.agents.trainer.lifecycle import effects as e
from unicrond.agents.trainer.lifecycle.candidates import UNKNOWN, row_of, without_storage
from unicrond.agents.trainer.lifecycle.ledger import ReplicaAccount
from unicrond.agents.trainer.lifecycle.member_state import FOLLOWS
from unicrond.agents.trainer.lifecycle.optimizer_shards import StatePart
from unicrond.agents.trainer.lifecycle.results import (
    NO_SAVE,
    GroupBroken,
    Holdings,
    LoadedState,
    MembershipSuperseded,
    ProgramLeftLoop,
    QuitRequested,
    RendezvousTimedOut,
    ReplicaDiffers,
    ReplicaWord,
    StateLost,
)
from unicrond.agents.trainer.loop import handlers
from unicrond.events.vocabulary import (
    CheckpointSpec,
    Member,
    StateLoaded,
    StopRequested,
    StoreAddress,
    TaskCompleted,
    TaskSpec,
    WorkerJoinedGroup,
    WorkerPaused,
)
from unicrond.replay.simulation.trainer import driver

STORE = StoreAddress(host="127.0.0.1", port=1)
DIRECTORY = Path(lifecycle.__file__).parent
#: What the lifecycle may import beside itself.
ALLOWED = {
    "__future__", "bisect", "collections", "collections.abc", "dataclasses", "functools",
    "heapq", "itertools", "math", "operator", "re", "statistics", "struct", "typing", "unicrond.events",
    "unicrond.events.vocabulary",
    "unicrond.agents.trainer", "unicrond.agents.trainer.lifecycle.lanes", "unicrond.agents.trainer.lifecycle.ledger",
    "unicrond.agents.protocol.messages", "unicrond.agents.protocol.sampling",
    "unicrond.agents.trainer.lifecycle.optimizer_shards",
}  # fmt: skip


def member(worker: str, replica: int) -> Member:
    return Member(worker=worker, node=f"n{replica}", replica=replica, shard=0)


def membership(generation: int, *workers: str, urgent: bool = True, handover: bool = False) -> GroupMembership:
    members = tuple(member(worker, number) for number, worker in enumerate(workers))
    return GroupMembership(
        generation=generation, members=members, joiners=(), urgent=urgent, store=STORE, handover=handover
    )


class Driven:
    """The lifecycle of `t.1`, whose group does what `answers` say; by default all members do as it does."""

    def __init__(self, *memberships: GroupMembership, iterations: int = 2, extents: tuple[int, ...] = ()) -> None:
        spec = TaskSpec(
            name="t", global_batch=4, iterations=iterations, checkpoint=CheckpointSpec(dir="/nowhere", interval=0)
        )
        launch = Launch(
            worker="t.1", task="t", node="n0", address="127.0.0.1", agent_socket="", replica=0, shard=0, store=STORE,
            spec=spec,
        )  # fmt: skip
        self.member = MemberState(launch, 1, lambda: 0.0, extents)
        self.memberships = list(memberships)
        self.parts: list[StatePart] = []
        self.staged: list[StatePart] = []
        self.done: list[e.Effect[Any]] = []
        self.answers: dict[type[e.Effect[Any]], Callable[[Any], Any]] = {}
        self.flow = run(self.member)

    def once(self, effect: type[e.Effect[Any]], failure: BaseException) -> None:
        """The next such effect fails."""

        def fail(_: object) -> None:
            del self.answers[effect]
            raise failure

        self.answers[effect] = fail

    def until(self, wanted: type[e.Effect[Any]] | None = None) -> e.Effect[Any] | None:
        """Drive on, to the next effect of that kind (which is not answered), or to the end."""
        step: Callable[[], e.Effect[Any]] = lambda: next(self.flow)  # noqa: E731
        if self.done:
            step = self._answer(self.done[-1])
        while True:
            try:
                effect = step()
            except StopIteration:
                return None
            self.done.append(effect)
            if type(effect) is wanted:
                return effect
            step = self._answer(effect)

    def _answer(self, effect: e.Effect[Any]) -> Callable[[], e.Effect[Any]]:
        try:
            given = self.answers.get(type(effect))
            result = given(effect) if given is not None else self._plainly(effect)
        except (GroupBroken, MembershipSuperseded, RendezvousTimedOut, ProgramLeftLoop, QuitRequested) as failure:
            thrown = failure
            return lambda: self.flow.throw(thrown)
        return lambda: self.flow.send(result)

    def _plainly(self, effect: e.Effect[Any]) -> Any:
        size = len(self.member.peers)
        match effect:
            case e.AwaitMembership():
                if not self.memberships:
                    raise RendezvousTimedOut("no membership")
                return self.memberships.pop(0)
            case e.ReportHoldings():
                return Holdings((), tuple(span for part in self.parts for span in part.spans(self.member.extents)))
            case e.ExchangePositions():
                return [effect.position]
            case e.GroupReady():
                return 1
            case e.GatherRows() | e.Agree():
                return [effect.row] * size
            case e.AnyShard():
                return effect.holds
            case e.AgreeInReplica():
                return ReplicaWord(effect.stop)
            case e.PendingGeneration():
                return 0
            case e.CheckPeers():
                return [0] * 10
            case e.Compute():
                effect.ledger.finished = len(effect.ledger.assignment)
                effect.ledger.add(4.0, 4)
            case e.LastStage():
                return effect.loss_sum, effect.tokens
            case e.Reduce():
                ledger = effect.ledger
                return [
                    ReplicaAccount(
                        ledger.iteration, ledger.finished, 4, 1, ledger.loss_sum, ledger.tokens, ledger.repeated
                    )
                ]
            case e.AskSaveSchedule():
                return NO_SAVE
            case e.ParamsDigest():
                return "digest"
            case e.Stage() | e.StageFirst():
                self.staged = list(effect.parts)
                return 0
            case e.Adopt():
                self.parts = self.staged
            case e.DropParts():
                self.parts = []
            case e.AwaitQuit():
                raise QuitRequested
        return None

    def names(self, since: int = 0) -> list[str]:
        told = self.done[since:]
        return [
            f"{type(one).__name__} {one.point}" if isinstance(one, e.FaultPoint) else type(one).__name__ for one in told
        ]

    def told(self, kind: type) -> list[Any]:
        return [one.message for one in self.done if isinstance(one, e.Send) and isinstance(one.message, kind)]


# --- what it is ----------------------------------------------------------------------------------


def test_lifecycle_imports_no_io() -> None:
    for path in DIRECTORY.glob("*.py"):
        tree = ast.parse(path.read_text())
        typing_only = {
            inner for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }  # fmt: skip
        for node in set(ast.walk(tree)) - typing_only:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name in ALLOWED or name.startswith("unicrond.agents.trainer.lifecycle"), (
                    f"{path.name} imports {name}"
                )


def test_lifecycle_imports_no_torch() -> None:
    program = "import sys, unicrond.agents.trainer.lifecycle; print({'torch', 'socket', 'asyncio'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "set()"


def test_lifecycle_table_matches_its_essay() -> None:
    rows = re.findall(r"^\| (\w+) \|[^|]*\|([^|]*)\|$", lifecycle.__doc__ or "", re.MULTILINE)
    told = {state: {name for name in FOLLOWS if re.search(rf"\b{name}\b", then)} for state, then in rows[1:]}
    assert told == {state: set(then) for state, then in FOLLOWS.items()}


def test_lifecycle_refuses_unlisted_transition() -> None:
    driven = Driven(membership(1, "t.1"))
    with pytest.raises(RuntimeError, match="from new to committing"):
        driven.member.enter("committing")


def test_effect_has_one_handler_in_process_and_simulation() -> None:
    effects = {
        kind
        for kind in vars(e).values()
        if isinstance(kind, type) and issubclass(kind, e.Effect) and kind is not e.Effect
    }
    assert set(handlers.HANDLERS) == effects - {e.Compute, e.Optimize}, "the seams are the training loop's"
    simulated = [*driver.OWN_HANDLERS, *driver.RENDEZVOUS_HANDLERS, *driver.STATES_HANDLERS]
    assert len(simulated) == len(set(simulated)) and set(simulated) == effects


# --- without faults ------------------------------------------------------------------------------


def test_iteration_emits_effects_in_order() -> None:
    driven = Driven(membership(1, "t.1"))
    driven.until(e.Compute)
    since = len(driven.done)
    driven.until(e.Compute)
    assert driven.names(since - 1) == [
        "Compute", "SetPhase", "FaultPoint computed", "LastStage", "Reduce", "FaultPoint reduced", "PendingGeneration",
        "AgreeInReplica", "Agree", "Settle", "SetPhase", "FaultPoint agreed", "Optimize", "Send", "Observe", "Clear",
        "StartClock", "FaultPoint committed", "SetPhase", "Save", "PrepareStandby", "SetPhase", "Compute",
    ]  # fmt: skip
    assert [message.iteration for message in driven.told(IterationCommitted)] == [1]


def test_training_runs_from_seed_to_end() -> None:
    driven = Driven(membership(1, "t.1"))
    assert driven.until() is None
    assert driven.member.state == "over"
    assert [message.source for message in driven.told(WorkerJoinedGroup)] == ["init"]
    assert [message.iteration for message in driven.told(IterationCommitted)] == [1, 2]
    assert [message.iteration for message in driven.told(TaskCompleted)] == [2]
    saved, told = driven.names().index("SaveAndWait"), driven.names().index("ParamsDigest")
    assert saved < told, "it says that it is complete before it has saved"


def test_unsound_state_falls_back_to_next() -> None:
    driven = Driven(membership(1, "t.1"), iterations=9)
    driven.answers[e.CheckPeers] = lambda _: [7, 5, 0, 0, 0, 0, 0, 0, 0, 0]
    driven.answers[e.LoadState] = lambda effect: (
        "torn" if effect.candidate.iteration == 7 else LoadedState(5, 1.0, 10, "memory", 2.0)
    )
    seam = driven.until(e.Compute)
    assert isinstance(seam, e.Compute) and seam.ledger.iteration == 6
    assert driven.member.origin == "memory" and driven.member.has_trained
    assert any(isinstance(one, e.Log) and "torn" in one.text for one in driven.done)


def test_nothing_begins_from_the_seed_before_storage_was_seen() -> None:
    """It hung, so what was nearer was tried first, and was torn."""
    driven = Driven(membership(1, "t.1"), iterations=9)
    driven.answers[e.CheckPeers] = lambda effect: (
        row_of({"checkpoint": [5]}) if effect.must_see_storage else without_storage(row_of({"memory": [7]}), 0)
    )
    driven.answers[e.LoadState] = lambda effect: (
        "torn" if effect.candidate.iteration == 7 else LoadedState(5, 1.0, 10, "checkpoint", 2.0)
    )
    seam = driven.until(e.Compute)
    assert isinstance(seam, e.Compute) and seam.ledger.iteration == 6
    assert driven.member.origin == "checkpoint"


@pytest.mark.parametrize(("checkpoint", "source"), [(7, "memory"), (8, "checkpoint"), (UNKNOWN, "checkpoint")])
def test_memory_older_than_known_checkpoint_is_not_taken_before_storage_was_seen(checkpoint: int, source: str) -> None:
    """The newest in memory is torn, and the one before it is from long ago."""
    driven = Driven(membership(1, "t.1"), iterations=10_000)
    driven.answers[e.CheckPeers] = lambda effect: (
        row_of({"memory": [9001, 7], "checkpoint": [9000]})
        if effect.must_see_storage
        else without_storage(row_of({"memory": [9001, 7]}), checkpoint)
    )
    driven.answers[e.LoadState] = lambda effect: (
        "torn" if effect.candidate.iteration == 9001
        else LoadedState(effect.candidate.iteration, 1.0, 10, effect.candidate.kind, 2.0)
    )  # fmt: skip
    seam = driven.until(e.Compute)
    assert driven.member.origin == source
    assert isinstance(seam, e.Compute) and seam.ledger.iteration == (8 if source == "memory" else 9001)
    (loaded,) = driven.told(StateLoaded)
    assert (loaded.storage_iteration, loaded.saved_us) == (0 if source == "memory" else 9000, 0), "7 were not saved"


# --- with faults ---------------------------------------------------------------------------------


def test_member_leaves_broken_group_before_report() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"))
    driven.until(e.Optimize)
    driven.until(e.Compute)
    driven.once(e.Compute, GroupBroken("connection closed"))
    since = len(driven.done)
    driven.until(e.Compute)
    names = driven.names(since)
    assert names[:6] == ["LeaveGroup", "ReportFailure", "SetPhase", "Idle", "ReportHoldings", "KeepOldGroup"]
    assert [message.generation for message in driven.told(WorkerJoinedGroup)] == [1, 2]
    assert driven.member.ledger.iteration == 2


@pytest.mark.parametrize("is_own", [False, True])
def test_iteration_with_an_odd_replicas_results_begins_again(*, is_own: bool) -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"))
    driven.until(e.Optimize)
    driven.until(e.Agree)
    driven.once(e.Agree, ReplicaDiffers("t.2: other parameters", is_own=is_own))
    since = len(driven.done)
    exchange = driven.until(e.ExchangePositions)
    assert isinstance(exchange, e.ExchangePositions)
    position = exchange.position
    assert (position.has_state, position.has_thrown_away) == (not is_own, not is_own)
    assert not position.sums_complete and not position.assignment
    names = driven.names(since)
    assert names.index("Clear") < names.index("LeaveGroup") and ("DropParts" in names) is is_own
    driven.until(e.Optimize)
    if not is_own:
        assert driven.member.ledger.iteration == 2 and driven.member.has_thrown_away
        driven.until(e.Compute)
        assert not driven.member.has_thrown_away


def test_complete_sums_step_in_next_group() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"))
    driven.until(e.Agree)
    driven.once(e.Agree, MembershipSuperseded())
    since = len(driven.done)
    driven.until(e.Optimize)
    assert "Compute" not in driven.names(since) and "Reduce" not in driven.names(since)
    assert driven.member.generation == 2


def test_failed_group_formation_waits_for_newer_membership() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"))
    driven.once(e.FormGroup, GroupBroken("no route"))
    driven.until(e.Compute)
    names = driven.names()
    assert names[names.index("FormGroup") + 1 :][:4] == [
        "ReportFailure",
        "LeaveGroup",
        "DropOldGroup",
        "AwaitMembership",
    ]
    assert driven.member.generation == 2


def test_removed_member_saves_and_parks() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.2", handover=True))
    driven.until(e.Compute)
    driven.until(e.Compute)
    driven.once(e.Compute, MembershipSuperseded())
    with pytest.raises(QuitRequested):
        driven.until()
    (saved,) = [one for one in driven.done if isinstance(one, e.SaveAndWait)]
    assert saved.handover and saved.iteration == 1
    assert [message.generation for message in driven.told(WorkerPaused)] == [2]
    assert driven.member.state == "parked"


def test_member_without_membership_saves_and_ends() -> None:
    driven = Driven(membership(1, "t.1"))
    driven.until(e.Compute)
    driven.until(e.Compute)
    driven.once(e.Compute, GroupBroken("gone"))
    with pytest.raises(RendezvousTimedOut):
        driven.until()
    assert driven.names()[-1] == "SaveAndWait" and driven.member.state == "stranded"


@pytest.mark.parametrize(("seam", "commits"), [(e.Compute, 0), (e.Optimize, 1)])
def test_announced_program_exit_commits_last_step(seam: type[e.Effect[Any]], commits: int) -> None:
    driven = Driven(membership(1, "t.1"), iterations=9)
    driven.until(seam)
    assert isinstance(driven.member.stop("enough"), StopRequested)
    assert driven.member.stop("again") is None
    driven.once(seam, ProgramLeftLoop())
    assert driven.until() is None
    assert len(driven.told(IterationCommitted)) == commits
    assert driven.member.state == "over"


# --- sharded optimizer state ---------------------------------------------------------------------


@pytest.mark.parametrize("memberships", [(), (membership(2, "t.2"),)], ids=["stranded", "left out"])
def test_half_gathered_state_is_never_saved(memberships: tuple[GroupMembership, ...]) -> None:
    """It would be the state of no iteration."""
    driven = Driven(membership(1, "t.1"), *memberships, extents=(128,))
    driven.until(e.GatherParameters)
    driven.until(e.GatherParameters)
    driven.once(e.GatherParameters, GroupBroken("gone"))
    with pytest.raises((RendezvousTimedOut, QuitRequested)):
        driven.until()
    assert driven.member.has_stepped and driven.member.state in ("stranded", "parked")
    assert not [one for one in driven.done if isinstance(one, e.SaveAndWait)]


def test_sharded_state_is_gathered_before_commit() -> None:
    driven = Driven(membership(1, "t.1"), extents=(128,))
    driven.until(e.Optimize)
    assert [type(one) for one in driven.done if isinstance(one, e.Stage | e.StageFirst)] == [e.StageFirst]
    assert driven.parts == [StatePart(1, 0)]
    since = len(driven.done)
    driven.until(e.Compute)
    names = driven.names(since)
    assert names[:4] == ["FaultPoint stepped", "GatherParameters", "Send", "Observe"]


def test_broken_gather_repeats_in_next_group() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"), extents=(128,))
    driven.until(e.GatherParameters)
    driven.once(e.GatherParameters, GroupBroken("gone"))
    driven.until(e.Compute)
    names = [
        name for name in driven.names() if name in ("GatherParameters", "ExchangePositions", "Observe", "Optimize")
    ]
    assert names == [
        "ExchangePositions",
        "Optimize",
        "GatherParameters",
        "ExchangePositions",
        "GatherParameters",
        "Observe",
    ]


def test_lost_part_loses_whole_state() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"), extents=(128,))
    driven.until(e.GatherParameters)
    driven.parts = []  # as if its other holders had died with them
    driven.once(e.GatherParameters, GroupBroken("gone"))
    with pytest.raises(StateLost):
        driven.until()


def test_state_assembled_for_one_group_is_not_saved_by_next() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"), extents=(128,))
    driven.until(e.BeginFinalSave)
    driven.until(e.SaveAndWait)
    assert driven.member.has_whole_state
    driven.once(e.SaveAndWait, GroupBroken("gone"))
    driven.until(e.Assemble)
    assert not driven.member.has_whole_state
    assert driven.until() is None


def test_program_checkpoint_assembles_whole_state() -> None:
    driven = Driven(membership(1, "t.1"), iterations=4, extents=(128,))
    driven.member.saves = lambda iteration: iteration == 2
    assert driven.until() is None
    names = [name for name in driven.names() if name in ("Compute", "Assemble")]
    assert names == ["Compute", "Compute", "Assemble", "Compute", "Compute", "Assemble"]


# --- what a lead may tell for all ----------------------------------------------------------------


def test_member_reports_work_dealt_to_peers() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1", "t.2"))
    driven.until(e.Compute)
    driven.answers[e.ExchangePositions] = lambda effect: [
        replace(effect.position, assignment=(0, 1)),
        replace(effect.position, assignment=(2,)),
    ]
    driven.once(e.Compute, MembershipSuperseded("generation 2 is urgent"))
    driven.until(e.Compute)
    last = driven.told(WorkerJoinedGroup)[-1]
    assert (last.generation, last.micro_batches_assigned, last.micro_batches_assigned_elsewhere) == (2, 0, 1)


# --- which members report a break ----------------------------------------------------------------


def test_small_group_reports_at_once() -> None:
    assert all(report_after_s(rank, ALL_REPORT_MAX) == 0.0 for rank in range(ALL_REPORT_MAX))


@pytest.mark.parametrize("size", [65, 100, 4096, 131_072])
def test_large_group_staggers_reports(size: int) -> None:
    at_once = [rank for rank in range(size) if report_after_s(rank, size) == 0.0]
    assert 8 <= len(at_once) <= 9 and all(b - a >= size // 9 for a, b in pairwise(at_once)), "on nodes of their own"
    assert all(1.0 <= report_after_s(rank, size) <= 2.0 for rank in range(size) if rank not in {*at_once})
