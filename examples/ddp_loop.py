"""Data-parallel training in plain torch, as its tutorials write it, without unicrond.

    torchrun --nproc-per-node 2 examples/ddp_loop.py

Compare it with recipes/ddp.py: `diff examples/ddp_loop.py examples/recipes/ddp.py` shows what unicrond asks for.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 16
SNAPSHOT = os.environ.get("SNAPSHOT", "snapshot.pt")

torch.manual_seed(1)
features = torch.randn(180, 8)
dataset = TensorDataset(features, (features @ torch.randn(8, 1)).tanh())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
dist.init_process_group("gloo")
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset))
for epoch in range(EPOCHS):
    loader.sampler.set_epoch(epoch)
    for rows, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(rows), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"loss {mean.item():.6f}", flush=True)
    scheduler.step()
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "epoch": epoch}, SNAPSHOT)
dist.destroy_process_group()
