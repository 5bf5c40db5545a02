"""A small Megatron-core training loop, data-parallel, as one writes it without unicrond.

    torchrun --nproc-per-node 2 examples/plain_loop.py

Compare it with own_loop.py: `diff examples/plain_loop.py examples/own_loop.py` shows all that unicrond asks for.
"""

import typing
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from unicrond.agents.trainer.process import cpu_shim

SEQ, MICRO_BATCHES, ITERATIONS = 32, 8, 20
TEXT = torch.frombuffer(bytearray(Path(typing.__file__).read_bytes()), dtype=torch.uint8).long()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build_model() -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
        calculate_per_token_loss=True, bias_dropout_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=SEQ).to(DEVICE)


def forward_backward(model: torch.nn.Module, sample: int) -> tuple[float, int]:
    """Accumulate the gradients of the sum of the token losses; returns that sum and the number of tokens."""
    window = TEXT[sample * SEQ : sample * SEQ + SEQ + 1].to(DEVICE)[None]
    positions = torch.arange(SEQ, device=DEVICE)[None]
    hidden = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool, device=DEVICE).triu(1)
    loss = model(window[:, :-1], positions, hidden, labels=window[:, 1:].contiguous()).sum()
    loss.backward()
    return loss.item(), SEQ


cpu_shim.apply()
torch.distributed.init_process_group()
parallel_state.initialize_model_parallel()
torch.manual_seed(1)
model_parallel_cuda_manual_seed(1)
model = build_model()
model = DistributedDataParallel(model.config, DistributedDataParallelConfig(overlap_grad_reduce=False), model)
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
rank, replicas = torch.distributed.get_rank(), torch.distributed.get_world_size()
for iteration in range(1, ITERATIONS + 1):
    model.zero_grad_buffer()
    total, tokens = 0.0, 0
    for micro_batch in range(rank, MICRO_BATCHES, replicas):
        loss_sum, count = forward_backward(model, (iteration - 1) * MICRO_BATCHES + micro_batch)
        total, tokens = total + loss_sum, tokens + count
    finalize_model_grads([model], torch.tensor(tokens, dtype=torch.int, device=DEVICE))
    optimizer.step()
    print(f"iteration {iteration}: loss {total / tokens:.4f} on rank {rank}", flush=True)
torch.distributed.destroy_process_group()
