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
        self._buffers = {
            number: [self._of_one(buffer) for buffer in chunk.buffers] for number, chunk in enumerate(chunks)
        }
        self._ddp_config = chunks[0].ddp_config
        self._read: Any = None
        for buffer in chain(*self._buffers.values(), *(chunk.buffers for chunk in chunks)):
            for holder in (buffer, *buffer.buckets):
                holder.param_data = None

    def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool = False, **options: Any) -> Any:
        """Return what Megatron's own would return; to save, of what is assembled. Raises Misplaced."""
        self._require_places((options.get("metadata") or {}).get("distrib_optim_sharding_type", ""))
        rows, self.assembled = self.assembled, None
        if is_loading:
            rows = self._empty()
        assert rows is not None
        whole = self._of_one_rank(rows)
        self._read = whole if is_loading else None
        tree = whole.sharded_state_dict(model_sharded_state_dict, is_loading, **options)
        if (copy_number := parallel_state.get_data_parallel_rank(with_context_parallel=True)) > 0:
            for entry in nested_values(tree):
                if isinstance(entry, ShardedBase):
                    place = entry.replica_id
                    entry.replica_id = (*place[:-1], copy_number) if isinstance(place, tuple) else copy_number
        return tree

    def _require_places(self, kind: str) -> None:
        """Refuse where Megatron mistakes places: it gathers whole buffers without the padding behind their buckets, and
        looks parameters up with it. Raises Misplaced."""
        padded = any(
            bucket.numel_unpadded != bucket.grad_data.numel()
            for buffer in chain(*self._buffers.values())
            for bucket in buffer.buckets[:-1]
        )
        if kind == "fully_reshardable" and padded:
            raise Misplaced(
                "--dist-ckpt-optim-fully-reshardable: Megatron mistakes parameters' places in this model's buffers"
                " (several buckets, with padding); leave it out"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load Megatron's state, or that of any sharded optimizer. Raises BadState."""
        if "param_state" not in state_dict:
            super().load_state_dict(state_dict)
            return
        rows, groups = self._empty(), state_dict["optimizer"]["param_groups"]
        whole, self._read = self._read, None
        whole._set_main_param_and_optimizer_states = partial(self._copy_parameter, rows)
        whole.load_state_dict(state_dict)
        for options, loaded_group in zip(self._options, whole.optimizer.param_groups, strict=True):
            options.update({name: value for name, value in loaded_group.items() if name not in ("params", "step")})
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
        alone.data_parallel_group, alone.data_parallel_world_size = self._groups[0], 1
        return alone

    def _of_one_rank(self, rows: Rows) -> Any:
        """Return an optimizer that holds `rows`, aliased, but for masters of float32 parameters, which are the
        parameters."""
        whole = self._distributed(
            [ModelChunk(self._ddp_config)] * len(self._buffers),
            self._buffers,
            data_parallel_group=self._groups[0],
            data_parallel_group_gloo=self._groups[1],
            data_parallel_group_idx=torch.distributed.get_rank(parallel_state.get_model_parallel_group()),
        )
        for parameter, shard in _pairs(whole):
            number = self._space_of(parameter)
            start, stop = self.spaces[number].places[parameter]
            views = {name: rows[number, name][start:stop] for name in self.spaces[number].fields}
            if MASTER in views:
                shard.data = views.pop(MASTER)
            whole.optimizer.state[shard] = {"step": torch.tensor(float(self.steps)), **views}
        return whole


def _groups_of_one_rank() -> tuple[Any, Any]:
    """Return groups of this process alone, of the world's backend and of gloo, to stand in the place of data-parallel
    ones; all processes of the replica call this."""
    if parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1:
        groups = parallel_state.get_data_parallel_group, parallel_state.get_data_parallel_group_gloo
        return groups[0](with_context_parallel=True), groups[1](with_context_parallel=True)
    return torch.distributed.new_subgroups(1)[0], torch.distributed.new_subgroups(1, backend="gloo")[0]


def _pairs(whole: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each parameter, and what is stepped in its place."""
    models = chain(*whole.model_float16_groups, *whole.model_fp32_groups)
    shards = chain(*whole.shard_fp32_from_float16_groups, *whole.shard_fp32_groups)
    yield from zip(models, shards, strict=True)
