"""What all workers of a simulation share: who has come, which groups exist, the checkpoints, the right answer.

Training is a function of the samples alone, so what the parameters must be after an iteration is known beforehand:
`expected`. A step that is left out, done twice or done with the wrong micro-batches shows in the next comparison.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from agents.trainer.messages import Membership
from agents.trainer.sampling import Sampling, samples_digest
from events.vocabulary import TaskSpec
from replay.simulation.group import Group
from replay.simulation.network import Reach
from replay.simulation.process import Process
from replay.simulation.replica import Replica, next_params

if TYPE_CHECKING:
    from replay.simulation.host import Host
    from replay.simulation.witness import Witness

#: Checkpoints that are kept.
_KEEP = 2


class Training:
    """`micro_batch_s`: how long one takes to compute."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        drawn: random.Random,
        witness: Witness,
        *,
        micro_batch_s: float,
        fault_wait_s: float,
        collective_timeout_s: float,
    ) -> None:
        self.loop = loop
        self.drawn = drawn
        self.witness = witness
        self.micro_batch_s = micro_batch_s
        self.fault_wait_s = fault_wait_s
        self.collective_timeout_s = collective_timeout_s
        self.reach = Reach()
        self.hosts: dict[str, Host] = {}
        self.replicas: list[Replica] = []
        self._shards: dict[tuple[str, int], dict[int, Process]] = {}
        self._groups: dict[tuple[str, int], Group] = {}
        self._checkpoints: dict[str, list[tuple[int, int]]] = {}
        self._expected: dict[str, list[int]] = {}
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

    def group(self, task: str, membership: Membership) -> Group:
        """The group that a membership asks for."""
        key = (task, membership.generation)
        if key not in self._groups:
            self._groups[key] = Group(self.loop, self.drawn, membership)
        return self._groups[key]

    # --- checkpoints -----------------------------------------------------------------------------

    def save(self, task: str, iteration: int, params: int) -> None:
        """A checkpoint appears, whole."""
        kept = [saved for saved in self._checkpoints.get(task, []) if saved[0] != iteration]
        self._checkpoints[task] = sorted([*kept, (iteration, params)])[-_KEEP:]

    def newest_checkpoint(self, task: str) -> tuple[int, int] | None:
        """Iteration and parameters."""
        saved = self._checkpoints.get(task)
        return saved[-1] if saved else None

    # --- the right answer ------------------------------------------------------------------------

    def expected(self, spec: TaskSpec, iteration: int) -> int:
        """The parameters after `iteration`."""
        known = self._expected.setdefault(spec.name, [0])
        while len(known) <= iteration:
            known.append(next_params(known[-1], len(known), self.digest(spec, len(known))))
        return known[iteration]

    def digest(self, spec: TaskSpec, iteration: int) -> int:
        """The digest of all samples of an iteration."""
        key = (spec.seed, spec.global_batch, spec.micro_batch, iteration)
        if key not in self._digests:
            sampling = Sampling(spec.seed, spec.global_batch, spec.micro_batch, None)
            samples = [s for m in range(spec.micro_batches) for s in sampling.samples(iteration, m)]
            self._digests[key] = samples_digest(iteration, samples)
        return self._digests[key]
