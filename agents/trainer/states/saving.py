"""Saves the leader replica's state into its nodes' memory, and from there to storage, while training goes on.

Rules
-----
* At the boundary after an iteration the state is copied into the node's memory (`memory.py`): that is all that
  training waits for. A thread seals the copy (its digest takes longer than the copy), and the agent hears of it, which
  passes it on to another node. Another thread writes it to storage from where it lies.
* All shards of the replica capture the same iterations: what depends on one shard's clock, memory or disk is put to
  the vote of all, and only at iterations at which something may be due, which all know.
* When: at every iteration that the task file's interval divides, or, without one, as often as Young and Daly ask for
  (`optimal_s`), with the cost and the pace as measured. A new leader saves at its first boundary.
* A capture has no turn while the one before is not sealed, or while the slot is being read. Storage has no turn while
  it is still being written to; an interval from the task file is a promise, though: there training waits.
* Where the node's memory has no room for two states, it keeps none, and what goes to storage is copied into memory of
  the process's own. Where no copy can be made when the task file's interval says so, as another node is reading the
  slot, or the last word must be on storage before the process ends, the state is written at once, and training waits:
  until the write is late, or twice as long as the last took that was given up; for the last word until it is given up.
* Where workers of another layout are about to take over (a handover), the last word is in memory, if that has room.
* Where the optimizer's state is sharded, the first replica says in the agreement on an iteration that it is going to
  save it (`due`), all then give it their parts, and what it saves is the whole state (`whole`).
* Storage that fails ends no training: what stands there stays, the log and an alarm say so (`SaveFailed`), and it is
  tried again next time. Only the last word must be written before the process ends.
* Nor does storage that hangs (`storing.py`): a write that is late is said to be so, and training waits for it no
  longer; after ten times that it is given up. It can publish nothing from then on, so its slot is free for captures.
  Nothing else is written before its thread is back.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

import msgspec

from unicrond.agents.protocol.memory import Draft, Memory, TooLarge
from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.trainer.lifecycle.results import NO_SAVE, SaveSchedule
from unicrond.agents.trainer.process.context import Context
from unicrond.agents.trainer.states import checkpoint, origins
from unicrond.agents.trainer.states.state import TrainingState
from unicrond.agents.trainer.states.state_bytes import Flat, read
from unicrond.agents.trainer.states.storing import StorageWriter
from unicrond.events.vocabulary import SnapshotStored

#: For captures on their way to storage only: bounds nothing that the state itself does not.
_PRIVATE_MAX_BYTES = 1 << 62
_PACE_WEIGHT = 0.2
#: Where the failure rate is not known: a failure a day.
MTBF_DEFAULT_S = 86400.0
#: However rare failures are said to be: no more work than this is ever put at stake.
INTERVAL_MAX_S = 3600.0


@dataclass(slots=True)
class Rhythm:
    """The interval at which one of the two targets is saved to. `every`: the task file's interval in iterations, None:
    as measured."""

    every: int | None
    cost_s: float = 0.0
    last: int = 0
    look_at: int = 0

    def may_be_due(self, iteration: int) -> bool:
        """Return whether a save may be due; cheap, and the same for all shards."""
        if self.every is not None:
            return self.every > 0 and iteration % self.every == 0
        return iteration >= self.look_at

    def saved(self, iteration: int) -> None:
        """Note that the state after `iteration` has been saved."""
        self.last, self.look_at = iteration, iteration + 1


@dataclass(frozen=True, slots=True)
class AssembledState:
    """A whole optimizer state, put together for saving, and the seconds for which training stood still for it."""

    tree: dict[str, Any]
    cost_s: float


class Saving:
    """Saves one worker's state. `memory`: the node's, None where the agent gives none."""

    def __init__(self, context: Context, state: TrainingState) -> None:
        launch = context.launch
        spec = launch.spec
        self._context = context
        self._state = state
        self.origin = origins.RunOrigin(spec)
        self.memory = Memory(launch.memory, launch.memory_max_bytes) if launch.memory else None
        self._private: Memory | None = None
        self._to_memory = Rhythm(spec.checkpoint.memory_interval if self.memory else 0)
        self._to_storage = Rhythm(spec.checkpoint.interval if spec.checkpoint.dir else 0)
        self._sealer = ThreadPoolExecutor(1, "seal")
        self._storage = StorageWriter(context)
        self._sealing: Future[None] | None = None
        #: A state has been on its way to storage since `has_written` was asked last.
        self._writes = False
        self._pace_s = 0.0
        self._was_lead = False
        #: Which state was saved last, or was to be, as (iteration, generation), and how often.
        self._attempted, self._attempt = (0, 0), 0
        #: What is known of the iterations' times (baseline.py), for the next owner of the state.
        self.duration_words: dict[str, Any] = {}
        #: The optimizer's state as put together from its parts; None: it is the optimizer's own.
        self.assembled: AssembledState | None = None

    @property
    def longest_write_s(self) -> float:
        """Return the seconds that a write to storage took at most; 0: none was made."""
        return self._storage.longest_s

    @property
    def last_write(self) -> int:
        """Return the iteration that was written to storage last; 0: none was."""
        return self._storage.newest

    # --- at a boundary ---------------------------------------------------------------------------

    def _collect(self) -> None:
        """Collect what the threads have finished, and raise what they have raised."""
        if self._sealing is not None and self._sealing.done():
            self._await_seal()
        self._storage.look()

    def boundary(
        self, iteration: int, duration_s: float, loss: float, membership: GroupMembership, *, leads: bool,
        schedule: SaveSchedule | None = None,
    ) -> None:  # fmt: skip
        """Save what is due after `iteration`, which took `duration_s`. `leads`: in the leader's replica. `schedule`:
        what is due, None: find out."""
        self._pace_s = self._pace_s * (1 - _PACE_WEIGHT) + duration_s * _PACE_WEIGHT if self._pace_s else duration_s
        schedule = self.schedule(iteration, membership, leads=leads) if schedule is None else schedule
        if leads and schedule.is_due:
            self._capture(iteration, loss, membership.generation, to_storage=schedule.to_storage)

    def schedule(self, iteration: int, membership: GroupMembership, *, leads: bool) -> SaveSchedule:
        """Return what is to be saved after `iteration`."""
        self._collect()
        if leads and not self._was_lead:
            self._to_memory.last = self._to_storage.last = 0
            self._to_memory.look_at = self._to_storage.look_at = iteration
        self._was_lead = leads
        if not leads or iteration >= self._context.launch.spec.iterations:
            return NO_SAVE
        mtbf_s, self._to_storage.cost_s = membership.mtbf_us / 1e6, self._storage.last_s
        to_memory = self._to_memory.may_be_due(iteration) and self._is_due(
            self._to_memory, iteration, mtbf_s, busy=not _is_over(self._sealing)
        )
        to_storage = self._to_storage.may_be_due(iteration) and self._is_storage_due(iteration, mtbf_s)
        return SaveSchedule(to_memory, to_storage)

    def _is_storage_due(self, iteration: int, mtbf_s: float) -> bool:
        if self._to_storage.every is not None:
            self._await_seal()
            return self._context.replica.all_true(self._storage.wait(last_word=False))
        busy = self._sealing is not None or self._storage.is_busy
        return self._is_due(self._to_storage, iteration, mtbf_s, busy=busy)

    def _is_due(self, rhythm: Rhythm, iteration: int, mtbf_s: float, *, busy: bool) -> bool:
        """Return the vote of the shards; set when to look again."""
        iterations = save_interval(rhythm.cost_s, self._pace_s, mtbf_s)
        iterations, is_busy = self._context.replica.highest(iterations, int(busy))
        if rhythm.every is None and rhythm.last and iteration < rhythm.last + iterations:
            rhythm.look_at = rhythm.last + iterations
            return False
        if is_busy:
            rhythm.look_at = iteration + max(1, iterations // 10)
            return False
        return True

    def has_written(self) -> bool:
        """Return whether a state has been on its way to storage, beside the iterations, since this was asked last."""
        writes = self._writes
        self._writes = (writes and not _is_over(self._sealing)) or (self._storage.is_busy and not self._storage.is_late)
        return writes or self._writes

    # --- capturing -------------------------------------------------------------------------------

    def _tree(self, iteration: int, loss: float) -> dict[str, Any]:
        tree = {**self._state.capture(iteration, loss), "pace_s": self._pace_s, **self.duration_words}
        tree[origins.KEY] = msgspec.to_builtins(self.origin.present())
        return tree if self.assembled is None else {**tree, "optimizer": self.assembled.tree}

    def _capture(self, iteration: int, loss: float, generation: int, *, to_storage: bool) -> None:
        started = time.monotonic()
        flat = Flat.of(self._tree(iteration, loss))
        draft = self._draft(flat.size_bytes, private=to_storage)
        if not self._context.replica.all_true(draft is not None):
            if draft is not None:
                draft.abandon()
            if to_storage and self._to_storage.every is not None:
                self._write_now(iteration, generation, loss, must=False)
            return
        assert draft is not None
        flat.write(draft.view)
        cost_s = time.monotonic() - started + (self.assembled.cost_s if self.assembled else 0.0)
        self._to_memory.cost_s = cost_s
        self._to_memory.saved(iteration)
        job = None
        if to_storage:
            self._to_storage.saved(iteration)
            self._writes = True
            job = self._job(iteration, generation)
        midway = self._midway(iteration)
        self._sealing = self._sealer.submit(self._seal, draft, iteration, generation, cost_s, job, midway)

    def _draft(self, size_bytes: int, *, private: bool) -> Draft | None:
        if not _is_over(self._sealing):
            return None
        if self.memory is not None:
            try:
                return self.memory.draft(size_bytes)
            except TooLarge as error:
                print(f"{self._context.launch.worker}: {error}; keeping no states in memory", file=sys.stderr)
                self.memory.close()
                self.memory, self._to_memory = None, Rhythm(0)
        if not private:
            return None
        if self._private is None:
            self._private = Memory.private(_PRIVATE_MAX_BYTES)
        return self._private.draft(size_bytes)

    def _seal(
        self, draft: Draft, iteration: int, generation: int, cost_s: float, job: checkpoint.WriteJob | None,
        midway: Callable[[], None],
    ) -> None:  # fmt: skip
        """Seal the copy, in the sealing thread, and begin the write to storage that follows, if any."""
        spec = self._context.launch.spec
        head = draft.seal(iteration, generation, layout=spec.cut)
        source = self.memory or self._private
        if self.memory is not None:
            self._context.channel.send(
                SnapshotStored(
                    node=self._context.launch.node,
                    task=spec.name,
                    origin=self._context.launch.node,
                    shard=self._context.replica.shard,
                    iteration=iteration,
                    generation=generation,
                    size_bytes=head.size_bytes,
                    shards=spec.replica_workers,
                    duration_us=int(cost_s * 1e6),
                )
            )
        if job is None or source is None:
            return
        resources = ExitStack()  # from here on the slot is not written to until storage has it
        reader = source.reopen()
        resources.callback(reader.close)
        state = resources.enter_context(reader.reading(iteration))
        if state is None:
            resources.close()
            return
        self._storage.begin(job, partial(read, state[1], copy=False), midway, resources)

    def capture_and_wait(self, iteration: int, generation: int, loss: float) -> bool:
        """Have the state after `iteration` in the nodes' memory when this returns, all shards of the replica together.

        False where that cannot be: no memory or no room, the task wants none, or the slot is being read.
        """
        self._await_seal()
        keeps_memory = self.memory is not None and self._to_memory.every != 0
        if not self._context.replica.all_true(keeps_memory):
            return False
        if not self._context.replica.all_true(self._to_memory.last == iteration):
            self._capture(iteration, loss, generation, to_storage=False)
            self._await_seal()
        newest = None if self.memory is None else self.memory.newest()
        return self._context.replica.all_true(newest is not None and newest.iteration == iteration)

    # --- storage ---------------------------------------------------------------------------------

    def save_and_wait(self, iteration: int, generation: int, loss: float) -> None:
        """Have the state after `iteration` on storage when this returns, all shards of the replica together.

        Raises OSError.
        """
        if self._context.launch.spec.checkpoint.dir:
            self._write_now(iteration, generation, loss, must=True)

    def _write_now(self, iteration: int, generation: int, loss: float, *, must: bool) -> None:
        self._await_seal()
        storage, is_free = self._storage, self._storage.wait(last_word=must)
        if not self._context.replica.all_true(storage.newest == iteration):
            failure, job = storage.lateness(), self._job(iteration, generation)
            if self._attempt > 1 and self._context.replica.all_true(is_free):  # a shard that is not may yet publish
                job = replace(job, replaces=self._writer(self._attempt - 1))
            if is_free:
                tree = partial(self._tree, iteration, loss)
                write = storage.begin(job, tree, self._midway(iteration), ExitStack())
                storage.wait(last_word=must, in_place=True)  # what is written changes with the next iteration
                failure = storage.give_up() or write.failure
            if must and failure is not None:
                raise failure
        self._context.replica.all_true(True)  # the last one publishes
        self._to_storage.saved(iteration)

    def _await_seal(self) -> None:
        if self._sealing is not None:
            self._sealing.result()
            self._sealing = None

    def _job(self, iteration: int, generation: int) -> checkpoint.WriteJob:
        """Return the next attempt to save a state. All shards call this, for the same ones."""
        launch, replica = self._context.launch, self._context.replica
        if self._attempted == (iteration, generation):
            self._attempt += 1  # a draft of its own: the last one has records of files that would be written again
        else:
            self._attempted, self._attempt = (iteration, generation), 1
        return checkpoint.WriteJob(
            directory=launch.spec.checkpoint.dir,
            task=launch.spec.name,
            iteration=iteration,
            generation=generation,
            shard=replica.shard,
            layout=launch.spec.cut,
            writer=self._writer(self._attempt),
            keep=launch.spec.checkpoint.keep,
            origin=self.origin,
        )

    def _writer(self, attempt: int) -> str:
        """Return who makes this attempt to save the state that is to be saved."""
        return f"{self._context.launch.replica}-{self._attempted[1]}" + (f"-{attempt}" if attempt > 1 else "")

    def _midway(self, iteration: int) -> Callable[[], None]:
        context = self._context
        return partial(context.injection.fire, "saving", iteration + 1, context.generation)


def _is_over(future: Future[Any] | None) -> bool:
    return future is None or future.done()


def optimal_s(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between two saves that lose least time to saving and to doing lost work again.
    `cost_s`: of a save; `mtbf_s`: between failures.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37. Its first
    term is Young's estimate.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return sqrt(2 * cost_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost_s


def save_interval(cost_s: float, pace_s: float, mtbf_s: float) -> int:
    """Return the same in iterations of `pace_s`, at least 1. `mtbf_s` 0: not known."""
    interval_s = min(optimal_s(cost_s, mtbf_s or MTBF_DEFAULT_S), INTERVAL_MAX_S)
    return max(1, round(interval_s / pace_s)) if pace_s > 0 else 1
