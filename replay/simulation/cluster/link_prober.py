"""Probes of links in virtual time: what `agents/health/link_probe.py` finds, of nodes that reach each other or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from unicrond.events.vocabulary import LinkProbe, LinksProbed, ProbeLinks
from unicrond.replay.simulation.models.network import Reach

#: How long a probe without an answer takes, and one with an answer; and how often a silent peer is probed.
LIMIT_S, ANSWER_S, EVERY_S = 1.0, 0.02, 1.5


class HasReach(Protocol):
    """What knows which nodes can talk to each other."""

    reach: Reach


class SimulatedProber:
    """Probes for one agent. `feed` takes what was found; an agent that has ended ignores it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, node: str, network: HasReach, feed: Callable[[LinksProbed], None]
    ) -> None:
        self._loop = loop
        self._node = node
        self._network = network
        self._feed = feed
        #: Peer -> the command for which it is watched, and since when it has been good; 0: it is not.
        self._watches: dict[str, tuple[str, float]] = {}

    def probe(self, order: ProbeLinks) -> None:
        """Probe all peers once, and watch those that do not answer; an order without a task is for a watch."""
        silent = [peer for peer in order.peers if not self._reaches(peer.node)]
        watched = silent if order.task else list(order.peers)
        for peer in watched:
            self._watches[peer.node] = (order.command_id, 0.0)
            self._loop.call_later(EVERY_S, self._watch, replace(order, peers=(peer,)))
        if order.task:
            conditions = [(peer.node, peer not in silent) for peer in order.peers]
            self._loop.call_later(LIMIT_S if silent else ANSWER_S, self._report, order, conditions)

    def _watch(self, order: ProbeLinks) -> None:
        (peer,) = order.peers
        command_id, since_s = self._watches.get(peer.node, ("", 0.0))
        if command_id != order.command_id:
            return
        is_good, now_s = self._reaches(peer.node), self._loop.time()
        if is_good and since_s and now_s - since_s >= order.patience_us / 1e6:
            del self._watches[peer.node]
            self._report(order, [(peer.node, True)])
            return
        self._watches[peer.node] = (command_id, (since_s or now_s) if is_good else 0.0)
        self._loop.call_later(EVERY_S, self._watch, order)

    def _report(self, order: ProbeLinks, conditions: list[tuple[str, bool]]) -> None:
        probes = [
            LinkProbe(
                peer=peer,
                condition="good" if is_good else "silent",
                took_us=int((ANSWER_S if is_good else LIMIT_S) * 1e6),
                hears_peer=not is_good and self._network.reach.carries(peer, self._node),
            )
            for peer, is_good in conditions
        ]
        self._feed(LinksProbed(node=self._node, command_id=order.command_id, probes=tuple(probes)))

    def _reaches(self, peer: str) -> bool:
        return self._network.reach.reaches(self._node, peer)
