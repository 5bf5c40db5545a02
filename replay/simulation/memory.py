"""States of training in the memory of nodes (agents/protocol/memory.py, agents/memory_server.py, sources.py).

Two states of each shard; a new one takes the place of the older. They are the fork server's, and go with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from agents.state import Held
from events.shape import Shape
from events.vocabulary import MemoryService
from replay.simulation.weights import State

if TYPE_CHECKING:
    from replay.simulation.host import Host
    from replay.simulation.process import Process


class Copy(NamedTuple):
    """The state after `iteration`, which a shard of `generation` captured on `origin`. `layout`: of its replica."""

    iteration: int
    generation: int
    state: State
    origin: str
    layout: Shape


class NodeMemory:
    """What one node keeps, newest first."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], tuple[Copy, ...]] = {}

    def keep(self, task: str, shard: int, copy: Copy) -> None:
        """Write over the older of two."""
        two = (*self._kept.get((task, shard), ())[:1], copy)
        self._kept[task, shard] = tuple(sorted(two, key=lambda c: (c.generation, c.iteration), reverse=True))

    def of(self, task: str, shard: int) -> tuple[Copy, ...]:
        """What is kept of a shard."""
        return self._kept.get((task, shard), ())

    def all_of(self, task: str) -> Iterator[tuple[int, Copy]]:
        """What is kept of all shards of a task."""
        for (of, shard), kept in self._kept.items():
            if of == task:
                yield from ((shard, copy) for copy in kept)

    def forget(self, task: str) -> None:
        """Give up what is kept of the task; of all where `task` is ""."""
        self._kept = {key: kept for key, kept in self._kept.items() if task and key[0] != task}

    def held(self) -> Iterator[Held]:
        """The newest of every shard, as an agent finds them."""
        for (task, shard), kept in self._kept.items():
            yield held(task, shard, kept[0])

    @property
    def tasks(self) -> set[str]:
        """Tasks of which anything is kept."""
        return {task for task, _ in self._kept}


def held(task: str, shard: int, copy: Copy) -> Held:
    """As an agent's core hears of it."""
    return Held(
        task=task, shard=shard, iteration=copy.iteration, generation=copy.generation, origin=copy.origin, size_bytes=1,
        shards=copy.layout.workers,
    )  # fmt: skip


def in_memory(task: str, shards: Sequence[Process]) -> dict[int, State]:
    """By iteration, what all shards of a replica find on their own nodes."""
    return _common(
        [
            {copy.iteration: copy for copy in _of(shard.host, task, number) if copy.layout == layout_of(shard)}
            for number, shard in enumerate(shards)
        ]
    )


def in_peers_memory(
    task: str, shards: Sequence[Process], peers: Sequence[MemoryService], hosts: Mapping[str, Host]
) -> dict[int, State]:
    """By iteration, what the agents of the peers answer all shards of a replica: their own, or all those of another
    layout."""
    kept: list[dict[int, Copy]] = []
    for number, shard in enumerate(shards):
        asked = [hosts[peer.node] for peer in peers if peer.node in hosts]
        there = [host for host in asked if host.serves_memory_to(shard.host)]
        others = [host for host in there if host is not shard.host]
        own = {c.iteration: c for host in others for c in _of(host, task, number) if c.layout == layout_of(shard)}
        kept.append(_put_together(task, there) | own)
    return _common(kept)


def _common(kept: Sequence[Mapping[int, Copy]]) -> dict[int, State]:
    """What is kept of all shards."""
    first, *others = kept
    return {iteration: copy.state for iteration, copy in first.items() if all(iteration in other for other in others)}


def layout_of(shard: Process) -> Shape:
    """The layout of its replica."""
    return shard.launch.spec.cut


def _put_together(task: str, hosts: Sequence[Host]) -> dict[int, Copy]:
    """By iteration, a copy of which all shards of its layout are on these hosts."""
    shards: dict[tuple[int, Shape], dict[int, Copy]] = {}
    for host in hosts:
        server = host.fork_server
        for shard, copy in server.memory.all_of(task) if host.on and server is not None and server.alive else ():
            shards.setdefault((copy.iteration, copy.layout), {})[shard] = copy
    whole = {key: found for key, found in shards.items() if len(found) == key[1].workers}
    return {iteration: found[0] for (iteration, _), found in sorted(whole.items())}


def _of(host: Host, task: str, shard: int) -> tuple[Copy, ...]:
    server = host.fork_server
    return server.memory.of(task, shard) if host.on and server is not None and server.alive else ()
