"""Queries to the throughput model, and the layouts that can answer one. The costs: `model.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unicrond.throughput.presets import STACKS, GptModel, Gpu, Stack

MICRO_BATCHES_TRIED = (1, 2, 4, 8, 16)
CHUNKS_MAX = 12


@dataclass(frozen=True, slots=True)
class ThroughputQuery:
    """A query: this model on this GPU under this stack; `None` leaves a choice to the model.

    `batch` is sequences per iteration, `seq` tokens per sequence. `uneven` allows batches that do not divide evenly
    among the replicas.
    """

    model: GptModel
    gpu: Gpu
    stack: Stack
    batch: int
    seq: int
    tp: int | None = None
    pp: int | None = None
    micro_batch: int | None = None
    chunks: int | None = None
    recompute: str | None = None
    uneven: bool = True

    @property
    def flops_per_iteration(self) -> int:
        """Return the model FLOP of one iteration."""
        return self.batch * self.model.flops_per_sequence(self.seq)


def job(model: GptModel, gpu: Gpu, **options: Any) -> ThroughputQuery:
    """Return a `ThroughputQuery` with these `options`; what is None has the model's batch and sequence length and the
    GPU's usual stack.

    Raises ValueError, naming the field and the fix, for values that no layout could satisfy.
    """
    usual: dict[str, Any] = {"stack": STACKS[gpu.stack], "batch": model.batch, "seq": model.seq}
    question = ThroughputQuery(
        model, gpu, **usual | {name: value for name, value in options.items() if value is not None}
    )
    tp, pp, micro_batch, recompute = question.tp, question.pp, question.micro_batch, question.recompute
    for name in ("batch", "seq", "tp", "pp", "micro_batch", "chunks"):
        value = getattr(question, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}: must be 1 or more, not {value}")
    if tp is not None and tp not in (cuts := tensor_degrees(model, gpu)):
        raise ValueError(f"tp: {tp} does not divide {model.name} on {gpu.name}; choose from {cuts}")
    if pp is not None and pp not in (cuts := pipeline_degrees(model, question.stack)):
        raise ValueError(f"pp: {pp} does not divide the {model.layers} layers of {model.name}; choose from {cuts}")
    if micro_batch is not None and question.batch % micro_batch:
        raise ValueError(f"micro_batch: {micro_batch} does not divide batch {question.batch}; choose a divisor")
    if recompute is not None and recompute not in question.stack.recompute:
        modes = ", ".join(question.stack.recompute)
        raise ValueError(f"recompute: {question.stack.name} does not have {recompute!r}; choose from {modes}")
    return question


@dataclass(frozen=True, slots=True)
class Layout:
    """How one replica runs. `chunks` is Megatron's virtual pipeline size (1: not interleaved)."""

    tp: int
    pp: int
    micro_batch: int
    chunks: int
    recompute: str


def tensor_degrees(model: GptModel, gpu: Gpu) -> list[int]:
    """Return the tensor-parallel degrees: powers of two inside a node that divide heads, K/V heads, ffn and
    vocabulary."""
    shared = (model.heads, model.kv_heads, model.ffn, model.vocab, gpu.per_node)
    return [tp for tp in (1, 2, 4, 8, 16) if all(size % tp == 0 for size in shared)]


def pipeline_degrees(model: GptModel, stack: Stack) -> list[int]:
    """Return the pipeline degrees that cut the layers into equal stages, or with a ragged stack into any."""
    return [pp for pp in range(1, model.layers + 1) if layers_per_stage(model, stack, pp)]


def layers_per_stage(model: GptModel, stack: Stack, pp: int) -> tuple[int, int, int] | None:
    """Return the layers of the (first, middle, last) stage, or None if they cannot be cut into `pp`.

    With `balance_ends` embedding and output layer count as one layer each where plain equality fails (Megatron's
    account_for_*_in_pipeline_split; Llama 3 405B's 126 layers on 16 stages). A ragged stack gives the odd layers to the
    first stages.
    """
    if model.layers % pp == 0:
        return (model.layers // pp,) * 3
    if stack.ragged and pp < model.layers:
        fewest = model.layers // pp
        return fewest + 1, fewest + 1, fewest
    slots = model.layers + 2
    if stack.balance_ends and slots % pp == 0 and slots // pp > 1:
        return slots // pp - 1, slots // pp, slots // pp - 1
    return None


def layouts(job: ThroughputQuery) -> Iterator[Layout]:
    """Yield every layout worth costing, in the order that decides ties."""
    tps = tensor_degrees(job.model, job.gpu) if job.tp is None else [job.tp]
    pps = pipeline_degrees(job.model, job.stack) if job.pp is None else [job.pp]
    micro_batches = MICRO_BATCHES_TRIED if job.micro_batch is None else (job.micro_batch,)
    recomputes = job.stack.recompute if job.recompute is None else (job.recompute,)
    for tp in tps:
        for pp in pps:
            cut = layers_per_stage(job.model, job.stack, pp)
            if cut is None:
                continue
            for micro_batch in micro_batches:
                if job.batch % micro_batch:
                    continue
                for chunks in _chunks(job, pp, cut[1]):
                    for recompute in recomputes:
                        yield Layout(tp, pp, micro_batch, chunks, recompute)


def _chunks(job: ThroughputQuery, pp: int, layers: int) -> list[int]:
    """Return the chunks per stage to try: 1, and with a pipeline each divisor of the stage's layers up to 12."""
    if job.chunks is not None:
        return [job.chunks] if layers % job.chunks == 0 and (pp > 1 or job.chunks == 1) else []
    if pp == 1:
        return [1]
    return [chunks for chunks in range(1, min(CHUNKS_MAX, layers) + 1) if layers % chunks == 0]
