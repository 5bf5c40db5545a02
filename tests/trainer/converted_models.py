"""Models of Megatron-core on one CPU, of both kinds that are converted, and what a task would have saved of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.process import cpu_shim
from unicrond.agents.trainer.process.randomness import seed_all
from unicrond.agents.trainer.states import checkpoint
from unicrond.agents.trainer.states.checkpoint import WriteJob
from unicrond.agents.trainer.states.layout import layout_of
from unicrond.agents.trainer.states.origins import RunOrigin
from unicrond.agents.trainer.states.state import TrainingState
from unicrond.events.vocabulary import ModelSpec, TaskSpec
from unicrond.events.vocabulary.shape import Shape

GPT = TaskSpec(name="big", model=ModelSpec(layers=3, hidden=48, heads=4, seq=16, vocab=96))
#: Of the same model that `llama` builds.
LLAMA_FLAGS = (
    "--num-layers 3 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 6 --group-query-attention"
    " --num-query-groups 2 --kv-channels 16 --max-position-embeddings 16 --seq-length 16 --normalization RMSNorm"
    " --norm-epsilon 1e-6 --swiglu --disable-bias-linear --position-embedding-type rope --rotary-base 5000"
    " --vocab-size 90 --global-batch-size 4 --lr 1e-3 --tokenizer-type HuggingFaceTokenizer"
)
LLAMA = TaskSpec(name="big", entry="megatron-lm", args=("pretrain_gpt.py", *LLAMA_FLAGS.split()), global_batch=4)
#: Rows of the vocabulary, six of which are padding.
ROWS = 96


@contextmanager
def one_worker() -> Iterator[None]:
    """A world of one rank, on the CPU."""
    cpu_shim.apply()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    seed_all(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def llama(*, is_tied: bool = False, is_interleaved: bool = False, in_16_bits: bool = False) -> torch.nn.Module:
    """Six heads of 16, which is not hidden / heads, in two groups."""
    dtype = torch.bfloat16 if in_16_bits else torch.float32
    config = TransformerConfig(
        num_layers=3, hidden_size=48, ffn_hidden_size=80, num_attention_heads=6, num_query_groups=2, kv_channels=16,
        normalization="RMSNorm", layernorm_epsilon=1e-6, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        rotary_interleaved=is_interleaved, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, persist_layer_norm=False, apply_rope_fusion=False, bf16=in_16_bits,
        params_dtype=dtype,
    )  # fmt: skip
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=ROWS,
        max_sequence_length=16,
        position_embedding_type="rope",
        rotary_base=5000,
        share_embeddings_and_output_weights=is_tied,
    )
    return Float16Module(config, model) if in_16_bits else model


def varied(model: torch.nn.Module) -> torch.nn.Module:
    """Give norms and biases values of their own, which a model begins without."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05)
    return model


def optimizer_of(spec: TaskSpec, model: torch.nn.Module) -> tuple[Any, Any]:
    model.ddp_config = getattr(model, "ddp_config", pretrain_gpt.DistributedDataParallelConfig())
    if spec.entry == "gpt":
        return pretrain_gpt.build_optimizer(spec, model)
    dtype = next(model.parameters()).dtype
    config = OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, bf16=dtype == torch.bfloat16, params_dtype=dtype)
    optimizer = get_megatron_optimizer(config, [model])
    scheduler = pretrain_gpt.OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=4, lr_decay_steps=400,
        lr_decay_style="cosine", start_wd=0.01, end_wd=0.01, wd_incr_steps=0, wd_incr_style="constant",
    )  # fmt: skip
    return optimizer, scheduler


def state_of(spec: TaskSpec, model: torch.nn.Module) -> TrainingState:
    optimizer, scheduler = optimizer_of(spec, model)

    def layout() -> object:
        return msgspec.to_builtins(layout_of([model], optimizer, 1, 1))

    return TrainingState([model], optimizer, scheduler, layout=layout)


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, mask)


def step(state: TrainingState, number: int) -> float:
    """One step of training; returns its loss."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 90, (4, 17), generator=generator)
    state.optimizer.zero_grad()
    outputs = logits(state.models[0], tokens[:, :-1]).float()
    loss = torch.nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), tokens[:, 1:].reshape(-1))
    loss.backward()
    for parameter in state.models[0].parameters():
        parameter.main_grad = parameter.grad
    state.optimizer.step()
    state.scheduler.step(increment=4)
    return float(loss)


def saved(directory: Path, spec: TaskSpec, state: TrainingState, iteration: int = 7) -> str:
    """The task's own checkpoint of this state, with its settings."""
    job = WriteJob(directory, spec.name, iteration, 1, 0, Shape(), "test", 2, RunOrigin(spec))
    checkpoint.write(job, state.capture(iteration, 0.5))
    return str(directory / f"iteration-{iteration:08d}")
