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

from replay.evaluation.policies.job import Elastic, Job
from replay.evaluation.speeds import Speeds, priced, restricted
from replay.evaluation.workload import Workload
from replay.evaluation.world import World
from unicrond.throughput.layouts import Job as Question


def searched(question: Question) -> Question:
    """What Varuna searches over: P, D and the micro-batch."""
    return replace(restricted(question, ragged=True), tp=1, recompute="full")


def varuna_speeds(work: Workload) -> Speeds:
    """The best P x D at each number of nodes."""
    return priced(work, searched)


class Varuna(Elastic):
    """Morphing from a checkpoint."""

    def __init__(self, world: World) -> None:
        super().__init__(world, speeds=varuna_speeds(world.workload))

    def detection_s(self) -> float:
        """A missed heartbeat."""
        return self.assumed.elastic_detect_s

    def restart_s(self, job: Job, node: int, severity: int) -> float:
        """Morph, and do again what came after the checkpoint."""
        return self.assumed.varuna_morph_s + self.assumed.varuna_recompute_s

    def join_s(self) -> float:
        """Morph to use the node."""
        return self.assumed.varuna_morph_s
