"""Where tasks' states are kept in memory, and which nodes are to hold copies: questions to the state, no decisions.

A task's *peers* are sent with its membership, and again when the targets among them change. Targets are the first
`COPIES` nodes by highest random weight of (task, node), so that they stay the same while nodes come and go around
them, and the copies of many tasks spread over the cluster. The node that captures the state copies it to the first
that is not itself. The other peers are nodes that already keep something of it, and can be asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from heapq import nlargest

from unicrond.core.state.state import ClusterState, Node, NodeStatus, Task
from unicrond.core.state.task_parts import KeptState
from unicrond.events import vocabulary as v

#: The number of candidates for copies. The first holds the copy; the others stand in when it is lost, or captures the
#: state itself.
COPIES = 3
PEERS_MAX = 8


def services(nodes: Iterable[Node]) -> tuple[v.MemoryService, ...]:
    """Return the memory services of the nodes that take and give states now: those that are up and have memory for
    it."""
    return tuple([n.memory for n in nodes if n.memory is not None and n.status is NodeStatus.UP])


def targets(services: Sequence[v.MemoryService], task: str) -> tuple[v.MemoryService, ...]:
    """Return the nodes to copy the task's state to, in the order in which they are tried."""
    return tuple(nlargest(COPIES, services, key=lambda service: _weight(task, service.node)))


def peers(state: ClusterState, task: Task, targets: Sequence[v.MemoryService]) -> tuple[v.MemoryService, ...]:
    """Return the `targets`, and all others to ask for the state."""
    keepers = [state.nodes.get(holding.node) for holding in newest_first(task)]
    memories = [node.memory for node in keepers if node and node.status is NodeStatus.UP and node.memory is not None]
    # All shards must be within reach, where they are to be put together anew.
    most = max([PEERS_MAX, *(COPIES + holding.shards for holding in task.copies.holdings.values())])
    return tuple(dict.fromkeys([*targets, *memories]))[:most]


def peers_are_stale(task: Task, targets: tuple[v.MemoryService, ...]) -> bool:
    """Return whether nodes have come or gone, so that those that hold the task's state would copy it to the wrong
    place."""
    return task.copies.peers[: len(targets)] != targets


def newest_first(task: Task) -> list[KeptState]:
    """Return what nodes keep of the task in memory, by iteration."""
    return sorted(task.copies.holdings.values(), key=lambda holding: holding.iteration, reverse=True)


def newest_stored(task: Task) -> int | None:
    """Return the newest checkpoint that storage is known to have, 0 for none; None where it may have others: a run that
    has committed nothing, or that goes on from an earlier one, may find any."""
    progress, start = task.progress, task.spec.start
    is_known = progress.checkpoint_iteration or (progress.best_iteration and not (start and start.continues))
    return progress.checkpoint_iteration if is_known else None


def nearest(state: ClusterState, task: Task) -> str:
    """Say in words what the task would start from without live state."""
    layouts: dict[int, dict[int, KeptState]] = {}
    for holding in newest_first(task):
        node = state.nodes.get(holding.node)
        if node is not None and node.status is NodeStatus.UP:
            layouts.setdefault(holding.shards or task.spec.replica_workers, {}).setdefault(holding.shard, holding)
    whole = [list(shards.values()) for count, shards in layouts.items() if len(shards) == count]
    if whole:
        newest = max(whole, key=lambda shards: min(holding.iteration for holding in shards))
        iteration = min(holding.iteration for holding in newest)
        if iteration >= task.progress.checkpoint_iteration:
            nodes = dict.fromkeys(holding.node for holding in newest)
            return f"the memory of {' or '.join(nodes)} (iteration {iteration} or later)"
    if task.progress.checkpoint_iteration:
        return f"the checkpoint of iteration {task.progress.checkpoint_iteration}, if it is valid"
    return "the newest checkpoint, or the seed" if task.progress.best_iteration else "the seed"


def to_drop(state: ClusterState, task: Task) -> list[Node]:
    """Return the nodes that still keep something of a task that has ended, and can be reached to drop it."""
    names = dict.fromkeys(holding.node for holding in task.copies.holdings.values())
    return [node for name in names if (node := state.nodes.get(name)) and node.status is NodeStatus.UP]


def _weight(task: str, node: str) -> bytes:
    return hashlib.blake2b(f"{task}\0{node}".encode(), digest_size=8).digest()
