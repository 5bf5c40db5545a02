"""Sums gradients from the buffers of Megatron's DistributedDataParallel, where Megatron accumulates them.

Rules
-----
* A store is laid out as Megatron's buffers are, one after the other, padding included; the first store *is* their
  memory. So whatever writes to `param.main_grad` writes to a store: DDP's hooks, and GEMMs that accumulate weight
  gradients themselves (`--gradient-accumulation-fusion`).
* Gradients of another running sum go to another store: every parameter's `main_grad` then points there. A forward pass
  takes `main_grad` along for its backward, and no store is changed between the two.
* Beside the gradients a store has what else belongs to the micro-batches in its sum: the numbers that are logged
  (*slots*, and what Megatron has *tracked*), and the tokens that each expert got (*counters*: the routers count in the
  present store). They are summed over the replicas as gradients are, and never divided.
* DDP's own reduction, behind the sum over the replicas, is the sum inside of one: over those that share a sequence,
  or samples, and with experts over those that have the same. It is a plain sum, whatever DDP would scale by: what the
  gradients are divided by counts all of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from unicrond.agents.trainer.gradients.accumulation import Accumulation, GradientStore, StoreLayout
from unicrond.agents.trainer.lifecycle.lanes import Lanes

#: Numbers for the log: two for each name.
SLOTS = 64
_COUNTER = "local_tokens_per_expert"


class BufferStore(GradientStore):
    """A store in Megatron's gradient buffers. `beside`: the elements behind the gradients: `slots`, `tracked`, and a
    counter for each router."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], plan: StoreLayout, beside: Sequence[int]) -> None:
        super().__init__(parameters, plan)
        self.slots, self.tracked, *self.counters = self.flat[plan.spans[0][0] :].split(list(beside))


class BufferAccumulation(Accumulation):
    """The accumulation of the parameters in `chunks`, which DistributedDataParallel has wrapped. `tracked`: elements of
    Megatron's auxiliary losses (`logs.py`). `divided_by`: what each gradient has been divided by in its backward.
    `lanes`, `bucket_bytes`: as of an accumulation."""

    def __init__(
        self, chunks: Sequence[Any], tracked: int, divided_by: int, lanes: Lanes | None, bucket_bytes: int
    ) -> None:
        self.divided_by = divided_by
        self._buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._routers = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if getattr(module, _COUNTER, None) is not None  # it is None where experts have no bias
        ]
        self._hooked: list[Any] = []
        parameters = [parameter for buffer in self._buffers for parameter in reversed(buffer.params)]
        self._beside = [SLOTS, tracked, *(getattr(router, _COUNTER).numel() for router in self._routers)]
        plan = buffer_layout(self._buffers, bucket_bytes, sum(self._beside))
        super().__init__(parameters, lanes=lanes, plan=plan)

    def _new_store(self) -> BufferStore:
        return BufferStore(self._parameters, self._plan, self._beside)

    def _install_hooks(self) -> None:
        """Have Megatron's buffers lie in the first store, and learn of each gradient behind DDP's own hook, which adds
        it."""
        end = 0
        for buffer in self._buffers:
            flat = self._first.flat[end : end + buffer.numel]
            end += buffer.numel
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = 1.0
                bucket.grad_data = flat[bucket.offset : bucket.offset + bucket.grad_data.numel()]
            buffer.grad_data = flat
        for index, parameter in enumerate(self._parameters):
            parameter.main_grad = self._first.places[index]
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(partial(self._note_gradient, index))
            self._hooked.append(node)
        for router, counter in zip(self._routers, self._first_store.counters, strict=True):
            setattr(router, _COUNTER, counter)

    def _drop_grads(self) -> None:
        """Leave that to DDP's hooks and the optimizer's `zero_grad`."""

    @property
    def _first_store(self) -> BufferStore:
        assert isinstance(self._first, BufferStore)
        return self._first

    def _enter(self, store: GradientStore) -> None:
        if store is self._present:
            return
        assert isinstance(store, BufferStore)
        super()._enter(store)
        for parameter, place in zip(self._parameters, store.places, strict=True):
            parameter.main_grad = place
        for router, counter in zip(self._routers, store.counters, strict=True):
            setattr(router, _COUNTER, counter)

    @property
    def present(self) -> BufferStore:
        """Return the sum that is being made; after `settle`, that of all micro-batches."""
        assert isinstance(self._present, BufferStore)
        return self._present

    def settle(self, sums: Iterable[tuple[int, torch.Tensor]], tokens: float) -> None:
        """Make `sums` / `tokens` the gradients; what is counted stays a sum."""
        beside = self._plan.spans[0][0]
        for start, total in sums:
            place = self._first.flat[start : start + total.numel()]
            if start >= beside:
                place.copy_(total)
            else:
                torch.div(total, tokens / self.divided_by, out=place)
        self._enter(self._first)


def buffer_layout(buffers: Sequence[Any], bucket_bytes: int, beside: int) -> StoreLayout:
    """Return the layout of Megatron's buffers, which hold parameters in the order in which a backward finishes them,
    and of `beside` elements behind them, which are a bucket of their own, the last to be reduced."""
    starts: list[int] = []
    buckets: list[tuple[int, int]] = []
    bucket_of: list[int] = []
    end = 0
    for buffer in buffers:
        for start, stop in _places(buffer):
            if not bucket_of or start + end >= buckets[-1][0] + bucket_bytes // 4 or start == 0:
                buckets.append((end + start, end + stop))
            buckets[-1] = (buckets[-1][0], end + stop)
            bucket_of.append(len(buckets) - 1)
            starts.append(end + start)
        end += buffer.numel
    last = len(buckets)
    spans = [(end, end + beside), *reversed(buckets)]
    return StoreLayout(starts, spans, [last - bucket for bucket in bucket_of], end + beside)


def _places(buffer: Any) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the buffer's parameters, in the order of their places."""
    for parameter in reversed(buffer.params):
        start, stop, _ = buffer.param_index_map[parameter]
        yield start, stop
