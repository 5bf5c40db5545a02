"""Drives the lifecycle in a training process: carries out what it asks for, blocking, and stops at its seams.

Rules
-----
* One method for each effect, named after it; what it returns or raises is what the lifecycle gets.
* Whatever touches this shard's group goes through `Rendezvous.together`: a failure of one shard is one of all.
* `seam` is what the lifecycle waits for: the loop's micro-batches (`Compute`), its optimizer's step (`Optimize`), or
  nothing more (None). The training loop answers with `advance`, or with `throw`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agents.protocol.exits import EXIT_NO_MEMBERSHIP
from agents.protocol.injection import Point
from agents.protocol.messages import Committed, Membership
from agents.protocol.sampling import Sampling
from agents.trainer.detection import determinism
from agents.trainer.detection.checksum import checksum_of_pieces
from agents.trainer.detection.observing import Detection
from agents.trainer.gradients.accumulation import Accumulation
from agents.trainer.gradients.reduction import Reduction
from agents.trainer.gradients.runs import Runs
from agents.trainer.groups.group import Group, Rows
from agents.trainer.groups.rendezvous import Rendezvous
from agents.trainer.ledger import Account
from agents.trainer.lifecycle import Books, run
from agents.trainer.lifecycle import effects as e
from agents.trainer.lifecycle.failures import QuitAsked, Stranded
from agents.trainer.lifecycle.results import Due, Loaded, Stock
from agents.trainer.lifecycle.verdict import Position
from agents.trainer.process.context import Context
from agents.trainer.sharded.optimizer import Rows as OptimizerRows
from agents.trainer.sharded.sharing import Sharing
from agents.trainer.states import transfer
from agents.trainer.states.resharding import NoLayout, reshard
from agents.trainer.states.saving import Saving, Whole
from agents.trainer.states.sources import Sources, Tree
from agents.trainer.states.state import BadState, TrainingState
from events.vocabulary import StateSource


@dataclass(slots=True)
class Driver:
    """What the effects act on: one worker's. `sharing`: None where the optimizer's state is not sharded;
    `runs`: None where the sum of a step follows the deal. `closing`: the program's, behind the last iteration.
    `finish`: what a replica's shards must still add up (`finishing.py`)."""

    books: Books
    here: Context
    state: TrainingState
    saving: Saving
    sampling: Sampling
    accumulation: Accumulation
    reduction: Reduction
    rendezvous: Rendezvous
    detection: Detection
    sharing: Sharing | None
    runs: Runs | None = None
    seam: e.Seam | None = None
    _flow: e.Flow[None] | None = None
    _sources: Sources | None = None
    closing: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None

    # --- driving ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Up to the first seam."""
        self._flow = run(self.books)
        self._go_on(lambda flow: next(flow))

    def advance(self) -> None:
        """The loop has done what the seam asked for: up to the next one. Raises what ends the worker."""
        self._go_on(lambda flow: flow.send(None))

    def throw(self, failure: BaseException) -> None:
        """As `advance`, where the seam has failed: Broken, Superseded, Stopped."""
        self._go_on(lambda flow: flow.throw(failure))

    def _go_on(self, enter: Callable[[e.Flow[None]], e.Effect[Any]]) -> None:
        flow, self._flow = self._flow, None
        if flow is None:
            raise RuntimeError("the lifecycle has not begun, or an error has ended it: let that error end the program")
        try:
            effect = enter(flow)
            while not isinstance(effect, e.Seam):
                try:
                    result = HANDLERS[type(effect)](self, effect)
                except BaseException as failure:
                    effect = flow.throw(failure)
                else:
                    effect = flow.send(result)
            self._flow, self.seam = flow, effect
        except StopIteration:
            self.seam = None
        except Stranded:
            raise SystemExit(EXIT_NO_MEMBERSHIP) from None

    @property
    def alive(self) -> bool:
        """The lifecycle waits at a seam; no error has ended it."""
        return self._flow is not None

    @property
    def group(self) -> Group:
        """The present group."""
        group = self.rendezvous.group
        assert group is not None
        return group

    def fire(self, point: Point) -> None:
        """A point of the loop's own: a fault may have been ordered for it."""
        ledger = self.books.ledger
        self.here.injection.fire(point, ledger.iteration, self.rendezvous.generation, ledger.finished)

    def _gathered(
        self, row: Sequence[int], amid: Point | None = None, meanwhile: Callable[[], None] | None = None
    ) -> list[list[int]]:
        """Every member's row. While they are under way the point `amid` is passed, and `meanwhile` done."""
        group = self.group

        def gather() -> list[list[int]]:
            rows = group.all_gather(row)
            if amid is not None:
                self.fire(amid)
            if meanwhile is not None:
                meanwhile()
            group.finish()
            return rows.read()

        return self.rendezvous.together(gather)

    def _compare_surroundings(self) -> None:
        """A member may compute on something else than the first. Raises NotDeterministic."""
        wish, odd = self.here.patience.deterministic, determinism.odd_places(self.rendezvous.surroundings)
        if not odd or wish == "off":
            return
        told = determinism.told_of(odd, self.group.rank, determinism.surroundings())
        if wish == "require" and self.group.rank in odd:
            raise determinism.NotDeterministic(f"deterministic: require: {told}")
        self._warn_of_bits(told)

    def _warn_of_bits(self, why: str) -> None:
        print(f"{self.here.launch.worker}: bits will not be kept over a change of replicas: {why}", flush=True)

    def bits_agree(self, checksums: Sequence[int]) -> None:
        """Compare what one micro-batch has come to, each time, with the other replicas'. Raises NotDeterministic, and
        what `Group.finish` raises."""
        here, books = self.here, self.books
        assert books.turn is not None
        books.turn.tried = True
        found = determinism.verdict(self._gathered(checksums))
        if found and here.patience.deterministic == "require":
            raise determinism.NotDeterministic(f"deterministic: require: {found}")
        if found:
            self._warn_of_bits(found)

    # --- noting ----------------------------------------------------------------------------------

    def _tell(self, effect: e.Tell) -> None:
        message = effect.message
        self.here.channel.send(self.detection.checked(message) if isinstance(message, Committed) else message)

    def _say(self, effect: e.Say) -> None:
        print(f"{self.here.launch.worker}: {effect.text}", flush=True)

    def _phase(self, effect: e.Phase) -> None:
        self.here.phase = effect.phase

    def _at(self, effect: e.At) -> None:
        self.here.injection.fire(effect.point, effect.iteration, self.rendezvous.generation, effect.finished)

    def _idle(self, effect: e.Idle) -> None:
        self.here.mark.idle()

    def _begun(self, effect: e.Begun) -> None:
        self.detection.begun(effect.iteration)
        self.group.waits = None  # the members have met; slow collectives from now on are training

    def _ending(self, effect: e.Ending) -> None:
        self.detection.ending(effect.iteration, self.group, self.saving.longest_write_s if effect.writes else None)

    def _observe(self, effect: e.Observe) -> None:
        membership, group = effect.membership, self.group
        self.detection.committed(effect.iteration, effect.duration_us, group)
        self.saving.usual = self.detection.usual()
        self.detection.judge(effect.iteration, effect.total, membership, self.here.launch.shard, group.rank)

    def _flush(self, effect: e.Flush) -> None:
        self.here.channel.flush(effect.timeout_s)

    # --- from group to group ---------------------------------------------------------------------

    def _take_stock(self, effect: e.TakeStock) -> Stock:
        spans = () if self.sharing is None else tuple(self.sharing.optimizer.spans())
        return Stock(tuple(self.reduction.complete()), spans)

    def _set_aside(self, effect: e.SetAside) -> None:
        self.rendezvous.set_aside(keep=effect.keep, bounded=effect.bounded)

    def _await_membership(self, effect: e.AwaitMembership) -> Membership:
        return self.rendezvous.await_membership()

    def _follow(self, effect: e.Follow) -> None:
        self.rendezvous.follow(effect.membership)

    def _form(self, effect: e.Form) -> None:
        self.rendezvous.form(effect.membership)

    def _exchange(self, effect: e.Exchange) -> list[Position]:
        books = self.books
        rendezvous = self.rendezvous
        told = rendezvous.exchange(effect.position, books.micro_batches, books.buckets, sharded=effect.sharded)
        self._compare_surroundings()
        return told

    def _drop(self, effect: e.Drop) -> None:
        self.rendezvous.drop()

    def _sit(self, effect: e.Sit) -> int:
        generation, channel = effect.membership.generation, self.here.channel
        duration_us = int((time.monotonic() - channel.received_at(generation)) * 1e6)
        self.rendezvous.drop()
        self.saving.whole = None
        self.detection.regrouped(self.group, share=effect.share, joins=effect.joins)
        channel.forget(generation)
        return duration_us

    def _leave(self, effect: e.Leave) -> None:
        self.rendezvous.leave()

    def _report(self, effect: e.Report) -> None:
        self.rendezvous.report(effect.failure, effect.iteration, effect.phase)

    def _stand_by(self, effect: e.StandBy) -> None:
        self.rendezvous.stand_by(effect.membership)

    def _await_quit(self, effect: e.AwaitQuit) -> None:
        self.here.channel.wait(lambda: False)

    def _await_urgent(self, effect: e.AwaitUrgent) -> None:
        channel, generation = self.here.channel, self.rendezvous.generation
        with contextlib.suppress(QuitAsked):
            channel.wait(lambda: channel.newest(generation, urgent_only=True) is not None, effect.timeout_s)

    # --- agreeing --------------------------------------------------------------------------------

    def _any_shard(self, effect: e.AnyShard) -> bool:
        return not self.here.replica.all_true(not effect.value)

    def _rows(self, effect: e.Rows) -> list[list[int]]:
        return self._gathered(effect.row)

    def _pending(self, effect: e.Pending) -> int:
        return self.rendezvous.pending()

    def _membership_of(self, effect: e.MembershipOf) -> Membership | None:
        return self.here.channel.membership(effect.generation)

    def _agree(self, effect: e.Agree) -> list[list[int]]:
        """With this shard's sighting of the iteration behind the row."""
        ledger, width = self.books.ledger, len(effect.row)
        sighting = self.detection.sighting(ledger.iteration, ledger.finished, self.reduction.norm())
        tells = self.books.is_lead and self.detection.checks(ledger.iteration)
        rows = self._gathered([*effect.row, *sighting.row()], "agreeing", self._check_sums if tells else None)
        self.detection.agreed([row[width:] for row in rows])
        return [row[:width] for row in rows]

    def _check_sums(self) -> None:
        """The lead alone, while the agreement is under way: all have the same."""
        complete = self.reduction.complete()
        pieces = [[piece for _, piece in complete[bucket]] for bucket in range(self.books.buckets)]
        self.detection.summed(checksum_of_pieces(pieces))

    # --- gradients -------------------------------------------------------------------------------

    def _clear(self, effect: e.Clear) -> None:
        self.accumulation.clear()
        self.reduction.begin()
        if self.sharing is not None:
            self.sharing.optimizer.assembled = None
        self.here.iteration = effect.iteration

    def _keep_sums(self, effect: e.KeepSums) -> None:
        if self.runs is not None:
            self.runs.say_lost()
        self.reduction.keep(effect.final)
        self.accumulation.keep(effect.kept)

    def _last_stage(self, effect: e.LastStage) -> tuple[float, int]:
        loss_sum, tokens = self.here.replica.from_last_stage(effect.loss_sum, effect.tokens)
        return loss_sum, int(tokens)

    def _reduce(self, effect: e.Reduce) -> list[Account]:
        group = self.group

        def complete() -> list[list[int]]:
            account = effect.ledger.account(self.sampling, self.accumulation.surplus)
            rows: list[Rows] = []
            self.reduction.start(group, lambda: rows.append(group.all_gather(account.row())))
            self.fire("reducing")
            group.finish()
            return rows[0].read()

        return [Account.from_row(row) for row in self.rendezvous.together(complete)]

    def _settle(self, effect: e.Settle) -> None:
        self.accumulation.settle(self.reduction.sums(), effect.total.tokens)
        if self.finish is not None:
            self.finish()

    # --- state -----------------------------------------------------------------------------------

    def _look_around(self, effect: e.LookAround) -> list[int]:
        self._sources = Sources(self.here, self.saving.memory, effect.membership, self._resharded)
        return self._sources.row(is_first=effect.is_first)

    def _take(self, effect: e.Take) -> Loaded | str:
        """Raises NoLayout where it can never be taken over by this layout: to begin from the seed instead would throw
        away a training without an order to end it."""
        sources, candidate = self._sources, effect.candidate
        assert sources is not None
        tree: Tree | None = None
        size_bytes, reason = 0, "another shard of the replica could not load it"
        try:
            found, size_bytes = sources.load(candidate)
            self.state.require_fitting(found)
            tree = found
        except NoLayout:
            raise
        except BadState as error:
            reason = str(error)
        if self.here.replica.all_true(tree is not None) and tree is not None:
            return self._live_in(tree, size_bytes, candidate.kind, sources.resharded_from)
        return reason

    def _resharded(self, shards: Iterable[Tree]) -> Tree:
        """This shard's state, from all those of another layout."""
        return reshard(self.state.capture(0, 0.0), shards)

    def _live_in(self, tree: Tree, size_bytes: int, origin: StateSource, resharded_from: str = "") -> Loaded:
        iteration, loss = self.state.restore(tree)
        self.detection.inherit(tree.get("usual"))
        return Loaded(iteration, loss, size_bytes, origin, float(tree.get("pace_s", 0.0)), resharded_from)

    def _give(self, effect: e.Give) -> None:
        state = {**self.state.capture(effect.iteration, effect.loss), "usual": self.detection.usual()}
        group, tree = self.group, {"origin": effect.origin, "state": state}
        self.rendezvous.together(lambda: transfer.give(group, tree))

    def _receive(self, effect: e.Receive) -> Loaded | None:
        group = self.group
        told, size_bytes = self.rendezvous.together(lambda: transfer.take(group, effect.source, effect.keep))
        return self._live_in(told["state"], size_bytes, told["origin"]) if effect.keep else None

    def _params_digest(self, effect: e.ParamsDigest) -> str:
        return self.state.params_digest()

    # --- saving ----------------------------------------------------------------------------------

    def _ask_due(self, effect: e.AskDue) -> Due:
        with self.detection.saving():
            return self.saving.due(effect.iteration, effect.membership, leads=effect.leads)

    def _save(self, effect: e.Save) -> None:
        duration_s = effect.duration_us / 1e6
        with self.detection.saving():
            self.saving.boundary(
                effect.iteration, duration_s, effect.loss, effect.membership, leads=effect.leads, due=effect.due
            )
        self.saving.whole = None
        if self.sharing is not None and not self.books.program_saves(effect.iteration):
            self.sharing.optimizer.assembled = None

    def _save_and_wait(self, effect: e.SaveAndWait) -> None:
        if self.sharing is not None and self.saving.whole is None:
            self._put_together(self.sharing, self.sharing.alone(), 0.0)
        last = effect.iteration, self.here.generation, effect.loss
        if not (effect.handover and self.saving.capture_and_wait(*last)):
            self.saving.save_and_wait(*last)
        if self.closing is not None:
            self.closing()

    # --- sharded optimizer state -----------------------------------------------------------------

    @property
    def _shared(self) -> Sharing:
        assert self.sharing is not None
        return self.sharing

    def _gather(self, effect: e.Gather) -> None:
        sharing = self._shared

        def gather() -> None:
            group = self.group
            arriving = sharing.gather(group, effect.moves)
            self.fire("gathering")
            group.finish()
            sharing.land(arriving)

        self.rendezvous.together(gather)

    def _stage_first(self, effect: e.StageFirst) -> None:
        self._shared.stage_first(effect.parts)

    def _stage(self, effect: e.Stage) -> int:
        group, sharing = self.group, self._shared
        return self.rendezvous.together(lambda: sharing.stage(group, effect.parts, effect.moves))

    def _adopt(self, effect: e.Adopt) -> None:
        self._shared.optimizer.adopt()

    def _forget(self, effect: e.Forget) -> None:
        if self.sharing is not None:
            self.sharing.optimizer.forget()

    def _assemble(self, effect: e.Assemble) -> None:
        group, sharing, started_s = self.group, self._shared, time.monotonic()
        with self.detection.saving() if effect.at_boundary else contextlib.nullcontext():
            rows = self.rendezvous.together(lambda: sharing.assemble(group, effect.moves))
            if rows is not None:
                self._put_together(sharing, rows, time.monotonic() - started_s)

    def _put_together(self, sharing: Sharing, rows: OptimizerRows, cost_s: float) -> None:
        sharing.optimizer.assembled = rows
        self.saving.whole = Whole(sharing.optimizer.whole_tree(rows), cost_s)


HANDLERS = e.handlers(Driver)
