"""A turn: one input on its way through the core. Rules: core.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from agents.agent_config import Config
from agents.state import MAX_ANSWERED, Action, Append, Link, Order, Remembered, State, Worker
from events.schemas import SCHEMA
from events.vocabulary import CommandApplied, CommandFailed, Observation, WorkerId

MAX_TEXT = 1024
#: How the reason begins why a command failed that could not be read.
UNREAD = "this agent cannot read it: "
K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Turn:
    """One input being handled: `state` is replaced, never changed, and `actions` grows."""

    state: State
    actions: list[Action] = field(default_factory=list)

    @property
    def memory(self) -> Remembered:
        """What outlives the agent."""
        return self.state.memory

    @property
    def config(self) -> Config:
        """See State."""
        return self.state.config

    def remember(self, **changes: Any) -> None:
        """Replace these fields of the memory."""
        self.state = replace(self.state, memory=replace(self.memory, **changes))

    def change(self, worker: Worker, **changes: Any) -> Worker:
        """Replace these fields of the worker's record; the new record."""
        changed = replace(worker, **changes)
        self.remember(workers={**self.memory.workers, worker.worker: changed})
        return changed

    def link(self, worker: WorkerId, link: Link) -> None:
        """Replace the worker's link."""
        self.state = replace(self.state, links={**self.state.links, worker: link})

    def append(self, event: Observation, caused_by: str = "", *, confirm: bool = False) -> None:
        """Ask for `event` to be appended. `confirm`: the core waits to hear that it stands in the log."""
        self.actions.append(Append(event=event, caused_by=caused_by, confirm=confirm))

    def answer(self, order: Order, reason: str = "") -> None:
        """Answer a command, now and whenever it comes again. `reason`: why it failed, "" if it did not."""
        answered = {**self.memory.answered, order.command_id: reason[:MAX_TEXT]}
        self.remember(answered=newest_of(answered, MAX_ANSWERED))
        self.say_answer(order)

    def say_answer(self, order: Order) -> None:
        """Append the answer to an order, as it is remembered."""
        reason = self.memory.answered[order.command_id]
        node, command_id = self.config.node, order.command_id
        self.append(
            CommandFailed(
                node=node, command_id=command_id, reason=reason, reads=SCHEMA if reason.startswith(UNREAD) else 0
            )
            if reason
            else CommandApplied(node=node, command_id=command_id),
            order.cause,
        )

    def is_connected(self, worker: WorkerId) -> bool:
        """Whether the worker has a connection to this agent."""
        link = self.state.links.get(worker)
        return link is not None and link.connected

    def reached(self, worker: WorkerId, iteration: int) -> None:
        """The newest iteration that the worker has told of."""
        self.link(worker, replace(self.state.links.get(worker, Link()), iteration=iteration))


def newest_of(mapping: dict[K, V], limit: int) -> dict[K, V]:
    """The `limit` entries that were put in last."""
    return dict(list(mapping.items())[-limit:])
