"""Bases of everything in the log: what an event is, who may say it, and how it is shown."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import msgspec

from unicrond.events.vocabulary.field_types import Boot, Iteration, Name, NameOrNone, Serial, Text, WorkerId


class Value(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, repr_omit_defaults=True
):
    """A part of an event, not an event by itself."""


class Event(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    repr_omit_defaults=True,
    tag=True,
):
    """Base of everything that may stand in the log; the class name is the wire tag.

    `is_decided`: a decision or a command; `is_request`. Asked of each entry of a log: `isinstance` with a base takes
    several times as long. `is_noteworthy`: a person who watches wants to see it; the rest is the machinery that brings
    it about. `since`: the schema that brought the type (schemas.py).
    """

    is_decided: ClassVar[bool] = False
    is_request: ClassVar[bool] = False
    is_noteworthy: ClassVar[bool] = False
    since: ClassVar[int] = 1

    @abstractmethod
    def sentence(self) -> str:
        """Say it as one plain sentence without a full stop. It may hold any text that the event holds."""

    def nodes_named(self) -> Iterator[str]:
        """Yield the nodes that it names."""
        node = getattr(self, "node", None)
        if node is not None:
            yield node

    def tasks_named(self) -> Iterator[str]:
        """Yield the tasks that it names."""
        task = getattr(self, "task", None)
        if task is not None:
            yield task


class Observation(Event, frozen=True, kw_only=True):
    """A fact that an agent or a person reports. The fold never raises on one."""


class WorkerObservation(Observation, frozen=True, kw_only=True):
    """An observation about one worker, reported by its node's agent."""

    node: Name
    task: Name
    worker: WorkerId


class PlacedObservation(WorkerObservation, frozen=True, kw_only=True):
    """An observation about one worker at an iteration of its group."""

    generation: Serial
    iteration: Iteration


class Request(Observation, frozen=True, kw_only=True):
    """A request of a person. Its producer is the API, whatever node it names.

    `requester`: the name of the token that came with it; "" where the API wants none.
    """

    is_request: ClassVar[bool] = True

    requester: NameOrNone = ""

    @abstractmethod
    def wish(self) -> str:
        """Say what the person asks for."""

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"{self.wish()}{f' (asked by {self.requester})' if self.requester else ''}"


class Decision(Event, frozen=True, kw_only=True):
    """A choice of the coordinator, with its reason."""

    is_decided: ClassVar[bool] = True


class BroadcastDecision(Decision, frozen=True, kw_only=True):
    """A decision about a task that the task's nodes read in the log themselves (event_log.py)."""

    task: Name


class Command(Event, frozen=True, kw_only=True):
    """An order to one node's agent. `command_id` is "term.epoch.node.number"; agents act once per id.

    `agent_boot`: the agent that it is for. The next agents of its run directory may obey, and no others; what starts a
    worker or a check is void for them, too. 0: any.
    """

    is_decided: ClassVar[bool] = True

    command_id: Text
    node: Name
    epoch: Serial
    agent_boot: Boot = 0
