"""State that all workers of a simulation share: which workers have come, which groups exist, the checkpoints, the right
parameters.

Training is a function of the samples alone, so the parameters after an iteration are known beforehand: `expected`. A
step that is left out, repeated or computed with the wrong micro-batches shows in the next comparison."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unicrond.agents.core.state import StateHeld
from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.protocol.sampling import Sampling, samples_digest
from unicrond.events.vocabulary import MemoryService, TaskSpec
from unicrond.replay.simulation.models.memory import Copy, held_state, states_in_peers_memory
from unicrond.replay.simulation.models.network import Reach
from unicrond.replay.simulation.models.weights import Blocks, WeightsState, initial_params, step_block
from unicrond.replay.simulation.trainer.group import SimulatedGroup
from unicrond.replay.simulation.trainer.process import Process
from unicrond.replay.simulation.trainer.replica import SimulatedReplica

if TYPE_CHECKING:
    from unicrond.replay.simulation.checks.checker import InvariantChecker
    from unicrond.replay.simulation.cluster.host import Host

#: Checkpoints that are kept.
_KEEP = 2


class Training:
    """`micro_batch_s`: how long one takes to compute. `capture_every`: iterations between two states in memory."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        checker: InvariantChecker,
        *,
        micro_batch_s: float,
        fault_wait_s: float,
        collective_timeout_s: float,
        capture_every: int,
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.checker = checker
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
        self.replicas: list[SimulatedReplica] = []
        self._shards: dict[tuple[str, int], dict[int, Process]] = {}
        self._groups: dict[tuple[str, int], SimulatedGroup] = {}
        self._checkpoints: dict[str, dict[int, WeightsState]] = {}
        self._expected: dict[str, list[Blocks]] = {}
        self._digests: dict[tuple[int, int, int, int], int] = {}

    def enter(self, process: Process) -> None:
        """Enter a process that has built its model; with the last shard of its replica, the replica begins."""
        launch = process.launch
        shards = self._shards.setdefault((launch.task, launch.replica), {})
        shards[launch.shard] = process
        if len(shards) == launch.spec.replica_workers and all(shard.alive for shard in shards.values()):
            replica = SimulatedReplica(self, [shards[number] for number in sorted(shards)])
            self.replicas.append(replica)
            replica.start()

    def on_join(self, replica: SimulatedReplica) -> None:
        """Handle that the replica has taken over the state of a running task."""
        for shard in replica.shards:
            after_s = self.join_hangers.pop(shard.host.name, None)
            if after_s is not None:
                self.loop.call_later(after_s, shard.stand_still)

    def group(self, task: str, membership: GroupMembership) -> SimulatedGroup:
        """Return the group of a membership."""
        key = (task, membership.generation)
        if key not in self._groups:
            self._groups[key] = SimulatedGroup(self.loop, self.rng, membership)
        return self._groups[key]

    # --- checkpoints -----------------------------------------------------------------------------

    def save(self, task: str, iteration: int, state: WeightsState) -> None:
        """Store a checkpoint, whole."""
        checkpoints = self._checkpoints.get(task, {}) | {iteration: state}
        self._checkpoints[task] = {number: checkpoints[number] for number in sorted(checkpoints)[-_KEEP:]}

    def checkpoints(self, task: str) -> dict[int, WeightsState]:
        """Return the task's checkpoints by iteration."""
        return self._checkpoints.get(task, {})

    # --- states in memory ------------------------------------------------------------------------

    def push(self, origin: Host, peer: MemoryService, task: str, shard: int, copy: Copy) -> bool:
        """Copy a state from one node's agent to another's, and return whether that one accepts it."""
        target = self.hosts.get(peer.node)
        if target is None or not target.serves_memory_to(origin) or target.fork_server is None:
            return False
        copy = copy._replace(origin=origin.name)
        target.fork_server.memory.keep(task, shard, copy)
        if target.agent is not None:
            target.agent.feed(StateHeld(held_state=held_state(task, shard, copy)))
        return True

    def count_holders(self, task: str, shard: int, since: int) -> int:
        """Count the nodes that have a state of the shard after `since` or a later iteration."""
        servers = [host.fork_server for host in self.hosts.values() if host.fork_server is not None]
        return sum(any(copy.iteration >= since for copy in server.memory.copies_of(task, shard)) for server in servers)

    def in_peers(self, task: str, shards: list[Process], peers: Sequence[MemoryService]) -> dict[int, WeightsState]:
        """Return, by iteration, what the peers' memory has for a replica."""
        return states_in_peers_memory(task, shards, peers, self.hosts)

    # --- the right answer ------------------------------------------------------------------------

    def expected(self, spec: TaskSpec, iteration: int) -> Blocks:
        """Return the parameters after `iteration`."""
        states = self._expected.setdefault(spec.name, [initial_params(sharded=spec.optimizer.distributed)])
        while len(states) <= iteration:
            number = len(states)
            states.append(tuple(step_block(value, number, self.digest(spec, number)) for value in states[-1]))
        return states[iteration]

    def digest(self, spec: TaskSpec, iteration: int) -> int:
        """Return the digest of all samples of an iteration."""
        key = (spec.seed, spec.global_batch, spec.micro_batch, iteration)
        if key not in self._digests:
            sampling = Sampling(spec.seed, spec.global_batch, spec.micro_batch, None)
            samples = [s for m in range(spec.micro_batches) for s in sampling.samples(iteration, m)]
            self._digests[key] = samples_digest(iteration, samples)
        return self._digests[key]
