"""A cluster whose users bring programs that are garbage, and the same cluster with idle programs in their places.

Rules
-----
* Each user has one program, and submits it when the day begins. One with patience leaves it there. One without cancels
  it after so many seconds, if the coordinator has not given it up before, and submits it again, as he believes mended:
  all day. He is the worst: a program that fails without progress gets no worker that others want, a new one does.
* What a program holds and earns is not the measured tasks': it has a meter of its own.
* On the day of idle programs each is submitted when the garbage program was, and cancelled when that was given up. It
  computes as a healthy task does, and does nothing to anybody.

What does not live here: programs that hang; the simulation of single processes has them (`replay/simulation`).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from unicrond.core.state.state import TaskStatus
from unicrond.core.state.work import iteration_flop
from unicrond.events import vocabulary as v
from unicrond.replay.evaluation.model.meter import Meter
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.simulator.core_driver import CoreDriver, NodeAgent
from unicrond.replay.evaluation.simulator.trainer_model import TrainerGroup, WorkerProcess

Flaw: TypeAlias = Literal["start", "exception", "nan_loss", "left_early", "out_of_memory"]
FLAWS: tuple[Flaw, ...] = ("start", "exception", "nan_loss", "left_early", "out_of_memory")
#: Users come one after the other, within this time.
_ARRIVE_WITHIN_S = 600.0
#: In which iteration of its own each program fails; what leaks memory, in each process after so many.
FLAWED_ITERATION = 1
_PRIORITY = -1
_MAX_WORKERS = 2
_MESSAGES: dict[Flaw, str] = {
    "start": "FileNotFoundError: [Errno 2] No such file or directory: 'corpus.txt'",
    "exception": "RuntimeError: shape '[4, 8]' is invalid for input of size 31",
    "nan_loss": "the loss is nan",
    "left_early": "the program left before the task was complete",
    "out_of_memory": "CUDA out of memory",
}


class ProgramStay(NamedTuple):
    """A program's time in the cluster, from its submission until it was given up, microseconds. `flaw`: of garbage."""

    name: str
    flaw: Flaw
    submitted_us: int
    ended_us: int


@dataclass
class FlawedGroup(TrainerGroup):
    """The trainers of a program that fails in an iteration; `driver` ends their processes. "": an idle program."""

    flaw: Flaw | Literal[""] = ""
    driver: ProgramDriver | None = None

    def _train(self) -> None:
        super()._train()
        if self.flaw and self._timer is not None:
            self._timer.cancel()
            first = self.committed if self.flaw == "out_of_memory" else 0
            steps = max(0, first + FLAWED_ITERATION - self.committed) + 0.5
            self._timer = self.world.clock.after(round(steps * self._iteration_us), self._fail)

    def _fail(self) -> None:
        members = self._members()
        self._report_steps()
        if self.driver is not None and members:
            self.driver.end_program(members[0], self.committed + 1)


class ProgramDriver(CoreDriver):
    """A coordinator with its cluster and so many users with programs that are garbage; or, given `stays`, with idle
    programs that hold the places for as long as those did. `patience_s`: 0 has no end."""

    def __init__(
        self, world: EvaluationWorld, users: int = 0, patience_s: float = 0.0, stays: tuple[ProgramStay, ...] = ()
    ) -> None:
        super().__init__(world)
        self._users = users
        self._patience_s = patience_s
        self._start_us = 0
        self._stays = stays
        self._numbers = len(self.specs)
        self._programs: dict[str, tuple[Flaw, int]] = {}
        self._ends_us: dict[str, int] = {}

    def start(self) -> None:
        """Start the cluster; from then on the users submit."""
        super().start()
        self._start_us = start_us = self.world.clock.now_us
        for user in range(self._users):
            self._after(user * _ARRIVE_WITHIN_S / self._users, lambda u=user: self._submit_garbage(u, 0))  # type: ignore[misc]
        for stay in self._stays:
            self.world.clock.at(start_us + stay.submitted_us, lambda s=stay: self._bring(s.name, ""))  # type: ignore[misc]
            self.world.clock.at(start_us + stay.ended_us, lambda s=stay: self._cancel(s.name))  # type: ignore[misc]

    def end_program(self, process: WorkerProcess, iteration: int) -> None:
        """Let a program end as its flaw says, in the iteration (0: before its training)."""
        host, flaw = self.hosts[process.node], self._programs[process.task][0]
        if host.process is not process:
            return
        error = v.ErrorReported(
            node=host.name,
            task=process.task,
            worker=process.worker,
            kind="exception" if flaw == "start" else flaw,
            generation=process.generation,
            iteration=iteration,
            phase="forward" if iteration else "start",
            message=_MESSAGES[flaw],
        )
        self._report(host, error)
        self._end_by_itself(host, process, 0 if flaw == "left_early" else 1)

    # --- the users ---------------------------------------------------------------------------

    def _submit_garbage(self, user: int, nth: int) -> None:
        flaw, name = FLAWS[user % len(FLAWS)], f"garbage-{user}-{nth}"
        self._programs[name] = flaw, self.world.clock.now_us - self._start_us
        self._bring(name, flaw)
        if self._patience_s:
            self._after(self._patience_s, lambda: self._submit_again(user, nth))

    def _submit_again(self, user: int, nth: int) -> None:
        self._cancel(f"garbage-{user}-{nth}")
        self._submit_garbage(user, nth + 1)

    def _bring(self, name: str, flaw: Flaw | Literal[""]) -> None:
        template = min(self.specs, key=lambda spec: (spec.min_workers, spec.replica_workers, spec.name))
        least = template.replica_workers
        most = least * _MAX_WORKERS
        spec = replace(
            template,
            name=name,
            weight=1.0,
            priority=_PRIORITY,
            min_workers=least,
            max_workers=most,
            throughput={count: flops for count, flops in template.throughput.items() if int(count) <= most},
        )
        world = copy(self.world)
        world.meter = Meter(self.world.clock, {name: 0})
        group = self.groups[template.name]
        self.groups[name] = FlawedGroup(
            world, name, group.flops, group.worth, iteration_flop(spec), group.report, flaw=flaw, driver=self
        )
        self._numbers += 1
        self.submit(v.TaskSubmitted(spec=spec), self._numbers)

    def _cancel(self, name: str) -> None:
        if self.state.tasks[name].status is TaskStatus.ACTIVE:
            self._numbers += 1
            self.submit(v.TaskCancelled(task=name, requester="its user", reason="no progress"), self._numbers)
            self._note_end(name)

    def _process_ready(self, host: NodeAgent, process: WorkerProcess) -> None:
        if host.process is process and self._programs.get(process.task, ("",))[0] == "start":
            self.end_program(process, 0)
        else:
            super()._process_ready(host, process)

    def _coordinate(self) -> None:
        super()._coordinate()
        for name in [name for name in self._programs if self.state.tasks[name].status is not TaskStatus.ACTIVE]:
            self._note_end(name)

    def _note_end(self, name: str) -> None:
        if name not in self._ends_us:
            self._ends_us[name] = self.world.clock.now_us - self._start_us

    def stays(self) -> tuple[ProgramStay, ...]:
        """Return every program's time in the cluster; those that are still there stay until now."""
        now_us = self.world.clock.now_us - self._start_us
        return tuple(
            ProgramStay(name, flaw, since_us, self._ends_us.get(name, now_us))
            for name, (flaw, since_us) in self._programs.items()
        )
