"""A request to a worker beside its work, for the content of its flight recorder. Part of messages.py."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from unicrond.agents.protocol.message import WireMessage
from unicrond.events.queries.collectives import COLLECTIVES_MAX, Collective
from unicrond.events.vocabulary import Text


class TellFlight(WireMessage, frozen=True, kw_only=True):
    """(agent -> worker) send the content of the flight recorder. Only to a worker whose Hello says that it can."""


class Flight(WireMessage, frozen=True, kw_only=True):
    """(worker -> agent) the content of the flight recorder, the oldest first. `trouble`: why there is nothing."""

    collectives: Annotated[tuple[Collective, ...], Meta(max_length=COLLECTIVES_MAX)] = ()
    trouble: Text = ""
