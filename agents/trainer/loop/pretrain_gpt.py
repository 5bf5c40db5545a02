"""The built-in entry `gpt`: pretraining of a Megatron-core GPTModel on an indexed dataset, through the hook.

Everything inside a replica is Megatron's: model, tensor and pipeline parallelism, schedules, optimizer, scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from unicrond.agents.trainer.lifecycle.ledger import to_fixed_point
from unicrond.agents.trainer.loop import corpus
from unicrond.agents.trainer.loop.corpus import Corpus
from unicrond.agents.trainer.loop.hook import Hook, Step
from unicrond.agents.trainer.loop.progress_lines import ProgressLog
from unicrond.agents.trainer.process.randomness import seed_all
from unicrond.agents.trainer.sharded.optimizer import ShardedOptimizer
from unicrond.events.vocabulary import TaskSpec


def main(spec: TaskSpec) -> None:
    """Train the task from wherever it stands to its last iteration."""
    prefix = Path(spec.data) if spec.data else corpus.default_prefix()
    if not spec.data:
        corpus.build(prefix)
    text = Corpus(prefix, spec.model.seq)
    seed_all(spec.seed)
    model = build_model(spec)
    optimizer, scheduler = build_optimizer(spec, model)
    hook = Hook.attach(model, optimizer, scheduler, dataset_size=len(text), overlap=True)
    progress = ProgressLog(time.monotonic)
    for step in hook.steps():
        for micro_batches in step.lists(at_most=1 if spec.pp == 1 else None):
            step.add(*forward_backward(spec, model, text, step, micro_batches))
        optimizer.step()
        scheduler.step(increment=spec.global_batch)
        if metrics := progress.after(step.loss):
            hook.log(metrics)


def build_model(spec: TaskSpec) -> torch.nn.Module:
    """Return this shard's part of the GPT that `spec.model` describes."""
    in_16_bits = spec.model.precision == "bf16"
    dtype = torch.bfloat16 if in_16_bits else torch.float32
    config = TransformerConfig(
        num_layers=spec.model.layers,
        hidden_size=spec.model.hidden,
        num_attention_heads=spec.model.heads,
        hidden_dropout=spec.model.dropout,
        attention_dropout=spec.model.dropout,
        tensor_model_parallel_size=spec.tp,
        pipeline_model_parallel_size=spec.pp,
        bf16=in_16_bits,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,  # the schedules must not divide: the global token count is ours to divide by
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=spec.model.vocab,
        max_sequence_length=spec.model.seq,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
    )
    model: torch.nn.Module = Float16Module(config, gpt) if in_16_bits else gpt
    model.ddp_config = DistributedDataParallelConfig()  # the optimizer asks what it would have been wrapped with
    return model.cuda() if torch.cuda.is_available() else model


def build_optimizer(spec: TaskSpec, model: torch.nn.Module) -> tuple[Any, OptimizerParamScheduler]:
    """Return Megatron's Adam and its scheduler, which counts samples."""
    settings, in_16_bits = spec.optimizer, spec.model.precision == "bf16"
    decay_iterations = settings.decay_iterations or spec.iterations
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        bf16=in_16_bits,
        params_dtype=torch.bfloat16 if in_16_bits else torch.float32,
    )
    optimizer = ShardedOptimizer(config, [model]) if settings.distributed else get_megatron_optimizer(config, [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_iterations * spec.global_batch,
        lr_decay_steps=max(decay_iterations, settings.warmup_iterations + 1) * spec.global_batch,
        lr_decay_style="cosine",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # the task may go on with another schedule
    )
    return optimizer, scheduler


def forward_backward(
    spec: TaskSpec, model: torch.nn.Module, text: Corpus, step: Step, micro_batches: list[int]
) -> tuple[float, int]:
    """Run Megatron's schedule over the micro-batches; return the sum of their token losses and the number of tokens."""
    report = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, text, step),
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=spec.model.seq,
        micro_batch_size=spec.micro_batch,
        forward_only=False,
    )
    return sum(to_fixed_point(entry["loss_sum"]) for entry in report), sum(entry["tokens"] for entry in report)


def _forward_step(text: Corpus, step: Step, micro_batches: Iterator[int], model: torch.nn.Module) -> tuple[Any, Any]:
    micro_batch = next(micro_batches)
    step.seed(micro_batch)
    with step.loading():
        window = torch.stack([text.sample(sample) for sample in step.samples(micro_batch)])
    device = next(model.parameters()).device
    tokens, labels = window[:, :-1].to(device), window[:, 1:].contiguous().to(device)
    length = tokens.shape[1]
    positions = torch.arange(length, device=device).expand_as(tokens)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
    losses = model(tokens, positions, mask, labels=labels)
    return losses, _loss


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float | int]]:
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, count, {"loss_sum": float(total.detach()), "tokens": losses.numel()}
