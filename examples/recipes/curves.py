"""Curves in TensorBoard, written by the lead, whichever process that is.

A task's `entry`, or `python examples/recipes/curves.py` (docs/use/recipes.md). Needs `tensorboard`.
"""

import os

import torch
from torch.utils.tensorboard import SummaryWriter

from unicrond import Hook, Local

torch.manual_seed(1)
FEATURES = torch.randn(512, 8)
TARGETS = FEATURES @ torch.randn(8, 1)

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-1)
hook = Hook.attach_or_local(
    Local(iterations=40, global_batch=32, micro_batch=8), model, optimizer, dataset_size=len(FEATURES)
)
writer: SummaryWriter | None = None
for step in hook.steps():
    for micro_batch in step:
        step.seed(micro_batch)
        chosen = torch.tensor(step.samples(micro_batch))
        loss = ((model(FEATURES[chosen]) - TARGETS[chosen]) ** 2).sum()
        loss.backward()
        step.add(loss.detach(), len(chosen))
    optimizer.step()
    if hook.is_leader:  # known from the first step on; another process is it when this one is lost
        if writer is None:
            writer = SummaryWriter(os.environ.get("TENSORBOARD_DIR", "runs"), purge_step=step.iteration)
        writer.add_scalar("loss", step.loss, step.iteration)
        writer.flush()
        hook.log({"loss": step.loss})
