"""The rules of links that carry one way only: who hears nothing is lost soon, nobody is accused, and all come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.events import vocabulary as v

#: Name -> sentence; part of `invariants.RULES`.
ONE_WAY_RULES: dict[str, str] = {
    "deaf_nodes_are_lost": "A node that alone is heard and hears nothing is lost within 3.5 s.",
    "cut_ways_accuse_nobody": "Where nothing fails but one way of links, no node is isolated, and nobody gives up.",
    "cut_ways_heal": "Where nothing fails but one way of links, a node is up 5 s after its link carries again.",
}
#: Three heartbeats, and half a second: the beat on its way at the cut comes back no more.
DEAF_WITHIN_S = 3.5
#: Two beats until own ones come back, and the word of that.
BACK_WITHIN_S = 5.0
#: What the head allows for new connections once it hears itself again, and its first beat.
_SETTLED_AFTER_S = 3.0
#: Of a node's link to the log, and its agent. deaf: it is heard, and hears nothing. bad: anything else.
Way: TypeAlias = Literal["sound", "deaf", "bad"]


def deaf_nodes_are_lost(deaf_s: Mapping[str, float]) -> str:
    """Check for how long nodes that are up have been deaf, while all others were heard."""
    late = [name for name, for_s in deaf_s.items() if for_s > DEAF_WITHIN_S]
    return "; ".join(f"{name} is heard and hears nothing for {deaf_s[name]:.2f} s, and is up" for name in late)


def cut_ways_accuse_nobody(event: v.AnyEvent) -> str:
    """Check a decision of a history in which nothing fails but one way of links."""
    match event:
        case v.NodeIsolated():
            return f"{event.node} is isolated for a link that carries one way: {event.reason}"
        case v.TaskFailed():
            return f"{event.task} fails for a link that carries one way: {event.reason}"
    return ""


def cut_ways_heal(state: ClusterState, sound_s: Mapping[str, float]) -> str:
    """Check for how long links have been sound again. `sound_s`: by node."""
    late = [name for name, for_s in sound_s.items() if for_s > BACK_WITHIN_S]
    absent = [name for name in late if name not in state.nodes or not state.nodes[name].schedulable]
    return "; ".join(f"{name} is not back {sound_s[name]:.2f} s after its link is sound" for name in absent)


class OneWayRecord:
    """Checks by these rules. `alone`: nothing fails but one way of links in this history."""

    def __init__(self) -> None:
        self.alone = False
        self._term = 0
        self._settled_at_s = 0.0
        #: Since when a node is deaf, or sound.
        self._deaf_since_s: dict[str, float] = {}
        self._sound_since_s: dict[str, float] = {}

    def on_entry(self, event: v.AnyEvent) -> Iterator[tuple[str, str]]:
        """Check an event that has become durable, and yield (rule, story)."""
        yield "cut_ways_accuse_nobody", cut_ways_accuse_nobody(event) if self.alone else ""

    def at_look(
        self, state: ClusterState, ways: Mapping[str, Way], now_s: float, *, judges: bool
    ) -> Iterator[tuple[str, str]]:
        """Look at the links as they are now, and yield (rule, story). `judges`: a head leads, and nothing is wrong with
        it, its log and its links."""
        if not judges or state.term != self._term or state.silence is not None:
            self._term, self._settled_at_s = state.term, now_s + _SETTLED_AFTER_S
        is_settled = now_s >= self._settled_at_s
        up = [node.name for node in state.nodes.values() if node.status is NodeStatus.UP]
        unsound = [name for name in up if ways.get(name) != "sound"]
        deaf = [name for name in unsound if ways.get(name) == "deaf"] if is_settled and len(unsound) == 1 else []
        self._deaf_since_s = {name: self._deaf_since_s.get(name, now_s) for name in deaf}
        yield "deaf_nodes_are_lost", deaf_nodes_are_lost(_ages(self._deaf_since_s, now_s))
        sound = [name for name, way in ways.items() if way == "sound"] if is_settled and self.alone else []
        self._sound_since_s = {name: self._sound_since_s.get(name, now_s) for name in sound}
        yield "cut_ways_heal", cut_ways_heal(state, _ages(self._sound_since_s, now_s))


def _ages(since_s: Mapping[str, float], now_s: float) -> dict[str, float]:
    return {name: now_s - at_s for name, at_s in since_s.items()}
