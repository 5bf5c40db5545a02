"""A simulated replica: its processes, and its main thread, which waits here and into which faults are injected. What it
computes: `driver.py`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Literal

from unicrond.agents.protocol.injection import PHASES, Point
from unicrond.agents.protocol.messages import EXIT_NO_MEMBERSHIP, FromWorker
from unicrond.agents.trainer.lifecycle.results import QuitRequested, RendezvousTimedOut, StateLost
from unicrond.events.vocabulary import ErrorKind, ErrorReported, Fault, Phase, WorkerReady
from unicrond.replay.simulation.trainer.driver import SimulatedDriver
from unicrond.replay.simulation.trainer.ports import GroupMember
from unicrond.replay.simulation.trainer.process import Moment, Process
from unicrond.replay.simulation.trainer.progress import ReplicaProgress
from unicrond.replay.simulation.trainer.training import Training

_ORDERED_ERRORS: dict[str, ErrorKind] = {"exception": "exception", "oom": "out_of_memory", "nan": "nan_loss"}


class SimulatedReplica:
    """One replica of a task. `shards`: its processes, in shard order."""

    def __init__(self, training: Training, shards: list[Process]) -> None:
        self.training = training
        self.shards = shards
        self.task = shards[0].launch.task
        self.spec = shards[0].launch.spec
        self.lead_worker = shards[0].worker
        interval = self.spec.checkpoint.interval or 0
        self.progress = ReplicaProgress(shards[0].host.clock.monotonic_us, interval)
        self._driver = SimulatedDriver(self, training)
        self._waker: asyncio.Future[None] | None = None
        self._main: asyncio.Task[None] | None = None
        self._failure: ErrorKind | None = None
        #: By how much a fault slows every micro-batch.
        self.slow_s = 0.0
        self._program_iteration = self._iterations_done = 0
        #: The moment at which a shard dies next: see `on_moment`.
        self.die_at: Moment | Literal[""] = ""
        for shard in shards:
            shard.replica = self

    @property
    def generation(self) -> int:
        """Return the generation of the membership last tried."""
        return self._driver.rendezvous.generation

    # --- the process -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the main thread."""
        self._main = self.training.loop.create_task(self._run())

    def shard_ended(self, shard: Process) -> None:
        """Handle that one process has ended: its sockets are closed, and the others' own collectives fail."""
        if self._main is not None:
            main, self._main = self._main, None
            main.cancel()
            self._driver.rendezvous.close(silently=not shard.host.on)
            for sibling in self.shards:
                if sibling is not shard:
                    self.training.loop.call_later(0.05, self._fail_shard, sibling)

    def _fail_shard(self, shard: Process) -> None:
        if shard.alive and not shard.hung:
            if not shard.quit_requested:
                shard.send(self.error_report("exception", "a rank of this replica is gone", "forward"))
            status = 0 if shard.quit_requested else 1 << 8
            self.training.loop.call_later(0.01, shard.end, status)
        elif shard.alive:
            self.training.loop.call_later(0.5, self._fail_shard, shard)

    def on_moment(self, moment: Moment) -> None:
        """Inject the ordered faults of a moment of the training; a death comes now, or a little later."""
        if moment != "regrouped":
            self._inject_due(moment)
        if self.die_at == moment:
            self.die_at = ""
            victim = self.training.rng.choice(self.shards)
            self.training.loop.call_later(self.training.rng.choice((0.0, 0.005, 0.015)), victim.end, signal.SIGKILL)

    def _inject_due(self, point: Point) -> None:
        """Inject the ordered faults that are due at this point."""
        for shard in self.shards:
            for fault in list(shard.ordered):
                if PHASES[fault.phase] == point and fault.at_iteration in (0, self._driver.member.ledger.iteration):
                    shard.ordered.remove(fault)
                    self._inject(shard, fault)

    def _inject(self, shard: Process, fault: Fault) -> None:
        soon = self.training.loop.call_soon
        match fault.kind:
            case "kill":
                soon(shard.end, signal.SIGKILL)
            case "exit":
                soon(shard.end, 3 << 8)
            case "stop":
                shard.hung = shard.sigstopped = shard.for_ever = True
            case "hang":
                shard.stuck = shard.for_ever = True
            case "slow":
                self.slow_s = fault.seconds
            case kind if kind in _ORDERED_ERRORS:
                self.raise_in(_ORDERED_ERRORS[kind])

    def raise_in(self, kind: ErrorKind) -> None:
        """Let the next micro-batch fail with an error of this kind."""
        self._failure = kind

    def report(self, kind: ErrorKind) -> None:
        """Report an error that does not end the replica."""
        self.shards[0].send(self.error_report(kind, "simulated", "reduce"))

    def reset(self, shards: Sequence[int]) -> None:
        """Reset the connections of these of its shards; the processes live. Each shard has connections only to its
        counterparts in the other replicas: what the others lose, they lose because a member leaves."""
        own_end = self._driver.rendezvous.end
        if own_end is not None:
            for peer_end in list(own_end.group.present.values()):
                if peer_end is not own_end:
                    own_end.peer_left(peer_end.rank, shards)
                    peer_end.peer_left(own_end.rank, shards)

    async def _run(self) -> None:
        code = 0
        try:
            for shard in self.shards:
                shard.send(WorkerReady(**shard.reporter))
            await self._driver.train()
        except QuitRequested:
            code = 0
        except RendezvousTimedOut:
            code = EXIT_NO_MEMBERSHIP
        except StateLost as error:
            self.send_all(self.error_report("exception", str(error), "regroup"))
            code = 1
        except _Failure as failure:
            self.send_all(self.error_report(failure.kind, "simulated", "forward"))
            code = 1
        except Exception as error:  # a defect of ours: judge, deal and the accounts raise where positions contradict
            self.training.checker.record_breach(
                "trainers_agree", f"{self.lead_worker}: {type(error).__name__}: {error}"
            )
            code = 1
        self._driver.rendezvous.close()
        self._main = None
        quits = any(shard.quit_requested for shard in self.shards)
        for shard in self.shards:
            if quits and not shard.quit_requested:
                self.training.loop.call_later(0.05, self._fail_shard, shard)
            else:
                shard.end(code << 8)

    # --- waiting ---------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the main thread: something has happened that it may wait for."""
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    async def _sleep(self, timeout_s: float | None) -> None:
        """Sleep until woken, at most so long."""
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

    async def wait(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for `is_done`; see AgentChannel.wait."""
        loop = self.training.loop
        until_s = None if timeout_s is None else loop.time() + timeout_s
        while True:
            await self._while_hung()
            self.check_quit()
            if is_done():
                return True
            left_s = None if until_s is None else until_s - loop.time()
            if left_s is not None and left_s <= 0:
                return False
            await self._sleep(left_s)

    async def work(self, duration_s: float) -> None:
        """Compute: nothing interrupts it but the process's end."""
        if self.training.slowness:
            duration_s *= self.training.slowdown(shard.host.name for shard in self.shards)
        await asyncio.sleep(duration_s)
        await self._while_hung()
        while not all(self._in_touch(shard) for shard in self.shards):
            await self._sleep(0.3)  # a rank of this replica does not answer: its collectives wait

    async def work_slowly(self) -> None:
        """Wait for as long as a fault slows every micro-batch."""
        if self.slow_s:
            await self.work(self.slow_s)

    def run_program(self, iteration: int, micro_batch: int) -> None:
        """Let a program that is garbage fail where it does; raises the error that it raises."""
        program = self.training.programs.get(self.task)
        if program is None:
            return
        if iteration != self._program_iteration:
            self._program_iteration, self._iterations_done = iteration, self._iterations_done + 1
            program.strike(self.shards, iteration, self._iterations_done)
        error = program.error(iteration, micro_batch)
        if error is not None:
            raise _Failure(error)

    def check_quit(self) -> None:
        """Raise QuitRequested if the agent wants a shard to end."""
        if any(shard.quit_requested for shard in self.shards):
            raise QuitRequested

    def raise_injected(self) -> None:
        """Raise the error with which a fault lets the micro-batch fail."""
        if self._failure is not None:
            raise _Failure(self._failure)

    def _in_touch(self, shard: Process) -> bool:
        return self.training.reach.reaches(shard.host.name, self.shards[0].host.name)

    def reaches(self, peer: GroupMember) -> bool:
        """Return whether the network carries between the two, for every shard."""
        reach = self.training.reach
        return all(
            own_shard.host.on and peer_shard.host.on and reach.reaches(own_shard.host.name, peer_shard.host.name)
            for own_shard, peer_shard in zip(self.shards, peer.shards, strict=True)
        )

    # --- messages --------------------------------------------------------------------------------

    def send_all(self, message: FromWorker) -> None:
        """Send `message` from every shard's process to its agent."""
        for shard in self.shards:
            shard.send(message)

    def error_report(self, kind: ErrorKind, message: str, phase: Phase) -> ErrorReported:
        """Return a report of an error in the present iteration."""
        iteration = self._driver.member.ledger.iteration
        return ErrorReported(
            **self.shards[0].reporter,
            kind=kind,
            generation=self.generation,
            iteration=iteration,
            phase=phase,
            message=message,
            detail="",
        )

    def newest(self, above: int, urgent_only: bool = False) -> int:
        """Return the newest generation that any shard received."""
        return max(shard.newest(above, urgent_only) for shard in self.shards)


def begin_replica(training: Training, shards: list[Process]) -> None:
    """Begin the replica of these processes."""
    SimulatedReplica(training, shards).start()


class _Failure(Exception):
    def __init__(self, kind: ErrorKind) -> None:
        super().__init__(kind)
        self.kind = kind
