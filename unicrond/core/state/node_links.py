"""What is known of bad links between nodes, by the probes of both ends; made by the fold alone."""

from __future__ import annotations

import msgspec


class NodeLink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Two nodes whose link was bad when it was probed last, or has been of late.

    `conditions`: end -> what it says of the way to the other one and back, of those that say anything bad; `took_us`:
    how long its probe took; `hears`: whether it hears the other, of ends to which nothing comes back. `since_us`: since
    when it is bad, or was; `restored_us`: when it was found good again, 0: it is not. `times`: how often it has become
    bad, each time soon after it was good. `watches`: end -> the agent that probes it again and again, the agent of the
    other end that answers, and for how long it must be good to be believed (microseconds). `has_stopped_task`: it
    has stopped a task, which went on without one end. Then both must say that it is good: through a link that loses
    packets some probes come quickly.
    """

    first: str
    second: str
    conditions: dict[str, str] = {}
    took_us: dict[str, int] = {}
    hears: dict[str, bool] = {}
    since_us: int = 0
    restored_us: int = 0
    times: int = 1
    watches: dict[str, tuple[int, int, int]] = {}
    has_stopped_task: bool = False

    @property
    def ends(self) -> tuple[str, str]:
        """The two nodes."""
        return self.first, self.second

    @property
    def is_poor(self) -> bool:
        """Return whether each end says that little or nothing comes back from the other."""
        return len(self.conditions) == len(self.ends)

    @property
    def is_silent(self) -> bool:
        """Return whether each end says that nothing comes back from the other."""
        return self.is_poor and all(condition == "silent" for condition in self.conditions.values())

    @property
    def is_barred(self) -> bool:
        """Return whether no task may be on both ends."""
        return self.is_silent or (self.has_stopped_task and bool(self.conditions))

    @property
    def cut_way(self) -> tuple[str, str] | None:
        """Return from which end nothing comes to which, where the other way works and both ends say so."""
        hearers = [end for end in self.ends if self.hears.get(end)]
        if not self.is_silent or len(hearers) != 1 or len(self.hears) != len(self.ends):
            return None
        return hearers[0], self.opposite(hearers[0])

    def opposite(self, end: str) -> str:
        """Return the other end."""
        return self.second if end == self.first else self.first


def link_key(node: str, peer: str) -> str:
    """Return the key of the link between two nodes; no name holds the sign between them."""
    return "|".join(sorted((node, peer)))


class LinkProbing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Probes of the links within the newest group. `rounds`: how often all were ordered, `ordered_us`: when last;
    `orders`: node -> the command that it has not answered. `overdue`: another round is due: the group has not met for
    long, or is slow for no worker's fault; `usual_us`: how long its iterations take when it is not (0: it is not slow).
    `slow_us`: how long they took when that last asked for a round; `is_repeated`: it was reported again too soon.
    `iteration`: the newest that was committed at the last order; -1: none was ordered for this group.
    """

    rounds: int = 0
    orders: dict[str, str] = {}
    overdue: bool = False
    usual_us: int = 0
    ordered_us: int = 0
    slow_us: int = 0
    is_repeated: bool = False
    iteration: int = -1
