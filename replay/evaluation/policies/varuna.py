"""Varuna (EuroSys 2022): job morphing.

Whatever happens, the job starts again from its last checkpoint in the best pipeline-by-data-parallel form for
the nodes that are there. Checkpoints are frequent, so that a morph costs `varuna_morph_s` and a short
recomputation, `varuna_recompute_s`. For a repaired node it morphs again, from a checkpoint written for that.

Failure-free it reaches `varuna_ratio` of Megatron's throughput.
"""

from __future__ import annotations

from replay.evaluation.policies.job import Elastic, Job


class Varuna(Elastic):
    """Morphing from a checkpoint."""

    def detection_s(self) -> float:
        """A missed heartbeat."""
        return self.assumed.elastic_detect_s

    def restart_s(self, job: Job, node: int, severity: int) -> float:
        """Morph, and do again what came after the checkpoint."""
        return self.assumed.varuna_morph_s + self.assumed.varuna_recompute_s

    def join_s(self) -> float:
        """Morph to use the node."""
        return self.assumed.varuna_morph_s
