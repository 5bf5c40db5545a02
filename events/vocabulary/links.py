"""Links between nodes: orders to probe them, what the probes found, and what follows for a task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta

from unicrond.events.vocabulary.base import Command, Decision, Observation, Value
from unicrond.events.vocabulary.field_types import NODES_MAX, Duration, Name, NameOrNone, Port, Serial, Text
from unicrond.events.vocabulary.phrases import seconds

#: What one probe says of the way to a peer and back. "silent": nothing came within the limit; "slow": it came late;
#: "unknown": this node itself had no time for it.
LinkCondition: TypeAlias = Literal["good", "slow", "silent", "unknown"]


class ProbedPeer(Value, frozen=True, kw_only=True):
    """A node to exchange a few kilobytes with, and where its agent answers."""

    node: Name
    host: Text
    port: Port


class ProbeLinks(Command, frozen=True, kw_only=True):
    """Exchange a few kilobytes with each of the peers, and say LinksProbed. A peer that does not answer is probed again
    until it has been good for `patience_us`, and at least twice; that is said too. `task`, `generation`: the group
    whose members' links are in question; "" and 0: a bad link is watched.
    """

    peers: tuple[ProbedPeer, ...]
    patience_us: Duration = 0
    task: NameOrNone = ""
    generation: Serial = 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        purpose = f" of generation {self.generation} of {self.task}" if self.task else ""
        return f"probe the links of {self.node} to {', '.join(peer.node for peer in self.peers)}{purpose}"

    def tasks_named(self) -> Iterator[str]:
        """Yield the task whose group is in question."""
        if self.task:
            yield self.task


class LinkProbe(Value, frozen=True, kw_only=True):
    """What a probe of the way to `peer` and back found. `hears_peer`: though nothing came back, datagrams of the peer
    came meanwhile, so that way works.
    """

    peer: Name
    condition: LinkCondition
    took_us: Duration
    hears_peer: bool = False


class LinksProbed(Observation, frozen=True, kw_only=True):
    """The probes that the ProbeLinks of `command_id` asked for have ended, or one of its peers has changed since."""

    node: Name
    command_id: Text
    probes: Annotated[tuple[LinkProbe, ...], Meta(max_length=NODES_MAX)]

    def sentence(self) -> str:
        """Say it in one sentence."""
        bad = [
            f"{p.peer} {p.condition} ({seconds(p.took_us)}{', but is heard' if p.hears_peer else ''})"
            for p in self.probes
            if p.condition != "good"
        ]
        good = [probe.peer for probe in self.probes if probe.condition == "good"]
        parts = [f"links of {self.node}: {', '.join(bad)}"] if bad else [f"links of {self.node} are good"]
        return "; ".join(parts + ([f"to {', '.join(good)}"] if good and not bad else []))


class WorkersWithdrawn(Decision, frozen=True, kw_only=True):
    """The task goes on without its workers on `node`: links from there to `peers` are bad, and these are worth more to
    it. It is no fault of the node, which other tasks may use.
    """

    is_noteworthy: ClassVar[bool] = True

    task: Name
    node: Name
    peers: tuple[Name, ...]
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"{self.task} goes on without {self.node}: {self.reason}"
