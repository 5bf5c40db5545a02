"""The trainers of one task as a model of time: they form the memberships that they are told of, and train.

    STANDING --all members there and ready--> FORMING --> CATCHING_UP --> TRAINING
       ^                                         |             |             |
       +------------ a member is lost, or its connection breaks -------------+      (another membership: FORMING)

Rules
-----
* A membership forms when all its members have a ready process. Until then the group that trains goes on.
* FORMING takes `regroup_s`; plus `transfer_s` where members come or fewer go on (state moves); plus `redeal_s`
  where survivors compute a lost replica's micro-batches; where no member has state, `checkpoint_load_s` instead.
* CATCHING_UP: work since the last checkpoint (`recompute_s`) is done again where no member had state, unless that was
  saved on purpose when the last group parted. Interrupted, what has been caught up stays done.
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

from events import vocabulary as v
from replay.evaluation.meter import Phase
from replay.evaluation.virtual_time import Action, Timer, to_us
from replay.evaluation.world import World
from unicrond.core.state import Membership


class Activity(StrEnum):
    """What a task's trainers are doing."""

    STANDING = "standing"
    FORMING = "forming"
    CATCHING_UP = "catching up"
    TRAINING = "training"


@dataclass
class Process:
    """A worker's process on a node. `generation`: of the group that it is in, 0 = none."""

    worker: str
    task: str
    node: int
    ready: bool = False
    generation: int = 0


@dataclass
class TrainerGroup:
    """See the module. `flops[n]`, `worth[n]`: T and F on n nodes. `flop`: of one iteration. `say(node, event)` puts an
    observation on the log.

    `told`: the newest membership decided. `formed`: the one that trains, or last did; `intact`: its members
    live and hear each other. `saved`: the state was written to a checkpoint when the last group parted.
    """

    world: World
    task: str
    flops: Sequence[int]
    worth: Sequence[int]
    flop: int
    say: Callable[[int, v.AnyEvent], None]
    processes: dict[str, Process] = field(default_factory=dict)
    activity: Activity = Activity.STANDING
    told: Membership | None = None
    formed: Membership | None = None
    intact: bool = False
    saved: bool = True
    committed: int = 0
    _owed_us: int = 0
    _since_us: int = 0
    _timer: Timer | None = None

    # --- what happens to it ------------------------------------------------------------------

    def tell(self, membership: Membership) -> None:
        """A membership is commanded; an older one than the newest changes nothing."""
        if self.told is None or self.told.generation < membership.generation:
            self.told = membership
            self.try_to_form()

    def add(self, process: Process) -> None:
        """A process starts."""
        self.processes[process.worker] = process

    def remove(self, process: Process) -> None:
        """A process is gone."""
        del self.processes[process.worker]
        if self.intact and process.generation and process.generation == self._generation:
            self.break_up()
        elif self.activity is Activity.FORMING and self._is_told(process.worker):
            self._enter(Activity.STANDING)

    def break_up(self) -> None:
        """A member is gone or cannot be reached: the group stands, unnoticed outside."""
        was_training = self.activity is Activity.TRAINING
        self._enter(Activity.STANDING)
        self.intact = False
        if was_training:
            self.world.meter.stall(self.task, Phase.DETECTION)

    def try_to_form(self) -> None:
        """Form the newest membership, if it has not formed yet and all its members are there and ready."""
        told = self.told
        if told is None or told.generation <= self._generation:
            return
        there = [self.processes.get(member.worker) for member in told.members]
        if not all(process is not None and process.ready for process in there):
            return
        if not told.members:
            self._part(told)
            return
        fresh = len(told.joiners) == len(told.members)
        self._enter(Activity.FORMING, self._forming_us(told, fresh), lambda: self._form(told, fresh))
        self.world.meter.stall(self.task, Phase.TRANSITION)

    # --- what it does ------------------------------------------------------------------------

    def _form(self, told: Membership, fresh: bool) -> None:
        """All say that they are in, or their lead for them; members left out park."""
        if fresh:
            self._owed_us = 0 if self.saved else to_us(self.world.assumptions.recompute_s)
        self.formed, self.intact, self.saved = told, True, False
        self._park_others(told)
        for member in told.members:
            process = self.processes[member.worker]
            process.generation = told.generation
            if process.worker == told.lead or process.worker not in told.spoken_for:
                self.say(process.node, self._regrouped(process, told, fresh))
        self._enter(Activity.CATCHING_UP, self._owed_us, self._train)

    def _train(self) -> None:
        self._owed_us = 0
        members = self._members()
        self._enter(Activity.TRAINING, self._iteration_us, self._first_step)
        self.world.meter.run(self.task, self.worth[len(members)], [p.node for p in members])

    def _first_step(self) -> None:
        self._timer = None
        self._report_steps()

    def _part(self, told: Membership) -> None:
        """No member stays: the state is saved and all park."""
        self.saved = self.saved or self.intact
        self._enter(Activity.STANDING)
        self.formed, self.intact = told, False
        self._park_others(told)
        self.world.meter.idle(self.task)

    def _enter(self, activity: Activity, length_us: int = 0, then: Action | None = None) -> None:
        """Leave the present activity with what it has done so far; after `length_us` comes `then`."""
        if self.activity is Activity.TRAINING:
            self._report_steps()
        if self.activity is Activity.CATCHING_UP:
            self._owed_us = max(0, self._owed_us - (self.world.clock.now_us - self._since_us))
        if self._timer is not None:
            self._timer.cancel()
        self.activity, self._since_us = activity, self.world.clock.now_us
        self._timer = self.world.clock.after(length_us, then) if then else None

    # --- details -----------------------------------------------------------------------------

    @property
    def _generation(self) -> int:
        return self.formed.generation if self.formed else 0

    def _is_told(self, worker: str) -> bool:
        return self.told is not None and any(member.worker == worker for member in self.told.members)

    def _members(self) -> list[Process]:
        """Processes of the formed membership that are there."""
        members = self.formed.members if self.formed else ()
        return [self.processes[member.worker] for member in members if member.worker in self.processes]

    def _forming_us(self, told: Membership, fresh: bool) -> int:
        assumed = self.world.assumptions
        before = [member.worker for member in self.formed.members] if self.formed else []
        now = [member.worker for member in told.members]
        length_s = assumed.regroup_s
        if fresh:
            length_s += assumed.checkpoint_load_s if self.formed else 0.0
        elif now != before:
            length_s += assumed.transfer_s
            length_s += assumed.redeal_s if told.urgent else 0.0
        return to_us(length_s)

    def _regrouped(self, process: Process, told: Membership, fresh: bool) -> v.WorkerRegrouped:
        source: Literal["own", "replica", "checkpoint", "init"] = "own"
        if fresh:
            source = "checkpoint" if self.committed else "init"
        elif process.worker in told.joiners:
            source = "replica"
        return v.WorkerRegrouped(
            node=self._name(process),
            task=self.task,
            worker=process.worker,
            generation=told.generation,
            iteration=self.committed + 1,
            dealt=0,
            duration_us=self.world.clock.now_us - self._since_us,
            source=source,
        )

    def _park_others(self, told: Membership) -> None:
        staying = {member.worker for member in told.members}
        for process in self.processes.values():
            if process.generation and process.worker not in staying:
                process.generation = 0
                parked = v.WorkerParked(
                    node=self._name(process),
                    task=self.task,
                    worker=process.worker,
                    generation=told.generation,
                    iteration=self.committed,
                )
                self.say(process.node, parked)

    @property
    def _iteration_us(self) -> int:
        """Length of one iteration on the members that there are."""
        achieved = self.flops[len(self.formed.members) if self.formed else 0]
        return self.flop * 1_000_000 // max(1, achieved) + 1

    def _report_steps(self) -> None:
        """One event for all whole iterations since the last one, said by the first member that is there."""
        members, iteration_us = self._members(), self._iteration_us
        steps = (self.world.clock.now_us - self._since_us) // iteration_us
        if not steps or not members or self.formed is None:
            return
        lead = members[0]
        committed = v.StepCommitted(
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
        self.say(lead.node, committed)
        self.committed += steps
        self._since_us += steps * iteration_us

    def _name(self, process: Process) -> str:
        return f"n{process.node}"
