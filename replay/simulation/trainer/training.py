"""State that all workers of a simulation share: which workers have come, which groups exist, the checkpoints, the right
parameters.

Training is a function of the samples alone, so the parameters after an iteration are known beforehand: `expected`. A
step that is left out, repeated or computed with the wrong micro-batches shows in the next comparison."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.protocol.sampling import Sampling, samples_digest
from unicrond.events.vocabulary import MemoryService, TaskSpec
from unicrond.replay.simulation.models.memory import Copy, states_in_peers_memory
from unicrond.replay.simulation.models.network import Reach
from unicrond.replay.simulation.models.weights import Blocks, WeightsState, initial_params, step_block
from unicrond.replay.simulation.trainer.group import SimulatedGroup
from unicrond.replay.simulation.trainer.ports import TrainingChecker, TrainingHost
from unicrond.replay.simulation.trainer.process import Process
from unicrond.replay.simulation.trainer.programs import GarbageProgram

#: Checkpoints that are kept.
_KEEP = 2


class Training:
    """The training of all tasks. `begin`: begins a replica, once all its processes are there. `micro_batch_s`: how long
    one takes to compute. `capture_every`: iterations between two states in memory."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        checker: TrainingChecker,
        begin: Callable[[Training, list[Process]], object],
        *,
        micro_batch_s: float,
        fault_wait_s: float,
        collective_timeout_s: float,
        capture_every: int,
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.checker = checker
        self._begin = begin
        self.micro_batch_s = micro_batch_s
        self.fault_wait_s = fault_wait_s
        self.collective_timeout_s = collective_timeout_s
        self.capture_every = capture_every
        self.reach = Reach()
        #: Nodes whose connections all end at each iteration's start.
        self.link_breakers: set[str] = set()
        #: Nodes on which the next worker that joins a running task stands still, so many seconds later.
        self.join_hangers: dict[str, float] = {}
        #: Nodes that compute so many times slower.
        self.slowness: dict[str, float] = {}
        #: By task, programs that are garbage.
        self.programs: dict[str, GarbageProgram] = {}
        self.hosts: Mapping[str, TrainingHost] = {}
        self._shards: dict[tuple[str, int], dict[int, Process]] = {}
        self._groups: dict[tuple[str, int], SimulatedGroup] = {}
        self._checkpoints: dict[str, dict[int, WeightsState]] = {}
        self._expected: dict[str, list[Blocks]] = {}
        self._digests: dict[tuple[int, int, int, int], int] = {}

    def enter(self, process: Process) -> None:
        """Enter a process that has built its model; with the last shard of its replica, the replica begins."""
        launch = process.launch
        program = self.programs.get(launch.task)
        if program is not None and not program.starts(process):
            return
        shards = self._shards.setdefault((launch.task, launch.replica), {})
        shards[launch.shard] = process
        if len(shards) == launch.spec.replica_workers and all(shard.alive for shard in shards.values()):
            self._begin(self, [shards[number] for number in sorted(shards)])

    def on_join(self, shards: Sequence[Process]) -> None:
        """Handle that the replica of these processes has taken over the state of a running task."""
        for shard in shards:
            after_s = self.join_hangers.pop(shard.host.name, None)
            if after_s is not None:
                self.loop.call_later(after_s, shard.stand_still)

    def slowdown(self, nodes: Iterable[str]) -> float:
        """Return how many times longer a replica on these nodes computes."""
        return max([1.0, *(self.slowness[node] for node in nodes if node in self.slowness)])

    def paces_s(self, task: str, membership: GroupMembership) -> tuple[float, ...]:
        """Return how long each replica of a group takes for a micro-batch now."""
        by_number = {member.replica: self._shards.get((task, member.replica), {}) for member in membership.members}
        return tuple(
            (self.micro_batch_s + max((shard.slow_s for shard in shards.values()), default=0.0))
            * self.slowdown(shard.host.name for shard in shards.values())
            for shards in by_number.values()
        )

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

    def push(self, origin: str, peer: MemoryService, task: str, shard: int, copy: Copy) -> bool:
        """Copy a state from one node's agent to another's, and return whether that one accepts it."""
        target = self.hosts.get(peer.node)
        return target is not None and target.accept_copy(origin, task, shard, copy)

    def in_peers(self, task: str, shards: Sequence[Process], peers: Sequence[MemoryService]) -> dict[int, WeightsState]:
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
