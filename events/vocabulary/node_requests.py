"""Requests of people about nodes: cordons, maintenance, logins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from unicrond.events.vocabulary.base import Request
from unicrond.events.vocabulary.field_types import Boot, Micros, Name, PublicKey, Text
from unicrond.events.vocabulary.phrases import to_the_second


class NodeCordoned(Request, frozen=True, kw_only=True):
    """The node gets no new workers. `drain`: those that it has leave it too, at an iteration boundary.

    `until_return`: until an agent joins under the name without workers. `agent_boot`, `address`: only if the node has
    that agent, or is there; 0 and "": whatever it is. `empty_by_us`: with `drain`, when the node is to be empty at the
    latest (log time): its workers stay until there is room for them elsewhere, or until that time is near
    (unicrond/core/nodes/drains.py); 0: they leave now.
    """

    node: Name
    drain: bool
    reason: Text
    until_return: bool = False
    agent_boot: Boot = 0
    address: Text = ""
    empty_by_us: Micros = 0

    def wish(self) -> str:
        """Say what the person asks for."""
        until = " until it returns" if self.until_return else ""
        by = f" by {to_the_second(self.empty_by_us)}" if self.drain and self.empty_by_us else ""
        return f"node {self.node} {'drained' if self.drain else 'cordoned'}{by}{until}: {self.reason}"


class NodeUncordoned(Request, frozen=True, kw_only=True):
    """The node may have workers again; an isolated one, whatever it waits for.

    `agent_boot`, `address`: see NodeCordoned.
    """

    node: Name
    reason: Text
    agent_boot: Boot = 0
    address: Text = ""

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"node {self.node} uncordoned: {self.reason}"


class MaintenancePlanned(Request, frozen=True, kw_only=True):
    """The nodes are to be empty from `from_us` to `until_us` (log time); a window `w<seq>` by this entry's number."""

    is_noteworthy: ClassVar[bool] = True

    nodes: tuple[Name, ...]
    from_us: Micros
    until_us: Micros
    reason: Text

    def wish(self) -> str:
        """Say what the person asks for."""
        window = f"{to_the_second(self.from_us)} to {to_the_second(self.until_us)}"
        return f"maintenance of {', '.join(self.nodes)} from {window}: {self.reason}"

    def nodes_named(self) -> Iterator[str]:
        """Yield the nodes that it names."""
        yield from self.nodes


class MaintenanceCancelled(Request, frozen=True, kw_only=True):
    """The maintenance window is no longer wanted, or is over before its time."""

    is_noteworthy: ClassVar[bool] = True

    window: Text
    reason: Text

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"maintenance {self.window} cancelled: {self.reason}"


class ForgetRequested(Request, frozen=True, kw_only=True):
    """A node that has left or is lost is to be forgotten. `leave`: one that is up is to leave for good first.
    `agent_boot`, `address`: see NodeCordoned.
    """

    is_noteworthy: ClassVar[bool] = True

    node: Name
    leave: bool
    reason: Text
    agent_boot: Boot = 0
    address: Text = ""

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"node {self.node} is to {'leave for good and ' if self.leave else ''}be forgotten: {self.reason}"


class NodeEnrolled(Request, frozen=True, kw_only=True):
    """The node's agent may log in with this key, and with no other (events/trust/logins.py).

    `expires_us`: if the node has not joined by then, the login ends; 0: never. `previous_until_us`: so long the keys
    that the node has hold as well; 0: they end at once.
    """

    node: Name
    key: PublicKey
    expires_us: Micros
    previous_until_us: Micros = 0

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"node {self.node} enrolled with key {self.key[:12]}..."


class NodeRevoked(Request, frozen=True, kw_only=True):
    """The node's login has ended; its workers have not."""

    node: Name
    reason: Text

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"login of node {self.node} revoked: {self.reason}"
