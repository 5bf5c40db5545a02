"""Addresses at which nodes serve others."""

from __future__ import annotations

from unicrond.events.vocabulary.base import Value
from unicrond.events.vocabulary.field_types import Name, Port, Text


class StoreAddress(Value, frozen=True, kw_only=True):
    """A rendezvous store (TCPStore) that lives beside an agent, never in a rank."""

    host: Text
    port: Port


class MemoryService(Value, frozen=True, kw_only=True):
    """The address at which a node's agent takes and gives states of training. `token`: requesters must name it."""

    node: Name
    host: Text
    port: Port
    token: Text
