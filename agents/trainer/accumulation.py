"""Gradients in flat fp32 buckets: accumulated over micro-batches, reduced on a copy.

Rules
-----
* Every parameter's `main_grad` is a view into a bucket; a hook adds each finished gradient to it (what Megatron's
  DistributedDataParallel does, without its collectives, its scaling and its groups).
* Reduction works on a copy. A collective that dies half-way leaves partial sums in the copy alone, and an abandoned
  one may go on writing there: a new attempt takes a new copy. The accumulation stays until the step is committed.
* `settle` writes sum / tokens back into the buckets: from then on `main_grad` (and `grad`, for plain torch
  optimizers) is the mean gradient of the whole global batch, until `clear`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

BUCKET_BYTES = 32 * 1024 * 1024


class Accumulation:
    """The buckets of the parameters that need gradients."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = [self._bucket(group) for group in _groups(self._parameters, bucket_bytes // 4)]
        for parameter in self._parameters:
            parameter.grad = None
            parameter.register_post_accumulate_grad_hook(_accumulate)

    @staticmethod
    def _bucket(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        count = sum(parameter.numel() for parameter in parameters)
        bucket = torch.zeros(count, dtype=torch.float32, device=parameters[0].device)
        offset = 0
        for parameter in parameters:
            parameter.main_grad = bucket[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
        return bucket

    def copy(self) -> list[torch.Tensor]:
        """The accumulated sums, copied, to be reduced."""
        return [bucket.clone() for bucket in self.buckets]

    def settle(self, sums: Sequence[torch.Tensor], tokens: float) -> None:
        """Make `sums` / `tokens` the gradients."""
        for bucket, total in zip(self.buckets, sums, strict=True):
            torch.div(total, tokens, out=bucket)
        for parameter in self._parameters:
            if parameter.dtype == torch.float32:
                parameter.grad = parameter.main_grad

    def clear(self) -> None:
        """Begin an iteration: nothing accumulated, no `grad` that aliases a bucket."""
        for bucket in self.buckets:
            bucket.zero_()
        for parameter in self._parameters:
            parameter.grad = None


def _accumulate(parameter: torch.nn.Parameter) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


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
