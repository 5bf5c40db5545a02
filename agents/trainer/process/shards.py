"""Tensors that torch's `fully_shard` has spread over a replica's workers (DTensors): this worker's shard of each.

Rules
-----
* What is summed, compared, sent and saved of such a tensor is the shard that this worker has, a plain tensor. What
  torch is to find in a parameter or in its optimizer is spread as the parameter is.
* A plain tensor is its own shard.
* Behind a forward pass without a backward a module may have its whole parameters still: whoever asks for its
  parameters, to read or to write them, has them sharded first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch


def is_spread(tensor: object) -> bool:
    """Return whether the tensor is spread over several workers. (Nothing is, before torch's module is loaded.)"""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's shard, which shares its memory with the tensor."""
    if not is_spread(tensor):
        return tensor
    shard: torch.Tensor = tensor._local_tensor.detach()  # to_local() takes twenty times as long, in each iteration
    return shard


def spread_as(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return the tensor that is spread as `parameter`, with this worker's shard of it. Raises ValueError for a shard of
    another shape."""
    if not is_spread(parameter):
        return shard
    if shard.shape != (expected := shard_of(parameter).shape):
        raise ValueError(f"a shard of shape {tuple(shard.shape)}, of a parameter whose shard is {tuple(expected)}")
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def spread_state(entry: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return a parameter's optimizer state with its tensors, but for numbers, spread as the parameter is. Raises
    ValueError."""
    return {
        name: spread_as(parameter, value) if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in entry.items()
    }


def modules_sharded(model: torch.nn.Module) -> list[Any]:
    """Return the modules of the model on which `fully_shard` was called."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [module for module in model.modules() if isinstance(module, kind)] if kind is not None else []


def reshard(model: torch.nn.Module) -> None:
    """Have the model's parameters be the sharded ones."""
    for module in modules_sharded(model):
        module.reshard()
