"""Examines models that torch's `fully_shard` (FSDP2) has sharded over the workers of a replica.

Rules
-----
* Inside a replica FSDP2 does what it does alone: it gathers parameters, and sums gradients over the replica's workers,
  each of which computes a part of the replica's samples. Its sum over them is in the shard that the hook takes
  (`gradients/accumulation.py`); sums over replicas are unicrond's. It must not divide: the one division is the hook's.
* So the mesh is of one dimension, and has all workers of the replica; all that is trained is sharded, each backward is
  summed at once, and the optimizer's state of a parameter is spread as the parameter is.

What does not live here: what a shard is (`process/shards.py`), where it lies in the whole (`states/layout.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from unicrond.agents.trainer.process.shards import is_spread, modules_sharded


class ChangesSums(RuntimeError):
    """The program has told FSDP2 to sum a gradient otherwise than the hook takes it."""


def obstacle(
    models: Sequence[torch.nn.Module], parameters: Sequence[tuple[str, torch.nn.Parameter]], workers: int, sharers: int
) -> str:
    """Return what of the models could not be trained right, and the fix, in a sentence; "" where nothing is in the way.
    `workers`: of a replica; `sharers`: those that share its samples, 1 for none."""
    spread = [(name, parameter) for name, parameter in parameters if is_spread(parameter)]
    sharded = {id(parameter) for group in _groups(models) for parameter in _parameters_of(group)}
    for name, parameter in spread:
        if id(parameter) not in sharded:
            return (
                f"{name} is a DTensor of parallelize_module or distribute_tensor: those of fully_shard alone are taken;"
                " leave it out, or shard inside a replica with Megatron's tp and pp"
            )
        mesh = parameter.device_mesh
        if mesh.ndim != 1 or mesh.size() != workers:
            return (
                f"{name} is on a mesh of {' x '.join(map(str, mesh.shape))}, and a replica has {workers} workers in one"
                " dimension: unicrond sums over the replicas, which come and go; leave mesh= out of fully_shard, and"
                " give the task as many workers to a replica (ep)"
            )
    if spread and sharers != workers:
        return (
            f"{spread[0][0]} is sharded by fully_shard in a replica of tp, pp or cp: the three beside it are not taken;"
            f" leave them out, and give ep: {workers}"
        )
    if sharers > 1 and (rest := [name for name, parameter in parameters if _is_trained_whole(parameter)]):
        return (
            f"{rest[0]} is sharded by no fully_shard: its gradients would not be summed over the {sharers} workers of a"
            " replica; call fully_shard(model) on the whole model, without ignored_params, or leave ep out"
        )
    return next(_unfit(models), "") if spread else ""


def _is_trained_whole(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad and not is_spread(parameter)


def _unfit(models: Sequence[torch.nn.Module]) -> Iterator[str]:
    """Yield what of FSDP2's settings, or beside them, is not taken."""
    for group in _groups(models):
        if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
            yield "fully_shard(offload_policy=CPUOffloadPolicy()) is not taken yet: leave it out"
        if not group.reduce_grads:
            yield "fully_shard: set_requires_gradient_sync(False) was called; leave it out: each backward is summed"
        if getattr(group, "_all_reduce_hook", None) is not None:
            yield "fully_shard: set_all_reduce_hook was called; leave it out: unicrond sums over the replicas"
    for model in models:
        for name, module in model.named_modules():
            if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
                yield f"{name or 'the model'} is compiled (torch.compile), which is not taken beside fully_shard yet"


def take_over(models: Sequence[torch.nn.Module]) -> None:
    """Have FSDP2 give the sum over the replica's workers after each backward, from now on."""
    for model in models:
        for module in modules_sharded(model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor = _refusal("set_gradient_divide_factor", 1.0)
            module.set_requires_gradient_sync = _refusal("set_requires_gradient_sync", True)
            module.set_is_last_backward = _refusal("set_is_last_backward", True)


def _refusal(name: str, expected: Any) -> Callable[..., None]:
    def refuse(value: Any, **_: object) -> None:
        """Do nothing for the value that holds already. Raises ChangesSums for any other."""
        if value == expected:
            return
        raise ChangesSums(
            f"fully_shard: {name}({value}): each backward's gradients are summed over the replica, undivided, for they"
            " are added up and divided by the hook; leave it out"
        )

    return refuse


def uneven_state(optimizers: Sequence[Any]) -> str:
    """Return what of the optimizers' states is not spread as its parameter, in a sentence; "" where all is."""
    for optimizer in optimizers:
        for parameter, entry in getattr(optimizer, "state", {}).items():
            for name, value in entry.items() if is_spread(parameter) and isinstance(entry, dict) else ():
                if isinstance(value, torch.Tensor) and value.dim() and not _is_spread_as(value, parameter):
                    return (
                        f"the optimizer {type(optimizer).__name__} has a {name} of shape {tuple(value.shape)}, which is"
                        f" not sharded as its parameter of shape {tuple(parameter.shape)}: no newcomer could go on from"
                        " it; use one whose state has the parameter's shape, as AdamW or SGD"
                    )
    return ""


def _is_spread_as(value: Any, parameter: Any) -> bool:
    return is_spread(value) and value.shape == parameter.shape and value.placements == parameter.placements


def _groups(models: Sequence[torch.nn.Module]) -> list[Any]:
    """Return FSDP2's groups of parameters, each once. (Until torch 2.12 a module has one at most.)"""
    states = [module._get_fsdp_state() for model in models for module in modules_sharded(model)]
    groups = [
        group
        for state in states
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    ]
    return list(dict.fromkeys(group for group in groups if group is not None))


def _parameters_of(group: Any) -> list[torch.nn.Parameter]:
    places = [parameter._module_info for parameter in group.fsdp_params]
    return [getattr(place.module, place.param_name) for place in places]
