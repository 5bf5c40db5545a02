"""A task's entry for tests: the built-in GPT's loop, in a program that fails by itself.

    entry: tests/integration/failing_gpt.py
    args: [DIRECTORY, HOW, ITERATION]

    typo    its first line opens a file that is nowhere
    mount   it opens a file that is not on the node where the task was started first, as a mount may be missing there
    nan     the loss of ITERATION is not a number, whoever computes it
    chip    the loss of ITERATION is not a number for the worker that comes to it first, as a chip may compute wrongly

The node is named in DIRECTORY/<task>.node, which the first process writes.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

HOW, ITERATION = sys.argv[2], int(sys.argv[3])
if HOW == "typo":
    Path("/data/tokens.txt").read_bytes()

from unicrond import Hook  # noqa: E402  # the typo comes before anything that takes time
from unicrond.agents.trainer.loop import pretrain_gpt  # noqa: E402
from unicrond.agents.trainer.loop.corpus import Corpus  # noqa: E402
from unicrond.agents.trainer.process import context  # noqa: E402
from unicrond.agents.trainer.process.randomness import seed_all  # noqa: E402


def is_first(path: Path, text: str) -> bool:
    """Write the file; return whether there was none before, or one with this text."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        return path.read_text() == text
    return True


def main() -> None:
    launch = context.current().launch
    spec = launch.spec
    path = Path(sys.argv[1]) / f"{spec.name}.node"
    if HOW == "mount" and is_first(path, launch.node):
        Path("/mnt/tokens.txt").read_bytes()
    text = Corpus(Path(spec.data), spec.model.seq)
    seed_all(spec.seed)
    model = pretrain_gpt.build_model(spec)
    optimizer, scheduler = pretrain_gpt.build_optimizer(spec, model)
    hook = Hook.attach(model, optimizer, scheduler, dataset_size=len(text))
    for step in hook.steps():
        for micro_batches in step.lists(at_most=1):
            loss, tokens = pretrain_gpt.forward_backward(spec, model, text, step, micro_batches)
            is_due = step.iteration == ITERATION and HOW in ("nan", "chip")
            if is_due and (HOW == "nan" or is_first(path, f"{launch.node} {launch.worker}")):
                loss = math.nan
            step.add(loss, tokens)
        optimizer.step()
        scheduler.step(increment=spec.global_batch)


if __name__ == "__main__":
    main()
