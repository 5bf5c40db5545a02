"""The loop of plain_loop.py, healed by unicrond: a task's `entry` (see docs/use/hook.md).

`diff examples/plain_loop.py examples/own_loop.py` shows all that unicrond asks for.
"""

import typing
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from unicrond import Hook

SEQ = 32
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


torch.manual_seed(1)
model_parallel_cuda_manual_seed(1)
model = build_model()
model.ddp_config = DistributedDataParallelConfig()  # get_megatron_optimizer asks for it
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
hook = Hook.attach(model, optimizer)
for step in hook.steps():
    for micro_batch in step:
        step.seed(micro_batch)
        for sample in step.samples(micro_batch):
            step.add(*forward_backward(model, sample))
    optimizer.step()
    print(f"iteration {step.iteration}: loss {step.loss:.4f}", flush=True)
