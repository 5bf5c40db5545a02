"""Completes the gradients within a replica once they are the global batch's, by Megatron's own `finalize_model_grads`,
for loops that are not Megatron-LM's.

Rules
-----
* With tensor parallelism each shard has only its own share of the gradients of norms that all have (under sequence
  parallelism, and of queries and keys); with pipeline parallelism the first and the last stage each have their share of
  a tied embedding's. Without this the copies part, silently.
* It runs once a step, on the means of the global batch, so that no replica's number of micro-batches matters.
* A router's bias follows from the tokens of the whole batch, which are counted on each replica: a plain loop has no
  place where they are summed. That is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig


class CannotFinish(ValueError):
    """The model would train wrongly in a loop of one's own; the text says why, in one line."""


class _Chunk:
    """Stands in for a model that DistributedDataParallel has wrapped."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = model
        self.ddp_config = getattr(model, "ddp_config", None) or DistributedDataParallelConfig()

    def finish_grad_sync(self, **_: object) -> None:
        """Do nothing: the sum over the replicas is there."""


def gradient_finalizer(models: Sequence[torch.nn.Module]) -> Callable[[], None] | None:
    """Return what to call after the sum; None where shards share nothing. Raises CannotFinish."""
    configs = [config for model in models if (config := _config(model)) is not None]
    if len(configs) < len(models) or not models:
        return None
    if any(config.moe_router_enable_expert_bias for config in configs):
        raise CannotFinish(
            "moe_router_enable_expert_bias: the tokens of each expert are not summed over the replicas in a loop of"
            " your own; leave it out, or train with entry: megatron-lm"
        )
    if not parallel_state.model_parallel_is_initialized():
        return None
    shards = (
        parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_pipeline_model_parallel_world_size()
    )
    return partial(finalize_model_grads, [_Chunk(model) for model in models], None) if shards > 1 else None


def _config(model: Any) -> TransformerConfig | None:
    """Return Megatron's configuration of a model that may be wrapped, None for another model."""
    while model is not None:
        config = getattr(model, "config", None)
        if isinstance(config, TransformerConfig):
            return config
        model = getattr(model, "module", None)
    return None
