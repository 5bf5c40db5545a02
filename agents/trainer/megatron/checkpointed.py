"""Writes the sharded optimizer into Megatron-LM's own checkpoints and reads it: `--use-distributed-optimizer` with
`--save` and `--load`.

Rules
-----
* What Megatron writes and reads is the state of a `DistributedOptimizer` of one rank, made for each save and each load
  over the buffers of Megatron's DistributedDataParallel. So the format, whichever the flags or the checkpoint name, is
  Megatron's own, and on any number of ranks it reads what is written here.
* Its buffers are laid out as for its own DistributedOptimizer, since one of its formats is that layout. Nothing else of
  it is used: gradients are not scattered, parameters lie in the optimizer's spaces (`sharded/optimizer.py`).
* Where workers of a replica share sequences each has the whole state, as of one rank; to Megatron, which writes one of
  them, the others' are replicas of it.
* Its tensors are whole rows: those that the lifecycle has put together (`assembled`), or those that all others are
  given their parts of (`brought`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import ChainedOptimizer

from unicrond.agents.trainer.lifecycle.optimizer_shards import StatePart
from unicrond.agents.trainer.sharded.optimizer import MASTER, Holding, ModelChunk, Rows, ShardedOptimizer


class StateIncomplete(RuntimeError):
    """This process does not have the whole state; the text says what is missing, in one line."""


class Misplaced(RuntimeError):
    """Megatron would put the state of one parameter where another's belongs; the text says which, in one line."""


class CheckpointedOptimizer(ShardedOptimizer):
    """The sharded optimizer of `chunks`, which DistributedDataParallel has wrapped. `overrides`: as of the sharded
    optimizer; `saves`: after which iterations Megatron saves."""

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: Sequence[Any],
        overrides: Mapping[Any, Any] | None = None,
        saves: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__(config, chunks, overrides)
        self.saves = saves
        self._groups = _groups_of_one_rank()
        of_chunks = [(chunk.buffers, chunk.expert_parallel_buffers) for chunk in chunks]
        for buffer in chain(*chain(*of_chunks)):
            for holder in (buffer, *buffer.buckets):
                holder.param_data = None
        #: By chunk: of all parameters but those of experts that are spread over workers, and of these.
        self._buffers, self._expert_buffers = (
            {number: [self._of_one(buffer) for buffer in kinds[kind]] for number, kinds in enumerate(of_chunks)}
            for kind in (0, 1)
        )
        self._ddp_config = chunks[0].ddp_config
        self._parts: list[Any] = []

    @property
    def has_spread_experts(self) -> bool:
        """Return whether this process has some of the experts that are spread over workers."""
        return any(self._expert_buffers.values())

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool = False, **options: Any) -> Any:
        """Return what Megatron's own would return; to save, of what is assembled. Raises Misplaced."""
        self._require_places((options.get("metadata") or {}).get("distrib_optim_sharding_type", ""))
        rows, self.assembled = self.assembled, None
        if is_loading:
            rows = self._empty()
        assert rows is not None
        parts = self._of_one_rank(rows)
        self._parts = parts if is_loading else []
        whole = parts[0] if len(parts) == 1 else ChainedOptimizer(parts)
        tree = whole.sharded_state_dict(model_sharded_state_dict, is_loading, **options)
        _note_copy(tree if len(parts) == 1 else tree[0], parallel_state.get_data_parallel_rank(True))
        if len(parts) > 1:
            _note_copy(tree[1], parallel_state.get_expert_data_parallel_rank())
        return tree

    def _require_places(self, kind: str) -> None:
        """Refuse where Megatron mistakes places: it gathers whole buffers without the padding behind their buckets, and
        looks parameters up with it. Raises Misplaced."""
        padded = any(
            bucket.numel_unpadded != bucket.grad_data.numel()
            for buffer in chain(*self._buffers.values(), *self._expert_buffers.values())
            for bucket in buffer.buckets[:-1]
        )
        if kind == "fully_reshardable" and padded:
            raise Misplaced(
                "--dist-ckpt-optim-fully-reshardable: Megatron mistakes parameters' places in this model's buffers"
                " (several buckets, with padding); leave it out"
            )

    def load_state_dict(self, state_dict: Mapping[Any, Any]) -> None:
        """Load Megatron's state (by number, where it has an optimizer for experts), or that of any sharded optimizer.
        Raises BadState."""
        states = [state for _, state in sorted(state_dict.items())] if 0 in state_dict else [state_dict]
        if "param_state" not in states[0]:
            super().load_state_dict(state_dict)
            return
        rows, loaded_groups = self._empty(), []
        parts, self._parts = self._parts, []
        for part, state in zip(parts, states, strict=True):
            part._set_main_param_and_optimizer_states = partial(self._copy_parameter, rows)
            part.load_state_dict(state)
            loaded_groups += part.optimizer.param_groups
        options_in_order = sorted(self._options, key=lambda options: bool(options["is_expert_parallel"]))
        for options, loaded_group in zip(options_in_order, loaded_groups, strict=True):
            options.update({name: value for name, value in loaded_group.items() if name not in ("params", "step")})
        groups = [group for state in states for group in state["optimizer"]["param_groups"]]
        self.steps = max((int(group["step"]) for group in groups if group.get("step") is not None), default=0)
        self._stage_loaded(rows)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _copy_parameter(self, rows: Rows, parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what is read of one parameter. (In place of Megatron's, which with torch's Adam mistakes its step
        counts.)"""
        number = self._space_of(parameter)
        start, stop = self.spaces[number].places[parameter]
        for name in self.spaces[number].fields:
            rows[number, name][start:stop].copy_(tensors["param" if name == MASTER else name].flatten())
        if MASTER not in self.spaces[number].fields:
            parameter.copy_(tensors["param"].view(parameter.shape))

    def adopt_loaded_parameters(self) -> None:
        """Go on from the parameters that the program has loaded, without moments where it has none."""
        if self.loaded_rows is None:
            self._stage_loaded(self.initial(StatePart(1, 0)).rows)

    def _empty(self) -> Rows:
        return {row: torch.zeros(self.spaces[row[0]].extent) for row in self.rows}

    def _stage_loaded(self, rows: Rows) -> None:
        self.loaded_rows = rows
        self.stage([Holding(StatePart(1, 0), rows)])

    def save_parameter_state(self, *_: Any, **__: Any) -> None:
        """Refuse another format than torch_dist. Raises StateIncomplete."""
        raise StateIncomplete("--ckpt-format: with --use-distributed-optimizer torch_dist only")

    load_parameter_state = save_parameter_state

    # --- Megatron's optimizer of one rank ---------------------------------------------------------

    def _of_one(self, buffer: Any) -> Any:
        """Return the buffer as that of a group of one rank; its buckets are the same."""
        alone = copy(buffer)
        alone.data_parallel_group, alone.data_parallel_world_size, alone.num_optimizer_shards = self._groups[0], 1, 1
        return alone

    def _of_one_rank(self, rows: Rows) -> list[Any]:
        """Return optimizers that hold `rows`, aliased, but for masters of float32 parameters, which are the parameters.
        As Megatron's: one for experts that are spread over workers, behind that of all others."""
        kinds = [(self._buffers, parallel_state.get_model_parallel_group())]
        if self.has_spread_experts:
            kinds.append((self._expert_buffers, parallel_state.get_expert_tensor_model_pipeline_parallel_group()))
        parts = [
            self._distributed(
                [ModelChunk(self._ddp_config)] * len(buffers),
                buffers,
                of_experts=buffers is self._expert_buffers,
                data_parallel_group=self._groups[0],
                data_parallel_group_gloo=self._groups[1],
                data_parallel_group_idx=torch.distributed.get_rank(group),
            )
            for buffers, group in kinds
        ]
        for parameter, shard in chain(*map(_pairs, parts)):
            number = self._space_of(parameter)
            start, stop = self.spaces[number].places[parameter]
            views = {name: rows[number, name][start:stop] for name in self.spaces[number].fields}
            if MASTER in views:
                shard.data = views.pop(MASTER)
            part = parts[-1] if parameter in self._of_experts else parts[0]
            part.optimizer.state[shard] = {"step": torch.tensor(float(self.steps)), **views}
        return parts


def _note_copy(tree: Any, number: int) -> None:
    """Have what Megatron is to write be a replica of that number of it."""
    for entry in nested_values(tree) if number else ():
        if isinstance(entry, ShardedBase):
            place = entry.replica_id
            entry.replica_id = (*place[:-1], number) if isinstance(place, tuple) else number


def _groups_of_one_rank() -> tuple[Any, Any]:
    """Return groups of this process alone, of the world's backend and of gloo, to stand in the place of data-parallel
    ones; all processes of the replica call this."""
    gloo = torch.distributed.new_subgroups(1, backend="gloo")[0]  # Megatron has none with --disable-gloo-process-groups
    if parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1:
        return parallel_state.get_data_parallel_group(with_context_parallel=True), gloo
    return torch.distributed.new_subgroups(1)[0], gloo


def _pairs(whole: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each parameter, and what is stepped in its place."""
    models = chain(*whole.model_float16_groups, *whole.model_fp32_groups)
    shards = chain(*whole.shard_fp32_from_float16_groups, *whole.shard_fp32_groups)
    yield from zip(models, shards, strict=True)
