"""How members of a group tell of broken links: each tells whom it had lost when it left."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence


def tell(
    draw: random.Random, workers: Sequence[str], dead: Collection[frozenset[str]], shards: int = 1
) -> dict[str, tuple[str, ...]]:
    """Who notices -> whom it has lost by then. They leave one after the other, in a drawn order, and are lost to who
    comes later. `dead`: the pairs whose links have broken. The n-th workers of all replicas are a group; who belongs to
    one replica leaves together."""
    groups = [set(workers[shard::shards]) for shard in range(shards)]
    replicas = [workers[first : first + shards] for first in range(0, len(workers), shards)]
    told: dict[str, tuple[str, ...]] = {}

    def lost(worker: str) -> tuple[str, ...]:
        (group,) = [group for group in groups if worker in group]
        return tuple(sorted(p for p in group if p != worker and (p in told or frozenset((worker, p)) in dead)))

    while ready := [replica for replica in replicas if replica[0] not in told and any(map(lost, replica))]:
        leaving = draw.choice(ready)
        told |= {worker: lost(worker) for worker in leaving}
    return told
