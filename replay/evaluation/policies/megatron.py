"""Megatron under a scheduler and a person: what most clusters do.

A fault shows when the collective times out (`timeout_s`). Then the job is queued again, set up, and trains
again what it had done since its last checkpoint: `requeue_s + setup_s + recompute_s`.

    megatron-wait     starts when all its nodes are there again
    megatron-shrink   starts on the nodes that are left; when one is back, restarts with it (saved before: no
                      recomputation, no timeout)
    hot-spare[:N]     keeps N nodes idle (1); a spare takes the dead node's place, the repaired node becomes a
                      spare; with no spare left the job waits, first come first served
"""

from __future__ import annotations

from collections.abc import Sequence

from replay.evaluation.meter import Phase
from replay.evaluation.policies.job import Elastic, Job, JobByJob


class MegatronWait(JobByJob):
    """Waits for the node."""

    def detection_s(self) -> float:
        """The collective's timeout."""
        return self.assumed.timeout_s

    def restart_s(self, job: Job, node: int, severity: int) -> float:
        """Queue, set-up, recomputation; the same for every fault."""
        return self.assumed.requeue_s + self.assumed.setup_s + self.assumed.recompute_s

    def seats(self, job: Job) -> Sequence[int] | None:
        """All or none."""
        there = job.there()
        return there if len(there) == len(job.home) else None


class MegatronShrink(Elastic):
    """Goes on with fewer."""

    def detection_s(self) -> float:
        """The collective's timeout."""
        return self.assumed.timeout_s

    def restart_s(self, job: Job, node: int, severity: int) -> float:
        """Queue, set-up, recomputation; the same for every fault."""
        return self.assumed.requeue_s + self.assumed.setup_s + self.assumed.recompute_s

    def join_s(self) -> float:
        """Queue and set-up; its state was saved for that."""
        return self.assumed.requeue_s + self.assumed.setup_s


class HotSpare(MegatronWait):
    """Replaces the node, while there are spares."""

    def seats(self, job: Job) -> Sequence[int] | None:
        """The job's nodes, dead ones replaced."""
        for node in [node for node in job.home if not self.world.up(node)]:
            spare = next((spare for spare in self.spares if self.world.up(spare)), None)
            if spare is None:
                return None
            self.spares.remove(spare)
            self.give(job, spare, instead_of=node)
        return job.home

    def node_back(self, node: int) -> None:
        """A node that was replaced becomes a spare; one that was not goes to its job."""
        if self.owner(node) is None and node not in self.spares:
            self.spares.append(node)
        for job in self.jobs:
            if job.phase is Phase.IDLE:
                job.try_to_start()
