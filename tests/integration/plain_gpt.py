"""Plain Megatron-core training of the same GPT on the same micro-batches: no hook, no unicrond, the standard to meet.

Megatron's own DistributedDataParallel, gradient finalisation, optimizer and scheduler, data parallel over the ranks
that the rig starts as one replica (`tp` of the task says how many). Rank r takes micro-batches r, r + size, ..., as
a failure-free deal does where the sum follows it; with `--lanes` a stretch of them, as where the sum is fixed.
Arguments: the directory of the traces (see `traced_gpt.py`), then `--no-overlap` (gradients are reduced after the last
backward), `--bucket NUMEL` (elements in a bucket), `--recompute`, `--bf16`.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from msgspec.structs import replace

from tests.integration.traced_gpt import build, digest, varied
from unicrond.agents.protocol.sampling import Sampling, work_seed
from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.loop.corpus import Corpus
from unicrond.agents.trainer.process import context, cpu_shim
from unicrond.agents.trainer.process.randomness import seed_all


@dataclass
class PlainStep:
    """What the forward step asks of an iteration."""

    task_seed: int
    sampling: Sampling
    iteration: int

    def seed(self, micro_batch: int) -> None:
        seed_all(work_seed(self.task_seed, self.iteration, micro_batch))

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def samples(self, micro_batch: int) -> tuple[int, ...]:
        return self.sampling.samples(self.iteration, micro_batch)


def main() -> None:
    launch = context.current().launch
    spec = varied(replace(launch.spec, tp=1))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    param_and_grad_buffer.torch = cpu_shim._CpuTorch(torch)
    text = Corpus(Path(spec.data), spec.model.seq)
    seed_all(spec.seed)
    inner: Any = build(spec)
    bucket = int(sys.argv[sys.argv.index("--bucket") + 1]) if "--bucket" in sys.argv else None
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce="--no-overlap" not in sys.argv, bucket_size=bucket, grad_reduce_in_fp32=True
    )
    model: Any = DistributedDataParallel(inner.config, ddp_config, inner, disable_bucketing=False)
    optimizer, scheduler = pretrain_gpt.build_optimizer(spec, model)
    inner.config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        inner.config.no_sync_func = model.no_sync
    sampling = Sampling(spec.seed, spec.global_batch, spec.micro_batch, len(text))
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = list(range(rank, spec.micro_batches, size))
    if "--lanes" in sys.argv:
        mine = list(range(rank * spec.micro_batches // size, (rank + 1) * spec.micro_batches // size))
    with (Path(sys.argv[1]) / f"{launch.worker}.trace").open("a", buffering=1) as trace:
        for iteration in range(1, spec.iterations + 1):
            step: Any = PlainStep(spec.seed, sampling, iteration)
            model.zero_grad_buffer()
            optimizer.zero_grad()
            loss_sum, tokens = pretrain_gpt.forward_backward(spec, model, text, step, mine)
            optimizer.step()
            scheduler.step(increment=spec.global_batch)
            told = digest(inner) if "--untraced" not in sys.argv else "-"
            print("stepped", iteration, told, loss_sum, tokens, time.monotonic(), time.process_time(), file=trace)
    if "--save" in sys.argv:
        torch.save(dict(inner.named_parameters()), Path(sys.argv[1]) / f"{launch.worker}.pt")
    dist.barrier()
    # It never trains by the hook, which our own worker would call an early end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
