"""Where tasks' states are kept in memory, and which nodes are to hold copies: questions to the state, no decisions.

A task's *peers* are told with its membership: first `COPIES` nodes by highest random weight of (task, node), so that
they stay the same while nodes come and go around them, and copies of many tasks spread over the cluster; then all
others that already keep something of it. Whoever captures the state copies it to the first peer that is not itself.
"""

from __future__ import annotations

import hashlib

from events import vocabulary as v
from unicrond.state import ClusterState, KeptState, Node, NodeStatus, Task

#: Candidates for copies, in this order. One holds; the others stand in when it is lost, or is the captor itself.
COPIES = 3
PEERS_MAX = 8


def peers(state: ClusterState, task: Task) -> tuple[v.MemoryService, ...]:
    """The nodes to copy the task's state to, and to ask for it; nearest to being asked first."""
    serving = [node for node in state.nodes.values() if node.status is NodeStatus.UP and node.memory is not None]
    ranked = sorted(serving, key=lambda node: _weight(task.name, node.name), reverse=True)
    keepers = [state.nodes[kept.node] for kept in newest_first(task) if state.nodes.get(kept.node) in serving]
    chosen = dict.fromkeys(node.name for node in [*ranked[:COPIES], *keepers][:PEERS_MAX])
    return tuple(memory for name in chosen if (memory := state.nodes[name].memory) is not None)


def newest_first(task: Task) -> list[KeptState]:
    """What is kept of the task in memory, by iteration."""
    return sorted(task.kept.values(), key=lambda kept: kept.iteration, reverse=True)


def nearest(state: ClusterState, task: Task) -> str:
    """In words: what the task would start from if nobody had state."""
    shards: dict[int, KeptState] = {}
    for kept in newest_first(task):
        node = state.nodes.get(kept.node)
        if node is not None and node.status is NodeStatus.UP:
            shards.setdefault(kept.shard, kept)
    if len(shards) == task.spec.replica_workers:
        iteration = min(kept.iteration for kept in shards.values())
        if iteration >= task.checkpoint_iteration:
            nodes = ", ".join(dict.fromkeys(shards[shard].node for shard in sorted(shards)))
            return f"the memory of {nodes} (iteration {iteration} or later)"
    if task.checkpoint_iteration:
        return f"the checkpoint of iteration {task.checkpoint_iteration}, if it is valid"
    return "the newest checkpoint, or the seed" if task.best_iteration else "the seed"


def to_drop(state: ClusterState, task: Task) -> list[Node]:
    """Nodes that still keep something of a task that has ended, and can hear so."""
    names = dict.fromkeys(kept.node for kept in task.kept.values())
    return [node for name in names if (node := state.nodes.get(name)) and node.status is NodeStatus.UP]


def _weight(task: str, node: str) -> bytes:
    return hashlib.blake2b(f"{task}\0{node}".encode(), digest_size=8).digest()
