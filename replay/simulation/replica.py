"""A replica's processes and its main thread: faults are injected here, and it waits here; what it does: `driver.py`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from agents.protocol.exits import EXIT_NO_MEMBERSHIP
from agents.protocol.injection import PHASES, Point
from agents.protocol.messages import FromWorker, Ready, Trouble
from agents.trainer.lifecycle.failures import NothingLeft, QuitAsked, Stranded
from events.vocabulary import ErrorKind, Fault, Phase
from replay.simulation.driver import Driver
from replay.simulation.progress import Progress

if TYPE_CHECKING:
    from replay.simulation.process import Process
    from replay.simulation.training import Training

#: A point of the lifecycle, or the moment at which a new group's members say that they are in it.
Moment: TypeAlias = Point | Literal["regrouped"]
_ORDERED_ERRORS: dict[str, ErrorKind] = {"exception": "exception", "oom": "out_of_memory", "nan": "nan_loss"}


class Replica:
    """`shards`: its processes, in shard order."""

    def __init__(self, training: Training, shards: list[Process]) -> None:
        self.training = training
        self.shards = shards
        self.task = shards[0].launch.task
        self.spec = shards[0].launch.spec
        self.lead_worker = shards[0].worker
        interval = self.spec.checkpoint.interval or 0
        self.progress = Progress(shards[0].host.clock.monotonic_us, interval)
        self._driver = Driver(self)
        self._waker: asyncio.Future[None] | None = None
        self._main: asyncio.Task[None] | None = None
        self._failure: ErrorKind | None = None
        self._slow_s = 0.0
        #: Die there the next time: see `reached`.
        self.die_at: Moment | Literal[""] = ""
        for shard in shards:
            shard.replica = self

    @property
    def generation(self) -> int:
        """Of the membership last tried."""
        return self._driver.seat.generation

    # --- the process -----------------------------------------------------------------------------

    def start(self) -> None:
        """Run the main thread."""
        self._main = self.training.loop.create_task(self._run())

    def shard_ended(self, shard: Process) -> None:
        """One process is gone: its sockets are closed, and the others' own collectives fail."""
        if self._main is not None:
            main, self._main = self._main, None
            main.cancel()
            self._driver.seat.close(silently=not shard.host.on)
            for other in self.shards:
                if other is not shard:
                    self.training.loop.call_later(0.05, self._break, other)

    def _break(self, shard: Process) -> None:
        if shard.alive and not shard.hung:
            if not shard.quit_asked:
                shard.say(self.trouble("exception", "a rank of this replica is gone", "forward"))
            status = 0 if shard.quit_asked else 1 << 8
            self.training.loop.call_later(0.01, shard.end, status)
        elif shard.alive:
            self.training.loop.call_later(0.5, self._break, shard)

    def reached(self, moment: Moment) -> None:
        """A moment of the training: ordered faults are injected; a death comes now, or a little later."""
        if moment != "regrouped":
            self._obey(moment)
        if self.die_at == moment:
            self.die_at = ""
            victim = self.training.drawn.choice(self.shards)
            self.training.loop.call_later(self.training.drawn.choice((0.0, 0.005, 0.015)), victim.end, signal.SIGKILL)

    def _obey(self, point: Point) -> None:
        """Inject the ordered faults that are due at this point."""
        for shard in self.shards:
            for fault in list(shard.ordered):
                if PHASES[fault.phase] == point and fault.at_iteration in (0, self._driver.books.ledger.iteration):
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
        self.shards[0].say(self.trouble(kind, "simulated", "reduce"))

    def reset(self, shards: Sequence[int]) -> None:
        """The connections of these of its shards are reset; the processes live. Each shard has connections to its like
        in the other replicas alone: what the others lose, they lose because somebody leaves."""
        mine = self._driver.seat.end
        if mine is not None:
            for other in list(mine.group.present.values()):
                if other is not mine:
                    mine.peer_left(other.rank, shards)
                    other.peer_left(mine.rank, shards)

    async def _run(self) -> None:
        code = 0
        try:
            for shard in self.shards:
                shard.say(Ready())
            await self._driver.train()
        except QuitAsked:
            code = 0
        except Stranded:
            code = EXIT_NO_MEMBERSHIP
        except NothingLeft as error:
            self.say_all(self.trouble("exception", str(error), "regroup"))
            code = 1
        except _Failure as failure:
            self.say_all(self.trouble(failure.kind, "simulated", "forward"))
            code = 1
        except Exception as error:  # a defect of ours: judge, deal and the accounts raise where positions contradict
            self.training.witness.broke("trainers_agree", f"{self.lead_worker}: {type(error).__name__}: {error}")
            code = 1
        self._driver.seat.close()
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

    async def wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """See AgentChannel.wait."""
        loop = self.training.loop
        until_s = None if timeout_s is None else loop.time() + timeout_s
        while True:
            await self._while_hung()
            self.look()
            if done():
                return True
            left_s = None if until_s is None else until_s - loop.time()
            if left_s is not None and left_s <= 0:
                return False
            await self._sleep(left_s)

    async def work(self, duration_s: float) -> None:
        """Compute: nothing interrupts it but the process's end."""
        await asyncio.sleep(duration_s)
        await self._while_hung()
        while not all(self._in_touch(shard) for shard in self.shards):
            await self._sleep(0.3)  # a rank of this replica does not answer: its collectives wait

    async def work_slowly(self) -> None:
        """What a fault makes every micro-batch take longer."""
        if self._slow_s:
            await self.work(self._slow_s)

    def look(self) -> None:
        """Raise QuitAsked if the agent wants a shard to end."""
        if any(shard.quit_asked for shard in self.shards):
            raise QuitAsked

    def fail_if_asked(self) -> None:
        """Raise what a fault wants the micro-batch to fail with."""
        if self._failure is not None:
            raise _Failure(self._failure)

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

    def say_all(self, message: FromWorker) -> None:
        """Every shard's process sends `message` to its agent."""
        for shard in self.shards:
            shard.say(message)

    def trouble(self, kind: ErrorKind, message: str, phase: Phase) -> Trouble:
        """A report of an error in the iteration that is under way."""
        iteration = self._driver.books.ledger.iteration
        return Trouble(
            kind=kind, generation=self.generation, iteration=iteration, phase=phase, message=message, detail=""
        )

    def newest(self, above: int, urgent_only: bool = False) -> int:
        """The newest generation that any shard was told."""
        return max(shard.newest(above, urgent_only) for shard in self.shards)


class _Failure(Exception):
    def __init__(self, kind: ErrorKind) -> None:
        super().__init__(kind)
        self.kind = kind
