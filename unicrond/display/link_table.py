"""Bad links between nodes, as `unicronctl status` shows them."""

from __future__ import annotations

import time

from unicrond.core.state.state import ClusterState
from unicrond.display.tables import Table


def links_table(state: ClusterState) -> Table:
    """Build a table of the links that are bad by the word of both ends."""
    rows = [
        (
            f"{link.first}-{link.second}",
            "nothing passes" if link.is_silent else "slow",
            f"{max(link.took_us.values(), default=0) / 1e6:.2f} s",
            "no task on both" if link.is_barred else "none",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(link.since_us / 1e6)),
            str(link.times),
        )
        for link in state.links.values()
        if link.is_poor
    ]
    headers = ("link", "condition", "probe", "response", "since", "times")
    return Table(headers, tuple(rows), frozenset({"probe", "times"}), "none")
