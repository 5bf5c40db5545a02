"""The inputs of the throughput model: models, GPUs and software stacks.

Models are GPTs in Megatron-core's terms. GPUs carry dense BF16 peaks and one-directional link speeds
from the vendor's data sheets. A software stack says which of Megatron's optimisations are on and
carries the two efficiencies that `replay/evaluation/studies/calibration.py` fits to published runs; a test fits them
again and compares. The formulas that use all this are in `model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GIB = 2**30


@dataclass(frozen=True, slots=True)
class GptModel:
    """A decoder-only transformer.

    `ffn` is the width of the feed-forward layer, `gated` says SwiGLU (three matrices) instead of GELU
    (two), `tied` that the output layer shares the embedding. `plain` models (GPT-3) have LayerNorm with
    biases, dropout and learned positions; the others (Llama) RMSNorm, no biases, rotary positions.
    `seq` (tokens) and `batch` (sequences per iteration) are defaults that a caller may replace.
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    batch: int
    gated: bool = False
    tied: bool = True
    plain: bool = True

    @property
    def kv_width(self) -> int:
        """Return the width of K (and of V) in elements: smaller than `hidden_size` with grouped queries."""
        return self.hidden_size // self.heads * self.kv_heads

    @property
    def layer_matrix_elements(self) -> int:
        """Count the elements of one layer's weight matrices: what its GEMMs multiply by."""
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * self.kv_width
        return attention + (3 if self.gated else 2) * self.hidden_size * self.ffn

    @property
    def layer_parameters(self) -> int:
        """Count the parameters of one layer, norms and biases included."""
        if self.plain:
            return self.layer_matrix_elements + 7 * self.hidden_size + 2 * self.kv_width + self.ffn
        return self.layer_matrix_elements + 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Count the parameters of the token embedding (and of the output layer, if that is separate: once each)."""
        return self.vocab * self.hidden_size

    @property
    def parameters(self) -> int:
        """Count all parameters."""
        positions = self.seq * self.hidden_size if self.plain else 0
        final_norm = (2 if self.plain else 1) * self.hidden_size
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + positions + final_norm

    def flops_per_sequence(self, seq: int) -> int:
        """Return the model FLOP of one sequence of `seq` tokens, forward and backward.

        The papers' convention: full (not causal) attention, no recomputation, embedding look-up free.
        """
        layer = 2 * seq * self.layer_matrix_elements + 4 * seq * seq * self.hidden_size
        return 3 * (self.layers * layer + 2 * seq * self.hidden_size * self.vocab)


def gpt3(
    name: str, layers: int, hidden_size: int, heads: int, *, batch: int, seq: int = 2048, vocab: int = 51200
) -> GptModel:
    """Return a model of GPT-3's kind: multi-head attention, GELU, ffn = 4 * hidden_size, tied embeddings."""
    return GptModel(name, layers, hidden_size, heads, heads, 4 * hidden_size, vocab, seq, batch)


def llama3(name: str, layers: int, hidden_size: int, heads: int, ffn: int, *, batch: int, seq: int = 8192) -> GptModel:
    """Return a model of Llama-3's kind: 8 groups of queries, SwiGLU, separate output layer, 128,256 tokens."""
    return GptModel(name, layers, hidden_size, heads, 8, ffn, 128256, seq, batch, gated=True, tied=False, plain=False)


def _by_name(*models: GptModel) -> Mapping[str, GptModel]:
    return MappingProxyType({model.name: model for model in models})


#: GPT-3: layers, widths and batch (tokens / 2048) from Brown et al. 2020 (arXiv 2005.14165), table 2.1,
#: with 16 heads at 1.3B and a width of 5,120 at 13B as Megatron's examples have them; vocabulary padded
#: to 51,200. The paper has no 70B: 88 layers of 8,192 are this project's choice (71 B).
#: Llama 3: Grattafiori et al. 2024 (arXiv 2407.21783), table 3; the batch of 405B is its table 4's, the
#: batches of 8B and 70B are this project's choice (4 M and 8 M tokens).
MODELS: Mapping[str, GptModel] = _by_name(
    gpt3("gpt3-1.3b", 24, 2048, 16, batch=512),
    gpt3("gpt3-7b", 32, 4096, 32, batch=1024),
    gpt3("gpt3-13b", 40, 5120, 40, batch=1024),
    gpt3("gpt3-70b", 88, 8192, 64, batch=1536),
    gpt3("gpt3-175b", 96, 12288, 96, batch=1536),
    llama3("llama3-8b", 32, 4096, 32, 14336, batch=512),
    llama3("llama3-70b", 80, 8192, 64, 28672, batch=1024),
    llama3("llama3-405b", 126, 16384, 128, 53248, batch=2048),
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU and its share of the node's links.

    Rates are per GPU and in one direction, bytes per second; `peak_flops` is dense BF16 FLOP/s;
    `stack` names the software stack that a run on this GPU has unless the caller says otherwise.
    """

    name: str
    peak_flops: float
    memory_bytes: int
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float
    nic_bytes_per_s: float
    stack: str
    per_node: int = 8


#: Vendor data sheets; nodes of 8. Network: 200 Gb/s per GPU for A100 (DGX A100), 400 Gb/s for H100 and
#: H200 (DGX H100). A800: NVLink cut to 400 GB/s in both directions together; four 200 Gb/s adapters per
#: node as in the cluster of the Unicron paper (recalled, not re-checked).
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("a100-40g", 312e12, 40 * GIB, 1555e9, 300e9, 25e9, "megatron-2023"),
            Gpu("a100-80g", 312e12, 80 * GIB, 2039e9, 300e9, 25e9, "megatron-2023"),
            Gpu("a800-80g", 312e12, 80 * GIB, 2039e9, 200e9, 12.5e9, "megatron-2023"),
            Gpu("h100-80g", 989.5e12, 80 * GIB, 3350e9, 450e9, 50e9, "mcore-2024"),
            Gpu("h200-141g", 989.5e12, 140 * GIB, 4800e9, 450e9, 50e9, "mcore-2024"),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Stack:
    """A generation of the training software: what it overlaps, recomputes and shards, and how well.

    `gemm_efficiency` is the share of peak that an infinitely wide GEMM reaches; `nic_efficiency` the
    share of the adapter's line rate that collectives and p2p reach. Both are fitted.
    `recompute` lists the modes of activation recomputation on offer, cheapest first.
    """

    name: str
    gemm_efficiency: float
    nic_efficiency: float
    recompute: tuple[str, ...]
    sequence_parallel: bool
    flash_attention: bool
    distributed_optimizer: bool
    overlap_tp: bool  #: tensor-parallel communication of the backward pass hides behind weight gradients
    overlap_pp: bool  #: sends between stages hide behind the next chunk's work
    overlap_dp: bool  #: gradient reduction and parameter gathering hide behind one micro-batch
    balance_ends: bool  #: embedding and output layer may count as a layer each when stages are cut
    gradient_bytes: int = 4
    ragged: bool = False  #: stages may differ by a layer (not Megatron; systems that cut pipelines freely)


STACKS: Mapping[str, Stack] = MappingProxyType(
    {
        stack.name: stack
        for stack in (
            Stack(
                "megatron-2021",
                0.736,
                0.8,
                ("full",),
                sequence_parallel=False,
                flash_attention=False,
                distributed_optimizer=False,
                overlap_tp=False,
                overlap_pp=False,
                overlap_dp=False,
                balance_ends=False,
                gradient_bytes=2,
            ),
            Stack(
                "megatron-2022",
                0.708,
                0.8,
                ("selective", "full"),
                sequence_parallel=True,
                flash_attention=False,
                distributed_optimizer=False,
                overlap_tp=True,
                overlap_pp=False,
                overlap_dp=False,
                balance_ends=False,
                gradient_bytes=2,
            ),
            Stack(
                "megatron-2023",
                0.63,
                0.353,
                ("none", "full"),
                sequence_parallel=True,
                flash_attention=True,
                distributed_optimizer=True,
                overlap_tp=True,
                overlap_pp=False,
                overlap_dp=False,
                balance_ends=False,
            ),
            Stack(
                "mt-nlg-2021",
                0.549,
                0.8,
                ("full",),
                sequence_parallel=False,
                flash_attention=False,
                distributed_optimizer=False,
                overlap_tp=False,
                overlap_pp=False,
                overlap_dp=False,
                balance_ends=False,
                gradient_bytes=2,
            ),
            Stack(
                "mcore-2024",
                0.544,
                0.8,
                ("none", "light", "full"),
                sequence_parallel=True,
                flash_attention=True,
                distributed_optimizer=True,
                overlap_tp=True,
                overlap_pp=True,
                overlap_dp=True,
                balance_ends=True,
            ),
            Stack(
                "llama3-2024",
                0.498,
                0.8,
                ("none", "light", "full"),
                sequence_parallel=True,
                flash_attention=True,
                distributed_optimizer=True,
                overlap_tp=True,
                overlap_pp=True,
                overlap_dp=True,
                balance_ends=True,
            ),
        )
    }
)
