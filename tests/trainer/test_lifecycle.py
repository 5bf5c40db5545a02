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

from agents.protocol.messages import Committed, Completed, Launch, Membership, Parked, Regrouped, StopWanted
from agents.trainer import lifecycle
from agents.trainer.groups.reporting import ALL_REPORT_MAX, report_after_s
from agents.trainer.ledger import Account
from agents.trainer.lifecycle import Books, run
from agents.trainer.lifecycle import effects as e
from agents.trainer.lifecycle.failures import Broken, NothingLeft, QuitAsked, Stopped, Stranded, Superseded
from agents.trainer.lifecycle.results import NOTHING, Loaded, Stock
from agents.trainer.lifecycle.table import FOLLOWS
from agents.trainer.sharded.parts import Part
from events.vocabulary import CheckpointSpec, Member, StoreAddress, TaskSpec

STORE = StoreAddress(host="127.0.0.1", port=1)
DIRECTORY = Path(lifecycle.__file__).parent
#: What the lifecycle may import beside itself.
ALLOWED = {
    "__future__", "collections.abc", "dataclasses", "heapq", "re", "typing", "events", "events.vocabulary",
    "agents.trainer", "agents.trainer.gradients.lanes", "agents.trainer.ledger", "agents.protocol.messages",
    "agents.trainer.sharded.parts",
}  # fmt: skip


def member(worker: str, replica: int) -> Member:
    return Member(worker=worker, node=f"n{replica}", replica=replica, shard=0)


def membership(generation: int, *workers: str, urgent: bool = True, handover: bool = False) -> Membership:
    members = tuple(member(worker, number) for number, worker in enumerate(workers))
    return Membership(generation=generation, members=members, joiners=(), urgent=urgent, store=STORE, handover=handover)


class Driven:
    """The lifecycle of `t.1`, whose group does what `answers` say; by default all members do as it does."""

    def __init__(self, *memberships: Membership, iterations: int = 2, extents: tuple[int, ...] = ()) -> None:
        spec = TaskSpec(
            name="t", global_batch=4, iterations=iterations, checkpoint=CheckpointSpec(dir="/nowhere", interval=0)
        )
        launch = Launch(
            worker="t.1", task="t", node="n0", address="127.0.0.1", agent_socket="", replica=0, shard=0, store=STORE,
            spec=spec,
        )  # fmt: skip
        self.books = Books(launch, 1, lambda: 0.0, extents)
        self.memberships = list(memberships)
        self.parts: list[Part] = []
        self.staged: list[Part] = []
        self.done: list[e.Effect[Any]] = []
        self.answers: dict[type[e.Effect[Any]], Callable[[Any], Any]] = {}
        self.flow = run(self.books)

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
        except (Broken, Superseded, Stranded, Stopped, QuitAsked) as failure:
            thrown = failure
            return lambda: self.flow.throw(thrown)
        return lambda: self.flow.send(result)

    def _plainly(self, effect: e.Effect[Any]) -> Any:
        size = len(self.books.peers)
        match effect:
            case e.AwaitMembership():
                if not self.memberships:
                    raise Stranded("no membership")
                return self.memberships.pop(0)
            case e.TakeStock():
                return Stock((), tuple(span for part in self.parts for span in part.spans(self.books.extents)))
            case e.Exchange():
                return [effect.position]
            case e.Sit():
                return 1
            case e.Rows() | e.Agree():
                return [effect.row] * size
            case e.AnyShard():
                return effect.value
            case e.Pending():
                return 0
            case e.LookAround():
                return [0] * 10
            case e.Compute():
                effect.ledger.finished = len(effect.ledger.held)
                effect.ledger.add(4.0, 4)
            case e.LastStage():
                return effect.loss_sum, effect.tokens
            case e.Reduce():
                ledger = effect.ledger
                return [Account(ledger.iteration, ledger.finished, 4, 1, ledger.loss_sum, ledger.tokens, ledger.redone)]
            case e.AskDue():
                return NOTHING
            case e.ParamsDigest():
                return "digest"
            case e.Stage() | e.StageFirst():
                self.staged = list(effect.parts)
                return 0
            case e.Adopt():
                self.parts = self.staged
            case e.Forget():
                self.parts = []
            case e.AwaitQuit():
                raise QuitAsked
        return None

    def names(self, since: int = 0) -> list[str]:
        told = self.done[since:]
        return [f"{type(one).__name__} {one.point}" if isinstance(one, e.At) else type(one).__name__ for one in told]

    def told(self, kind: type) -> list[Any]:
        return [one.message for one in self.done if isinstance(one, e.Tell) and isinstance(one.message, kind)]


# --- what it is ----------------------------------------------------------------------------------


def test_it_imports_nothing_that_does_io() -> None:
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
                assert name in ALLOWED or name.startswith("agents.trainer.lifecycle"), f"{path.name} imports {name}"


def test_it_comes_without_torch() -> None:
    program = "import sys, agents.trainer.lifecycle; print({'torch', 'socket', 'asyncio'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "set()"


def test_the_table_in_the_essay_is_the_table() -> None:
    rows = re.findall(r"^\| (\w+) \|[^|]*\|([^|]*)\|$", lifecycle.__doc__ or "", re.MULTILINE)
    told = {state: {name for name in FOLLOWS if re.search(rf"\b{name}\b", then)} for state, then in rows[1:]}
    assert told == {state: set(then) for state, then in FOLLOWS.items()}


def test_a_step_that_the_table_does_not_have_is_a_defect() -> None:
    driven = Driven(membership(1, "t.1"))
    with pytest.raises(RuntimeError, match="from new to committing"):
        driven.books.enter("committing")


# --- without faults ------------------------------------------------------------------------------


def test_an_iteration_in_its_order() -> None:
    driven = Driven(membership(1, "t.1"))
    driven.until(e.Compute)
    since = len(driven.done)
    driven.until(e.Compute)
    assert driven.names(since - 1) == [
        "Compute", "Phase", "At computed", "LastStage", "Reduce", "At reduced", "Pending", "AnyShard", "Agree",
        "Settle", "Phase", "At agreed", "Optimize", "Tell", "Observe", "Clear", "Begun", "At committed", "Phase",
        "Save", "StandBy", "Phase", "Compute",
    ]  # fmt: skip
    assert [message.iteration for message in driven.told(Committed)] == [1]


def test_a_training_from_the_seed_to_its_end() -> None:
    driven = Driven(membership(1, "t.1"))
    assert driven.until() is None
    assert driven.books.state == "over"
    assert [message.source for message in driven.told(Regrouped)] == ["init"]
    assert [message.iteration for message in driven.told(Committed)] == [1, 2]
    assert [message.iteration for message in driven.told(Completed)] == [2]
    saved, told = driven.names().index("SaveAndWait"), driven.names().index("ParamsDigest")
    assert saved < told, "it says that it is complete before it has saved"


def test_a_state_that_is_not_sound_is_passed_over() -> None:
    driven = Driven(membership(1, "t.1"), iterations=9)
    driven.answers[e.LookAround] = lambda _: [7, 5, 0, 0, 0, 0, 0, 0, 0, 0]
    driven.answers[e.Take] = lambda effect: (
        "torn" if effect.candidate.iteration == 7 else Loaded(5, 1.0, 10, "memory", 2.0)
    )
    seam = driven.until(e.Compute)
    assert isinstance(seam, e.Compute) and seam.ledger.iteration == 6
    assert driven.books.origin == "memory" and driven.books.trained
    assert any(isinstance(one, e.Say) and "torn" in one.text for one in driven.done)


# --- with faults ---------------------------------------------------------------------------------


def test_a_broken_group_is_left_before_it_is_told_of() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"))
    driven.until(e.Optimize)
    driven.until(e.Compute)
    driven.once(e.Compute, Broken("connection closed"))
    since = len(driven.done)
    driven.until(e.Compute)
    names = driven.names(since)
    assert names[:6] == ["Leave", "Report", "Phase", "Idle", "TakeStock", "SetAside"]
    assert [message.generation for message in driven.told(Regrouped)] == [1, 2]
    assert driven.books.ledger.iteration == 2


def test_complete_sums_are_stepped_in_the_next_group() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"))
    driven.until(e.Agree)
    driven.once(e.Agree, Superseded())
    since = len(driven.done)
    driven.until(e.Optimize)
    assert "Compute" not in driven.names(since) and "Reduce" not in driven.names(since)
    assert driven.books.generation == 2


def test_a_group_that_breaks_while_it_forms_is_followed_by_a_newer_one() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"))
    driven.once(e.Form, Broken("no route"))
    driven.until(e.Compute)
    names = driven.names()
    assert names[names.index("Form") + 1 :][:4] == ["Report", "Leave", "Drop", "AwaitMembership"]
    assert driven.books.generation == 2


def test_a_member_that_is_left_out_saves_and_parks() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.2", handover=True))
    driven.until(e.Compute)
    driven.until(e.Compute)
    driven.once(e.Compute, Superseded())
    with pytest.raises(QuitAsked):
        driven.until()
    (saved,) = [one for one in driven.done if isinstance(one, e.SaveAndWait)]
    assert saved.handover and saved.iteration == 1
    assert [message.generation for message in driven.told(Parked)] == [2]
    assert driven.books.state == "parked"


def test_without_a_membership_it_saves_and_ends() -> None:
    driven = Driven(membership(1, "t.1"))
    driven.until(e.Compute)
    driven.until(e.Compute)
    driven.once(e.Compute, Broken("gone"))
    with pytest.raises(Stranded):
        driven.until()
    assert driven.names()[-1] == "SaveAndWait" and driven.books.state == "stranded"


@pytest.mark.parametrize(("seam", "commits"), [(e.Compute, 0), (e.Optimize, 1)])
def test_a_program_that_leaves_as_it_said_commits_what_it_stepped(seam: type[e.Effect[Any]], commits: int) -> None:
    driven = Driven(membership(1, "t.1"), iterations=9)
    driven.until(seam)
    assert isinstance(driven.books.stop("enough"), StopWanted)
    assert driven.books.stop("again") is None
    driven.once(seam, Stopped())
    assert driven.until() is None
    assert len(driven.told(Committed)) == commits
    assert driven.books.state == "over"


# --- sharded optimizer state ---------------------------------------------------------------------


@pytest.mark.parametrize("memberships", [(), (membership(2, "t.2"),)], ids=["stranded", "left out"])
def test_between_its_step_and_the_others_parameters_nothing_is_saved(memberships: tuple[Membership, ...]) -> None:
    """It would be the state of no iteration."""
    driven = Driven(membership(1, "t.1"), *memberships, extents=(128,))
    driven.until(e.Gather)
    driven.until(e.Gather)
    driven.once(e.Gather, Broken("gone"))
    with pytest.raises((Stranded, QuitAsked)):
        driven.until()
    assert driven.books.stepped and driven.books.state in ("stranded", "parked")
    assert not [one for one in driven.done if isinstance(one, e.SaveAndWait)]


def test_sharded_state_begins_in_parts_and_is_gathered_before_the_commit() -> None:
    driven = Driven(membership(1, "t.1"), extents=(128,))
    driven.until(e.Optimize)
    assert [type(one) for one in driven.done if isinstance(one, e.Stage | e.StageFirst)] == [e.StageFirst]
    assert driven.parts == [Part(1, 0)]
    since = len(driven.done)
    driven.until(e.Compute)
    names = driven.names(since)
    assert names[:4] == ["At stepped", "Gather", "Tell", "Observe"]


def test_a_gathering_that_breaks_is_made_again_in_the_next_group() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"), extents=(128,))
    driven.until(e.Gather)
    driven.once(e.Gather, Broken("gone"))
    driven.until(e.Compute)
    names = [name for name in driven.names() if name in ("Gather", "Exchange", "Observe", "Optimize")]
    assert names == ["Exchange", "Optimize", "Gather", "Exchange", "Gather", "Observe"]


def test_where_a_part_is_lost_all_state_is_and_untrained_members_begin_anew() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"), extents=(128,))
    driven.until(e.Gather)
    driven.parts = []  # as if its other holders had died with them
    driven.once(e.Gather, Broken("gone"))
    with pytest.raises(NothingLeft):
        driven.until()


def test_a_state_assembled_for_one_group_is_not_saved_by_another() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1"), extents=(128,))
    driven.until(e.Ending)
    driven.until(e.SaveAndWait)
    assert driven.books.whole
    driven.once(e.SaveAndWait, Broken("gone"))
    driven.until(e.Assemble)
    assert not driven.books.whole
    assert driven.until() is None


def test_for_a_checkpoint_that_the_program_writes_the_state_is_put_together() -> None:
    driven = Driven(membership(1, "t.1"), iterations=4, extents=(128,))
    driven.books.saves = lambda iteration: iteration == 2
    assert driven.until() is None
    names = [name for name in driven.names() if name in ("Compute", "Assemble")]
    assert names == ["Compute", "Compute", "Assemble", "Compute", "Compute", "Assemble"]


# --- what a lead may tell for all ----------------------------------------------------------------


def test_a_member_tells_what_fell_to_the_others_too() -> None:
    driven = Driven(membership(1, "t.1"), membership(2, "t.1", "t.2"))
    driven.until(e.Compute)
    driven.answers[e.Exchange] = lambda effect: [
        replace(effect.position, held=(0, 1)),
        replace(effect.position, held=(2,)),
    ]
    driven.once(e.Compute, Superseded("generation 2 is urgent"))
    driven.until(e.Compute)
    last = driven.told(Regrouped)[-1]
    assert (last.generation, last.dealt, last.others_dealt) == (2, 0, 1)


# --- which members report a break ----------------------------------------------------------------


def test_all_members_of_a_small_group_report_at_once() -> None:
    assert all(report_after_s(rank, ALL_REPORT_MAX) == 0.0 for rank in range(ALL_REPORT_MAX))


@pytest.mark.parametrize("size", [65, 100, 4096, 131_072])
def test_a_few_members_of_a_large_group_report_at_once(size: int) -> None:
    at_once = [rank for rank in range(size) if report_after_s(rank, size) == 0.0]
    assert 8 <= len(at_once) <= 9 and all(b - a >= size // 9 for a, b in pairwise(at_once)), "on nodes of their own"
    assert all(1.0 <= report_after_s(rank, size) <= 2.0 for rank in range(size) if rank not in {*at_once})
