"""Gradients in flat buckets: accumulated over micro-batches, reduced on a copy.

Rules
-----
* A hook adds each finished gradient to its parameter's place in a bucket (what Megatron's DistributedDataParallel
  does, without its collectives, its scaling and its groups).
* Reduction works on a copy. A collective that dies half-way leaves partial sums in the copy alone, and an abandoned
  one may go on writing there: a new attempt takes a new copy. The accumulation stays until the iteration is agreed.
* `settle` makes sum / tokens the gradients: from then on every parameter's `main_grad` (and `grad`, for plain torch
  optimizers) is the mean gradient of the whole global batch, in fp32, until `clear`.
* What may be reduced during a backward is counted: `expect` says how many gradients each parameter will still get,
  and learns of each bucket whose parameters have had theirs. A gradient beyond that is a `surplus`.

Float mode sums in fp32, in the order of computation: the last bits depend on which replica computed what.

Exact mode sums integers, so that they do not. A gradient is taken in units of 2**-40, rounded to the nearest, as a
64-bit integer, and integers add up to the same in any order, in any grouping, on any number of replicas. The scale is
fixed: a scale taken from the data would depend on the deal. What that costs and what it holds:

* memory: 8 bytes an element for the sum and 8 for its copy, where float mode has 4 and 4;
* resolution: a gradient (of the sum of a micro-batch's token losses) of 7.7e-6 or more is held with all of fp32's 24
  bits; below that to +-4.5e-13;
* range: +-2**22 (4.2 million) for the sum over the global batch. `peak` bounds what any element can have come to, from
  the largest element of every gradient; it travels with the accounts, and beyond the range (or where a gradient was
  not finite) the iteration fails with one clear error, on all replicas, before anything is stepped (`ledger.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

BUCKET_BYTES = 32 * 1024 * 1024
UNITS = 2.0**40


class Accumulation:
    """The buckets of the parameters that need gradients. `bucket_bytes`: of fp32 gradients in one bucket, at most
    (a larger parameter has one of its own)."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, exact: bool = False, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._exact = exact
        self._buckets: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []
        self._bucket_of: list[int] = []
        self._members: list[int] = []
        for group in _groups(self._parameters, bucket_bytes // 4):
            self._add_bucket(group)
        self._peaks = [torch.zeros((), dtype=torch.float64, device=place.device) for place in self._places]
        self._awaited: list[int] | None = None
        self._unready: list[int] = []
        self._ready: Callable[[int], None] | None = None
        #: Called with each finished gradient: this is a backward.
        self.arriving: Callable[[], None] = _nothing
        #: Whether a parameter got more gradients than were expected.
        self.surplus = False
        for index, parameter in enumerate(self._parameters):
            parameter.grad = None
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))

    def __len__(self) -> int:
        """The number of buckets, in the parameters' order."""
        return len(self._buckets)

    def copy(self, bucket: int) -> torch.Tensor:
        """What is accumulated in the bucket, copied, to be reduced."""
        return self._buckets[bucket].clone()

    def expect(self, gradients: int, ready: Callable[[int], None] | None) -> None:
        """Each parameter is about to get that many gradients more: call `ready` with each bucket that has them all.
        None: nothing is expected."""
        self._ready = ready
        self._awaited = None if ready is None else [gradients] * len(self._parameters)
        self._unready = list(self._members)

    def peak(self) -> float:
        """Exact mode: no element has come to more than this; not finite if a gradient was not. Float mode: 0."""
        return max(map(float, self._peaks), default=0.0) if self._exact else 0.0

    def settle(self, sums: Sequence[torch.Tensor], tokens: float) -> None:
        """Make `sums` / `tokens` the gradients."""
        for bucket, total in zip(self._buckets, sums, strict=True):
            if self._exact:
                # What was accumulated has served: its memory takes the means.
                bucket.view(torch.float32)[: total.numel()].copy_(total.double().div_(UNITS * tokens))
            else:
                torch.div(total, tokens, out=bucket)
        for parameter in self._parameters:
            if parameter.dtype == torch.float32:
                parameter.grad = parameter.main_grad

    def clear(self) -> None:
        """Begin an iteration: nothing accumulated or expected, no `grad` that aliases a bucket."""
        self.expect(0, None)
        self.surplus = False
        for tensor in (*self._buckets, *self._peaks):
            tensor.zero_()
        for parameter in self._parameters:
            parameter.grad = None

    def _add_bucket(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        count = sum(parameter.numel() for parameter in parameters)
        dtype = torch.int64 if self._exact else torch.float32
        bucket = torch.zeros(count, dtype=dtype, device=parameters[0].device)
        means = bucket.view(torch.float32)
        offset = 0
        for parameter in parameters:
            place = slice(offset, offset + parameter.numel())
            parameter.main_grad = means[place].view(parameter.shape)
            self._places.append(bucket[place].view(parameter.shape))
            self._bucket_of.append(len(self._buckets))
            offset += parameter.numel()
        self._buckets.append(bucket)
        self._members.append(len(parameters))

    def _arrived(self, index: int, parameter: torch.nn.Parameter) -> None:
        """A gradient is finished, in the middle of a backward."""
        self.arriving()
        gradient, parameter.grad = parameter.grad, None
        if self._exact:
            self._add_exactly(index, gradient)
        else:
            self._places[index].add_(gradient)
        if self._awaited is None or self._ready is None:
            return
        self._awaited[index] -= 1
        self.surplus |= self._awaited[index] < 0
        if self._awaited[index] == 0:
            bucket = self._bucket_of[index]
            self._unready[bucket] -= 1
            if self._unready[bucket] == 0:
                self._ready(bucket)

    def _add_exactly(self, index: int, gradient: torch.Tensor) -> None:
        # fp32 times a power of two, rounded, is exact in fp32; what overflows there is infinite, and shows in the peak.
        units = gradient.float().mul(UNITS).round_()
        if units.numel():
            self._peaks[index].add_(units.abs().amax().double() / UNITS)
        self._places[index].add_(units.to(torch.int64))


def _nothing() -> None:
    pass


def _groups(parameters: Sequence[torch.nn.Parameter], numel_max: int) -> list[list[torch.nn.Parameter]]:
    """Consecutive parameters, at most `numel_max` elements together (a larger one stands alone)."""
    groups: list[list[torch.nn.Parameter]] = []
    count = 0
    for parameter in parameters:
        if not groups or count + parameter.numel() > numel_max:
            groups.append([])
            count = 0
        groups[-1].append(parameter)
        count += parameter.numel()
    return groups
