"""What all workers of a simulation share: which workers have come, which groups exist, the checkpoints, the right
answer.

Training is a function of the samples alone, so what the parameters must be after an iteration is known beforehand:
`expected`. A step that is left out, done twice or done with the wrong micro-batches shows in the next comparison.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agents.protocol.messages import Membership
from agents.protocol.sampling import Sampling, samples_digest
from agents.state import StateHeld
from events.vocabulary import MemoryService, TaskSpec
from replay.simulation.group import Group
from replay.simulation.memory import Copy, held, in_peers_memory
from replay.simulation.network import Reach
from replay.simulation.process import Process
from replay.simulation.replica import Replica
from replay.simulation.weights import Blocks, State, first, stepped

if TYPE_CHECKING:
    from replay.simulation.host import Host
    from replay.simulation.witness import Witness

#: Checkpoints that are kept.
_KEEP = 2


class Training:
    """`micro_batch_s`: how long one takes to compute. `capture_every`: iterations between two states in memory."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        drawn: random.Random,
        witness: Witness,
        *,
        micro_batch_s: float,
        fault_wait_s: float,
        collective_timeout_s: float,
        capture_every: int,
    ) -> None:
        self.loop = loop
        self.drawn = drawn
        self.witness = witness
        self.micro_batch_s = micro_batch_s
        self.fault_wait_s = fault_wait_s
        self.collective_timeout_s = collective_timeout_s
        self.capture_every = capture_every
        self.reach = Reach()
        #: Nodes whose connections all end at each iteration's start.
        self.link_breakers: set[str] = set()
        #: Nodes on which the next worker that joins a running task stands still, so many seconds later.
        self.join_hangers: dict[str, float] = {}
        self.hosts: dict[str, Host] = {}
        self.replicas: list[Replica] = []
        self._shards: dict[tuple[str, int], dict[int, Process]] = {}
        self._groups: dict[tuple[str, int], Group] = {}
        self._checkpoints: dict[str, dict[int, State]] = {}
        self._expected: dict[str, list[Blocks]] = {}
        self._digests: dict[tuple[int, int, int, int], int] = {}

    def enter(self, process: Process) -> None:
        """A process has built its model; with the last shard of its replica, the replica begins."""
        launch = process.launch
        shards = self._shards.setdefault((launch.task, launch.replica), {})
        shards[launch.shard] = process
        if len(shards) == launch.spec.replica_workers and all(shard.alive for shard in shards.values()):
            replica = Replica(self, [shards[number] for number in sorted(shards)])
            self.replicas.append(replica)
            replica.start()

    def joined(self, replica: Replica) -> None:
        """It has taken over the state of a task that runs."""
        for shard in replica.shards:
            after_s = self.join_hangers.pop(shard.host.name, None)
            if after_s is not None:
                self.loop.call_later(after_s, shard.stand_still)

    def group(self, task: str, membership: Membership) -> Group:
        """The group that a membership asks for."""
        key = (task, membership.generation)
        if key not in self._groups:
            self._groups[key] = Group(self.loop, self.drawn, membership)
        return self._groups[key]

    # --- checkpoints -----------------------------------------------------------------------------

    def save(self, task: str, iteration: int, state: State) -> None:
        """A checkpoint appears, whole."""
        saved = self._checkpoints.get(task, {}) | {iteration: state}
        self._checkpoints[task] = {number: saved[number] for number in sorted(saved)[-_KEEP:]}

    def checkpoints(self, task: str) -> dict[int, State]:
        """By iteration."""
        return self._checkpoints.get(task, {})

    # --- states in memory ------------------------------------------------------------------------

    def push(self, origin: Host, peer: MemoryService, task: str, shard: int, copy: Copy) -> bool:
        """A copy goes from one node's agent to another's, if that one takes it."""
        other = self.hosts.get(peer.node)
        if other is None or not other.serves_memory_to(origin) or other.fork_server is None:
            return False
        copy = copy._replace(origin=origin.name)
        other.fork_server.memory.keep(task, shard, copy)
        if other.agent is not None:
            other.agent.feed(StateHeld(held=held(task, shard, copy)))
        return True

    def keepers(self, task: str, shard: int, since: int) -> int:
        """Nodes that keep a state of the shard after `since` or a later iteration."""
        servers = [host.fork_server for host in self.hosts.values() if host.fork_server is not None]
        return sum(any(copy.iteration >= since for copy in server.memory.of(task, shard)) for server in servers)

    def in_peers(self, task: str, shards: list[Process], peers: Sequence[MemoryService]) -> dict[int, State]:
        """By iteration, what the peers' memory has for a replica."""
        return in_peers_memory(task, shards, peers, self.hosts)

    # --- the right answer ------------------------------------------------------------------------

    def expected(self, spec: TaskSpec, iteration: int) -> Blocks:
        """The parameters after `iteration`."""
        known = self._expected.setdefault(spec.name, [first(sharded=spec.optimizer.distributed)])
        while len(known) <= iteration:
            number = len(known)
            known.append(tuple(stepped(value, number, self.digest(spec, number)) for value in known[-1]))
        return known[iteration]

    def digest(self, spec: TaskSpec, iteration: int) -> int:
        """The digest of all samples of an iteration."""
        key = (spec.seed, spec.global_batch, spec.micro_batch, iteration)
        if key not in self._digests:
            sampling = Sampling(spec.seed, spec.global_batch, spec.micro_batch, None)
            samples = [s for m in range(spec.micro_batches) for s in sampling.samples(iteration, m)]
            self._digests[key] = samples_digest(iteration, samples)
        return self._digests[key]
