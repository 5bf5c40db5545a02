"""A question to a worker beside its work: what does its flight recorder hold? Part of messages.py."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agents.protocol.message import Message
from events.collectives import COLLECTIVES_MAX, Collective
from events.vocabulary import Text


class TellFlight(Message, frozen=True, kw_only=True):
    """(agent -> worker) tell what the flight recorder holds. Only to a worker whose Hello says that it can."""


class Flight(Message, frozen=True, kw_only=True):
    """(worker -> agent) what the flight recorder holds, the oldest first. `trouble`: why there is nothing."""

    collectives: Annotated[tuple[Collective, ...], Meta(max_length=COLLECTIVES_MAX)] = ()
    trouble: Text = ""
