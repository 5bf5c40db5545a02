"""Varuna (EuroSys 2022): job morphing.

Whatever happens, the job starts again from its last checkpoint in the best form for the nodes that are there: P stages
of whole layers, one GPU each, times D replicas. Every P is tried, with every micro-batch; GPUs beyond P x D are idle.
Checkpoints are frequent, so that a morph costs `varuna_morph_s` and a short recomputation, `varuna_recompute_s`.
For a repaired node it morphs again, from a checkpoint written for that.

The price, computed: no tensor parallelism and no interleaving, the forward pass always computed twice (its schedule
rests on that), whole optimizer states in every replica. Stages may differ by a layer. Its kernels are Megatron's.
"""

from __future__ import annotations

from dataclasses import replace

from unicrond.replay.evaluation.model.speeds import Speeds, restricted_job, speeds_under
from unicrond.replay.evaluation.model.workload import Workload
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.policies.job import Elastic, TrainingJob
from unicrond.throughput.layouts import ThroughputQuery as Question


def search_space(question: Question) -> Question:
    """Restrict the question to what Varuna searches over: P, D and the micro-batch."""
    return replace(restricted_job(question, ragged=True), tp=1, recompute="full")


def varuna_speeds(work: Workload) -> Speeds:
    """Return the speeds of the best P x D at each number of nodes."""
    return speeds_under(work, search_space)


class Varuna(Elastic):
    """Starts the job again from a checkpoint, in the best form for the nodes that are there."""

    def __init__(self, world: EvaluationWorld) -> None:
        super().__init__(world, speeds=varuna_speeds(world.workload))

    def detection_s(self) -> float:
        """Return the time until a missed heartbeat is noticed."""
        return self.assumptions.elastic_detect_s

    def restart_s(self, job: TrainingJob, node: int, severity: int) -> float:
        """Return the time to morph, and to compute again what came after the checkpoint."""
        return self.assumptions.varuna_morph_s + self.assumptions.varuna_recompute_s

    def join_s(self) -> float:
        """Return the time to morph so that the node is used."""
        return self.assumptions.varuna_morph_s
