"""States of training in the memory of nodes (agents/protocol/memory.py, agents/memory/server.py, sources.py).

Two states of each shard; a new one takes the place of the older. The fork server owns them, and they end with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from unicrond.agents.protocol.messages import Launch
from unicrond.events.vocabulary import MemoryService, SnapshotStored
from unicrond.events.vocabulary.shape import Shape
from unicrond.replay.simulation.models.weights import WeightsState


class Copy(NamedTuple):
    """The state after `iteration`, which a shard of `generation` captured on `origin`. `layout`: that of its
    replica."""

    iteration: int
    generation: int
    state: WeightsState
    origin: str
    layout: Shape


class NodeMemory:
    """The states that one node stores, newest first."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, int], tuple[Copy, ...]] = {}

    def keep(self, task: str, shard: int, copy: Copy) -> None:
        """Store a copy in place of the older of two."""
        two = (*self._copies.get((task, shard), ())[:1], copy)
        self._copies[task, shard] = tuple(sorted(two, key=lambda c: (c.generation, c.iteration), reverse=True))

    def copies_of(self, task: str, shard: int) -> tuple[Copy, ...]:
        """Return the copies of a shard."""
        return self._copies.get((task, shard), ())

    def all_copies_of(self, task: str) -> Iterator[tuple[int, Copy]]:
        """Yield the copies of all shards of a task, with the shard's number."""
        for (name, shard), copies in self._copies.items():
            if name == task:
                yield from ((shard, copy) for copy in copies)

    def forget(self, task: str) -> None:
        """Drop the copies of the task; all copies where `task` is ""."""
        self._copies = {key: copies for key, copies in self._copies.items() if task and key[0] != task}

    def holdings(self, node: str) -> Iterator[SnapshotStored]:
        """Yield the newest copy of every shard, as the agent of `node` finds them."""
        for (task, shard), copies in self._copies.items():
            yield snapshot(node, task, shard, copies[0])

    @property
    def tasks(self) -> set[str]:
        """List the tasks of which there is a copy."""
        return {task for task, _ in self._copies}


class MemoryHost(Protocol):
    """A node, as the processes use it that look for states in memory."""

    name: str

    @property
    def memory(self) -> NodeMemory | None:
        """Return the states that the node stores; None while its fork server does not live."""
        ...

    def serves_memory_to(self, peer: str) -> bool:
        """Return whether the node's agent answers another node's requests for states."""
        ...


class MemoryReader(Protocol):
    """A process of a replica that looks for states."""

    launch: Launch

    @property
    def host(self) -> MemoryHost:
        """Return its node."""
        ...


def snapshot(node: str, task: str, shard: int, copy: Copy) -> SnapshotStored:
    """Describe a copy for an agent's core."""
    return SnapshotStored(
        node=node, task=task, shard=shard, iteration=copy.iteration, generation=copy.generation, origin=copy.origin,
        size_bytes=1, shards=copy.layout.workers, duration_us=0,
    )  # fmt: skip


def states_in_memory(task: str, shards: Sequence[MemoryReader]) -> dict[int, WeightsState]:
    """Return, by iteration, the states that all shards of a replica find on their own nodes."""
    return _in_all_shards(
        [
            {copy.iteration: copy for copy in _copies_on(shard.host, task, number) if copy.layout == layout_of(shard)}
            for number, shard in enumerate(shards)
        ]
    )


def states_in_peers_memory(
    task: str, shards: Sequence[MemoryReader], peers: Sequence[MemoryService], hosts: Mapping[str, MemoryHost]
) -> dict[int, WeightsState]:
    """Return, by iteration, what the agents of the peers answer all shards of a replica: states of their own layout, or
    all those of another layout."""
    by_shard: list[dict[int, Copy]] = []
    for number, shard in enumerate(shards):
        known_hosts = [hosts[peer.node] for peer in peers if peer.node in hosts]
        serving = [host for host in known_hosts if host.serves_memory_to(shard.host.name)]
        peers_only = [host for host in serving if host is not shard.host]
        same_layout = {
            c.iteration: c
            for host in peers_only
            for c in _copies_on(host, task, number)
            if c.layout == layout_of(shard)
        }
        by_shard.append(_put_together(task, serving) | same_layout)
    return _in_all_shards(by_shard)


def _in_all_shards(by_shard: Sequence[Mapping[int, Copy]]) -> dict[int, WeightsState]:
    """Return the states that exist of all shards."""
    first, *rest = by_shard
    return {iteration: copy.state for iteration, copy in first.items() if all(iteration in copies for copies in rest)}


def layout_of(shard: MemoryReader) -> Shape:
    """Return the layout of the shard's replica."""
    return shard.launch.spec.cut


def _put_together(task: str, hosts: Sequence[MemoryHost]) -> dict[int, Copy]:
    """Return, by iteration, a copy of which all shards of its layout are on these hosts."""
    shards: dict[tuple[int, Shape], dict[int, Copy]] = {}
    for host in hosts:
        memory = host.memory
        for shard, copy in memory.all_copies_of(task) if memory is not None else ():
            shards.setdefault((copy.iteration, copy.layout), {})[shard] = copy
    complete = {key: copies for key, copies in shards.items() if len(copies) == key[1].workers}
    return {iteration: copies[0] for (iteration, _), copies in sorted(complete.items())}


def _copies_on(host: MemoryHost, task: str, shard: int) -> tuple[Copy, ...]:
    memory = host.memory
    return memory.copies_of(task, shard) if memory is not None else ()
