"""The life of a task: submitted, reshaped, cancelled, failed, completed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from unicrond.events.vocabulary.base import Decision, Request, WorkerObservation
from unicrond.events.vocabulary.field_types import (
    FirstIteration,
    Iteration,
    LearningRate,
    LongText,
    Name,
    NameOrNone,
    Priority,
    Serial,
    Small,
    SomeWorkers,
    Text,
    Weight,
    Workers,
)
from unicrond.events.vocabulary.phrases import count
from unicrond.events.vocabulary.shape import Shape
from unicrond.events.vocabulary.tasks import TaskSpec


class TaskSubmitted(Request, frozen=True, kw_only=True):
    """A person asks for a task to be trained. `owner`: whose it is; "": the requester's."""

    is_noteworthy: ClassVar[bool] = True

    spec: TaskSpec
    owner: NameOrNone = ""

    def wish(self) -> str:
        """Say what the person asks for."""
        spec = self.spec
        return (
            f"task {spec.name} submitted: weight {spec.weight:g}, {spec.min_workers} to {spec.max_workers}"
            f" workers, {count(spec.iterations, 'iteration')}{_beginning(spec)}"
        )

    def tasks_named(self) -> Iterator[str]:
        """Yield the tasks that it names."""
        yield self.spec.name


def _beginning(spec: TaskSpec) -> str:
    """Say what a person has ordered about states of an earlier run of the name; "" for nothing."""
    mode = spec.start.mode if spec.start else ""
    source = f" {spec.start.source}" if spec.start and spec.start.source else ""
    proof = ", --prove" if spec.start and spec.start.prove else ""
    return (f", --{mode}{f' of task{source}' if source else ''}" if mode else "") + proof


class TaskCancelled(Request, frozen=True, kw_only=True):
    """A person ends a task before it is complete."""

    is_noteworthy: ClassVar[bool] = True

    task: Name
    reason: Text

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"task {self.task} cancelled: {self.reason}"


class ProofRequested(Request, frozen=True, kw_only=True):
    """A person asks a running task for the proof that it heals: one of its workers is killed, and watched what
    follows."""

    is_noteworthy: ClassVar[bool] = True

    task: Name

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"task {self.task} is to prove that it heals: one of its workers will be killed"


class TaskUpdated(Request, frozen=True, kw_only=True):
    """A person changes what a running task is worth, or how many workers it may have. None: as it is."""

    is_noteworthy: ClassVar[bool] = True

    task: Name
    reason: Text
    weight: Weight | None = None
    priority: Priority | None = None
    preemptible: bool | None = None
    min_workers: SomeWorkers | None = None
    max_workers: SomeWorkers | None = None

    @property
    def settings(self) -> dict[str, float | int | bool]:
        """Return the settings that change, by their names in the task file."""
        names = ("weight", "priority", "preemptible", "min_workers", "max_workers")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def wish(self) -> str:
        """Say what the person asks for."""
        changes = ", ".join(f"{name} {_word(value)}" for name, value in self.settings.items())
        return f"task {self.task} is to have {changes}: {self.reason}"


def _word(value: float | bool) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:g}"


def _settings(iterations: int | None, lr: float | None) -> str:
    """Say what a reshape changes beside the layout."""
    text = f", {iterations} iterations" if iterations is not None else ""
    return text + (f", learning rate {lr:g}" if lr is not None else "")


class ReshapeRequested(Request, frozen=True, kw_only=True):
    """A person asks for other replicas of a running task, of `tp` * `pp` workers; it goes on from where it stands.

    `vpp`, `ep`: as in TaskSpec. `micro_batch`: 0: as it is. `iterations`, `lr`: with another end and another learning
    rate; None: as they are.
    """

    is_noteworthy: ClassVar[bool] = True

    task: Name
    tp: SomeWorkers
    pp: SomeWorkers
    min_workers: SomeWorkers
    max_workers: SomeWorkers
    reason: Text
    iterations: FirstIteration | None = None
    lr: LearningRate | None = None
    vpp: SomeWorkers = 1
    ep: SomeWorkers = 1
    micro_batch: Small = 0
    cp: SomeWorkers = 1
    etp: Workers = 0

    @property
    def shape(self) -> Shape:
        """Return the layout."""
        return Shape(self.tp, self.pp, self.vpp, self.ep, self.micro_batch, self.cp, self.etp)

    def wish(self) -> str:
        """Say what the person asks for."""
        return (
            f"task {self.task} is to continue with {self.shape}{_settings(self.iterations, self.lr)} and"
            f" {self.min_workers} to {self.max_workers} workers: {self.reason}"
        )


class TaskReshaped(Decision, frozen=True, kw_only=True):
    """The task has another layout from now on, and its replicas as many workers as that says (`Shape`).

    The workers of the old layout have handed the state over and are gone. The first of the new ones reassemble it.
    `vpp`, `ep`, `micro_batch`, `cp`, `etp`, `iterations`, `lr`: as it was asked. `plan`: the epoch of the plan that has
    chosen it; 0: a person has.
    """

    is_noteworthy: ClassVar[bool] = True

    task: Name
    tp: SomeWorkers
    pp: SomeWorkers
    min_workers: SomeWorkers
    max_workers: SomeWorkers
    reason: Text
    iterations: FirstIteration | None = None
    lr: LearningRate | None = None
    plan: Serial = 0
    vpp: SomeWorkers = 1
    ep: SomeWorkers = 1
    micro_batch: Small = 0
    cp: SomeWorkers = 1
    etp: Workers = 0

    @property
    def shape(self) -> Shape:
        """Return the layout."""
        return Shape(self.tp, self.pp, self.vpp, self.ep, self.micro_batch, self.cp, self.etp)

    def sentence(self) -> str:
        """Say it in one sentence."""
        return (
            f"task {self.task} has {self.shape}{_settings(self.iterations, self.lr)} and {self.min_workers} to"
            f" {self.max_workers} workers from now on: {self.reason}"
        )


class TaskFailed(Decision, frozen=True, kw_only=True):
    """The task has ended without success, and is not tried again."""

    is_noteworthy: ClassVar[bool] = True

    task: Name
    reason: LongText

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"task {self.task} failed: {self.reason}"


class TaskCompleted(WorkerObservation, frozen=True, kw_only=True):
    """The last iteration is committed; `params_digest` identifies the final parameters."""

    is_noteworthy: ClassVar[bool] = True

    iteration: Iteration
    loss: float
    params_digest: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"task {self.task} completed after iteration {self.iteration}, loss {self.loss:.4g}"
