"""Describes how this worker's tensors lie in the whole model and optimizer: from Megatron's `sharded_state_dict`, or as
`fully_shard` has spread them.

Rules
-----
* Global names, shapes and offsets are Megatron's: the same in every layout. Layers of pipeline stages are counted
  through there, while a stage's own names begin with 0.
* Of a model that `fully_shard` has spread, global names are its own, and what is not spread is whole on every worker.
* Where a part of the state is not told (a plain torch model, an optimizer that is not known here, a buffer without a
  global name), the layout is missing: only the same layout can take the state over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from unicrond.agents.trainer.process.shards import is_spread, reshard
from unicrond.agents.trainer.states.resharding import Piece, StateLayout


def layout_of(models: Sequence[torch.nn.Module], optimizer: Any, tp: int, pp: int) -> StateLayout | None:
    """Return the layout of the tensors by the names of `TrainingState`, None where a part of it is not known."""
    tensors: dict[str, tuple[Piece, ...]] = {}
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        reshard(model)
        pieces_of = _pieces_of(model, f"{number}." if len(models) > 1 else "")
        for name, tensor in _persistent_tensors(model):
            pieces = pieces_of(name, tensor) if pieces_of is not None else None
            if pieces is None:
                return None
            tensors[f"{number}.{name}"] = pieces
            names[id(tensor)] = f"{number}.{name}"
    try:
        paths = {path: names[id(parameter)] for path, parameter in owners(optimizer)}
    except UnknownOptimizer:
        return None
    return StateLayout(tp, pp, tensors, paths)


def _pieces_of(model: torch.nn.Module, prefix: str) -> Callable[[str, torch.Tensor], tuple[Piece, ...] | None] | None:
    """Return what tells the pieces of a tensor of the model from its name and itself; None where nothing does.
    `prefix`: of the global names of a model that has none of Megatron's."""
    if any(map(is_spread, model.parameters())):
        return lambda name, tensor: (_spread_piece(f"{prefix}{name}", tensor),)
    if not hasattr(model, "sharded_state_dict"):
        return None
    sharded = {
        id(entry.data): entry
        for entry in nested_values(model.sharded_state_dict())
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    return lambda _, tensor: _pieces(sharded[id(tensor)], tensor) if id(tensor) in sharded else None


def _spread_piece(key: str, tensor: torch.Tensor) -> Piece:
    shape, start = tuple(tensor.shape), (0,) * tensor.dim()
    if is_spread(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, start = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return Piece(key, tuple(tensor.shape), tuple(start), (0,) * tensor.dim(), tuple(shape))


def _persistent_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and the buffers that are not merely derived from the configuration."""
    yield from model.named_parameters()
    saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    yield from ((name, buffer) for name, buffer in model.named_buffers() if id(buffer) in saved)


def _pieces(sharded: ShardedTensor | ShardedTensorFactory, tensor: torch.Tensor) -> tuple[Piece, ...] | None:
    if isinstance(sharded, ShardedTensor):
        return (_piece(sharded, (0,) * tensor.dim(), tuple(tensor.shape)),)
    # A factory cuts a tensor in several (the halves of a gated layer): seen by cutting the elements' numbers.
    numbers = torch.arange(tensor.numel()).reshape(tensor.shape)
    pieces = []
    for part in nested_values(sharded.build_fn(sharded.key, numbers, sharded.replica_id, sharded.flattened_range)):
        if not isinstance(part, ShardedTensor) or part.data.dim() != tensor.dim() or not part.data.numel():
            return None
        within = tuple(int(place) for place in torch.unravel_index(part.data.flatten()[0], tensor.shape))
        shape = tuple(part.data.shape)
        box = numbers[tuple(slice(begin, begin + extent) for begin, extent in zip(within, shape, strict=True))]
        if not torch.equal(box, part.data):
            return None
        pieces.append(_piece(part, within, shape))
    return tuple(pieces)


def _piece(sharded: ShardedTensor, within: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
    return Piece(sharded.key, tuple(sharded.global_shape), tuple(sharded.global_offset), within, shape)


# --- optimizers ----------------------------------------------------------------------------------


class UnknownOptimizer(Exception):
    """The optimizer's state is not known to lie by parameter."""


def owners(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's parameter for each path of `optimizer.state_dict()` that belongs to one. Raises
    UnknownOptimizer."""
    if isinstance(optimizer, torch.optim.Optimizer):
        yield from _torch_owners(optimizer, {})
        return
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

    whole_groups = getattr(optimizer, "whole_groups", None)
    if whole_groups is not None:  # our own, whose captures are as the plain one's
        yield from _plain_owners(whole_groups)
    elif type(optimizer) is ChainedOptimizer:
        chained = optimizer.chained_optimizers
        for number, inner in enumerate(chained):
            ahead = "" if len(chained) == 1 else f"{number}."
            yield from ((f"{ahead}{path}", parameter) for path, parameter in owners(inner))
    elif type(optimizer) is FP32Optimizer:
        yield from _torch_owners(optimizer.optimizer, {})
    elif type(optimizer) is Float16OptimizerWithFloat16Params:
        models: dict[int, torch.Tensor] = {}
        groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
        for group, (parameters, masters) in enumerate(groups):
            for number, (parameter, master) in enumerate(zip(parameters, masters, strict=True)):
                models[id(master)] = parameter
                yield f"fp32_from_fp16_params.{group}.{number}", parameter
        yield from ((f"optimizer.{path}", parameter) for path, parameter in _torch_owners(optimizer.optimizer, models))
    else:
        raise UnknownOptimizer


def _plain_owners(groups: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the paths as Megatron's plain optimizer has them for these groups: with masters where some are of 16
    bits."""
    parameters = [parameter for group in groups for parameter in group]
    mixed = any(parameter.dtype != torch.float32 for parameter in parameters)
    for number, parameter in enumerate(parameters):
        yield f"{'optimizer.' if mixed else ''}state.{number}", parameter
    for number, group in enumerate(groups):
        masters = [parameter for parameter in group if parameter.dtype != torch.float32]
        yield from ((f"fp32_from_fp16_params.{number}.{place}", master) for place, master in enumerate(masters))


def _torch_owners(optimizer: Any, models: dict[int, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the paths as torch.optim numbers them: one after the other through the groups. `models`: of masters."""
    leaves = dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"])
    yield from ((f"state.{number}", models.get(id(leaf), leaf)) for number, leaf in enumerate(leaves))
