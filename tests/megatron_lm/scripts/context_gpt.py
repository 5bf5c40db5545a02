"""pretrain_gpt.py with a double of Transformer Engine's attention, which alone knows context parallelism:
Megatron-core's own, over keys and values that are gathered from all that share the sequence. For machines without a
GPU."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import megatron.training
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention


class Gathered(torch.autograd.Function):
    """All pieces of a sequence, in its order: rank r of n has pieces r and 2n - 1 - r. Tensors are [s, b, ...]."""

    @staticmethod
    def forward(context: Any, piece: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        pieces = [torch.empty_like(piece) for _ in range(group.size())]
        dist.all_gather(pieces, piece.contiguous(), group=group)
        halves = [half for held in pieces for half in held.chunk(2)]
        return torch.cat(halves[0::2] + halves[1::2][::-1])

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        rank, size = context.group.rank(), context.group.size()
        whole = gradient.contiguous()
        dist.all_reduce(whole, group=context.group)
        pieces = whole.chunk(2 * size)
        return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]]), None


def install() -> None:
    """Have Megatron-core's attention take its part of the queries, and all keys and values."""
    make, attend = DotProductAttention.__init__, DotProductAttention.forward

    def made(self: Any, config: Any, *rest: Any, **options: Any) -> None:
        size, config.context_parallel_size = config.context_parallel_size, 1  # it asserts that it is alone
        try:
            make(self, config, *rest, **options)
        finally:
            config.context_parallel_size = size

    def attended(self: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            key, value = Gathered.apply(key, group), Gathered.apply(value, group)
        return attend(self, query, key, value, *rest, **options)

    DotProductAttention.__init__, DotProductAttention.forward = made, attended


if __name__ == "__main__":
    install()
    runpy.run_path(str(Path(megatron.training.__file__).parents[2] / "pretrain_gpt.py"), run_name="__main__")
