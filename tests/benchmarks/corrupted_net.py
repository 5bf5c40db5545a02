"""A task's entry for `corruption.py`: one bit of one replica's numbers is another, from some moment on.

    entry: tests/benchmarks/corrupted_net.py
    args: [SURFACE, BIT, LIFETIME, WORKER_NUMBER, ITERATION, SEED]

SURFACE: `output` of a layer, `gradient`, `weight`, `optimizer` (its state). BIT: of a float32, 0 the lowest. LIFETIME:
`once` (in one call of that iteration, drawn by SEED) or `sticky` (in each from there on). Each process prints a line
after each iteration: a digest of parameters and optimizer state.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import torch

from tests.integration.own_models import SAMPLES, WIDTH, Net, data, digest
from unicrond import Hook
from unicrond.agents.trainer.process import context


@dataclass(slots=True)
class Injector:
    """Flips one bit of one element. `call`: of the iteration, where it does so once; `element`: of the tensor."""

    surface: str
    bit: int
    is_sticky: bool
    iteration: int
    call: int
    element: int
    calls: int = 0
    is_over: bool = False

    def flip(self, tensor: torch.Tensor) -> None:
        """Flip the bit."""
        words = tensor.detach().view(torch.int32).view(-1)
        words[self.element % words.numel()] ^= -(2**31) if self.bit == 31 else 1 << self.bit

    def is_due(self, iteration: int) -> bool:
        """Return whether this call of the iteration is hit."""
        if iteration < self.iteration or self.is_over:
            return False
        self.calls += iteration == self.iteration
        if self.is_sticky:
            return True
        self.is_over = self.calls > self.call
        return self.is_over


def hit(tensor: torch.Tensor, injector: Injector) -> torch.Tensor:
    """Return a copy of the tensor that was hit, with its gradient's path."""
    spoiled = tensor.clone()
    injector.flip(spoiled)
    return spoiled


def main(injector: Injector | None) -> None:
    """Train through all iterations."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    rows, classes = data()
    hook = Hook.attach(model, optimizer, dataset_size=SAMPLES)
    for step in hook.steps():
        for micro_batch in step:
            step.seed(micro_batch)
            places = list(step.samples(micro_batch))
            hits = injector is not None and injector.surface != "optimizer" and injector.is_due(step.iteration)
            handles = []
            if injector is not None and hits:
                if injector.surface == "weight":
                    injector.flip(model.first.weight)
                elif injector.surface == "output":
                    handles.append(model.first.register_forward_hook(lambda *call: hit(call[2], injector)))
                else:
                    handles.append(model.first.weight.register_hook(lambda gradient: hit(gradient, injector)))
            loss = torch.nn.functional.cross_entropy(model(rows[places]), classes[places], reduction="sum")
            loss.backward()
            for handle in handles:
                handle.remove()
            step.add(loss.detach(), len(places))
        optimizer.step()
        if injector is not None and injector.surface == "optimizer" and injector.is_due(step.iteration):
            injector.flip(optimizer.state[model.first.weight]["exp_avg"])
        print(f"iteration {step.iteration}: {digest(model, [optimizer])}", flush=True)


if __name__ == "__main__":
    surface, bit, lifetime, number, first_iteration, seed = sys.argv[1:]
    is_culprit = context.current().launch.worker.endswith(f".{number}")
    draw = random.Random(int(seed))
    calls = 1 if surface == "optimizer" else 2
    main(
        Injector(
            surface,
            int(bit),
            lifetime == "sticky",
            int(first_iteration),
            draw.randrange(calls),
            draw.randrange(WIDTH * WIDTH),
        )
        if is_culprit
        else None
    )
