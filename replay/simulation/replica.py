"""A replica's main thread: agents/trainer/hook.py and rendezvous.py, step for step, around the real pure parts.

Real here: `judge` and `deal`, positions and their rows, ledger, accounts, totals, sampling. Modelled: the model (a
chain of hashes), time, collectives. All shards of a replica take the same turns, as their vote makes them: one
coroutine.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

from msgspec.structs import replace

from agents.classify import EXIT_NO_MEMBERSHIP
from agents.trainer import regrouping
from agents.trainer.injection import PHASES, Point
from agents.trainer.ledger import Account, Ledger, Total
from agents.trainer.messages import (
    Captured,
    Committed,
    Completed,
    FromWorker,
    Membership,
    Parked,
    Ready,
    Regrouped,
    Saved,
    Taken,
    Trouble,
    Waits,
)
from agents.trainer.regrouping import Position, Verdict
from agents.trainer.sampling import Sampling
from events.vocabulary import ErrorKind, Fault, Phase
from replay.simulation.buckets import BUCKETS, Buckets, from_row, to_row
from replay.simulation.group import Broken, End, Row, Superseded
from replay.simulation.memory import Copy, layout_of
from replay.simulation.progress import Progress

if TYPE_CHECKING:
    from replay.simulation.process import Process
    from replay.simulation.training import Training


def next_params(params: int, iteration: int, gradient: int) -> int:
    """The parameters after one more step: a chain, so that order and number of the steps count."""
    return hash((params, iteration, gradient))


Moment = Literal["computed", "reduced", "agreeing", "committed", "regrouped"]
Origin = Literal["own", "replica", "memory", "peer", "checkpoint", "init"]
_ORIGINS: tuple[Origin, ...] = get_args(Origin)
#: Where an ordered fault strikes, by the training loop's name for it (agents/trainer/injection.py).
_POINTS: dict[Moment, Point] = {
    "computed": "computed", "reduced": "reducing", "agreeing": "agreed", "committed": "saving", "regrouped": "formed",
}  # fmt: skip
_ORDERED_ERRORS: dict[str, ErrorKind] = {"exception": "exception", "oom": "out_of_memory", "nan": "nan_loss"}
_STATE, _NO_STATE = 1, 0
#: See agents/trainer/group.py, which would bring torch.
WAITS_S = 2.0


class QuitAsked(Exception):
    """The agent wants a shard to end."""


class LeftOut(Exception):
    """The membership to follow does not name this replica."""

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership.generation)
        self.membership = membership


class Stranded(Exception):
    """No membership came in time."""


class Replica:
    """`shards`: its processes, in shard order."""

    def __init__(self, training: Training, shards: list[Process]) -> None:
        self.training = training
        self.shards = shards
        self.task = shards[0].launch.task
        self.spec = shards[0].launch.spec
        self.lead_worker = shards[0].worker
        self.generation = 0
        interval = self.spec.checkpoint.interval or 0
        self.progress = Progress(shards[0].host.clock.monotonic_us, interval)
        self._sampling = Sampling(self.spec.seed, self.spec.global_batch, self.spec.micro_batch, None)
        self._membership: Membership | None = None
        self._end: End | None = None
        self._ledger = Ledger(iteration=0)
        self._buckets = Buckets(self.spec.micro_batches)
        self._total: Total | None = None
        self._verdict: Verdict | None = None
        self._next_hand: tuple[int, ...] | None = None
        self._transfer_owed = False
        self._has_state = False
        self._origin: Origin = "own"
        self._params = 0
        self._lineage = 0
        self._committed: Committed | None = None
        self._committed_told = False
        self._target = 0
        self._waker: asyncio.Future[None] | None = None
        self._main: asyncio.Task[None] | None = None
        self._failure: ErrorKind | None = None
        self._slow_s = 0.0
        self._lost: list[list[str]] = []
        #: Die there the next time: see `_reached`.
        self.die_at: Moment | Literal[""] = ""
        for shard in shards:
            shard.replica = self

    # --- the process -----------------------------------------------------------------------------

    def start(self) -> None:
        """Run the main thread."""
        self._main = self.training.loop.create_task(self._run())

    def shard_ended(self, shard: Process) -> None:
        """One process is gone: its sockets are closed, and the others' own collectives fail."""
        if self._main is not None:
            main, self._main = self._main, None
            main.cancel()
            if self._end is not None:
                self._end.leave(silently=not shard.host.on)
                self._end = None
            for other in self.shards:
                if other is not shard:
                    self.training.loop.call_later(0.05, self._break, other)

    def _break(self, shard: Process) -> None:
        if shard.alive and not shard.hung:
            if not shard.quit_asked:
                shard.say(self._trouble("exception", "a rank of this replica is gone", "forward"))
            status = 0 if shard.quit_asked else 1 << 8
            self.training.loop.call_later(0.01, shard.end, status)
        elif shard.alive:
            self.training.loop.call_later(0.5, self._break, shard)

    def _reached(self, moment: Moment) -> None:
        """A moment of the training at which a death is of interest: it comes now, or a little later."""
        self._obey(_POINTS[moment])
        if self.die_at == moment:
            self.die_at = ""
            victim = self.training.drawn.choice(self.shards)
            self.training.loop.call_later(self.training.drawn.choice((0.0, 0.005, 0.015)), victim.end, signal.SIGKILL)

    def _obey(self, point: Point) -> None:
        """Let the ordered faults strike that are due at this point."""
        for shard in self.shards:
            for fault in list(shard.ordered):
                if PHASES[fault.phase] == point and fault.at_iteration in (0, self._ledger.iteration):
                    shard.ordered.remove(fault)
                    self._strike(shard, fault)

    def _strike(self, shard: Process, fault: Fault) -> None:
        soon = self.training.loop.call_soon
        match fault.kind:
            case "kill":
                soon(shard.end, signal.SIGKILL)
            case "exit":
                soon(shard.end, 3 << 8)
            case "stop":
                shard.hung = shard.stopped = shard.for_ever = True
            case "hang":
                shard.stuck = shard.for_ever = True
            case "slow":
                self._slow_s = fault.seconds
            case kind if kind in _ORDERED_ERRORS:
                self.raise_in(_ORDERED_ERRORS[kind])

    def raise_in(self, kind: ErrorKind) -> None:
        """The next micro-batch fails with an error of this kind."""
        self._failure = kind

    def report(self, kind: ErrorKind) -> None:
        """It has seen an error that does not end it."""
        self.shards[0].say(self._trouble(kind, "simulated", "reduce"))

    def reset(self) -> None:
        """The connections of its group are reset; the process lives."""
        if self._end is not None:
            mine = self._end
            for other in list(mine.group.present.values()):
                if other is not mine:
                    mine.peer_left(other.rank)
                    other.peer_left(mine.rank)

    async def _run(self) -> None:
        code = 0
        try:
            for shard in self.shards:
                shard.say(Ready())
            await self._train()
            self.progress.done()
        except QuitAsked:
            code = 0
        except Stranded:
            if self._has_state and self._ledger.iteration > 1:
                await self._save()
            code = EXIT_NO_MEMBERSHIP
        except _Failure as failure:
            self._say_all(self._trouble(failure.kind, "simulated", "forward"))
            code = 1
        except Exception as error:  # a defect of ours: judge, deal and the accounts raise where positions contradict
            self.training.witness.broke("trainers_agree", f"{self.lead_worker}: {type(error).__name__}: {error}")
            code = 1
        if self._end is not None:
            self._end.leave()
            self._end = None
        self._main = None
        quits = any(shard.quit_asked for shard in self.shards)
        for shard in self.shards:
            if quits and not shard.quit_asked:
                self.training.loop.call_later(0.05, self._break, shard)
            else:
                shard.end(code << 8)

    # --- waiting ---------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something has happened that the main thread may wait for."""
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    async def _sleep(self, timeout_s: float | None) -> None:
        """Until woken, at most so long."""
        loop = self.training.loop
        self._waker = loop.create_future()
        timer = loop.call_later(timeout_s, self.wake) if timeout_s is not None else None
        try:
            await self._waker
        finally:
            self._waker = None
            if timer is not None:
                timer.cancel()

    async def _while_hung(self) -> None:
        while any(shard.hung or shard.stuck for shard in self.shards):
            await self._sleep(None)

    async def _wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """See AgentChannel.wait."""
        loop = self.training.loop
        until_s = None if timeout_s is None else loop.time() + timeout_s
        while True:
            await self._while_hung()
            if any(shard.quit_asked for shard in self.shards):
                raise QuitAsked
            if done():
                return True
            left_s = None if until_s is None else until_s - loop.time()
            if left_s is not None and left_s <= 0:
                return False
            await self._sleep(left_s)

    async def _work(self, duration_s: float) -> None:
        """Compute: nothing interrupts it but the process's end."""
        await asyncio.sleep(duration_s)
        await self._while_hung()
        while not all(self._in_touch(shard) for shard in self.shards):
            await self._sleep(0.3)  # a rank of this replica does not answer: its collectives wait

    def _in_touch(self, shard: Process) -> bool:
        return self.training.reach.reaches(shard.host.name, self.shards[0].host.name)

    def reaches(self, other: Replica) -> bool:
        """The network carries between the two, for every shard."""
        reach = self.training.reach
        return all(
            mine.host.on and theirs.host.on and reach.reaches(mine.host.name, theirs.host.name)
            for mine, theirs in zip(self.shards, other.shards, strict=True)
        )

    # --- messages --------------------------------------------------------------------------------

    def _say_all(self, message: FromWorker) -> None:
        for shard in self.shards:
            shard.say(message)

    def _trouble(self, kind: ErrorKind, message: str, phase: Phase) -> Trouble:
        iteration = self._ledger.iteration
        return Trouble(
            kind=kind, generation=self.generation, iteration=iteration, phase=phase, message=message, detail=""
        )

    def _newest(self, above: int, urgent_only: bool = False) -> int:
        """The newest generation that any shard was told."""
        return max(shard.newest(above, urgent_only) for shard in self.shards)

    def _pending(self) -> int:
        known = {shard.newest(self.generation) for shard in self.shards}
        return known.pop() if len(known) == 1 else 0

    def _report(self, failure: Broken, phase: Phase) -> None:
        self._note_losses()
        if not self._newest(self.generation, urgent_only=True):
            for number, shard in enumerate(self.shards):
                trouble = self._trouble("connection_broken", str(failure), phase)
                shard.say(replace(trouble, lost=tuple(sorted(mates[number] for mates in self._lost))))

    def _note_losses(self) -> None:
        """Whom it has lost, the workers of each replica; before it leaves the group, for that ends all connections."""
        if self._end is not None:
            members = self._end.group.membership.members
            places = {member.worker: member.replica for member in members}
            replicas = [places[lead] for number, lead in enumerate(self._end.group.leads) if number in self._end.lost]
            self._lost = [[m.worker for m in members if m.replica == replica] for replica in replicas]

    # --- an iteration ----------------------------------------------------------------------------

    async def _train(self) -> None:
        await self._regroup(None)
        while self._ledger.iteration <= self.spec.iterations:
            await self._iterate()
            await self._work(0.002)  # the optimizer's step
            await self._commit()
        await self._complete()

    async def _iterate(self) -> None:
        """From the hand that was dealt to the agreement of all."""
        agreed = False
        while not agreed:
            try:
                self._look()
                if todo := self._ledger.todo():
                    await self._compute(todo[0], is_last=len(todo) == 1)
                else:
                    await self._reduce()
                    agreed = True
            except Broken as failure:
                self._leave()
                self._report(failure, "reduce")
                agreed = await self._regroup(None)
            except Superseded:
                agreed = await self._regroup(None)

    async def _compute(self, micro_batch: int, *, is_last: bool) -> None:
        """One micro-batch. Inside the last backward the reduction of the buckets begins, one after the other."""
        self.progress.working(self._ledger.finished)
        self._obey("micro_batch")
        if self._slow_s:
            await self._work(self._slow_s)
        if is_last and self._end is not None:
            await self._work(self.training.micro_batch_s * 0.4)
            self._buckets.add(micro_batch)
            while self._end is not None and self._buckets.start_next(self._end, self.training.collective_timeout_s):
                await self._work(self.training.micro_batch_s * 0.2)
        else:
            await self._work(self.training.micro_batch_s)
            self._buckets.add(micro_batch)
        if self._failure is not None:
            raise _Failure(self._failure)
        self._ledger.finished += 1
        self._ledger.add(1.0, self.spec.micro_batch)

    def _look(self) -> None:
        if any(shard.quit_asked for shard in self.shards):
            raise QuitAsked
        if self._newest(self.generation, urgent_only=True):
            raise Superseded

    async def _gather(self, row: Row) -> list[Row]:
        """A collective of the present group, and the wait for it. Raises Broken, Superseded, QuitAsked."""
        self.progress.entering()
        rows = await self._rows(row)
        self.progress.leaving()
        return rows

    async def _rows(self, row: Row) -> list[Row]:
        end = self._end
        assert end is not None
        result = end.gather(row, self.training.collective_timeout_s)
        await self._wait(lambda: result.over or bool(self._newest(self.generation, urgent_only=True)))
        if result.error:
            raise Broken(result.error)
        if result.rows is None:
            raise Superseded
        return result.rows

    async def _reduce(self) -> None:
        """From *computed* to *agreed*."""
        ledger = self._ledger
        self._reached("computed")
        if self._total is None:
            self._total = await self._sum()
        self._reached("reduced")
        pending = self._pending()
        self._reached("agreeing")
        agreed = await self._gather([ledger.iteration, pending])
        self._target = pending if {row[1] for row in agreed} == {pending} else 0

    async def _sum(self) -> Total:
        """Complete all sums over the replicas, and gather their accounts."""
        end, buckets, timeout_s = self._end, self._buckets, self.training.collective_timeout_s
        assert end is not None
        while buckets.start_next(end, timeout_s):
            pass
        self.progress.entering()
        rows = await self._rows(self._ledger.account(self._sampling).row())
        await self._wait(lambda: buckets.settled or bool(self._newest(self.generation, urgent_only=True)))
        if buckets.error:
            raise Broken(buckets.error)
        if not buckets.settled:
            raise Superseded
        self.progress.leaving()
        total = Total(self.generation, tuple(Account.from_row(row) for row in rows))
        total.check(self._ledger.iteration, self.spec.micro_batches)
        return total

    # --- between iterations ----------------------------------------------------------------------

    async def _commit(self) -> None:
        total, iteration = self._total, self._ledger.iteration
        assert total is not None
        # Where a micro-batch is missing in a bucket, or twice, the parameters are other ones for ever.
        gradient = total.samples_digest if self._buckets.are_right() else -1
        self._params = next_params(self._params, iteration, gradient)
        self.training.witness.step_committed(self, iteration, self._lineage, total, self._params)
        self._committed = Committed(
            generation=total.generation,
            iteration=iteration,
            samples=total.samples,
            samples_digest=total.samples_digest,
            loss=total.loss,
            duration_us=1000,
            micro_batches_by_rank=total.micro_batches_by_rank,
            redone=total.redone,
        )
        self._committed_told = False
        self._total = None
        self._tell_committed()
        self._reached("committed")
        hand, self._next_hand = self._next_hand, None
        self.progress.committed(iteration)
        self._begin(iteration + 1)
        self.progress.begun(iteration + 1)
        if self._is_lead() and iteration % self.training.capture_every == 0:
            await self._capture(iteration)
        interval = self.spec.checkpoint.interval
        if interval and iteration % interval == 0 and iteration < self.spec.iterations:
            await self._save_if_lead()
        if self._transfer_owed:
            self._ledger.deal(hand or (), redone=False)
            try:
                await self._transfer()
            except Superseded:
                await self._regroup(None)
            except Broken as failure:
                self._leave()
                self._report(failure, "regroup")
                await self._regroup(None)
        elif self._target:
            target, self._target = self._membership_of(self._target), 0
            await self._regroup(target)
        else:
            self._ledger.deal(self._fair_hand() if hand is None else hand, redone=False)

    def _begin(self, iteration: int) -> None:
        if any(shard.host.name in self.training.link_breakers for shard in self.shards):
            self.training.loop.call_later(self.training.drawn.uniform(0.0, 0.05), self.reset)
        self._buckets.begin()
        self._ledger = Ledger(iteration=iteration)

    def _fair_hand(self) -> range:
        assert self._end is not None
        return range(self._end.rank, self.spec.micro_batches, self._end.group.size)

    def _is_lead(self) -> bool:
        return self._membership is not None and self._membership.members[0].worker == self.lead_worker

    def _tell_committed(self) -> None:
        if self._committed is not None and not self._committed_told and self._is_lead():
            self.shards[0].say(self._committed)
            self._committed_told = True

    async def _save_if_lead(self) -> None:
        if self._ledger.iteration > 1 and self._is_lead():
            await self._save()

    async def _save(self) -> None:
        iteration = self._ledger.iteration - 1
        await self._work(self.training.drawn.uniform(0.01, 0.2))
        self.training.save(self.task, iteration, self._params)
        self.shards[0].say(Saved(iteration=iteration, path=f"/checkpoints/{iteration}", size_bytes=1, duration_us=1))

    async def _capture(self, iteration: int) -> None:
        """Training waits for the copy; a thread of each shard seals it in its node's memory."""
        await self._work(0.002)
        for number, shard in enumerate(self.shards):
            copy = Copy(iteration, self.generation, self._params, shard.host.name, layout_of(shard))
            self.training.loop.call_later(self.training.drawn.uniform(0.002, 0.05), self._seal, shard, number, copy)

    def _seal(self, shard: Process, number: int, copy: Copy) -> bool:
        server = shard.host.fork_server
        if not shard.alive or shard.hung or server is None or shard.worker not in server.processes:
            return False
        server.memory.keep(self.task, number, copy)
        captured = Captured(
            shard=number, iteration=copy.iteration, generation=copy.generation, size_bytes=1,
            shards=self.spec.replica_workers, duration_us=2000,
        )  # fmt: skip
        shard.say(captured)
        return True

    async def _hand_over(self) -> None:
        """For workers of another layout: to memory, or to storage where that cannot be."""
        iteration = self._ledger.iteration - 1
        if iteration and self._is_lead():
            await self._work(0.01)
            sealed = [
                self._seal(
                    shard, number, Copy(iteration, self.generation, self._params, shard.host.name, layout_of(shard))
                )
                for number, shard in enumerate(self.shards)
            ]
            if not all(sealed):
                await self._save()

    async def _complete(self) -> None:
        told = False
        while True:
            self.progress.ending(self._ledger.iteration, writes=self._is_lead())
            try:
                if self._is_lead() and not told:
                    await self._save()
                    digest = f"{self._params:x}"
                    self.shards[0].say(Completed(iteration=self._ledger.iteration - 1, loss=1.0, params_digest=digest))
                    await self._work(0.005)
                    told = True
                await self._gather([self._ledger.iteration])
                return
            except (Broken, Superseded) as failure:
                self._leave()
                if isinstance(failure, Broken):
                    self._report(failure, "checkpoint")
                await self._regroup(None)

    # --- from group to group ---------------------------------------------------------------------

    def _leave(self) -> None:
        if self._end is not None:
            self._note_losses()
            self._end.leave()
            self._end = None

    def _membership_of(self, generation: int) -> Membership:
        return self.shards[0].memberships[generation]

    def _position(self) -> Position:
        return Position(
            has_state=self._has_state,
            iteration=self._ledger.iteration if self._has_state else 0,
            sums_complete=self._total is not None,
            held=tuple(self._ledger.held) if self._has_state else (),
            complete=tuple(self._buckets.complete()) if self._has_state else (),
        )

    async def _regroup(self, target: Membership | None) -> bool:
        """Take a seat in the next group, state included. True: step first, with the sums that are complete."""
        while True:
            self.progress.idle()
            self._verdict, self._transfer_owed, self._next_hand, self._target = None, False, None, 0
            try:
                membership, verdict = await self._join(target)
            except LeftOut as left_out:
                await self._park(left_out.membership)
            target = None
            self._membership, self._verdict = membership, verdict
            share = -(-self.spec.micro_batches // len({member.replica for member in membership.members}))
            self.progress.regrouped(membership.generation, share=share, joins=bool(membership.joiners))
            if self._apply(verdict):
                self._tell_regrouped(membership, "own")
                return True
            origin: Origin = "own"
            if self._transfer_owed:
                try:
                    origin = await self._transfer()
                except Superseded:
                    continue
                except Broken as failure:
                    self._leave()
                    self._report(failure, "regroup")
                    continue
            self._tell_regrouped(membership, origin)
            return False

    async def _join(self, target: Membership | None) -> tuple[Membership, Verdict]:
        """See Rendezvous.join."""
        loop = self.training.loop
        sound, self._end = self._end, None
        if target is None and sound is not None:
            sound.leave()
        until_s = loop.time() + self.training.fault_wait_s if self._has_state else None
        try:
            while True:
                membership = target or await self._await_membership(until_s)
                target = None
                self.generation = membership.generation
                if all(member.worker != self.lead_worker for member in membership.members):
                    raise LeftOut(membership)
                try:
                    return membership, await self._attempt(membership, until_s)
                except Broken as failure:
                    self._report(failure, "regroup")
                except Superseded:
                    pass
                self._leave()
                if sound is not None:
                    sound.leave()
                    sound = None
        except LeftOut:
            sound = None  # its last group stays open: the others may still read the last agreement from it
            raise
        finally:
            if sound is not None:
                sound.leave()

    async def _await_membership(self, until_s: float | None) -> Membership:
        loop = self.training.loop
        left_s = None if until_s is None else max(0.0, until_s - loop.time())
        if not await self._wait(lambda: bool(self._newest(self.generation)), left_s):
            raise Stranded
        newest = self._newest(self.generation)
        left_s = None if until_s is None else max(0.0, until_s - loop.time())
        if not await self._wait(lambda: all(newest in shard.memberships for shard in self.shards), left_s):
            raise Stranded
        return self._membership_of(newest)

    async def _attempt(self, membership: Membership, until_s: float | None) -> Verdict:
        """Form the group, exchange positions."""
        training, generation = self.training, membership.generation
        group = training.group(self.task, membership)
        self._lost = []
        end = group.enter(self)
        self._end = end
        if group.size > 1:
            await self._meet(membership, end, until_s)
        micro_batches = self.spec.micro_batches
        rows = await self._gather(self._position().row(micro_batches, BUCKETS))
        assert generation == self.generation
        return regrouping.judge([Position.from_row(row, micro_batches) for row in rows], micro_batches)

    async def _meet(self, membership: Membership, end: End, until_s: float | None) -> None:
        loop, store = self.training.loop, membership.store
        home = self.training.hosts[store.host]
        since_s, told = loop.time(), False

        def superseded() -> bool:
            return bool(self._newest(membership.generation))

        while not end.all_keys:
            if not self.training.reach.reaches(self.shards[0].host.name, store.host):
                await self._wait(superseded, 5.0)
                raise Broken(f"the store on {store.host} does not answer")
            if not home.store_serves(store.port):
                raise Broken(f"the store on {store.host} is gone")
            await self._wait(lambda: end.all_keys or superseded(), 0.5)
            if not end.all_keys and not told and loop.time() >= since_s + WAITS_S:
                told = True
                self._say_all(Waits(generation=membership.generation))
            if superseded():
                raise Superseded
            if until_s is not None and loop.time() >= until_s:
                raise Broken("not all members came in time")
        await self._work(self.training.drawn.uniform(0.005, 0.03))
        if not end.connects():
            await self._wait(superseded, self.training.drawn.choice((0.01, 0.1, 1.0)))
            raise Superseded if superseded() else Broken("a member could not be connected to")

    def _apply(self, verdict: Verdict) -> bool:
        assert self._end is not None
        rank = self._end.rank
        hand = verdict.dealt[rank]
        self._transfer_owed = bool(verdict.receivers)
        if rank in verdict.step_first:
            self._next_hand = hand
            return True
        self._total = None
        if rank in verdict.receivers:
            self._begin(verdict.iteration)
            self._ledger.deal(hand, redone=False)
        else:
            self._buckets.keep(verdict.final)
            self._ledger.deal(hand, redone=bool(self._ledger.held))
        return False

    async def _transfer(self) -> Origin:
        """State from the verdict's source to who has none."""
        verdict, end = self._verdict, self._end
        assert verdict is not None and end is not None
        if end.rank == verdict.source and verdict.fresh:
            self._find_state()
        told = [_NO_STATE, 0, 0, 0, 0, *self.progress.usual()]
        if end.rank == verdict.source:
            origin = _ORIGINS.index(self._origin if verdict.fresh else "replica")
            told = [_STATE, self._ledger.iteration - 1, self._params, self._lineage, origin, *self.progress.usual()]
        told += to_row(self._buckets.final(), self.spec.micro_batches)
        await self._work(self.training.drawn.uniform(0.01, 0.1))
        rows = await self._gather(told)
        if end.rank in verdict.receivers and end.rank != verdict.source:
            has, iteration, self._params, self._lineage, origin, *rest = rows[verdict.source]
            assert has == _STATE
            words = len(self.progress.usual())
            self.progress.inherit(rest[:words])
            final = rest[words:]
            hand = list(self._ledger.held)
            self._begin(iteration + 1)
            self._buckets.adopt(from_row(final, self.spec.micro_batches))
            self._ledger.deal(hand, redone=False)
            self._has_state = True
            self._origin = _ORIGINS[origin]
        self._transfer_owed = False
        return self._origin if end.rank in verdict.receivers or verdict.fresh else "own"

    def _find_state(self) -> None:
        """Nobody has state: take the newest that anybody keeps, of the same the nearest, or begin."""
        assert self._end is not None and self._membership is not None
        members = [end.replica.shards for end in self._end.group.present.values()]
        found = self.training.nearest_state(self.task, self.shards, members, self._membership.peers)
        iteration, self._params, self._origin = 0, 0, "init"
        if found is not None:
            iteration, self._params, self._origin = found.iteration, found.params, found.source
            self.shards[0].say(self._taken(self._origin, iteration))
        self._lineage = self.training.witness.new_lineage(self.task)
        hand = list(self._ledger.held)
        self._begin(iteration + 1)
        self._ledger.deal(hand, redone=False)
        self._has_state = True

    def _taken(self, source: Origin, iteration: int) -> Taken:
        saved = self.training.newest_checkpoint(self.task)
        return Taken(
            generation=self.generation, source=source, iteration=iteration, size_bytes=1, duration_us=1, tried=(),
            storage_iteration=saved[0] if saved else 0, saved_us=0, resharded_from="",
        )  # fmt: skip

    def _tell_regrouped(self, membership: Membership, source: Origin) -> None:
        self.progress.begun(self._ledger.iteration)
        self.training.witness.regrouped(self, membership)
        self._reached("regrouped")
        if source == "replica":
            self.training.joined(self)
        self._say_all(
            Regrouped(
                generation=membership.generation,
                iteration=self._ledger.iteration,
                dealt=self._ledger.redone,
                duration_us=1000,
                source=source,
            )
        )
        self._tell_committed()

    async def _park(self, target: Membership) -> NoReturn:
        present = () if self._membership is None else self._membership.members
        staying = {member.worker for member in present} & {member.worker for member in target.members}
        if self._has_state and not staying:
            await (self._hand_over() if target.handover else self._save_if_lead())
        iteration = max(0, self._ledger.iteration - 1)
        self._say_all(Parked(generation=target.generation, iteration=iteration))
        await self._wait(lambda: False)
        raise QuitAsked


class _Failure(Exception):
    def __init__(self, kind: ErrorKind) -> None:
        super().__init__(kind)
        self.kind = kind
