"""T(t, x): how many model FLOP per second a GPT task achieves on x GPUs under Megatron's 3D parallelism.

The rules
---------
A task's x GPUs are cut into `dp` replicas of `tp * pp` GPUs. A *layout* says how one replica runs:
tensor and pipeline parallel degree, micro-batch, chunks per stage (interleaving), and what the backward
pass computes again: "none", "light" (norms and activation function), "selective" (attention's core),
"full" (the whole layer). The
batch of an iteration is divided among the replicas in whole micro-batches; if it does not divide, some
replicas run one micro-batch more and the iteration is as long as theirs (`uneven`: plain Megatron
refuses this, unicrond's redistribution allows it). The iteration is the sum of six parts, all on the
slowest stage of the busiest replica:

    compute    GEMMs at gemm_efficiency / (1 + 17.5 tp / hidden) of peak, element-wise work at 80 % of
               HBM bandwidth, recomputation included
    tp         all-reduces (or reduce-scatter + all-gather) inside layers, at 75 % of NVLink
    transfer   sends between pipeline stages
    bubble     filling and draining: the other stages' time for one micro-batch, divided by the chunks
    dp         gradient reduction and, with a distributed optimizer, parameter gathering
    optimizer  Adam's HBM traffic

Everything but the number of micro-batches, the data-parallel group and the sharded memory is a
property of the layout alone, so a layout is costed once for *all* dp at a time (numpy arrays over dp).
T(x) is the best feasible layout with tp * pp * dp == x exactly; x with none has no entry. It need not
be monotone: a caller that may leave GPUs idle takes the running maximum itself.

Not in this module: the layouts to try (`layouts.py`), the fitted efficiencies (`presets.py`, fitted by
`replay/evaluation/studies/calibration.py`), and measured iteration times. Sources, errors: docs/results/calibration.md.
Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from unicrond.throughput.layouts import Layout, ThroughputQuery, layers_per_stage, layouts
from unicrond.throughput.presets import GIB, Gpu

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
#: A cost of a layout for each of an array of replica counts.
Cost: TypeAlias = Callable[[ThroughputQuery, Layout, Ints], Floats]

#: A GEMM cut `tp` ways over a width `hidden` reaches 1 / (1 + 17.5 tp / hidden) of a wide one's rate.
NARROW_GEMM = 17.5
#: Attention's batched, short GEMMs against the layer's large ones.
ATTENTION_EFFICIENCY = 0.8
HBM_EFFICIENCY = 0.8
NVLINK_EFFICIENCY = 0.75
#: HBM bytes per parameter and step: Adam reads gradient, master, two moments (16) and writes master,
#: moments, weight (14); clipping and zeroing touch the gradient twice (8).
OPTIMIZER_TRAFFIC_BYTES = 38
#: Resident bytes per parameter: BF16 weight; FP32 master and two moments.
WEIGHT_BYTES, MASTER_BYTES = 2, 12
#: Not ours to fill: CUDA context and NCCL buffers, then a share lost to fragmentation.
RESERVED_BYTES, USABLE_SHARE = 4 * GIB, 0.96


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the seconds of one iteration go; their sum is the iteration."""

    compute_s: float
    tp_s: float
    transfer_s: float
    bubble_s: float
    dp_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """Return the seconds of one iteration."""
        return self.compute_s + self.tp_s + self.transfer_s + self.bubble_s + self.dp_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer for one number of GPUs: layout, parts, memory."""

    job: ThroughputQuery
    gpus: int
    layout: Layout
    dp: int
    micro_batches: int  #: of the busiest replica
    uneven: bool  #: some replicas run one micro-batch fewer
    parts: Parts
    memory_bytes: int  #: of the fullest GPU

    @property
    def iteration_s(self) -> float:
        """Return the seconds of one iteration."""
        return self.parts.total_s

    @property
    def flops_per_s(self) -> int:
        """Return the achieved model FLOP/s of all GPUs together, a whole number."""
        return round(self.job.flops_per_iteration / self.iteration_s)

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilisation, 0..1."""
        return self.flops_per_s / (self.gpus * self.job.gpu.peak_flops)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No layout runs on this many GPUs, and why."""

    job: ThroughputQuery
    gpus: int
    reason: str


# --- the cost of one layout ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of one micro-batch, forward and backward: busy, and waiting for tensor-parallel peers."""

    compute_s: float
    tp_s: float

    @property
    def total_s(self) -> float:
        """Return the seconds of both together."""
        return self.compute_s + self.tp_s


def _gemm_rate(job: ThroughputQuery, tp: int) -> float:
    """Return the FLOP/s of a layer's GEMMs on one GPU."""
    return job.gpu.peak_flops * job.stack.gemm_efficiency / (1 + NARROW_GEMM * tp / job.model.hidden_size)


def _all_reduce_s(job: ThroughputQuery, tp: int, tokens: int) -> float:
    """Return the seconds of one all-reduce of BF16 activations among `tp` GPUs of a node."""
    volume_bytes = 2 * (tp - 1) / tp * tokens * job.model.hidden_size * 2
    return volume_bytes / (job.gpu.nvlink_bytes_per_s * NVLINK_EFFICIENCY)


def _layer(job: ThroughputQuery, layout: Layout) -> _Work:
    """Return the work of one transformer layer."""
    model, tp = job.model, layout.tp
    tokens = layout.micro_batch * job.seq
    gemm_s = 2 * tokens * model.layer_matrix_elements / tp / _gemm_rate(job, tp)
    # Flash attention skips the half above the diagonal; the older kernels compute and mask it.
    share = 0.5 if job.stack.flash_attention else 1.0
    core_s = share * 4 * tokens * job.seq * model.hidden_size / tp / (_gemm_rate(job, tp) * ATTENTION_EFFICIENCY)
    memory_s, scores_s = (size / (job.gpu.hbm_bytes_per_s * HBM_EFFICIENCY) for size in _layer_traffic(job, layout))
    core_s += scores_s
    forward_s = gemm_s + memory_s + core_s
    again_s = {"none": 0.0, "light": memory_s, "selective": core_s, "full": forward_s}[layout.recompute]
    # Two all-reduces forward, two backward, two more if the forward pass is run again.
    waits = 2 + (0 if job.stack.overlap_tp else 2) + (2 if layout.recompute == "full" else 0)
    return _Work(3 * forward_s + again_s, waits * _all_reduce_s(job, tp, tokens))


def _layer_traffic(job: ThroughputQuery, layout: Layout) -> tuple[float, float]:
    """Return the HBM bytes of a layer's forward pass on one GPU: element-wise work, and attention scores.

    In bytes per token: two norms read and write (8 h); two residual additions read two, write one and, with dropout,
    its mask (12 h, 14 h); Q, K, V and the context are split and transposed (4 bytes per element); the feed-forward
    activation reads and writes (4 bytes per ffn element, gated 6). Scores, if they are materialised: written, masked
    and normalised, dropped out, read (13 bytes each).
    """
    model, tp = job.model, layout.tp
    tokens = layout.micro_batch * job.seq
    whole = (22 if model.plain else 20) * model.hidden_size
    split = 8 * (model.hidden_size + model.kv_width) + (6 if model.gated else 4) * model.ffn
    per_token = whole / (tp if job.stack.sequence_parallel else 1) + split / tp
    scores = 0 if job.stack.flash_attention else 13 * model.heads * job.seq / tp
    return tokens * per_token, tokens * scores


def _ends(job: ThroughputQuery, layout: Layout) -> tuple[_Work, _Work]:
    """Return the work of the first stage besides its layers (embedding) and of the last (logits and loss)."""
    model, tp = job.model, layout.tp
    tokens = layout.micro_batch * job.seq
    bandwidth = job.gpu.hbm_bytes_per_s * HBM_EFFICIENCY
    reduce_s = _all_reduce_s(job, tp, tokens)
    embedding = _Work(3 * tokens * model.hidden_size * 6 / bandwidth, reduce_s)
    logits_s = 3 * 2 * tokens * model.hidden_size * model.vocab / tp / _gemm_rate(job, tp)
    # Logits in FP32: written, read for the maximum, the sum and the gradient, written as gradient.
    loss_s = tokens * model.vocab / tp * 20 / bandwidth
    return embedding, _Work(logits_s + loss_s, 0.0 if job.stack.overlap_tp else reduce_s)


def legal(job: ThroughputQuery, layout: Layout, dp: Ints) -> npt.NDArray[np.bool_]:
    """Return whether the schedule accepts the batch on each of `dp` replicas."""
    count = job.batch // layout.micro_batch
    accepted = dp <= count
    if not job.uneven:
        accepted &= count % dp == 0
    if layout.chunks > 1:  # the interleaved schedule runs groups of pp micro-batches, alike everywhere
        accepted &= count % (dp * layout.pp) == 0
    return accepted


def micro_batches(job: ThroughputQuery, layout: Layout, dp: Ints) -> Ints:
    """Return the micro-batches per iteration of the busiest replica."""
    return -(-(job.batch // layout.micro_batch) // dp)


def parts_s(job: ThroughputQuery, layout: Layout, dp: Ints) -> Floats:
    """Return the seconds of one iteration under `layout` with each of `dp` replicas: a row per field of `Parts`."""
    cut = _cut(job, layout)
    layer, (embedding, logits) = _layer(job, layout), _ends(job, layout)
    slowest = max(_stages(cut, layout.pp, layer, embedding, logits), key=lambda stage: stage.total_s)
    others_s = job.model.layers * layer.total_s + embedding.total_s + logits.total_s - slowest.total_s
    send_s = _send_s(job, layout, dp)
    count = micro_batches(job, layout, dp)
    parts = np.empty((6, dp.size))
    parts[0] = count * slowest.compute_s
    parts[1] = count * slowest.tp_s
    parts[2] = count * send_s * layout.chunks
    parts[3] = max(0.0, others_s) / layout.chunks + (layout.pp - 1) * send_s
    parts[4] = _synchronise_s(job, layout, dp, hidden_s=slowest.total_s if job.stack.overlap_dp else 0.0)
    parts[5] = _optimizer_s(job, layout, dp)
    return parts


def _cut(job: ThroughputQuery, layout: Layout) -> tuple[int, int, int]:
    cut = layers_per_stage(job.model, job.stack, layout.pp)
    assert cut is not None, f"{layout} does not cut {job.model.name}"
    return cut


def _stages(cut: tuple[int, int, int], pp: int, layer: _Work, embedding: _Work, logits: _Work) -> list[_Work]:
    """Return one micro-batch's work on the distinct stages."""

    def stage(layers: int, *extra: _Work) -> _Work:
        """Return the work of a stage with so many layers and the extra work."""
        return _Work(
            layers * layer.compute_s + sum(work.compute_s for work in extra),
            layers * layer.tp_s + sum(work.tp_s for work in extra),
        )

    if pp == 1:
        return [stage(cut[1], embedding, logits)]
    return [stage(cut[0], embedding), stage(cut[2], logits), *([stage(cut[1])] if pp > 2 else [])]


def _link_bytes_per_s(job: ThroughputQuery, gpus: Ints) -> Floats:
    """Return the rate between two GPUs of the task: NVLink while all of it is on one node, else the adapter."""
    nvlink = job.gpu.nvlink_bytes_per_s * NVLINK_EFFICIENCY
    nic = job.gpu.nic_bytes_per_s * job.stack.nic_efficiency
    return np.where(gpus <= job.gpu.per_node, nvlink, nic)


def _send_s(job: ThroughputQuery, layout: Layout, dp: Ints) -> Floats:
    """Return the seconds that a micro-batch's activations and gradients take to the next stage, per chunk.

    Each tensor-parallel peer sends its slice (scatter/gather optimisation).
    """
    if layout.pp == 1 or job.stack.overlap_pp:
        return np.zeros(dp.size)
    size_bytes = layout.micro_batch * job.seq * job.model.hidden_size * 2 / layout.tp
    return 2 * size_bytes / _link_bytes_per_s(job, dp * layout.tp * layout.pp)


def _stage_parameters(job: ThroughputQuery, layout: Layout) -> tuple[float, float]:
    """Return the parameters per GPU of the first and of the last stage."""
    cut = _cut(job, layout)
    model, tp = job.model, layout.tp
    positions = job.seq * model.hidden_size if model.plain else 0
    first = cut[0] * model.layer_parameters + model.embedding_parameters
    if layout.pp == 1:
        first += 0 if model.tied else model.embedding_parameters
        return (first / tp + positions,) * 2
    last = cut[2] * model.layer_parameters + model.embedding_parameters
    return first / tp + positions, last / tp


def _synchronise_s(job: ThroughputQuery, layout: Layout, dp: Ints, hidden_s: float) -> Floats:
    """Return the seconds of gradient reduction among replicas, and of a shared embedding between first and last stage.

    A ring over nodes uses the adapters of all its members on a node: 8 / tp of them.
    """
    gradient_bytes = job.stack.gradient_bytes
    # A reduce-scatter of gradients, then an all-gather: of new weights, or of the reduced gradients.
    gathered_bytes = WEIGHT_BYTES if job.stack.distributed_optimizer else gradient_bytes
    volume_bytes = (dp - 1) / dp * max(_stage_parameters(job, layout)) * (gradient_bytes + gathered_bytes)
    members = max(1, job.gpu.per_node // layout.tp)
    nvlink = job.gpu.nvlink_bytes_per_s * NVLINK_EFFICIENCY
    across = np.minimum(members * job.gpu.nic_bytes_per_s * job.stack.nic_efficiency, nvlink)
    reduce_s = volume_bytes / np.where(dp * layout.tp <= job.gpu.per_node, nvlink, across)
    exposed_s = np.maximum(0.0, reduce_s - hidden_s)
    if job.model.tied and layout.pp > 1:
        shared_bytes = job.model.embedding_parameters / layout.tp * gradient_bytes
        exposed_s = exposed_s + shared_bytes / _link_bytes_per_s(job, dp * layout.tp * layout.pp)
    return np.asarray(exposed_s, dtype=np.float64)


def _optimizer_s(job: ThroughputQuery, layout: Layout, dp: Ints) -> Floats:
    """Return the seconds of Adam's pass over this GPU's parameters (or its share of them)."""
    shards = dp if job.stack.distributed_optimizer else np.ones(dp.size)
    size_bytes = max(_stage_parameters(job, layout)) * OPTIMIZER_TRAFFIC_BYTES / shards
    return np.asarray(size_bytes / (job.gpu.hbm_bytes_per_s * HBM_EFFICIENCY), dtype=np.float64)


# --- memory --------------------------------------------------------------------------------------


def usable_bytes(gpu: Gpu) -> float:
    """Return the bytes of a GPU that a task's tensors may fill."""
    return USABLE_SHARE * gpu.memory_bytes - RESERVED_BYTES


def memory_bytes(job: ThroughputQuery, layout: Layout, dp: Ints) -> Floats:
    """Return the bytes on the fuller of the first stage (most micro-batches in flight) and the last (logits)."""
    cut = _cut(job, layout)
    first, last = _stage_parameters(job, layout)
    per_parameter = _bytes_per_parameter(job, dp)
    resident, working = _layer_activation_bytes(job, layout)
    # 1F1B keeps pp micro-batches on the first stage; interleaving a part of another pass of them.
    in_flight = layout.pp + ((layout.pp - 1) / layout.chunks if layout.chunks > 1 else 0)
    tokens = layout.micro_batch * job.seq
    logits_bytes = tokens * job.model.vocab / layout.tp * 10  # BF16, FP32 and their gradient
    alive = np.minimum(micro_batches(job, layout, dp), in_flight)
    first_bytes = first * per_parameter + alive * cut[0] * resident + working
    last_bytes = last * per_parameter + cut[2] * resident + max(working, logits_bytes)
    if layout.pp == 1:
        first_bytes = first_bytes + max(0.0, logits_bytes - working)
    return np.asarray(np.maximum(first_bytes, last_bytes), dtype=np.float64)


def state_bytes(job: ThroughputQuery, layout: Layout, dp: Ints) -> Floats:
    """Return the bytes of weights, gradients, master weights and moments on the GPU that has the most of them."""
    return np.asarray(parameters(job, layout) * _bytes_per_parameter(job, dp), dtype=np.float64)


def parameters(job: ThroughputQuery, layout: Layout) -> float:
    """Return the parameters on the GPU that has the most."""
    return max(_stage_parameters(job, layout))


def _bytes_per_parameter(job: ThroughputQuery, dp: Ints) -> Floats:
    shards = dp if job.stack.distributed_optimizer else np.ones(dp.size)
    return np.asarray(WEIGHT_BYTES + job.stack.gradient_bytes + MASTER_BYTES / shards, dtype=np.float64)


def _layer_activation_bytes(job: ThroughputQuery, layout: Layout) -> tuple[float, float]:
    """Return the bytes that one layer keeps of a micro-batch for its backward pass, and that it needs while running.

    Korthikanti et al. 2022 (arXiv 2205.05198), section 4, with grouped queries and SwiGLU: inputs of norms, attention
    and feed-forward (8 h) and dropout masks (2 h) are whole without sequence parallelism; Q, K, V, context and ffn
    activations are split by tp; scores take 5 bytes each.
    """
    model, tp = job.model, layout.tp
    tokens = layout.micro_batch * job.seq
    whole = (10 if model.plain else 8) * model.hidden_size / (tp if job.stack.sequence_parallel else 1)
    split = (4 * model.hidden_size + 4 * model.kv_width + (6 if model.gated else 4) * model.ffn) / tp
    scores = 0.0 if job.stack.flash_attention else 5 * model.heads * job.seq / tp
    layer_bytes = tokens * (whole + split)
    if layout.recompute == "light":  # outputs of the norms (2 h each) and of the activation (2 ffn)
        spared = 4 * model.hidden_size / (tp if job.stack.sequence_parallel else 1) + 2 * model.ffn / tp
        return layer_bytes + tokens * (scores - spared), tokens * spared
    if layout.recompute == "full":
        resident = tokens * 2 * model.hidden_size / (tp if job.stack.sequence_parallel else 1)
        return resident, layer_bytes + tokens * scores
    if layout.recompute == "selective":
        return layer_bytes, tokens * scores
    return layer_bytes + tokens * scores, 0.0


# --- the answers ---------------------------------------------------------------------------------


def best(job: ThroughputQuery, gpus: int) -> Estimate | Infeasible:
    """Return the fastest feasible layout on exactly `gpus` GPUs, or why there is none."""
    fastest: Estimate | None = None
    least_bytes = np.inf
    divided = False
    for layout in layouts(job):
        replica = layout.tp * layout.pp
        if gpus % replica:
            continue
        divided = True
        dp = np.array([gpus // replica], dtype=np.int64)
        if not legal(job, layout, dp)[0]:
            continue
        needed_bytes = float(memory_bytes(job, layout, dp)[0])
        least_bytes = min(least_bytes, needed_bytes)
        if needed_bytes > usable_bytes(job.gpu):
            continue
        parts = Parts(*parts_s(job, layout, dp)[:, 0].tolist())
        if fastest is None or parts.total_s < fastest.parts.total_s:
            fastest = _estimate(job, gpus, layout, parts, needed_bytes)
    return fastest or Infeasible(job, gpus, _infeasibility(job, gpus, divided, least_bytes))


def _estimate(job: ThroughputQuery, gpus: int, layout: Layout, parts: Parts, needed_bytes: float) -> Estimate:
    dp = gpus // (layout.tp * layout.pp)
    count = job.batch // layout.micro_batch
    return Estimate(job, gpus, layout, dp, -(-count // dp), count % dp != 0, parts, int(needed_bytes))


def _infeasibility(job: ThroughputQuery, gpus: int, divided: bool, least_bytes: float) -> str:
    if not divided:
        return f"no tp x pp of {job.model.name} divides {gpus} GPUs"
    if least_bytes == np.inf:
        return f"a batch of {job.batch} cannot be dealt to {gpus} GPUs"
    usable = usable_bytes(job.gpu) / GIB
    return f"needs {least_bytes / GIB:.0f} GiB per GPU at least, {job.gpu.name} has {usable:.0f} GiB to use"


def iteration_s(job: ThroughputQuery, layout: Layout, dp: Ints) -> Floats:
    """Return the seconds of one iteration under `layout` with each of `dp` replicas."""
    return np.asarray(parts_s(job, layout, dp).sum(axis=0), dtype=np.float64)


def table(
    job: ThroughputQuery, max_workers: int, *, seconds: Cost = iteration_s, needed_bytes: Cost = memory_bytes
) -> dict[int, int]:
    """Return T(x) for the planner, for every feasible x up to `max_workers`: GPUs -> achieved model FLOP/s, whole
    numbers.

    The same answers as `best`, layout by layout instead of GPU count by GPU count; x that no layout fits exactly is
    missing (the planner reads 0). `seconds`, `needed_bytes`: what a layout takes, where a system that is not Megatron
    takes more.
    """
    fastest_s = np.full(max_workers + 1, np.inf)
    for layout in layouts(job):
        replica = layout.tp * layout.pp
        replicas = min(max_workers // replica, job.batch // layout.micro_batch)
        if replicas < 1:
            continue
        dp = np.arange(1, replicas + 1, dtype=np.int64)
        dp = dp[legal(job, layout, dp)]
        dp = dp[needed_bytes(job, layout, dp) <= usable_bytes(job.gpu)]
        total_s = seconds(job, layout, dp)
        fastest_s[dp * replica] = np.minimum(fastest_s[dp * replica], total_s)
    flops = job.flops_per_iteration
    return {int(x): round(flops / float(fastest_s[x])) for x in np.flatnonzero(np.isfinite(fastest_s))}
