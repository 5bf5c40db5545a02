"""The task's entry under unicrond: the built-in training, with a witness. Arguments: the traces' directory, PACED_S.

Besides the witness's words it says, of each regroup, when the worker began it ("leaving"), when it had its seat, and
when the membership had come ("seated GENERATION CAME_US"), and when an iteration was agreed on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.recovery.witness import Witness
from unicrond.agents.trainer.lifecycle.effects import GroupReady, Idle
from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.loop.corpus import Corpus
from unicrond.agents.trainer.loop.handlers import HANDLERS, EffectHandlers
from unicrond.agents.trainer.loop.hook import Hook
from unicrond.agents.trainer.process import context
from unicrond.agents.trainer.process.randomness import seed_all


def watch_regroups(hook: Hook, witness: Witness) -> None:
    channel, idle, sit = hook._context.channel, HANDLERS[Idle], HANDLERS[GroupReady]

    def leaving(driver: EffectHandlers, effect: Idle) -> Any:
        witness.tell("leaving")
        return idle(driver, effect)

    def seated(driver: EffectHandlers, effect: GroupReady) -> Any:
        generation = effect.membership.generation
        came_us = (time.time_ns() - time.monotonic_ns()) // 1000 + int(channel.received_at(generation) * 1e6)
        witness.tell("seated", generation, came_us)
        return sit(driver, effect)

    HANDLERS[Idle], HANDLERS[GroupReady] = leaving, seated


def main() -> None:
    launch = context.current().launch
    spec = launch.spec
    witness = Witness(Path(sys.argv[1]), launch.worker, float(sys.argv[2]))
    text = Corpus(Path(spec.data), spec.model.seq)
    seed_all(spec.seed)
    model = pretrain_gpt.build_model(spec)
    optimizer, scheduler = pretrain_gpt.build_optimizer(spec, model)
    hook = Hook.attach(model, optimizer, scheduler, dataset_size=len(text), overlap=True)
    watch_regroups(hook, witness)
    for step in hook.steps():
        for micro_batches in step.lists(at_most=1):
            witness.computing(step.iteration, micro_batches[0])
            step.add(*pretrain_gpt.forward_backward(spec, model, text, step, micro_batches))
            witness.computed()
        witness.tell("agreed", step.iteration)
        optimizer.step()
        scheduler.step(increment=spec.global_batch)
        witness.stepped(step.iteration, spec.micro_batches)


if __name__ == "__main__":
    main()
