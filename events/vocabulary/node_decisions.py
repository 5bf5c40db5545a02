"""Decisions about nodes: lost, isolated, readmitted, forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from msgspec import Meta

from unicrond.events.vocabulary.base import Decision, Value
from unicrond.events.vocabulary.field_types import (
    NODES_NAMED_MAX,
    Count,
    Duration,
    FirstSerial,
    Micros,
    Name,
    NameOrNone,
    Text,
)
from unicrond.events.vocabulary.phrases import abridge, count, seconds


class Evidence(Value, frozen=True, kw_only=True):
    """The last beat that was seen of a node: its sequence and receive time on the heartbeat stream."""

    beat_seq: Count
    beat_at_us: Micros


class NodeLost(Decision, frozen=True, kw_only=True):
    """The node's agent is silent or away: its workers count as lost. `evidence`: the sign that decided it."""

    is_noteworthy: ClassVar[bool] = True

    node: Name
    evidence: Evidence
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"node {self.node} lost: {self.reason}"


class NodesLost(Decision, frozen=True, kw_only=True):
    """So many nodes have fallen silent together that one cause is likeliest (a rack, a switch, power): their workers
    count as lost, and no machine is to blame. `domain`: the label that they share. `joins`: they belong to the outage
    that stands: what one event has no room for, and those of a domain that fall silent later than the rest.
    """

    is_noteworthy: ClassVar[bool] = True

    nodes: Annotated[tuple[Name, ...], Meta(max_length=NODES_NAMED_MAX)]
    reason: Text
    domain: NameOrNone = ""
    joins: bool = False

    def sentence(self) -> str:
        """Say it in one sentence."""
        domain = f" of {self.domain}" if self.domain else ""
        names = f"{count(len(self.nodes), 'node')}{domain}"
        together = "lost with those before" if self.joins else "lost together"
        return f"{names} {together} ({abridge(self.nodes)}): {self.reason}"

    def nodes_named(self) -> Iterator[str]:
        """Yield the nodes that it names."""
        yield from self.nodes


class NodeReturned(Decision, frozen=True, kw_only=True):
    """A lost node's agent gives signs of life again. `evidence`: the sign that decided it."""

    is_noteworthy: ClassVar[bool] = True

    node: Name
    evidence: Evidence

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"node {self.node} returned, beat {self.evidence.beat_seq}"


class SilenceHeld(Decision, frozen=True, kw_only=True):
    """The coordinator hears none of the nodes that are up, two or more: it holds that for its own trouble, judges none
    of them and decides nothing about their workers. `nodes`: how many they are.
    """

    is_noteworthy: ClassVar[bool] = True

    nodes: Count
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"the head hears none of {self.nodes} nodes: {self.reason}"


class SilenceEnded(Decision, frozen=True, kw_only=True):
    """The coordinator hears its nodes again; those that are silent still are judged one by one from now on."""

    is_noteworthy: ClassVar[bool] = True

    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"the head hears nodes again: {self.reason}"


class NodeForgotten(Decision, frozen=True, kw_only=True):
    """The node has gone for good: nothing is held against its name any more, and nothing is kept for it."""

    is_noteworthy: ClassVar[bool] = True

    node: Name
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"node {self.node} forgotten: {self.reason}"


class NodeIsolated(Decision, frozen=True, kw_only=True):
    """The node gets no worker until `until_us` (log time), or until it is readmitted where that is None."""

    is_noteworthy: ClassVar[bool] = True

    node: Name
    until_us: Micros | None
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        until = "" if self.until_us is None else f" until {self.until_us} us"
        return f"node {self.node} isolated{until}: {self.reason}"


class DrainStarted(Decision, frozen=True, kw_only=True):
    """The workers of a node that is to be empty by a time leave it now, before that time is near."""

    is_noteworthy: ClassVar[bool] = True

    node: Name
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"workers leave node {self.node} now: {self.reason}"


class NodeReadmitted(Decision, frozen=True, kw_only=True):
    """The node's isolation is over: it may get workers again."""

    is_noteworthy: ClassVar[bool] = True

    node: Name
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"node {self.node} readmitted: {self.reason}"


class RepairEnded(Decision, frozen=True, kw_only=True):
    """The operator's repair command for the node has ended, in its `isolation`-th isolation. `detail`: what it said."""

    is_noteworthy: ClassVar[bool] = True

    node: Name
    isolation: FirstSerial
    has_passed: bool
    duration_us: Duration
    detail: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        how = "succeeded" if self.has_passed else "failed"
        return f"the repair of node {self.node} {how} after {seconds(self.duration_us)}: {self.detail}"
