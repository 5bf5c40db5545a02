"""Megatron's distributed optimizer over replicas that come and go: each replica steps the parts that it holds, and no
others.

    optimizer = ShardedOptimizer(OptimizerConfig(...), models)     # where get_megatron_optimizer(...) stood
    hook = Hook.attach(models, optimizer, scheduler)

Rules
-----
* Each part that is held here (`optimizer_shards.py`) is stepped by a `DistributedOptimizer` of Megatron's, which
  believes that it is rank `index` of `count`: which stretches of which parameters those are, fp32 masters, Adam,
  clipping, and what goes back into the parameters are its own. A chain of them is one optimizer to the training loop.
* What it would do with a process group is not its to do here, since such a group cannot be left and replaced in the
  middle of an iteration: gradients arrive summed and whole (`reduction.py`), and parameters travel after the step
  (`sharing.py`). Nor does it know when the number of replicas changes: then new ones are made.
* The norm that clips is that of the whole gradient, which every replica has, in the order in which the plain optimizer
  takes it: so the same bits come of any number of parts.
* Moments and masters are flat stretches of memory, one for each *row* (a space and a field), and Adam's tensors are
  views of them. They are put there directly: the library's own loading shares one step count tensor between
  parameters and sets it back, with torch's Adam.
* Parts that have arrived are *staged*; what was held before is dropped when all have said that they have theirs.
* Its `state_dict` is all that is the same for all replicas; `whole_tree` makes of all rows the state dict that the
  plain optimizer would have, and `load_state_dict` takes either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import (
    OptimizerConfig,
    _get_megatron_optimizer_based_on_param_groups,
    _get_param_groups,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from unicrond.agents.trainer.lifecycle.optimizer_shards import ALIGN, Span, StatePart
from unicrond.agents.trainer.states.resharding import BEGINS
from unicrond.agents.trainer.states.state import BadState

MASTER, _MOMENTS = "master", ("exp_avg", "exp_avg_sq")
#: A space's number and a field of Adam's state, or the fp32 master.
Row: TypeAlias = tuple[int, str]
Rows: TypeAlias = dict[Row, torch.Tensor]


class Space:
    """The parameters of one dtype in one stretch of memory, each at a multiple of ALIGN elements."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.places: dict[torch.nn.Parameter, Span] = {}
        end = 0
        for parameter in parameters:
            self.places[parameter] = end, end + parameter.numel()
            end = -(-(end + parameter.numel()) // ALIGN) * ALIGN
        self.extent = end
        self.data = torch.zeros(end, dtype=parameters[0].dtype, device=parameters[0].device)
        for parameter, (start, stop) in self.places.items():
            place = self.data[start:stop].view(parameter.shape)
            place.copy_(parameter.data)
            parameter.data = place

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the names of what is kept per element: the moments, and float32 masters where `data` is not
        float32."""
        return _MOMENTS if self.data.dtype == torch.float32 else (MASTER, *_MOMENTS)


@dataclass(slots=True)
class Holding:
    """A part of the optimizer's state that this replica holds. `rows`: each as long as the part's span of its space;
    `stepper`: None until it is to be stepped."""

    part: StatePart
    rows: Rows
    stepper: DistributedOptimizer | None = None


class ShardedOptimizer(ChainedOptimizer):  # type: ignore[misc]
    """Adam over `models`, stepping the parts that this replica holds. See the module's rules."""

    def __init__(
        self, config: OptimizerConfig, models: Sequence[torch.nn.Module], overrides: Mapping[Any, Any] | None = None
    ) -> None:
        """Move the models' parameters into spaces. `overrides`: of groups of parameters, as `get_megatron_optimizer`
        takes them. ValueError for what it cannot do (docs/use/task-files.md)."""
        if config.fp16 or config.loss_scale or config.optimizer != "adam":
            raise ValueError(
                "optimizer.distributed: Adam without loss scaling only; use fp32 or bf16, or the unsharded optimizer"
            )
        super().__init__([])
        self.config = replace(config, use_distributed_optimizer=True)
        self.is_stub_optimizer = False
        if overrides is None:  # no decay of biases and norms; core_v0.18 and newer read None as no overrides here
            overrides = get_standard_config_overrides(self.config)
        groups = _get_param_groups(list(models), self.config, overrides)
        #: Parameters of experts that are spread over workers, of which others have others.
        self._of_experts = {
            parameter for group in groups if group["is_expert_parallel"] for parameter in group["params"]
        }
        #: The models' parameters by optimizer group, in the order in which the plain optimizer numbers them.
        self.whole_groups: list[list[torch.nn.Parameter]] = [group["params"] for group in groups]
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in chain(*self.whole_groups):
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self.spaces = [Space(parameters) for parameters in by_dtype.values()]
        self.steps = 0
        self._options = [{**group, "params": []} for group in groups]
        self._holdings: list[Holding] = []
        self._staged: list[Holding] = []
        #: All rows, as the program has loaded them itself, until the first step.
        self.loaded_rows: Rows | None = None
        #: After which iterations the program writes a checkpoint of its own; None: it never does. It finds the whole
        #: state in `assembled` then, at the leader's replica.
        self.saves: Callable[[int], bool] | None = None
        self.assembled: Rows | None = None
        probe = self._stepper(StatePart(1, 0), {})
        self._options = [{**group, "params": []} for group in probe.optimizer.param_groups]

    # --- what Megatron's training loop asks for ---------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of all steppers; and those that the next ones are made after, so that a scheduler sets them
        too."""
        return [*self._options, *super().param_groups]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def get_grad_norm(self) -> float:
        """Return the norm of the whole gradient, over the replica's shards."""
        norms = [get_grad_norm_fp32(grads, grad_stats_parallel_group=group) for grads, group in self._by_group()]
        return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def count_zeros(self) -> float:
        """Return how many elements of the whole gradient are zero, over the replica's shards."""
        count = 0.0
        for grads, group in self._by_group():
            zeros = sum(gradient.numel() - int(torch.count_nonzero(gradient)) for gradient in grads)
            total = torch.tensor([float(zeros)], device=self.spaces[0].data.device)
            torch.distributed.all_reduce(total, group=group)
            count += float(total)
        return count

    def _by_group(self) -> Iterator[tuple[list[torch.Tensor], Any]]:
        """Yield the whole gradients, those that several shards have once, and the group of those that have the others;
        then the same of experts that are spread over workers, where the model has any."""
        kinds = [(False, parallel_state.get_model_parallel_group)]
        if self.has_spread_experts:
            kinds.append((True, parallel_state.get_expert_tensor_model_pipeline_parallel_group))
        for of_experts, group in kinds:
            parameters = [
                parameter
                for parameter in chain(*self.whole_groups)
                if (parameter in self._of_experts) == of_experts
                and param_is_not_shared(parameter)
                and param_is_not_tensor_parallel_duplicate(parameter)
            ]
            yield [parameter.main_grad.float() for parameter in parameters], group()

    @property
    def has_spread_experts(self) -> bool:
        """Return whether the model has experts that are spread over workers, also where this shard has none."""
        return bool(parallel_state.get_expert_model_parallel_world_size() > 1)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> Any:
        """Step all parts that are held here. The parameters are whole again when the hook has them gathered."""
        if not self._holdings or self._staged:
            raise RuntimeError("the program stepped a sharded optimizer outside of hook.steps()")
        outcome = super().step()
        self.steps += 1
        self.loaded_rows = None
        return outcome

    def reload_model_params(self, state_dict: object = None) -> None:
        """Skip this: masters are part of the state."""

    def state_dict(self) -> dict[str, Any]:
        """Return what all replicas share: the step count and the options of each group, without its tensors."""
        return {"steps": self.steps, "groups": [_plain(group) for group in self._options]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over `state_dict`'s, or a plain optimizer's whole one: then this replica holds everything, staged.

        Raises BadState where it is not of these parameters; then nothing has changed.
        """
        staged: list[Holding] = []
        if "state" in state_dict.get("optimizer", state_dict):
            rows, steps, groups = self._whole_rows(state_dict)
            staged = [Holding(StatePart(1, 0), rows)]
        else:
            steps, groups = int(state_dict["steps"]), state_dict["groups"]
            staged = [self.initial(StatePart(1, 0))] if BEGINS in state_dict else []
        if len(groups) != len(self._options):
            raise BadState(f"optimizer: the state has {len(groups)} groups of parameters, not {len(self._options)}")
        self.loaded_rows = None
        self.drop_parts()
        self._staged, self.steps = staged, steps
        for options, loaded_group in zip(self._options, groups, strict=True):
            options.update(_plain(loaded_group))

    # --- parts ------------------------------------------------------------------------------------

    @property
    def extents(self) -> list[int]:
        """Return the elements of each space."""
        return [space.extent for space in self.spaces]

    @property
    def rows(self) -> list[Row]:
        """Return every (number of a space, name of a field), in order."""
        return [(number, name) for number, space in enumerate(self.spaces) for name in space.fields]

    def spans(self) -> list[Span]:
        """Return the spans of all that is held here, staged or not."""
        spans = [span for holding in (*self._holdings, *self._staged) for span in holding.part.spans(self.extents)]
        return sorted({span for span in spans if span[0] < span[1]})

    def drop_parts(self) -> None:
        """Drop all parts but what the program has loaded, before the first step."""
        self._holdings, self._staged = (
            [],
            [] if self.loaded_rows is None else [Holding(StatePart(1, 0), self.loaded_rows)],
        )
        self.chained_optimizers: list[DistributedOptimizer] = []

    def read(self, row: Row, start: int, stop: int) -> torch.Tensor:
        """Return a stretch of a row that one part held here has all of, counted within its space; not a copy. Raises
        KeyError."""
        for holding in (*self._holdings, *self._staged):
            first, last = holding.part.within(self.spaces[row[0]].extent)
            if first <= start and stop <= last:
                return holding.rows[row][start - first : stop - first]
        raise KeyError(f"elements {start} to {stop} of {row} are not on this replica")

    def bytes_at(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of the parameters in a span of one space, counted through all spaces; not a copy. Raises
        IndexError."""
        for space in self.spaces:
            if start < space.extent:
                return space.data[start:stop].view(torch.uint8)
            start, stop = start - space.extent, stop - space.extent
        raise IndexError(f"elements {start} to {stop} lie behind the last space")

    def initial(self, part: StatePart) -> Holding:
        """Return the part as training begins: no moments, masters as the parameters are."""
        rows: Rows = {}
        for row in self.rows:
            space, name = self.spaces[row[0]], row[1]
            start, stop = part.within(space.extent)
            master = space.data[start:stop].float()
            rows[row] = master if name == MASTER else torch.zeros_like(master)
        return Holding(part, rows)

    def stage(self, arrived: Sequence[Holding]) -> None:
        """Hold these beside all others."""
        self._staged = list(arrived)

    def adopt(self) -> None:
        """Step what is staged from now on, and drop all others."""
        self._holdings, self._staged = self._staged, []
        for holding in self._holdings:
            holding.stepper = self._stepper(holding.part, holding.rows)
        self.chained_optimizers = [holding.stepper for holding in self._holdings]

    def _stepper(self, part: StatePart, rows: Rows) -> DistributedOptimizer:
        """Return Megatron's optimizer of the part, which goes on from `rows` (where there are any)."""
        rank = _Rank(part)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,  # the step itself gathers nothing
        )
        buffers = {0: [_Buffer(space, rank, ddp_config) for space in self.spaces]}
        stepper = self._distributed([ModelChunk(ddp_config)], buffers, data_parallel_group=rank)
        if rows:
            with torch.no_grad():
                self._attach_rows(stepper, rows)
        return stepper

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _distributed(
        self,
        chunks: Sequence[Any],
        buffers: Mapping[int, Sequence[Any]],
        of_experts: bool | None = None,
        **groups: Any,
    ) -> Any:
        """Return Megatron's optimizer of these buffers. (Shards of fp32 parameters are views of them, and must be
        leaves.) It makes its masters known at the parameters, for their norm: they would be a part of them.
        `of_experts`: of these alone, or of all others alone; None: of all."""
        param_groups = [
            {**options, "params": list(parameters)}
            for options, parameters in zip(self._options, self.whole_groups, strict=True)
            if of_experts in (None, bool(options["is_expert_parallel"]))
        ]
        optimizer = _get_megatron_optimizer_based_on_param_groups(
            self.config,
            chunks,
            param_groups,
            buffers,
            intra_dist_opt_group=parallel_state.get_model_parallel_group(),
            **groups,
        )
        for parameter in chain(*self.whole_groups):
            for name in [name for name in vars(parameter) if name.startswith("main_param")]:
                delattr(parameter, name)
        return optimizer

    def _attach_rows(self, stepper: DistributedOptimizer, rows: Rows) -> None:
        models = [*stepper.model_float16_groups, *stepper.model_fp32_groups]
        shards = [*stepper.shard_fp32_from_float16_groups, *stepper.shard_fp32_groups]
        for model_group, shard_group in zip(models, shards, strict=True):
            for parameter, shard in zip(model_group, shard_group, strict=True):
                number = self._space_of(parameter)
                place = stepper._get_model_param_range_map(parameter)["gbuf_local"]
                views = {name: rows[number, name][place.start : place.end] for name in self.spaces[number].fields}
                if MASTER in views:
                    shard.data = views.pop(MASTER)
                stepper.optimizer.state[shard] = {"step": torch.tensor(float(self.steps)), **views}

    def _space_of(self, parameter: torch.nn.Parameter) -> int:
        return next(number for number, space in enumerate(self.spaces) if parameter in space.places)

    # --- the whole state --------------------------------------------------------------------------

    def whole_tree(self, rows: Rows) -> dict[str, Any]:
        """Return the plain optimizer's state dict; `rows` are whole, and aliased."""
        state: dict[int, dict[str, torch.Tensor]] = {}
        masters: list[list[torch.Tensor]] = []
        groups: list[dict[str, Any]] = []
        for options, parameters in zip(self._options, self.whole_groups, strict=True):
            groups.append({**_plain(options), "params": list(range(len(state), len(state) + len(parameters)))})
            masters.append([])
            for parameter in parameters:
                number = self._space_of(parameter)
                start, stop = self.spaces[number].places[parameter]
                views = {
                    name: rows[number, name][start:stop].view(parameter.shape) for name in self.spaces[number].fields
                }
                if MASTER in views:
                    masters[-1].append(views.pop(MASTER))
                state[len(state)] = {"step": torch.tensor(float(self.steps)), **views}
        inner = {"state": state, "param_groups": groups}
        return {"optimizer": inner, "fp32_from_fp16_params": masters} if self.config.bf16 else inner

    def _whole_rows(self, tree: Mapping[str, Any]) -> tuple[Rows, int, list[dict[str, Any]]]:
        """Return the rows of such a state dict, on the CPU, the steps made, and the groups' options. Raises
        BadState."""
        inner: Mapping[str, Any] = tree.get("optimizer", tree)
        rows = {row: torch.zeros(self.spaces[row[0]].extent) for row in self.rows}
        expected = self.whole_tree(rows)
        loaded_tensors = dict(_tensors(inner["state"], tree.get("fp32_from_fp16_params", [])))
        expected_tensors = dict(
            _tensors(expected.get("optimizer", expected)["state"], expected.get("fp32_from_fp16_params", []))
        )
        if {name: tensor.shape for name, tensor in expected_tensors.items()} != {
            name: tensor.shape for name, tensor in loaded_tensors.items()
        }:
            raise BadState("optimizer: the state has other tensors than this model's optimizer")
        for name, tensor in expected_tensors.items():
            tensor.copy_(loaded_tensors[name])
        steps = {int(entry["step"]) for entry in inner["state"].values()}
        if len(steps) != 1:
            raise BadState(f"optimizer: parameters are at different numbers of steps: {sorted(steps)}")
        return rows, steps.pop(), list(inner["param_groups"])


def _tensors(state: Mapping[int, Mapping[str, torch.Tensor]], masters: Sequence[Sequence[torch.Tensor]]) -> Any:
    for number, entry in state.items():
        for name in _MOMENTS:
            yield (number, name), entry[name]
    for number, group in enumerate(masters):
        for place, tensor in enumerate(group):
            yield (MASTER, number, place), tensor


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


# --- what a DistributedOptimizer asks of Megatron's gradient buffers -----------------------------------


@dataclass(frozen=True, slots=True)
class _Rank:
    """Stands in for a data-parallel process group: rank `rank` of how many."""

    part: StatePart

    def rank(self) -> int:
        """Return which part it is."""
        return self.part.index

    def size(self) -> int:
        """Return how many parts there are."""
        return self.part.count


@dataclass(frozen=True)
class ModelChunk:
    """Stands in for a model chunk that DistributedDataParallel has wrapped."""

    ddp_config: DistributedDataParallelConfig


class _Bucket:
    """The only bucket of its buffer: one whole space."""

    def __init__(self, space: Space, part: StatePart) -> None:
        self.offset = 0
        self.params_list = list(space.places)
        self.param_data = space.data
        self.numel_unpadded = space.extent
        self.grad_data = torch.empty(part.count * part.size(space.extent), device="meta")


@dataclass
class _Buffer:
    """Stands in for Megatron's parameter and gradient buffer."""

    space: Space
    data_parallel_group: _Rank
    ddp_config: DistributedDataParallelConfig
    grad_dtype: torch.dtype = torch.float32
    buckets: list[_Bucket] = field(init=False)

    def __post_init__(self) -> None:
        self.buckets = [_Bucket(self.space, self.data_parallel_group.part)]
        self.params = list(self.space.places)
        self.param_dtype = self.space.data.dtype
        self.data_parallel_world_size = self.num_optimizer_shards = self.data_parallel_group.size()
        self.param_index_map = {parameter: (start, stop, 0) for parameter, (start, stop) in self.space.places.items()}

    def get_unpacked_index_map(self) -> dict[torch.nn.Parameter, tuple[int, int, int]]:
        """Return the places again: core_v0.17 asks for those of fp4 parameters."""
        return self.param_index_map
