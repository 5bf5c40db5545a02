"""Bamboo (NSDI 2023): redundant computation.

Pipelines of P >= 2 stages, one GPU each, times D. The job's nodes stand in a ring in their order, the stages of a
pipeline are dealt around it, so that consecutive stages are on different nodes. Every GPU keeps the state of its own
stage and of its successor's, and computes the successor's forward pass too. When a node dies its predecessor, the
shadow, takes over (`bamboo_failover_s`). The shadow then needs twice as long for a micro-batch and the job waits for
it, so the pipelines are built anew at once on the nodes that are left (`bamboo_reconfigure_s`; kinder than waiting).
When the shadow or the successor of a dead node dies as well before that, or the job has one node and so no shadow, a
stage is lost: back to the checkpoint.

The price, computed: every P is tried with every micro-batch and recomputation, without tensor parallelism, interleaving
or a sharded optimizer; stages may differ by a layer.
* Work: one more forward pass per micro-batch. Bubbles hide as much of it as they are long, the rest is added.
* Memory: weights, master weights and moments of a second stage. Gradients and activations of the shadow's forward
  passes are not counted (Bamboo moves the latter to host memory; that this costs nothing is assumed).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unicrond.replay.evaluation.model.speeds import Speeds, restricted_job, speeds_under
from unicrond.replay.evaluation.model.workload import Workload
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.policies.job import Elastic, TrainingJob
from unicrond.throughput.layouts import Layout
from unicrond.throughput.layouts import ThroughputQuery as Question
from unicrond.throughput.model import Floats, Ints, memory_bytes, parts_s, state_bytes


def search_space(question: Question) -> Question:
    """Restrict the question to the forms that Bamboo can have: P, D, micro-batch, recomputation."""
    return replace(restricted_job(question, ragged=True), tp=1)


def iteration_with_shadows_s(question: Question, layout: Layout, dp: Ints) -> Floats:
    """Return the seconds of an iteration with the redundant forward passes, as far as no bubble hides them."""
    parts = parts_s(question, layout, dp)
    passes = 4 if layout.recompute == "full" else 3  # a backward pass takes two forward passes' time
    exposed_s = np.maximum(0.0, parts[0] / passes - parts[3])
    return np.asarray(parts.sum(axis=0) + exposed_s, dtype=np.float64)


def memory_with_shadows_bytes(question: Question, layout: Layout, dp: Ints) -> Floats:
    """Return the bytes on the fullest GPU, the successor's state without its gradients included; inf for one stage,
    which has no successor."""
    if layout.pp == 1:
        return np.full(dp.size, np.inf)
    without = replace(question, stack=replace(question.stack, gradient_bytes=0))
    return np.asarray(memory_bytes(question, layout, dp) + state_bytes(without, layout, dp), dtype=np.float64)


def bamboo_speeds(work: Workload) -> Speeds:
    """Return the speeds of the best pipelines with shadows at each number of nodes."""
    return speeds_under(work, search_space, seconds=iteration_with_shadows_s, needed_bytes=memory_with_shadows_bytes)


class Bamboo(Elastic):
    """Pipelines in which each GPU can take over from its successor."""

    def __init__(self, world: EvaluationWorld) -> None:
        super().__init__(world, speeds=bamboo_speeds(world.workload))

    def detection_s(self) -> float:
        """Return the time until a broken connection is noticed."""
        return self.assumptions.elastic_detect_s

    def restart_s(self, job: TrainingJob, node: int, severity: int) -> float:
        """Return the time in which the shadow takes over, if there is one, and pipelines are built anew."""
        if severity == 3:
            return self.assumptions.bamboo_failover_s
        if self.has_shadow(job, node):
            return self.assumptions.bamboo_failover_s + self.assumptions.bamboo_reconfigure_s
        return self.assumptions.bamboo_reconfigure_s + self.assumptions.checkpoint_load_s + self.assumptions.recompute_s

    def has_shadow(self, job: TrainingJob, node: int) -> bool:
        """Return whether both neighbours in the ring that the job trains on are up. False on one node."""
        place, ring = job.nodes.index(node), len(job.nodes)
        neighbours = {job.nodes[place - 1], job.nodes[(place + 1) % ring]} - {node}
        return bool(neighbours) and all(self.world.up(neighbour) for neighbour in neighbours)

    def join_s(self) -> float:
        """Return the time in which the pipelines are built anew with the node."""
        return self.assumptions.bamboo_reconfigure_s
