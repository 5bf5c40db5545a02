"""Data-parallel training in plain torch, ported from ../ddp_loop.py: its DataLoader, sampler and mean loss stay.

A task's `entry`, with `global_batch: 32, micro_batch: 16, iterations: 18` (two ranks' batches of 16, three epochs of
six iterations); or `python examples/recipes/ddp.py` (docs/use/adapters.md).
"""

import os

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from unicrond import Hook, Local

EPOCHS, BATCH = 3, 16
SNAPSHOT = os.environ.get("SNAPSHOT", "snapshot.pt")

torch.manual_seed(1)
features = torch.randn(180, 8)
dataset = TensorDataset(features, (features @ torch.randn(8, 1)).tanh())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
hook = Hook.attach_or_local(Local(6 * EPOCHS, 2 * BATCH, BATCH), model, optimizer, scheduler)
loader = hook.loader(DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, 1, 0)))
for step in hook.steps():
    for rows, targets in loader(step):
        loss = torch.nn.functional.mse_loss(model(rows), targets)
        step.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if hook.is_leader:
        print(f"loss {step.loss:.6f}", flush=True)
    epoch, place = divmod(step.iteration, len(loader))
    if place == 0:
        scheduler.step()
        if hook.is_leader:
            torch.save({"model": model.state_dict(), "epoch": epoch - 1}, SNAPSHOT)
