"""A task's entry for tests: the built-in GPT's loop, which does at some iterations what its arguments say.

    entry: tests/integration/wilful_gpt.py
    args: [DIRECTORY, "ITERATION:WHO:WHAT", ...]

WHO: `all`, `lead`, `other` (all but the lead), or `new` (the third that was started). ITERATION: a number; of `new`,
how many steps after its first. At the end of that iteration, behind the optimizer's step, WHAT happens there:

    break       the loop is left
    stop        hook.stop("enough")
    leave       hook.stop("enough"), then the loop is left
    exit        the process ends at once, with code 0
    sys.exit    the program ends, with code 0
    hang        it stands still for ever
    busy=A/B    it is busy with an evaluation for A seconds, of at most B; `busy=A`: of as many as its limit is
    stall       it stands still for ever in the section "fetch", which each iteration has

`START_S` in the environment: how long it takes to start; `LASTS_S`: how long each iteration lasts at least. What it
does after the loop stands in DIRECTORY/<worker>.end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from unicrond import Hook
from unicrond.agents.trainer.loop import corpus, pretrain_gpt
from unicrond.agents.trainer.loop.corpus import Corpus
from unicrond.agents.trainer.process import context
from unicrond.agents.trainer.process.randomness import seed_all


def main() -> None:
    launch = context.current().launch
    spec = launch.spec
    time.sleep(float(os.environ.get("START_S", "0")))
    prefix = Path(spec.data) if spec.data else corpus.default_prefix()
    if not spec.data:
        corpus.build(prefix)
    text = Corpus(prefix, spec.model.seq)
    seed_all(spec.seed)
    model = pretrain_gpt.build_model(spec)
    optimizer, scheduler = pretrain_gpt.build_optimizer(spec, model)
    hook = Hook.attach(model, optimizer, scheduler, dataset_size=len(text))
    is_new = launch.worker.endswith(".3")
    first = 0
    for step in hook.steps():
        first = first or step.iteration
        for micro_batches in step.lists(at_most=1):
            step.add(*pretrain_gpt.forward_backward(spec, model, text, step, micro_batches))
        optimizer.step()
        scheduler.step(increment=spec.global_batch)
        done = step.iteration
        time.sleep(float(os.environ.get("LASTS_S", "0")))
        whats = []
        for order in sys.argv[2:]:
            when, who, what = order.split(":")
            meant = {"all": True, "lead": hook.is_leader, "other": not hook.is_leader, "new": is_new}[who]
            at = first + int(when) if who == "new" else int(when)
            if meant and at == step.iteration:
                whats.append(what)
        if "stop" in whats or "leave" in whats:
            hook.stop("enough")
        if "break" in whats or "leave" in whats:
            break
        if "exit" in whats:
            os._exit(0)
        if "sys.exit" in whats:
            sys.exit(0)
        if "hang" in whats:
            time.sleep(3600.0)
        for what in whats:
            if what.startswith("busy="):
                takes_s, _, at_most_s = what.removeprefix("busy=").partition("/")
                with hook.section("evaluation", timeout_s=float(at_most_s) if at_most_s else None):
                    time.sleep(float(takes_s))
        with hook.section("fetch"):
            if "stall" in whats:
                time.sleep(3600.0)
    (Path(sys.argv[1]) / f"{launch.worker}.end").write_text(f"after {done}")


if __name__ == "__main__":
    main()
