"""Bamboo (NSDI 2023): redundant computation.

Every node computes its own pipeline stage and its successor's, too. When a node dies its predecessor, the shadow,
does both: `bamboo_failover_s` and training goes on. When the shadow or the successor of a dead node dies as
well, before a repaired node has let the pipeline be built anew, the stage is lost: back to the checkpoint.
The job's nodes stand in a ring in their order. So does a job on one node: it has no shadow.

Failure-free it reaches `bamboo_ratio` of Megatron's throughput. That the shadow now does twice the work of the
others is not charged: T(t, x) of the nodes that are left is (kinder to Bamboo than it was).
"""

from __future__ import annotations

from replay.evaluation.policies.job import Elastic, Job


class Bamboo(Elastic):
    """Shadows."""

    def detection_s(self) -> float:
        """A broken connection."""
        return self.assumed.elastic_detect_s

    def restart_s(self, job: Job, node: int, severity: int) -> float:
        """The shadow takes over, if there is one."""
        if severity == 3 or self._has_shadow(job, node):
            return self.assumed.bamboo_failover_s
        return self.assumed.bamboo_reconfigure_s + self.assumed.checkpoint_load_s + self.assumed.recompute_s

    def _has_shadow(self, job: Job, node: int) -> bool:
        place, ring = job.home.index(node), len(job.home)
        neighbours = {job.home[place - 1], job.home[(place + 1) % ring]} - {node}
        return bool(neighbours) and all(self.world.up(neighbour) for neighbour in neighbours)

    def join_s(self) -> float:
        """The pipeline is built anew with the node."""
        return self.assumed.bamboo_reconfigure_s
