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

from unicrond.replay.evaluation.model.meter import CostPhase
from unicrond.replay.evaluation.policies.job import Elastic, JobByJob, TrainingJob


class MegatronWait(JobByJob):
    """Starts the job again when the lost node is back."""

    def detection_s(self) -> float:
        """Return the collective's timeout."""
        return self.assumptions.timeout_s

    def restart_s(self, job: TrainingJob, node: int, severity: int) -> float:
        """Return the time of queue, set-up and recomputation; the same for every fault."""
        return self.assumptions.requeue_s + self.assumptions.setup_s + self.assumptions.recompute_s

    def pick_nodes(self, job: TrainingJob) -> Sequence[int] | None:
        """Return all the job's nodes, or None while one is down."""
        nodes = job.nodes_up()
        return nodes if len(nodes) == len(job.home) else None


class MegatronShrink(Elastic):
    """Starts the job again on the nodes that are left."""

    def detection_s(self) -> float:
        """Return the collective's timeout."""
        return self.assumptions.timeout_s

    def restart_s(self, job: TrainingJob, node: int, severity: int) -> float:
        """Return the time of queue, set-up and recomputation; the same for every fault."""
        return self.assumptions.requeue_s + self.assumptions.setup_s + self.assumptions.recompute_s

    def join_s(self) -> float:
        """Return the time of queue and set-up; the job's state was saved for that."""
        return self.assumptions.requeue_s + self.assumptions.setup_s


class HotSpare(MegatronWait):
    """Replaces the lost node by a spare, while there is one."""

    def pick_nodes(self, job: TrainingJob) -> Sequence[int] | None:
        """Return the job's nodes, dead ones replaced by spares; None where no spare is left."""
        for node in [node for node in job.home if not self.world.up(node)]:
            spare = next((spare for spare in self.spares if self.world.up(spare)), None)
            if spare is None:
                return None
            self.spares.remove(spare)
            self.replace_node(job, spare, instead_of=node)
        return job.home

    def node_back(self, node: int) -> None:
        """Make a node that was replaced a spare; give one that was not to its job."""
        if self.owner(node) is None and node not in self.spares:
            self.spares.append(node)
        for job in self.jobs:
            if job.phase is CostPhase.IDLE:
                job.try_to_start()
