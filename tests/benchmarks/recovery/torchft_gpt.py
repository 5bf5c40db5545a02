"""The same training under torchft: one rank is one replica group; torchft's DistributedDataParallel around the same
GPTModel, Megatron-core's optimizer behind the manager's vote. Arguments: TASK_JSON DIRECTORY PACED_S RANK RANKS.

The quorum runs beside the forward (torchft's default, and faster than waiting for it). Whoever comes back heals from a
living replica, by torchft's own transport. Collectives time out after 1 s: with 5 s, some recoveries took 5 s.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torchft
from megatron.core import parallel_state

from tests.benchmarks.recovery.witness import Witness
from tests.integration.plain_gpt import PlainStep
from unicrond.agents.protocol.sampling import Sampling
from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.loop.corpus import Corpus
from unicrond.agents.trainer.process import cpu_shim
from unicrond.agents.trainer.process.randomness import seed_all
from unicrond.events.vocabulary import TaskSpec


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TaskSpec)
    rank, ranks = int(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    cpu_shim.apply()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    witness = Witness(Path(sys.argv[2]), f"rank{rank}", float(sys.argv[3]))
    text = Corpus(Path(spec.data), spec.model.seq)
    seed_all(spec.seed)
    inner: Any = pretrain_gpt.build_model(spec)
    optimizer, scheduler = pretrain_gpt.build_optimizer(spec, inner)

    def state() -> dict[str, Any]:
        return {
            "model": {name: parameter.detach() for name, parameter in inner.named_parameters()},
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }

    def live_in(tree: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in inner.named_parameters():
                parameter.copy_(tree["model"][name])
        optimizer.load_state_dict(tree["optimizer"])
        scheduler.load_state_dict(tree["scheduler"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=1)),
        load_state_dict=live_in,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"replica{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
        heartbeat_interval=timedelta(milliseconds=100),
        hostname="127.0.0.1",
        init_sync=False,
    )
    model = torchft.DistributedDataParallel(manager, inner)
    sampling = Sampling(spec.seed, spec.global_batch, spec.micro_batch, len(text))
    mine = list(range(rank, spec.micro_batches, ranks))
    tokens = len(mine) * spec.micro_batch * spec.model.seq
    while manager.current_step() < spec.iterations:
        iteration = manager.current_step() + 1
        step: Any = PlainStep(spec.seed, sampling, iteration)
        manager.start_quorum()
        optimizer.zero_grad()
        for micro_batch in mine:
            witness.computing(iteration, micro_batch)
            with contextlib.nullcontext() if micro_batch == mine[-1] else model.no_sync():
                losses, _ = pretrain_gpt._forward_step(text, step, iter([micro_batch]), model)
                (losses.float().sum() / tokens).backward()
            witness.computed()
        if manager.should_commit():
            optimizer.step()
            scheduler.step(increment=spec.global_batch)
            witness.stepped(manager.current_step(), len(mine) * manager.num_participants())
        else:
            witness.discarded(iteration, len(mine))


if __name__ == "__main__":
    main()
