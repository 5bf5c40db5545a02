"""A task's entry for tests: loops that train something else on each replica, or each time, one kind each.

    entry: tests/integration/diverging_models.py
    args: [CASE, WORKER_NUMBER, FROM_ITERATION]

CASE: `dropout` (no step.seed), `own-data` (each process has rows of its own), `schedule` (a learning rate by the
process's own count), `flip` (one bit of that worker's parameters is another, once, from that iteration on), `threads`
(so, and that worker computes on two threads), `hiccup` (one bit of one gradient of that worker's is another, once, in
that iteration), `sick` (so in each backward from that iteration on, the same bit each time), `loose` (so, another bit
each time), `none`.
Each process prints a line after each iteration: a digest of the parameters.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import torch

from tests.integration.own_models import CLASSES, SAMPLES, WIDTH, data, digest
from unicrond import Hook
from unicrond.agents.trainer.process import context


class Net(torch.nn.Module):
    """Two layers, with dropout between them where `dropout` is above 0."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the classes' scores."""
        return self.last(self.dropout(self.first(rows).relu()))


def flip(model: torch.nn.Module) -> None:
    """Make one bit of the parameters another."""
    with torch.no_grad():
        next(model.parameters()).view(torch.int32).view(-1)[3] ^= 1 << 20


def other_bit(gradient: torch.Tensor, place: int) -> torch.Tensor:
    """Return the gradient with one bit another, nearly the lowest."""
    spoiled = gradient.clone()
    spoiled.view(torch.int32).view(-1)[5 + place] ^= 1 << 3
    return spoiled


def main(case: str, number: int, iteration: int) -> None:
    """Train through all iterations, and print a line after each."""
    torch.manual_seed(1)
    model = Net(0.2 if case == "dropout" else 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    rows, classes = data()
    if case == "own-data":
        rows = rows + os.getpid() % 97
    is_odd = context.current().launch.worker.endswith(f".{number}")
    if case == "threads" and is_odd:
        torch.set_num_threads(2)
    hook = Hook.attach(model, optimizer, dataset_size=SAMPLES)
    spoiled = 0
    for steps, step in enumerate(hook.steps()):
        for micro_batch in step:
            if case in ("flip", "threads") and is_odd and step.iteration >= iteration:
                is_odd = False
                flip(model)
            if case != "dropout":
                step.seed(micro_batch)
            places = list(step.samples(micro_batch))
            loss = torch.nn.functional.cross_entropy(model(rows[places]), classes[places], reduction="sum")
            if is_odd and step.iteration >= iteration and case in ("hiccup", "sick", "loose"):
                is_odd = case != "hiccup"
                spoiled += case == "loose"
                handle = model.first.weight.register_hook(partial(other_bit, place=spoiled % 3))
                loss.backward()
                handle.remove()
            else:
                loss.backward()
            step.add(loss.detach(), len(places))
        if case == "schedule":
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + steps)
        optimizer.step()
        print(f"iteration {step.iteration}: {digest(model, [optimizer])}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
