"""Oobleck (SOSP 2023): pipeline templates, made beforehand for every number of nodes a pipeline may have.

When a node dies, the job re-instantiates pipelines from the templates for the nodes that are left and copies
missing layers from other replicas: no checkpoint, no recomputation beyond the iteration, as long as another
replica has the layers (it plans for f + 1 of them). With the last replica gone it starts from a checkpoint.
A repaired node joins by the same re-instantiation.

Failure-free it reaches `oobleck_ratio` of Megatron's throughput.
"""

from __future__ import annotations

from replay.evaluation.policies.job import Elastic, Job


class Oobleck(Elastic):
    """Templates and re-instantiation."""

    def detection_s(self) -> float:
        """A broken connection."""
        return self.assumed.elastic_detect_s

    def restart_s(self, job: Job, node: int, severity: int) -> float:
        """New pipelines; from a checkpoint if no replica is left."""
        reinstantiate_s = self.assumed.oobleck_reinstantiate_s
        if severity == 3 or self._replicas(job) >= 2:
            return reinstantiate_s
        return reinstantiate_s + self.assumed.checkpoint_load_s + self.assumed.recompute_s

    def _replicas(self, job: Job) -> int:
        """Pipelines that the job ran: as many as its nodes hold at the fewest nodes per pipeline."""
        fewest = next(count for count in range(1, len(job.home) + 1) if self.world.worth(job.task, count))
        return len(job.nodes) // fewest

    def join_s(self) -> float:
        """The node joins."""
        return self.assumed.oobleck_reinstantiate_s
