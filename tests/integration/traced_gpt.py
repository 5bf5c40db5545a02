"""The built-in entry `gpt`, as a script that writes down what it does: the tests' independent witness.

One line in `<first argument>/<worker>.trace` for each micro-batch whose forward begins ("computed ITERATION
MICRO_BATCH") and for each step ("stepped ITERATION DIGEST LOSS TIME CPU", the digest of all parameters of this shard,
seconds). `PAUSE_S` in the environment: how long each iteration waits, for a run of which others compute the reference.
Further arguments: `--recompute` (activation checkpointing), `--bf16` (the task's precision), `--untraced`
(steps alone, and no digests: for measuring).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

import torch
from msgspec.structs import replace

from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.loop.corpus import Corpus
from unicrond.agents.trainer.loop.hook import Hook, Step
from unicrond.agents.trainer.process import context
from unicrond.agents.trainer.process.randomness import seed_all
from unicrond.events.vocabulary import TaskSpec


def digest(model: torch.nn.Module) -> str:
    """blake2b over the bytes of all parameters in name order."""
    found = blake2b(digest_size=16)
    for _, parameter in sorted(model.named_parameters(), key=lambda named: named[0]):
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def varied(spec: TaskSpec) -> TaskSpec:
    """As the arguments ask for."""
    return replace(spec, model=replace(spec.model, precision="bf16")) if "--bf16" in sys.argv else spec


def build(spec: TaskSpec) -> torch.nn.Module:
    """The task's GPT, with the variants that the arguments ask for."""
    model: Any = pretrain_gpt.build_model(spec)
    config = model.config
    if "--recompute" in sys.argv:
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    return model


def main() -> None:
    launch = context.current().launch
    spec = varied(launch.spec)
    traced = "--untraced" not in sys.argv
    if torch.cuda.is_available():  # digests are compared with those of a run that another number of ranks made
        torch.use_deterministic_algorithms(True)
    with (Path(sys.argv[1]) / f"{launch.worker}.trace").open("a", buffering=1) as trace:
        plain_step = pretrain_gpt._forward_step

        def told_step(text: Corpus, step: Any, micro_batches: Iterator[int], model: Any) -> Any:
            micro_batch = next(micro_batches)
            print("computed", step.iteration, micro_batch, file=trace)
            return plain_step(text, step, iter([micro_batch]), model)

        if traced:
            pretrain_gpt._forward_step = told_step
        train(spec, trace, traced)


def train(spec: TaskSpec, trace: TextIO, traced: bool) -> None:
    """As `pretrain_gpt.main` does."""
    text = Corpus(Path(spec.data), spec.model.seq)
    seed_all(spec.seed)
    model: Any = build(spec)
    optimizer, scheduler = pretrain_gpt.build_optimizer(spec, model)
    hook = Hook.attach(model, optimizer, scheduler, dataset_size=len(text), overlap=True)

    def tell(step: Step) -> None:
        told = digest(model) if traced else "-"
        print("stepped", step.iteration, told, step.loss, time.monotonic(), time.process_time(), file=trace)

    pause_s = float(os.environ.get("PAUSE_S", "0"))
    before: Step | None = None
    for step in hook.steps():
        if before is not None and before.iteration + 1 == step.iteration:
            tell(before)
        for micro_batches in step.lists(at_most=1 if spec.pp == 1 else None):
            step.add(*pretrain_gpt.forward_backward(spec, model, text, step, micro_batches))
        time.sleep(pause_s)
        optimizer.step()
        scheduler.step(increment=spec.global_batch)
        if spec.optimizer.distributed:
            before = step  # only when the next one begins does this replica have what others have stepped
        else:
            tell(step)
    if before is not None:
        tell(before)


if __name__ == "__main__":
    main()
