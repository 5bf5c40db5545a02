"""Training of a sharded transformer in the shape of torchtitan, without unicrond: FSDP2 over the ranks of torchrun.

    torchrun --nproc-per-node 2 examples/fsdp_loop.py

Compare it with recipes/fsdp.py: `diff examples/fsdp_loop.py examples/recipes/fsdp.py` shows what unicrond asks for.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS, BATCH, ACCUMULATE, LENGTH, WIDTH = 12, 2, 2, 16, 32


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
dist.init_process_group("gloo")
model = Transformer()
parallelize(model)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 8)
ranks, rank = dist.get_world_size(), dist.get_rank()
for module in model.modules():
    if hasattr(module, "set_gradient_divide_factor"):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
for step in range(1, STEPS + 1):
    optimizer.zero_grad()
    total = torch.zeros(())
    for number in range(ACCUMULATE):
        first = ((step - 1) * ACCUMULATE + number) * ranks * BATCH + rank * BATCH
        batch = windows[[sample % len(windows) for sample in range(first, first + BATCH)]]
        scores = model(batch[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, batch[:, 1:].flatten(), reduction="sum")
        loss = loss / (ACCUMULATE * ranks * BATCH * LENGTH)
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    dist.all_reduce(total)
    if rank == 0:
        print(f"loss {total.item():.6f}", flush=True)
dist.destroy_process_group()
