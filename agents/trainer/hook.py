"""The hook: what a Megatron-core training loop calls, and all that unicrond needs of it.

    hook = Hook.attach(model, optimizer, scheduler)
    for step in hook.steps():
        for micro_batch in step:                    # dealt to this replica; more of them after a peer's death
            loss_sum, tokens = forward_backward(step, micro_batch)
            step.add(loss_sum, tokens)
        optimizer.step()                            # the gradients are the global batch's mean, on every replica
        scheduler.step(...)

Rules
-----
* An iteration: micro-batches are dealt, computed, accumulated; *computed* when this replica's are all done; *reduced*
  when every bucket's sum and every replica's account are here (buckets are reduced while the last backward still
  runs, where the loop allows it: `reduction.py`); *agreed* when all members have said so; *committed*
  when the loop comes back for the next step. Only then is the accumulation cleared.
* Between micro-batches and in every wait, an urgent membership sends the worker to the next group, with its model,
  optimizer and accumulation; the verdict there (`regrouping.py`) says how the iteration goes on.
* A planned membership is followed at the boundary after an agreement that showed every member holding it.
* The *lead* is the first member: it reports commits, writes checkpoints, and says when the task is complete. Everybody
  keeps the newest commit, so that a new lead can report what the old one took with it.
* After the last iteration nobody leaves before the lead has saved: if it dies, another does it.
* With sharded optimizer state (`sharded_optimizer.py`) an iteration is committed when every replica's parameters have
  been gathered, each from one that has stepped it; a group that breaks before that gathers again in the next. A new
  group begins with that, then gives state to who has none, then divides the parts anew. Who leaves as planned, leaves
  its parts with those who stay.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import msgspec
import torch

from agents.trainer import context, randomness, transfer
from agents.trainer.accumulation import Accumulation
from agents.trainer.channel import QuitAsked
from agents.trainer.context import Context
from agents.trainer.detection import Detection
from agents.trainer.faults import LEFT_EARLY, LeftEarly, NanLoss, trouble
from agents.trainer.group import Broken, Group, Superseded
from agents.trainer.injection import Point
from agents.trainer.layout import layout_of
from agents.trainer.ledger import Account, Ledger, Total
from agents.trainer.messages import Committed, Completed, Membership, Parked, Ready, Regrouped, StopWanted, Taken
from agents.trainer.parts import Part
from agents.trainer.randomness import seed_all
from agents.trainer.reduction import Reduction
from agents.trainer.regrouping import Position, Verdict
from agents.trainer.rendezvous import LeftOut, Rendezvous, Seat, Stranded
from agents.trainer.resharding import NoLayout, reshard
from agents.trainer.sampling import Sampling, work_seed
from agents.trainer.saving import Due, Saving, Whole
from agents.trainer.sharded_optimizer import ShardedOptimizer
from agents.trainer.sharing import Sharing
from agents.trainer.sources import Candidate, Sources, newest, ordered
from agents.trainer.state import BadState, TrainingState
from events.vocabulary import StateSource

EXIT_STRANDED = 75
MAX_REASON = 512
#: In the agreement that ends an iteration: this replica's program has said stop (beside Due.word).
_STOP_BIT = 4
_FLUSH_S = 2.0
#: An exception in the body of the loop has been told of by then.
_LEFT_S = 1.0
_PARTING_S = 5.0
_BUSY_MAX_S = 7 * 86400.0
NOTHING = Due(False, False)
Origin = StateSource


@dataclass(slots=True)
class _Turn:
    """What the last verdict left to do: a transfer that is owed, and the hand for the iteration after this one."""

    verdict: Verdict
    transfer_owed: bool
    next_hand: tuple[int, ...] | None = None


class Step:
    """One iteration. Iterate over it to get the micro-batches that this replica is to compute."""

    def __init__(self, hook: Hook, iteration: int) -> None:
        self._hook = hook
        self.iteration = iteration
        self.agreed = False
        #: Mean loss per token over the global batch; known once the step is agreed.
        self.loss = float("nan")

    def __iter__(self) -> Iterator[int]:
        """One micro-batch at a time; after a peer's death between two of them, more may come."""
        for (micro_batch,) in self.lists(1):
            yield micro_batch

    def lists(self, at_most: int | None = None) -> Iterator[list[int]]:
        """Lists of micro-batches, as many as are left (pipeline schedules want them all at once) or `at_most`."""
        yield from self._hook._micro_batches(self, at_most)

    def add(self, loss_sum: float | torch.Tensor, tokens: int | torch.Tensor) -> None:
        """Account for the micro-batches just computed: sum of token losses, number of tokens (both 0 in pipeline
        stages without the loss). Raises NanLoss where the sum is not finite."""
        self._hook._add(float(loss_sum), int(tokens))

    def samples(self, micro_batch: int) -> tuple[int, ...]:
        """The indices of the micro-batch's samples in the data set."""
        return self._hook._sampling.samples(self.iteration, micro_batch)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """`with step.loading():` around what reads data: an exception, a hang there is told as one of the data."""
        here = self._hook._context
        phase, here.phase = here.phase, "data"
        yield
        here.phase = phase

    def seed(self, micro_batch: int) -> None:
        """Seed every random number drawn for the micro-batch; call it first in the forward step."""
        seed_all(work_seed(self._hook._context.launch.spec.seed, self.iteration, micro_batch))


@dataclass(slots=True)
class Hook:
    """A training process's side of unicrond. See the module's rules; make one with `attach`."""

    _context: Context
    _state: TrainingState
    _saving: Saving
    _sampling: Sampling
    _accumulation: Accumulation
    _reduction: Reduction
    _rendezvous: Rendezvous
    _ledger: Ledger
    _detection: Detection
    _overlap: bool
    _membership: Membership | None = None
    _turn: _Turn | None = None
    _total: Total | None = None
    _has_state: bool = False
    _origin: Origin = "own"
    _loss: float = 0.0
    _pace_s: float = 0.0
    _sharing: Sharing | None = None
    _stepped: bool = False
    _trained: bool = False
    _due: Due = NOTHING
    _committed: Committed | None = None
    _committed_told: bool = False
    _stop: str = ""
    _stopped: bool = False
    _over: bool = False
    _step: Step | None = None
    _early: LeftEarly | None = None
    _boundary_at: float = field(default_factory=time.monotonic)
    _target: int = 0

    @staticmethod
    def attach(
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any = None,
        *,
        dataset_size: int | None = None,
        overlap: bool = False,
    ) -> Hook:
        """Take over gradient accumulation and cross-replica reduction of `model` (or model chunks).

        `optimizer` and `scheduler` need state_dict and load_state_dict. `dataset_size`: samples in the data set,
        over which `step.samples` permutes; None: an endless stream. `overlap`: reduce inside the last backward; only
        for loops that give each parameter at most one gradient per micro-batch (one backward for each; an iteration
        fails where that is not so). Raises RuntimeError outside a worker.
        """
        here = context.current()
        models = [model] if isinstance(model, torch.nn.Module) else list(model)
        spec = here.launch.spec

        def layout() -> object:
            return msgspec.to_builtins(layout_of(models, optimizer, spec.tp, spec.pp))

        accumulation = Accumulation(
            (parameter for module in models for parameter in module.parameters()),
            exact=spec.accumulation == "exact",
            bucket_bytes=here.patience.bucket_bytes,
        )
        hook = Hook(
            _context=here,
            _state=(state := TrainingState(models, optimizer, scheduler, randomness, layout)),
            _saving=Saving(here, state),
            _sampling=Sampling(spec.seed, spec.global_batch, spec.micro_batch, dataset_size),
            _accumulation=accumulation,
            _reduction=Reduction(accumulation),
            _rendezvous=Rendezvous(here),
            _ledger=Ledger(iteration=0),
            _detection=Detection(here, (parameter for module in models for parameter in module.parameters())),
            _overlap=overlap,
            _sharing=Sharing(optimizer) if isinstance(optimizer, ShardedOptimizer) else None,
        )
        accumulation.arriving = partial(setattr, here.mark, "phase", "backward")
        hook._look_for_ordered_faults(models)
        here.finish = hook._finish
        here.channel.send(Ready())
        return hook

    @property
    def is_lead(self) -> bool:
        """Whether this process is the one of its task that reports: true in one of all, for what is to be done once
        (a run of W&B, an evaluation). Another becomes it when it is lost; false before the first step."""
        return self._is_lead()

    def steps(self) -> Iterator[Step]:
        """The iterations that are left, one after the other, from wherever the task stands."""
        self._regroup(None)
        complete = False
        while not complete:
            while self._goes_on():
                self._step = step = Step(self, self._ledger.iteration)
                self._context.phase = "forward"
                try:
                    yield step
                except GeneratorExit:
                    self._left()
                    raise
                if not step.agreed:
                    raise RuntimeError("the loop left a step before its micro-batches were all computed and agreed on")
                if self._gather():
                    self._commit()
            complete = self._complete()
        self._done()

    def stop(self, reason: str) -> None:
        """Have training end after the iteration on whose end all replicas next agree; the loop over `steps` ends then,
        on all of them, and the task is complete, with its state saved. One replica may say it, or all. `reason`: for
        people. Raises ValueError without one."""
        if not reason:
            raise ValueError("hook.stop(reason): say why, in a few words; the task's status tells it")
        if not self._stop:
            self._stop = reason[:MAX_REASON]
            iteration = max(0, self._ledger.iteration - 1)
            self._context.channel.send(StopWanted(iteration=iteration, reason=self._stop))

    @contextlib.contextmanager
    def busy(self, what: str, *, at_most_s: float) -> Iterator[None]:
        """`with hook.busy("evaluation", at_most_s=600):` around what takes long and is no training, inside the loop.

        Nobody is held to hang for it within that time; whoever is busy for longer is, and it is named so. Enter it on
        every replica, whoever does the work inside: the others then wait for as long. Raises ValueError.
        """
        if not what or not 0.0 < at_most_s <= _BUSY_MAX_S:
            raise ValueError(
                f"hook.busy({what!r}, at_most_s={at_most_s}): say with what, and for how many seconds at most (above 0,"
                f" at most {_BUSY_MAX_S:g})"
            )
        with self._detection.busy(what[:MAX_REASON], at_most_s):
            yield

    def _goes_on(self) -> bool:
        return self._ledger.iteration <= self._context.launch.spec.iterations and not self._stopped

    def _done(self) -> None:
        self._over = True
        self._context.phase = "done"

    # --- the end of the program -------------------------------------------------------------------

    def _left(self) -> None:
        """The program has left the loop. (Nothing may be raised here: nobody would hear it.)"""
        if self._over or self._context.over:
            return
        if self._stop:
            with contextlib.suppress(QuitAsked):
                self._leave_as_said()
        else:
            where = f"the loop over hook.steps() was left in iteration {self._context.iteration}"
            self._early = LeftEarly(f"{where}: {LEFT_EARLY}")
            late = threading.Timer(_LEFT_S, self._tell_left_early)
            late.daemon = True
            late.start()

    def _tell_left_early(self) -> None:
        """It is gone from its loop for good. (An exception in the loop's body ends the loop as well, before anybody
        can see it; it is told of as what it is, a moment later.)"""
        here, error = self._context, self._early
        if here.over or error is None:
            return
        print(f"{here.launch.worker}: {error}", file=sys.stderr, flush=True)
        here.channel.send(trouble(error, here.generation, here.iteration, here.phase))
        here.channel.flush(_FLUSH_S)
        here.over = True

    def _finish(self) -> None:
        """The program has ended, with code 0."""
        if self._over:
            return
        if self._context.over:
            raise SystemExit(1)  # it has been told of
        if self._early is not None:
            raise self._early
        if not self._stop or self._step is None:
            ran = f"in iteration {self._context.iteration} of {self._context.launch.spec.iterations}"
            raise LeftEarly(f"the program ended {ran if self._step else 'before it trained'}: {LEFT_EARLY}")
        self._leave_as_said()

    def _leave_as_said(self) -> None:
        """The program has said `stop`, and does not come back for the end of training: commit what it has stepped. If
        all have agreed on the end by then, they go it together. Else the others wait for this one in the next
        iteration; where they all have left as well, the log knows, and asks all to end; where not, they go on without
        it and end after their next. (A part of sharded optimizer state is not saved alone: newer processes train on
        from the last that was.)"""
        step, channel = self._step, self._context.channel
        assert step is not None
        if step.agreed and self._gather():
            self._commit()
        if self._stopped and self._complete():
            self._done()
            return
        self._detection.ending(self._ledger.iteration, self._group(), self._saving.longest_write_s)
        if self._sharing is None:
            if self._in_lead_replica():
                self._save_and_wait()
            channel.send(StopWanted(iteration=self._ledger.iteration - 1, reason=self._stop, left=True))
            generation = self._rendezvous.generation
            with contextlib.suppress(QuitAsked):
                channel.wait(lambda: channel.newest(generation, urgent_only=True) is not None, self._parting_s())
        self._done()
        channel.flush(_FLUSH_S)
        self._rendezvous.leave()

    def _parting_s(self) -> float:
        """How long the others may take to leave as well, before they are left."""
        return max(_PARTING_S, 2.0 * self._pace_s)

    # --- within an iteration ---------------------------------------------------------------------

    def _micro_batches(self, step: Step, at_most: int | None) -> Iterator[list[int]]:
        while not step.agreed:
            try:
                self._rendezvous.look()
                todo = self._ledger.todo()[:at_most]
                if todo:
                    self._detection.own_time.begin()
                    self._fire("micro_batch")
                    self._context.mark.working(self._ledger.finished)
                    if self._overlap and len(todo) == len(self._ledger.todo()):
                        self._reduction.overlap(self._group(), len(todo))
                    yield todo
                    self._detection.own_time.end(len(todo))
                    self._ledger.finished += len(todo)
                else:
                    self._reduce()
                    step.agreed = True
            except Broken as failure:
                self._rendezvous.leave()
                self._rendezvous.report(failure, self._ledger.iteration, "reduce")
                step.agreed = self._regroup(None)
            except Superseded:
                step.agreed = self._regroup(None)
        step.loss = self._settle()

    def _look_for_ordered_faults(self, models: Sequence[torch.nn.Module]) -> None:
        """Points inside the computation are looked for only where a fault is ordered there."""
        expects = self._context.injection.expects
        parameters = [
            (module, own) for model in models for module in model.modules() for own in module.parameters(False)
        ]
        module, parameter = parameters[len(parameters) // 2]
        if expects("forward"):
            module.register_forward_hook(lambda *_: self._fire("forward"))
        if expects("backward"):
            parameter.register_hook(lambda _: self._fire("backward"))
        if expects("partly"):
            self._reduction.started_one = self._partly

    def _partly(self) -> None:
        if self._context.injection.expects("partly"):
            with contextlib.suppress(Broken, Superseded):  # it will show again where the rest is waited for
                self._group().finish()
                self._fire("partly")

    def _fire(self, point: Point) -> None:
        self._context.injection.fire(point, self._ledger.iteration, self._rendezvous.generation, self._ledger.finished)

    def _add(self, loss_sum: float, tokens: int) -> None:
        loss_sum = self._context.injection.spoilt(loss_sum)
        if loss_sum - loss_sum != 0.0:  # neither NaN nor infinite
            raise NanLoss(f"the loss of a micro-batch of iteration {self._ledger.iteration} is {loss_sum}")
        self._ledger.add(loss_sum, tokens)

    def _reduce(self) -> None:
        """Bring this iteration from *computed* to *agreed*. Raises Broken or Superseded."""
        self._context.phase = "reduce"
        self._fire("computed")
        group, ledger, replica = self._group(), self._ledger, self._context.replica
        loss_sum, tokens = replica.from_last_stage(ledger.loss_sum, ledger.tokens)
        ledger.loss_sum, ledger.tokens = loss_sum, int(tokens)
        if self._total is None:
            self._total = self._rendezvous.together(lambda: self._sum(group))
        self._fire("reduced")
        pending = self._rendezvous.pending()
        (stops,) = self._context.replica.highest(int(bool(self._stop)))

        sighting = self._detection.sighting(ledger.iteration, ledger.finished, self._reduction.norm())
        due = NOTHING
        if self._sharing is not None and self._membership is not None:
            with self._detection.saving():
                due = self._saving.due(ledger.iteration, self._membership, leads=self._in_lead_replica())

        def agree() -> list[list[int]]:
            rows = group.all_gather([ledger.iteration, pending, due.word() + _STOP_BIT * stops, *sighting.row()])
            self._fire("agreeing")
            group.finish()
            return rows.read()

        rows = self._rendezvous.together(agree)
        held_by_all = {row[1] for row in rows} == {pending}
        self._target = pending if held_by_all else 0
        self._due = Due.of(rows[0][2])
        if any(row[2] & _STOP_BIT for row in rows):
            self._stop = self._stop or "another replica's program asked for it"
            self._stopped, self._target = True, 0
        self._detection.agreed([row[3:] for row in rows])

    def _sum(self, group: Group) -> Total:
        """Complete all sums over the replicas, and gather their accounts."""
        self._reduction.start(group)
        accumulation = self._accumulation
        account = self._ledger.account(self._sampling, accumulation.peak(), accumulation.surplus)
        rows = group.all_gather(account.row())
        self._fire("reducing")
        group.finish()
        total = Total(group.generation, tuple(Account.from_row(row) for row in rows.read()))
        total.check(self._ledger.iteration, self._context.launch.spec.micro_batches)
        return total

    def _settle(self) -> float:
        """The iteration is agreed: its gradients are final. Returns the mean loss."""
        assert self._total is not None
        self._accumulation.settle(self._reduction.sums(), self._total.tokens)
        self._context.phase = "step"
        self._fire("agreed")
        return self._total.loss

    # --- between iterations ----------------------------------------------------------------------

    def _gather(self) -> bool:
        """The loop has stepped: have what other replicas have stepped. False: the live state was lost meanwhile,
        another iteration begins instead."""
        self._trained = True
        if self._sharing is None:
            return True
        self._stepped = True
        self._fire("stepped")
        while True:
            try:
                self._rendezvous.together(self._gather_once)
            except Broken as failure:
                self._rendezvous.leave()
                self._rendezvous.report(failure, self._ledger.iteration, "step")
            except Superseded:
                pass
            else:
                self._stepped = False
                return True
            if not self._regroup(None):
                return False

    def _gather_once(self) -> None:
        assert self._sharing is not None
        group = self._group()
        arriving = self._sharing.gather(group)
        self._fire("gathering")
        group.finish()
        self._sharing.land(arriving)

    def _commit(self) -> None:
        """The loop has stepped: report, save, and go where the next iteration is to happen."""
        assert self._total is not None
        total, iteration = self._total, self._ledger.iteration
        now = time.monotonic()
        self._loss = total.loss
        self._committed = Committed(
            generation=total.generation,
            iteration=iteration,
            samples=total.samples,
            samples_digest=total.samples_digest,
            loss=total.loss,
            duration_us=int((now - self._boundary_at) * 1e6),
            micro_batches_by_rank=total.micro_batches_by_rank,
            redone=total.redone,
        )
        self._committed_told = False
        self._boundary_at = now
        self._total = None
        self._tell_committed()
        self._observe(iteration, total, self._committed.duration_us)
        turn, self._turn = self._turn, None
        hand = turn.next_hand if turn is not None else None
        self._begin(iteration + 1)
        self._detection.begun(iteration + 1)
        self._fire("committed")
        target = self._context.channel.membership(self._target) if self._target else None
        try:
            self._save(iteration, self._committed.duration_us)
            if turn is not None and turn.transfer_owed:
                self._ledger.deal(hand or (), redone=False)
                self._transfer(turn)
                return
            if target is not None:
                self._leave_parts(target)
        except Superseded:
            self._regroup(None)
            return
        except Broken as failure:
            self._rendezvous.leave()
            self._rendezvous.report(failure, self._ledger.iteration, "regroup")
            self._regroup(None)
            return
        if target is not None:
            self._regroup(target)
        else:
            self._ledger.deal(self._fair_hand() if hand is None else hand, redone=False)
            if self._membership is not None:
                self._rendezvous.stand_by(self._membership)

    def _observe(self, iteration: int, total: Total, duration_us: int) -> None:
        membership, group = self._membership, self._group()
        assert membership is not None
        self._detection.committed(iteration, duration_us, group)
        self._saving.usual = self._detection.usual()
        self._detection.judge(iteration, total, membership, self._context.launch.shard, group.rank)

    def _begin(self, iteration: int) -> None:
        self._accumulation.clear()
        self._reduction.begin()
        self._ledger = Ledger(iteration=iteration)
        self._context.iteration = iteration

    def _fair_hand(self) -> range:
        """Round-robin: this replica's share of an iteration from the start (what `deal` gives to empty hands)."""
        group = self._group()
        return range(group.rank, self._context.launch.spec.micro_batches, group.size)

    def _is_lead(self) -> bool:
        return self._membership is not None and self._membership.members[0].worker == self._context.launch.worker

    def _in_lead_replica(self) -> bool:
        members = () if self._membership is None else self._membership.members
        mine = [member.replica for member in members if member.worker == self._context.launch.worker]
        return bool(mine) and mine[0] == members[0].replica

    def _tell_committed(self) -> None:
        if self._committed is not None and not self._committed_told and self._is_lead():
            self._context.channel.send(self._committed)
            self._committed_told = True

    def _save(self, iteration: int, duration_us: int) -> None:
        """Save what is due after `iteration`, which took `duration_us`."""
        assert self._membership is not None
        self._context.phase = "checkpoint"
        due = None
        with self._detection.saving():
            if self._sharing is not None:
                due, self._due = self._due, NOTHING
                if due.anything:
                    self._assemble()
            self._saving.boundary(
                iteration, duration_us / 1e6, self._loss, self._membership, leads=self._in_lead_replica(), due=due
            )
        self._saving.whole = None

    def _assemble(self) -> None:
        """Have the lead's replica hold the whole optimizer state, to be saved; all take part. Raises Broken,
        Superseded."""
        sharing, started = self._sharing, time.monotonic()
        assert sharing is not None
        rows = self._rendezvous.together(lambda: sharing.assemble(self._group()))
        if rows is not None:
            self._saving.whole = Whole(sharing.optimizer.whole_tree(rows), time.monotonic() - started)

    def _leave_parts(self, target: Membership) -> None:
        """Before leaving for a planned membership: have those who stay hold every part, or, if nobody stays, the lead
        hold everything, to be saved. Raises Broken, Superseded."""
        sharing = self._sharing
        if sharing is None or self._membership is None:
            return
        named = {member.worker for member in target.members}
        mine = [member for member in self._membership.members if member.shard == self._context.launch.shard]
        staying = [rank for rank, member in enumerate(mine) if member.worker in named]
        if not staying:
            self._assemble()
        elif not sharing.is_whole_in([sharing.layout[rank] for rank in staying]):
            nodes = self._nodes(self._membership)
            self._divide(sharing.cut(nodes, staying))

    def _save_and_wait(self, *, handover: bool = False) -> None:
        """Have the last committed iteration on storage; all shards of the replica take part. `handover`: memory will
        do, where it has room."""
        if self._ledger.iteration > 1:
            self._context.phase = "checkpoint"
            if self._sharing is not None and self._saving.whole is None:
                rows = self._sharing.alone()
                if rows is None:
                    print(
                        f"{self._context.launch.worker}: this replica has parts of the state only: not saved",
                        flush=True,
                    )
                    return
                self._saving.whole = Whole(self._sharing.optimizer.whole_tree(rows), 0.0)
            last = self._ledger.iteration - 1, self._context.generation, self._loss
            if not (handover and self._saving.capture_and_wait(*last)):
                self._saving.save_and_wait(*last)

    def _complete(self) -> bool:
        """Let the lead save and say that the task is complete; leave together. False: the live state was lost before
        that, and iterations are left."""
        told = False
        while True:
            writes = self._in_lead_replica() and bool(self._context.launch.spec.checkpoint.dir)
            longest_s = self._saving.longest_write_s if writes else None
            self._detection.ending(self._ledger.iteration, self._group(), longest_s)
            try:
                if self._sharing is not None and self._context.launch.spec.checkpoint.dir:
                    self._assemble()
                if self._in_lead_replica() and not told:
                    self._save_and_wait()
                if self._is_lead() and not told:
                    self._context.channel.send(
                        Completed(
                            iteration=self._ledger.iteration - 1,
                            loss=self._loss,
                            params_digest=self._state.params_digest(),
                        )
                    )
                    self._context.channel.flush(5.0)
                told = told or self._in_lead_replica()
                self._farewell(self._group())
                return True
            except (Broken, Superseded) as failure:
                self._rendezvous.leave()
                if isinstance(failure, Broken):
                    self._rendezvous.report(failure, self._ledger.iteration, "checkpoint")
                self._regroup(None)
                if self._goes_on():
                    return False

    def _farewell(self, group: Group) -> None:
        def wave() -> None:
            group.all_gather([self._ledger.iteration])
            group.finish()

        self._rendezvous.together(wave)

    # --- from group to group ---------------------------------------------------------------------

    def _group(self) -> Group:
        group = self._rendezvous.group
        assert group is not None
        return group

    def _position(self) -> Position:
        return Position(
            has_state=self._has_state,
            iteration=self._ledger.iteration if self._has_state else 0,
            sums_complete=self._total is not None,
            held=tuple(self._ledger.held) if self._has_state else (),
            complete=tuple(self._reduction.complete()) if self._has_state else (),
            stepped=self._stepped,
            spans=tuple(self._sharing.optimizer.spans()) if self._sharing is not None and self._has_state else (),
        )

    def _regroup(self, target: Membership | None) -> bool:
        """Take a seat in the next group, state included. True: step first, with the sums that are complete."""
        while True:
            self._context.phase = "regroup"
            self._context.mark.idle()
            self._turn = None
            self._target = 0
            self._due = NOTHING
            self._stopped = False  # the next group agrees on it anew
            try:
                micro_batches, buckets = self._context.launch.spec.micro_batches, len(self._accumulation)
                total = 0 if self._sharing is None else self._sharing.total
                seat = self._rendezvous.join(self._position(), micro_batches, buckets, target, total)
            except LeftOut as left_out:
                self._park(left_out.membership)
            except Stranded as stranded:
                self._give_up(stranded)
            target = None
            self._membership = seat.membership
            self._stop = self._stop or seat.membership.stop
            replicas = len({member.replica for member in seat.membership.members})
            share = -(-self._context.launch.spec.micro_batches // replicas)
            self._detection.regrouped(self._group(), share=share, joins=bool(seat.membership.joiners))
            self._context.channel.forget(seat.membership.generation)
            self._turn, step_first = self._apply(seat.verdict)
            if step_first:
                self._tell_regrouped(seat, "own")
                return True
            origin: Origin = "own"
            if self._turn.transfer_owed:
                try:
                    origin = self._transfer(self._turn)
                except Superseded:
                    continue
                except Broken as failure:
                    self._rendezvous.leave()
                    self._rendezvous.report(failure, self._ledger.iteration, "regroup")
                    continue
            self._tell_regrouped(seat, origin)
            return False

    def _apply(self, verdict: Verdict) -> tuple[_Turn, bool]:
        """Act on the verdict as far as this member's own books go; the transfer is left to `_transfer`."""
        rank = self._group().rank
        hand = verdict.dealt[rank]
        turn = _Turn(verdict, transfer_owed=bool(verdict.receivers) or self._sharing is not None)
        if self._sharing is not None:
            self._sharing.layout = list(verdict.shares)
            if verdict.fresh:
                self._lose(self._sharing)
        if rank in verdict.step_first:
            turn.next_hand = hand
            return turn, True
        self._total = None
        if rank in verdict.receivers:
            self._begin(verdict.iteration)
            self._ledger.deal(hand, redone=False)
        else:
            self._reduction.keep(verdict.final)
            if verdict.final:
                kept = f"{len(verdict.final)} of {len(self._accumulation)} buckets are final"
                print(f"{self._context.launch.worker}: iteration {verdict.iteration} goes on, {kept}", flush=True)
            self._ledger.deal(hand, redone=bool(self._ledger.held))
        return turn, False

    def _lose(self, sharing: Sharing) -> None:
        """Nobody has state any more; this member's, if it had any, is no more than a part."""
        if self._has_state:
            print(f"{self._context.launch.worker}: all holders of a part of the state are lost", flush=True)
        sharing.optimizer.forget()
        self._has_state = self._stepped = False

    def _transfer(self, turn: _Turn) -> Origin:
        """Bring everybody to the verdict's iteration: parameters, state for who has none, and its parts for each."""
        verdict, sharing = turn.verdict, self._sharing
        if sharing is not None and verdict.step_first and self._group().rank not in verdict.step_first:
            self._rendezvous.together(self._gather_once)
        origin = self._give_or_take(verdict) if verdict.receivers else "own"
        if sharing is not None and self._membership is not None:
            nodes = self._nodes(self._membership)
            self._divide(sharing.cut(nodes), begin=verdict.fresh and self._origin == "init")
        turn.transfer_owed = False
        return origin

    def _nodes(self, membership: Membership) -> list[frozenset[str]]:
        """The nodes that each replica stands on, in rank order."""
        found: dict[int, set[str]] = {}
        for member in membership.members:
            found.setdefault(member.replica, set()).add(member.node)
        return [frozenset(nodes) for nodes in found.values()]

    def _divide(self, cut: Sequence[Sequence[Part]], *, begin: bool = False) -> None:
        """Have each member hold its parts, `cut[rank]`, and nothing else. Raises Broken, Superseded."""
        group, sharing, started = self._group(), self._sharing, time.monotonic()
        assert sharing is not None
        received_bytes = 0
        if begin:
            sharing.begin(group, cut)
        else:
            received_bytes = self._rendezvous.together(lambda: sharing.divide(group, cut))
        self._fire("dividing")
        self._rendezvous.together(partial(_gathered, group, [1]))
        sharing.adopt(cut)
        held = ", ".join(f"{part.index + 1} of {part.count}" for part in cut[group.rank]) or "none"
        took = f"{received_bytes} bytes of them from other replicas, {(time.monotonic() - started) * 1e3:.0f} ms"
        print(f"{self._context.launch.worker}: holds parts {held}; {took}", flush=True)

    def _give_or_take(self, verdict: Verdict) -> Origin:
        """Give, take, or stand by while the source's state is broadcast."""
        group = self._group()
        rank, started = group.rank, time.monotonic()
        source = self._find_state(group) if verdict.fresh else verdict.source
        self._fire("giving")
        if rank == source:
            state = {**self._state.capture(self._ledger.iteration - 1, self._loss), "usual": self._detection.usual()}
            tree = {"origin": self._origin, "state": state}
            self._rendezvous.together(lambda: transfer.give(group, tree))
        else:
            keep = rank in verdict.receivers
            told, size_bytes = self._rendezvous.together(lambda: transfer.take(group, source, keep))
            if keep:
                self._live_in(told["state"])
                self._origin = told["origin"] if verdict.fresh else "replica"
                if not verdict.fresh:
                    self._tell_taken("replica", size_bytes, started)
        if self._sharing is not None and verdict.fresh:
            self._sharing.layout = [()] * group.size
            self._sharing.layout[source] = [(0, self._sharing.total)]
        return self._origin if rank in verdict.receivers or verdict.fresh else "own"

    def _find_state(self, group: Group) -> int:
        """Nobody has state: let the member that is nearest to the newest take it (`sources.py`). Its rank."""
        assert self._membership is not None
        started, rank = time.monotonic(), group.rank
        tried: list[str] = []
        sources = Sources(self._context, self._saving.memory, self._membership.peers, self._resharded)
        row = sources.row(is_first=rank == 0)
        rows = self._rendezvous.together(partial(_gathered, group, row))
        for candidate in ordered(rows):
            taken = 0
            if candidate.rank == rank:
                taken = self._take(sources, candidate, tried)
            answers = self._rendezvous.together(partial(_gathered, group, [taken]))
            if answers[candidate.rank][0]:
                if candidate.rank == rank:
                    stored = newest(rows, "checkpoint")
                    self._tell_taken(candidate.kind, taken, started, tried, stored, sources.resharded_from)
                return candidate.rank
        seed = self._untouched(group)
        if rank == seed:
            self._origin = "init"
            self._stand_after(0)
            self._tell_taken("init", 0, started, tried)
        return seed

    def _untouched(self, group: Group) -> int:
        """The first member whose state is still that of the seed. Raises RuntimeError where there is none."""
        if self._sharing is None:
            return 0
        rows = self._rendezvous.together(partial(_gathered, group, [int(self._trained)]))
        if [1] in rows and [0] not in rows:
            raise RuntimeError(
                "all holders of a part of the optimizer's state are lost, and nothing was saved: training has to begin"
                " anew, in new processes"
            )
        return rows.index([0])

    def _take(self, sources: Sources, candidate: Candidate, tried: list[str]) -> int:
        """Live in the candidate's state, if it is sound for all shards; its size in bytes, 0 if it is not.

        Raises NoLayout where it can never be taken over by this layout: to begin from the seed instead would throw
        away a training that nobody asked to end.
        """
        tree: dict[str, Any] | None = None
        size_bytes, reason = 0, "another shard of the replica could not take it"
        try:
            loaded, size_bytes = sources.load(candidate)
            self._state.require_fitting(loaded)
            tree = loaded
        except NoLayout:
            raise
        except BadState as error:
            reason = str(error)
        if self._context.replica.all_true(tree is not None) and tree is not None:
            self._live_in(tree)
            self._origin = candidate.kind
            return size_bytes
        tried.append(f"{candidate}: {reason}"[:1024])
        print(f"{self._context.launch.worker}: no state from {tried[-1]}", flush=True)
        return 0

    def _resharded(self, shards: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """This shard's state, from all those of another layout."""
        return reshard(self._state.capture(0, 0.0), shards)

    def _live_in(self, tree: dict[str, Any]) -> None:
        iteration, self._loss = self._state.restore(tree)
        self._trained = True
        self._pace_s = float(tree.get("pace_s", 0.0))
        self._detection.inherit(tree.get("usual"))
        self._stand_after(iteration)

    def _stand_after(self, iteration: int) -> None:
        hand = list(self._ledger.held)
        self._begin(iteration + 1)
        self._ledger.deal(hand, redone=False)
        self._has_state = True

    def _tell_taken(
        self, source: Origin, size_bytes: int, started: float, tried: Sequence[str] = (), storage_iteration: int = 0,
        resharded_from: str = "",
    ) -> None:  # fmt: skip
        assert self._membership is not None
        iteration = self._ledger.iteration - 1
        nearer = source in ("memory", "peer")
        self._context.channel.send(
            Taken(
                generation=self._membership.generation,
                source=source,
                iteration=iteration,
                size_bytes=size_bytes,
                duration_us=int((time.monotonic() - started) * 1e6),
                tried=tuple(tried),
                storage_iteration=storage_iteration,
                saved_us=int(max(0, iteration - storage_iteration) * self._pace_s * 1e6) if nearer else 0,
                resharded_from=resharded_from,
            )
        )

    def _tell_regrouped(self, seat: Seat, source: Origin) -> None:
        self._boundary_at = self._boundary_at if source == "own" else time.monotonic()
        self._detection.begun(self._ledger.iteration)
        self._group().waits = None
        self._context.channel.send(
            Regrouped(
                generation=seat.membership.generation,
                iteration=self._ledger.iteration,
                dealt=self._ledger.redone,
                duration_us=seat.duration_us,
                source=source,
            )
        )
        self._tell_committed()

    def _park(self, target: Membership) -> NoReturn:
        """This worker is no longer a member: say so, and wait to be ended. Its last group stays open, see
        `rendezvous.py`. Where nobody stays, the lead's replica is the last that can save the state: to memory, where
        others are about to take it from there, else to storage."""
        present = () if self._membership is None else self._membership.members
        staying = {member.worker for member in present}.intersection(member.worker for member in target.members)
        if self._has_state and not staying and self._in_lead_replica():
            self._save_and_wait(handover=target.handover)
        self._context.channel.send(Parked(generation=target.generation, iteration=max(0, self._ledger.iteration - 1)))
        self._context.channel.wait(lambda: False)
        raise QuitAsked

    def _give_up(self, stranded: Stranded) -> NoReturn:
        """No membership came: save what there is and stop."""
        print(f"{self._context.launch.worker}: {stranded}; saving and ending", flush=True)
        if self._has_state:
            self._save_and_wait()
        raise SystemExit(EXIT_STRANDED)


def _gathered(group: Group, row: Sequence[int]) -> list[list[int]]:
    rows = group.all_gather(row)
    group.finish()
    return rows.read()
