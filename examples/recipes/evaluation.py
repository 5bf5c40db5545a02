"""Evaluation every ten iterations, by the lead; and an average of the weights that survives faults.

A task's `entry`, or `python examples/recipes/evaluation.py` (docs/use/recipes.md).
"""

from typing import Any

import torch

from unicrond import Hook, Local

torch.manual_seed(1)
FEATURES = torch.randn(512, 8)
TARGETS = FEATURES @ torch.randn(8, 1)
HELD_OUT = 64


class Average:
    """A moving average of a model's weights: what is registered travels with the training state."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = {name: one.detach().clone() for name, one in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        for name, one in self.model.named_parameters():
            self.weights[name].lerp_(one, 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.weights)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, weight in state_dict.items():
            self.weights[name].copy_(weight)


def evaluate(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        told = torch.func.functional_call(model, weights, FEATURES[:HELD_OUT])
    return float(((told - TARGETS[:HELD_OUT]) ** 2).mean())


model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
average = Average(model, 0.9)
hook = Hook.attach_or_local(
    Local(iterations=40, global_batch=32, micro_batch=8), model, optimizer, dataset_size=len(FEATURES) - HELD_OUT
)
hook.register("average", average)
for step in hook.steps():
    for micro_batch in step:
        step.seed(micro_batch)
        chosen = torch.tensor(step.samples(micro_batch)) + HELD_OUT
        loss = ((model(FEATURES[chosen]) - TARGETS[chosen]) ** 2).sum()
        loss.backward()
        step.add(loss.detach(), len(chosen))
    optimizer.step()
    average.update()
    if step.iteration % 10 == 0:
        with hook.section("evaluation", timeout_s=60):
            if hook.is_leader:
                hook.log({"loss": step.loss, "held_out": evaluate(model, average.weights)})
