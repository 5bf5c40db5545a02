"""The same training under torchrun: Megatron-core's DistributedDataParallel at its best flags (reduction overlapped), a
checkpoint every ten steps, from which all ranks go on after a restart. Arguments: TASK_JSON DIRECTORY PACED_S.

torchrun keeps its store over a restart, and gloo's keys in it: each restart needs a prefix of its own, or the ranks
connect to those that have died.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)

from tests.benchmarks.recovery.witness import Witness
from tests.integration.plain_gpt import PlainStep
from unicrond.agents.protocol.sampling import Sampling
from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.loop.corpus import Corpus
from unicrond.agents.trainer.process import cpu_shim
from unicrond.agents.trainer.process.randomness import seed_all
from unicrond.events.vocabulary import TaskSpec

CHECKPOINT_EVERY = 10


def meet() -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    own = dist.PrefixStore(f"restart/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel()


def main() -> None:
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TaskSpec)
    directory = Path(sys.argv[2])
    torch.set_num_threads(1)
    cpu_shim.apply()
    param_and_grad_buffer.torch = cpu_shim._CpuTorch(torch)
    meet()
    rank, size = dist.get_rank(), dist.get_world_size()
    witness = Witness(directory, f"rank{rank}", float(sys.argv[3]))
    text = Corpus(Path(spec.data), spec.model.seq)
    seed_all(spec.seed)
    inner: Any = pretrain_gpt.build_model(spec)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    model: Any = DistributedDataParallel(inner.config, config, inner, disable_bucketing=False)
    optimizer, scheduler = pretrain_gpt.build_optimizer(spec, model)

    def finalize(*arguments: Any, **options: Any) -> None:
        witness.computed()
        finalize_model_grads(*arguments, **options)

    inner.config.finalize_model_grads_func = finalize
    inner.config.no_sync_func = model.no_sync
    tell_forwards(witness)
    sampling = Sampling(spec.seed, spec.global_batch, spec.micro_batch, len(text))
    mine = list(range(rank, spec.micro_batches, size))
    checkpoint = directory / "checkpoint.pt"
    done = load(checkpoint, inner, optimizer, scheduler)
    for iteration in range(done + 1, spec.iterations + 1):
        step: Any = PlainStep(spec.seed, sampling, iteration)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        pretrain_gpt.forward_backward(spec, model, text, step, mine)
        optimizer.step()
        scheduler.step(increment=spec.global_batch)
        witness.stepped(iteration, spec.micro_batches)
        if iteration % CHECKPOINT_EVERY == 0 and rank == 0:
            save(checkpoint, iteration, inner, optimizer, scheduler)


def tell_forwards(witness: Witness) -> None:
    """Have the witness see each forward, and the end of the micro-batch before."""
    forward_step = pretrain_gpt._forward_step

    def told(text: Corpus, step: Any, micro_batches: Iterator[int], model: Any) -> Any:
        micro_batch = next(micro_batches)
        witness.computing(step.iteration, micro_batch)
        return forward_step(text, step, iter([micro_batch]), model)

    pretrain_gpt._forward_step = told


def save(path: Path, iteration: int, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    tree = {
        "iteration": iteration,
        "model": dict(model.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(tree, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def load(path: Path, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> int:
    """The iteration after which the checkpoint was made; 0 where there is none."""
    if not path.exists():
        return 0
    tree = torch.load(path, weights_only=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tree["model"][name])
    optimizer.load_state_dict(tree["optimizer"])
    scheduler.load_state_dict(tree["scheduler"])
    return int(tree["iteration"])


if __name__ == "__main__":
    main()
