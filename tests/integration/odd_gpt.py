"""A task's entry for tests: trains as the built-in entry does, and one worker does so oddly.

    entry: tests/integration/odd_gpt.py
    args: [WHAT, WORKER_NUMBER, FROM_ITERATION]

WHAT: `slow` (each micro-batch takes 0.15 s longer), `straggle` (0.05 s), `spike` (its losses are tenfold once),
`gradient` (its gradients are a hundredfold once), `flip` (one bit of its parameters is another), `wrap` (an exception
raised from a device's error), `threads` (it computes with one thread more).
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.loop.hook import Step
from unicrond.agents.trainer.process import context

FORWARD_BACKWARD = pretrain_gpt.forward_backward
LOSS = pretrain_gpt._loss
SLOW_S = {"slow": 0.15, "straggle": 0.05}


class Odd:
    """This worker's oddity, from an iteration on."""

    def __init__(self, what: str, iteration: int) -> None:
        self.what = what
        self.iteration = iteration
        self.done = False

    def forward_backward(
        self, spec: Any, model: torch.nn.Module, text: Any, step: Step, micro_batches: list[int]
    ) -> tuple[float, int]:
        if step.iteration < self.iteration or (self.done and self.what not in SLOW_S):
            return FORWARD_BACKWARD(spec, model, text, step, micro_batches)
        self.done = True
        if self.what in SLOW_S:
            time.sleep(SLOW_S[self.what] * len(micro_batches))
        elif self.what == "flip":
            with torch.no_grad():
                next(model.parameters()).view(torch.int32).view(-1)[0] ^= 1
        elif self.what == "wrap":
            raise RuntimeError("the step failed") from RuntimeError("CUDA error: uncorrectable ECC error encountered")
        elif self.what == "gradient":
            pretrain_gpt._loss = lambda losses: LOSS(losses * 100)
        loss_sum, tokens = FORWARD_BACKWARD(spec, model, text, step, micro_batches)
        if self.what == "gradient":
            pretrain_gpt._loss = LOSS
            return loss_sum / 100, tokens
        return loss_sum * (10 if self.what == "spike" else 1), tokens


if __name__ == "__main__":
    what, number, iteration = sys.argv[1:]
    here = context.current()
    if here.launch.worker.endswith(f".{number}") and what == "threads":
        torch.set_num_threads(1 + torch.get_num_threads())
    elif here.launch.worker.endswith(f".{number}"):
        pretrain_gpt.forward_backward = Odd(what, int(iteration)).forward_backward
    pretrain_gpt.main(here.launch.spec)
