"""One input on its way through the core: the state as it changes, and the actions that follow. Rules: machine.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from unicrond.agents.core.agent_config import AgentConfig
from unicrond.agents.core.state import (
    MAX_ANSWERED,
    Action,
    AgentState,
    Append,
    PendingCommand,
    Remembered,
    WorkerLink,
    WorkerRecord,
)
from unicrond.events.vocabulary import CommandApplied, CommandFailed, Observation, WorkerId
from unicrond.events.wire.schemas import SCHEMA

MAX_TEXT = 1024
#: The beginning of the reason why an unreadable command failed.
UNREAD = "this agent cannot read it: "
K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Transition:
    """The handling of one input: `state` is replaced, never changed in place, and `actions` grows."""

    state: AgentState
    actions: list[Action] = field(default_factory=list)

    @property
    def memory(self) -> Remembered:
        """Return the memory that outlives the agent."""
        return self.state.memory

    @property
    def config(self) -> AgentConfig:
        """Return the agent's settings."""
        return self.state.config

    def remember(self, **changes: Any) -> None:
        """Replace these fields of the memory."""
        self.state = replace(self.state, memory=replace(self.memory, **changes))

    def change(self, worker: WorkerRecord, **changes: Any) -> WorkerRecord:
        """Replace these fields of the worker's record; return the new record."""
        changed = replace(worker, **changes)
        self.remember(workers={**self.memory.workers, worker.worker: changed})
        return changed

    def link(self, worker: WorkerId, link: WorkerLink) -> None:
        """Replace the worker's link."""
        self.state = replace(self.state, links={**self.state.links, worker: link})

    def append(self, event: Observation, caused_by: str = "", *, confirm: bool = False) -> None:
        """Append `event` to the outbox. `confirm`: feed the core an input once the log holds it."""
        self.actions.append(Append(event=event, caused_by=caused_by, confirm=confirm))

    def answer(self, order: PendingCommand, reason: str = "") -> None:
        """Answer a command, now and whenever it comes again. `reason`: why it failed, "" if it did not."""
        answered = {**self.memory.answers, order.command_id: reason[:MAX_TEXT]}
        self.remember(answers=newest_of(answered, MAX_ANSWERED))
        self.say_answer(order)

    def say_answer(self, order: PendingCommand) -> None:
        """Append the answer to an order, as it is remembered."""
        reason = self.memory.answers[order.command_id]
        node, command_id = self.config.node, order.command_id
        self.append(
            CommandFailed(
                node=node,
                command_id=command_id,
                reason=reason,
                readable_schema=SCHEMA if reason.startswith(UNREAD) else 0,
            )
            if reason
            else CommandApplied(node=node, command_id=command_id),
            order.cause,
        )

    def is_connected(self, worker: WorkerId) -> bool:
        """Return whether the worker has a connection to this agent."""
        link = self.state.links.get(worker)
        return link is not None and link.connected

    def reached(self, worker: WorkerId, iteration: int) -> None:
        """Record the newest iteration that the worker has reported."""
        self.link(worker, replace(self.state.links.get(worker, WorkerLink()), iteration=iteration))


def newest_of(mapping: dict[K, V], limit: int) -> dict[K, V]:
    """Return the `limit` entries that were put in last."""
    return dict(list(mapping.items())[-limit:])
