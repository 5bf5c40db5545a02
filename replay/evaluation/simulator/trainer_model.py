"""The trainers of one task as a model of time: they form the memberships that the coordinator decides, and train.

    STANDING --all members up and ready--> FORMING --> CATCHING_UP --> TRAINING
       ^                                      |             |             |
       +---------- a member is lost, or its connection breaks ------------+      (another membership: FORMING)

Rules
-----
* A membership forms when all its members have a ready process. Until then the group that trains goes on.
* FORMING takes `regroup_s`; plus `transfer_s` where members come or fewer go on (state moves); plus `redeal_s`
  where survivors compute a lost replica's micro-batches; where no member has state, `checkpoint_load_s` instead.
* CATCHING_UP: work since the last checkpoint (`recompute_s`) is done again where no member had state, unless that was
  saved on purpose when the last group was dissolved. Interrupted, what has been caught up stays done.
* Steps are reported in sums: one event after the first iteration of a membership, one when training stops. The
  fold learns no less from them than from one a second.
* Standing or forming, the meter's account is DETECTION until the coordinator knows of the fault, then
  TRANSITION; the driver says when it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from unicrond.core.state.state import Membership
from unicrond.events import vocabulary as v
from unicrond.replay.evaluation.model.meter import CostPhase
from unicrond.replay.evaluation.model.virtual_time import Action, Timer, to_us
from unicrond.replay.evaluation.model.world import EvaluationWorld


class Activity(StrEnum):
    """What a task's trainers are doing."""

    STANDING = "standing"
    FORMING = "forming"
    CATCHING_UP = "catching up"
    TRAINING = "training"


@dataclass
class WorkerProcess:
    """A worker's process on a node. `generation`: of the group that it is in, 0 = none."""

    worker: str
    task: str
    node: int
    ready: bool = False
    generation: int = 0


@dataclass
class TrainerGroup:
    """The trainers of one task (see the module). `flops[n]`, `worth[n]`: T and F on n nodes. `flop`: FLOP of one
    iteration. `report(node, event)` puts an observation on the log.

    `target`: the newest membership decided. `formed`: the one that trains, or last did; `intact`: its members live and
    reach each other. `saved`: the state was written to a checkpoint when the last group was dissolved.
    """

    world: EvaluationWorld
    task: str
    flops: Sequence[int]
    worth: Sequence[int]
    flop: int
    report: Callable[[int, v.AnyEvent], None]
    processes: dict[str, WorkerProcess] = field(default_factory=dict)
    activity: Activity = Activity.STANDING
    target: Membership | None = None
    formed: Membership | None = None
    intact: bool = False
    saved: bool = True
    committed: int = 0
    _recompute_us: int = 0
    _since_us: int = 0
    _timer: Timer | None = None

    # --- what happens to it ------------------------------------------------------------------

    def set_target(self, membership: Membership) -> None:
        """Handle a membership that the coordinator commands; an older one than the newest changes nothing."""
        if self.target is None or self.target.generation < membership.generation:
            self.target = membership
            self.try_to_form()

    def add(self, process: WorkerProcess) -> None:
        """Add a process that starts."""
        self.processes[process.worker] = process

    def remove(self, process: WorkerProcess) -> None:
        """Remove a process that has ended."""
        del self.processes[process.worker]
        if self.intact and process.generation and process.generation == self._generation:
            self.break_up()
        elif self.activity is Activity.FORMING and self._is_target_member(process.worker):
            self._enter(Activity.STANDING)

    def break_up(self) -> None:
        """Stop the group because a member ended or cannot be reached; unnoticed outside."""
        was_training = self.activity is Activity.TRAINING
        self._enter(Activity.STANDING)
        self.intact = False
        if was_training:
            self.world.meter.stall(self.task, CostPhase.DETECTION)

    def try_to_form(self) -> None:
        """Form the newest membership, if it has not formed yet and all its members are up and ready."""
        target = self.target
        if target is None or target.generation <= self._generation:
            return
        processes = [self.processes.get(member.worker) for member in target.members]
        if not all(process is not None and process.ready for process in processes):
            return
        if not target.members:
            self._dissolve(target)
            return
        fresh = len(target.joiners) == len(target.members)
        self._enter(Activity.FORMING, self._forming_us(target, fresh), lambda: self._form(target, fresh))
        self.world.meter.stall(self.task, CostPhase.TRANSITION)

    # --- what it does ------------------------------------------------------------------------

    def _form(self, target: Membership, fresh: bool) -> None:
        """Report the members as joined, each itself or their lead for them, and pause the members left out."""
        if fresh:
            self._recompute_us = 0 if self.saved else to_us(self.world.assumptions.recompute_s)
        self.formed, self.intact, self.saved = target, True, False
        self._pause_nonmembers(target)
        for member in target.members:
            process = self.processes[member.worker]
            process.generation = target.generation
            if process.worker == target.lead or process.worker not in target.spoken_for:
                self.report(process.node, self._joined_event(process, target, fresh))
        self._enter(Activity.CATCHING_UP, self._recompute_us, self._train)

    def _train(self) -> None:
        self._recompute_us = 0
        members = self._members()
        self._enter(Activity.TRAINING, self._iteration_us, self._first_step)
        self.world.meter.run(self.task, self.worth[len(members)], [p.node for p in members])

    def _first_step(self) -> None:
        self._timer = None
        self._report_steps()

    def _dissolve(self, target: Membership) -> None:
        """Save the state and pause all: no member stays."""
        self.saved = self.saved or self.intact
        self._enter(Activity.STANDING)
        self.formed, self.intact = target, False
        self._pause_nonmembers(target)
        self.world.meter.idle(self.task)

    def _enter(self, activity: Activity, length_us: int = 0, then: Action | None = None) -> None:
        """Leave the present activity with what it has done so far; after `length_us` comes `then`."""
        if self.activity is Activity.TRAINING:
            self._report_steps()
        if self.activity is Activity.CATCHING_UP:
            self._recompute_us = max(0, self._recompute_us - (self.world.clock.now_us - self._since_us))
        if self._timer is not None:
            self._timer.cancel()
        self.activity, self._since_us = activity, self.world.clock.now_us
        self._timer = self.world.clock.after(length_us, then) if then else None

    # --- details -----------------------------------------------------------------------------

    @property
    def _generation(self) -> int:
        return self.formed.generation if self.formed else 0

    def _is_target_member(self, worker: str) -> bool:
        return self.target is not None and any(member.worker == worker for member in self.target.members)

    def _members(self) -> list[WorkerProcess]:
        """Return the processes of the formed membership that are up."""
        members = self.formed.members if self.formed else ()
        return [self.processes[member.worker] for member in members if member.worker in self.processes]

    def _forming_us(self, target: Membership, fresh: bool) -> int:
        assumptions = self.world.assumptions
        before = [member.worker for member in self.formed.members] if self.formed else []
        now = [member.worker for member in target.members]
        length_s = assumptions.regroup_s
        if fresh:
            length_s += assumptions.checkpoint_load_s if self.formed else 0.0
        elif now != before:
            length_s += assumptions.transfer_s
            length_s += assumptions.redeal_s if target.urgent else 0.0
        return to_us(length_s)

    def _joined_event(self, process: WorkerProcess, target: Membership, fresh: bool) -> v.WorkerJoinedGroup:
        source: Literal["own", "replica", "checkpoint", "init"] = "own"
        if fresh:
            source = "checkpoint" if self.committed else "init"
        elif process.worker in target.joiners:
            source = "replica"
        return v.WorkerJoinedGroup(
            node=self._name(process),
            task=self.task,
            worker=process.worker,
            generation=target.generation,
            iteration=self.committed + 1,
            micro_batches_assigned=0,
            duration_us=self.world.clock.now_us - self._since_us,
            source=source,
        )

    def _pause_nonmembers(self, target: Membership) -> None:
        staying = {member.worker for member in target.members}
        for process in self.processes.values():
            if process.generation and process.worker not in staying:
                process.generation = 0
                event = v.WorkerPaused(
                    node=self._name(process),
                    task=self.task,
                    worker=process.worker,
                    generation=target.generation,
                    iteration=self.committed,
                )
                self.report(process.node, event)

    @property
    def _iteration_us(self) -> int:
        """Compute the length of one iteration on the present members."""
        achieved = self.flops[len(self.formed.members) if self.formed else 0]
        return self.flop * 1_000_000 // max(1, achieved) + 1

    def _report_steps(self) -> None:
        """Report all whole iterations since the last report in one event of the first member that is up."""
        members, iteration_us = self._members(), self._iteration_us
        steps = (self.world.clock.now_us - self._since_us) // iteration_us
        if not steps or not members or self.formed is None:
            return
        lead = members[0]
        event = v.StepCommitted(
            node=self._name(lead),
            task=self.task,
            worker=lead.worker,
            generation=self.formed.generation,
            first=self.committed + 1,
            last=self.committed + steps,
            samples=0,
            samples_digest=0,
            loss=1.0,
            duration_us=steps * iteration_us,
            micro_batches_by_rank=(),
        )
        self.report(lead.node, event)
        self.committed += steps
        self._since_us += steps * iteration_us

    def _name(self, process: WorkerProcess) -> str:
        return f"n{process.node}"
