"""Computes an iteration's micro-batches with Megatron's schedule, list by list; losses and gradients are summed, not
averaged.

Rules
-----
* Megatron's schedules divide each loss by the number of micro-batches in the call, and without
  `--calculate-per-token-loss` by its tokens. Here each gradient enters the backward with the weight that it has in the
  whole iteration's sum: what the schedule does to the loss behind that is without effect, so a gradient's bits do not
  depend on how many micro-batches a call has. The sum over all replicas is divided once, by what is counted: tokens, or
  micro-batches without per-token loss.
* Under fp16's loss scale a gradient is divided by the iteration's micro-batches in its backward, as Megatron has it on
  one data-parallel rank: else it would overflow at another scale, and other iterations would be skipped.
* What is logged (the dictionaries that loss functions return) is added up beside the gradients (`buffers.py`).
* An interleaved pipeline takes whole groups of pp micro-batches at least: a shorter list is filled up with its last
  micro-batch, without weight (`padding.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unicrond.agents.trainer.lifecycle.ledger import to_fixed_point
from unicrond.agents.trainer.loop.hook import Hook, Step
from unicrond.agents.trainer.megatron.buffers import SLOTS, BufferAccumulation
from unicrond.agents.trainer.megatron.data import MicroBatchLoader
from unicrond.agents.trainer.megatron.logs import Trackers
from unicrond.agents.trainer.megatron.padding import Padding, auxiliary_scales


class TooManyNames(RuntimeError):
    """The script's loss function reports more than there is room for."""


class ScheduleRuns:
    """Runs an iteration's micro-batches. `config`: the model's. `trackers`: of its auxiliary losses. `data`: the
    loaders of this process. `mpu`: Megatron's. `chunks`: of the model. `is_sharded`: the optimizer's state is."""

    def __init__(
        self,
        hook: Hook,
        config: Any,
        trackers: Trackers,
        data: Sequence[MicroBatchLoader],
        mpu: Any,
        chunks: int,
        *,
        is_sharded: bool,
    ) -> None:
        assert isinstance(hook.sums, BufferAccumulation)
        self._sums = hook.sums
        self._config = config
        self._trackers = trackers
        self._data = data
        self._stages: int = mpu.get_pipeline_model_parallel_world_size()
        self._context_parallel: int = mpu.get_context_parallel_world_size()
        #: Beside Megatron's own: sums are whole on all ranks, also where Megatron would scatter them.
        of_dense = mpu.get_data_parallel_world_size(with_context_parallel=True)
        scatters = is_sharded and max(of_dense, mpu.get_expert_data_parallel_world_size()) > 1
        self._finalizing = {"force_all_reduce": True} if scatters else {}
        self._in_last_stage: bool = mpu.is_pipeline_last_stage(ignore_virtual=True)
        self._interleaved = chunks > 1
        self._padding = Padding(self._counts, auxiliary_scales(config))
        #: What is logged, in the order of its slots.
        self._names: list[str] = []

    def compute(self, step: Step, schedule: Callable[..., Any], options: dict[str, Any]) -> list[dict[str, Any]]:
        """Compute all that this replica is assigned, until all have agreed on the sums. Return what Megatron is to log:
        of the whole iteration, in the last stage."""
        config = self._config
        scale, finalize, group = config.grad_scale_func, config.finalize_model_grads_func, _group_size(config)
        try:
            config.finalize_model_grads_func = None
            for micro_batches in step.lists(at_most=1 if self._stages == 1 else None):
                self._compute_list(step, schedule, micro_batches, options)
        finally:
            config.grad_scale_func, config.finalize_model_grads_func = scale, finalize
            if self._interleaved:
                config.microbatch_group_size_per_vp_stage = group
        if not step.agreed:
            raise RuntimeError("the iteration was left before all had agreed on its sums")
        self._trackers.put_back(self._sums.present.tracked)
        finalize(options["model"], None, **self._finalizing)
        return self._report(step) if self._in_last_stage else []

    def evaluate(
        self,
        schedule: Callable[..., Any],
        micro_batches: list[int],
        options: dict[str, Any],
        request: Callable[[list[int]], None],
    ) -> Sequence[dict[str, Any]]:
        """Run the schedule's forward passes for these micro-batches, for which `request` asks the loaders. Return what
        each of them reports, in the last stage."""
        group = _group_size(self._config)
        try:
            padded = self._pad(micro_batches)
            request(padded)
            reports: Sequence[dict[str, Any]] = schedule(**{**options, "num_microbatches": len(padded)})
        finally:
            if self._interleaved:
                self._config.microbatch_group_size_per_vp_stage = group
        return reports[: len(micro_batches)]

    def _compute_list(
        self, step: Step, schedule: Callable[..., Any], micro_batches: list[int], options: dict[str, Any]
    ) -> None:
        config, whole = self._config, len(micro_batches)
        padded = self._pad(micro_batches)
        for data in self._data:
            data.request(step.iteration, padded, step.upcoming(whole), step.loading)
        scale = config.grad_scale_func
        divisor = self._sums.divided_by
        weigh = _Weighing(
            lambda loss: scale(loss) / divisor,
            per_token=config.calculate_per_token_loss,
            of_means=self._context_parallel,
        )
        forward_step = options["forward_step_func"]
        counts: Counter[int] = Counter()

        def seeded(data_iterator: Any, model: Any, *rest: Any, **keywords: Any) -> Any:
            """Seed the micro-batch and run the script's forward step."""
            place = counts[id(model)]  # of chunks of a model, each takes the micro-batches in their order
            counts[id(model)] += 1
            step.seed(padded[place])
            if place < whole:
                output, loss = forward_step(data_iterator, model, *rest, **keywords)
            else:
                with self._padding.forward():
                    output, loss = forward_step(data_iterator, model, *rest, **keywords)
                self._padding.prepare_backward(output)
            return output, weigh.wrap(loss, counts=place < whole)

        if not config.calculate_per_token_loss:  # auxiliary losses are scaled by it, and divided by the call's length
            config.grad_scale_func = lambda loss: scale(loss) * len(padded) / divisor
        try:
            reports = schedule(**{**options, "forward_step_func": seeded, "num_microbatches": len(padded)})
        finally:
            config.grad_scale_func = scale
        self._note(reports[:whole])
        self._trackers.take(self._sums.present.tracked)
        step.add(*weigh.total())

    def _counts(self) -> list[torch.Tensor]:
        """Return the tensors in which forward passes count."""
        return [*self._trackers.values(), *self._sums.present.counters]

    def _pad(self, micro_batches: list[int]) -> list[int]:
        if not self._interleaved:
            return micro_batches
        padded = micro_batches + micro_batches[-1:] * max(0, self._stages - len(micro_batches))
        self._config.microbatch_group_size_per_vp_stage = _fitting(_group_size(self._config), len(padded), self._stages)
        return padded

    def _note(self, reports: Sequence[dict[str, Any]]) -> None:
        slots = self._sums.present.slots
        for report in reports:
            for name, value in report.items():
                if name not in self._names:
                    if 2 * len(self._names) == SLOTS:
                        raise TooManyNames(f"the loss function reports more than {SLOTS // 2} values; report fewer")
                    self._names.append(name)
                place = 2 * self._names.index(name)
                flat = torch.as_tensor(value).detach().view(-1).float()
                pair = flat if flat.numel() == 2 else torch.stack([flat.sum(), flat.new_tensor(float(flat.numel()))])
                slots[place : place + 2].add_(pair.to(slots.device))

    def _report(self, step: Step) -> list[dict[str, Any]]:
        """Return each value as a sum and its count, as Megatron wants them of one micro-batch."""
        slots = self._sums.present.slots
        if not self._names:  # this replica has computed nothing yet
            return [{"lm loss": slots.new_tensor([step.loss, 1.0])}]
        return [{name: slots[2 * place : 2 * place + 2].clone() for place, name in enumerate(self._names)}]


class _Weighing:
    """The weights of the micro-batches in one call of the schedule. `scale`: by the loss scale. `of_means`: by what
    Megatron multiplies a loss without a count: its program has divided it by that of all who share the sequence."""

    def __init__(self, scale: Callable[[torch.Tensor], torch.Tensor], *, per_token: bool, of_means: int = 1) -> None:
        self._scale = scale
        self._of_means = of_means
        self._per_token = per_token
        self._losses: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []

    def wrap(self, loss_func: Any, *, counts: bool) -> Any:
        """Return the script's loss function, with a weight for its gradient. `counts`: the micro-batch is no
        padding."""
        if loss_func is None:
            return None

        def weighed(output: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
            """Return the loss with its weight, and note what is counted."""
            outputs = loss_func(output, *rest, **keywords)
            if keywords.get("non_loss_data"):
                return outputs
            loss, *extras = outputs
            tokens = extras[0] if len(extras) == 2 else None
            whole = loss.new_ones(()) if tokens is None else torch.as_tensor(tokens).to(loss).clamp(min=1)
            share = whole.new_ones(()) if self._per_token else 1.0 / whole
            if counts:
                self._losses.append((loss.detach() * share).sum().double())
                if self._per_token and tokens is not None:
                    self._tokens.append(torch.as_tensor(tokens).detach().double().reshape(()))
            weight = self._scale(share.reshape(1)).reshape(()) * float(counts)
            if tokens is None:
                weight = weight * self._of_means
            return _Weighted.apply(loss, weight), *extras

        return weighed

    def total(self) -> tuple[float, int]:
        """Return the sum of the losses, and what it is to be divided by; both 0 where there is no loss."""
        if not self._losses:
            return 0.0, 0
        count, values = len(self._losses), torch.stack([*self._losses, *self._tokens]).tolist()
        return sum(map(to_fixed_point, values[:count])), int(sum(values[count:])) if self._tokens else count


class _Weighted(torch.autograd.Function):  # type: ignore[misc]
    """A loss whose gradient is `weight`, whatever is done to it later."""

    @staticmethod
    def forward(context: Any, loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the loss as it is."""
        context.save_for_backward(weight)
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the weight as its gradient."""
        (weight,) = context.saved_tensors
        return weight.to(gradient.dtype).expand_as(gradient), None


def _group_size(config: Any) -> int:
    return int(getattr(config, "microbatch_group_size_per_vp_stage", None) or 1)


def _fitting(group: int, micro_batches: int, stages: int) -> int:
    """Return the group size that is nearest to `group` and leaves no remainder below `stages`. `micro_batches` is at
    least `stages`, so all of them in one group always do."""
    fits = [
        size for size in range(stages, micro_batches + 1) if micro_batches % size == 0 or micro_batches % size >= stages
    ]
    return min(fits, key=lambda size: (abs(size - group), size))
