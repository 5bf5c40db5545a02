"""Training of a sharded transformer in the shape of torchtitan, ported from ../fsdp_loop.py: `parallelize` stays.

A task's `entry`, with `ep: 2, global_batch: 8, micro_batch: 2, iterations: 12` (docs/use/adapters.md).
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from unicrond import Hook

BATCH, LENGTH, WIDTH = 2, 16, 32


class Transformer(torch.nn.Module):
    """A decoder of two layers over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(256, WIDTH)
        block = torch.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).layers
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.lm_head = torch.nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of each next byte."""
        hidden = self.tok_embeddings(tokens)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.lm_head(self.norm(hidden))


def parallelize(model: Transformer) -> None:
    """Shard the model over all ranks, as torchtitan's `apply_fsdp_to_decoder` does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(model.tok_embeddings, mesh=mesh, mp_policy=policy)
    fully_shard([model.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


torch.manual_seed(1)
text = torch.randint(0, 64, (4096,)).cumsum(0) % 256
windows = text[: 240 * (LENGTH + 1)].view(240, LENGTH + 1)
model = Transformer()
parallelize(model)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 8)
hook = Hook.attach(model, optimizer, scheduler)
for step in hook.steps():
    for number in step:
        batch = windows[[sample % len(windows) for sample in step.samples(number)]]
        scores = model(batch[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, batch[:, 1:].flatten(), reduction="sum")
        step.backward(loss, tokens=BATCH * LENGTH, mean=False)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if hook.is_leader:
        print(f"loss {step.loss:.6f}", flush=True)
