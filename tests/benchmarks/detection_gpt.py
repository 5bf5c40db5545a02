"""A task's entry for the benchmark of detection's cost: the built-in training, with all detection in every other
iteration and none in the others, all workers alike. Each iteration's times go to `<first argument>/<worker>`:
"ITERATION ON|OFF WALL_S CPU_S", the CPU time of all threads of the process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unicrond.agents.protocol.marks import Marker
from unicrond.agents.trainer.detection.observing import Detection, Sighting
from unicrond.agents.trainer.detection.own_time import ComputeTime
from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.loop.corpus import Corpus
from unicrond.agents.trainer.loop.hook import Hook
from unicrond.agents.trainer.process import context
from unicrond.agents.trainer.process.randomness import seed_all


class NoMarks(Marker):
    """Makes no mark."""

    def _mark(self) -> None:
        pass


class NoTime(ComputeTime):
    """Looks at no clock."""

    def begin(self) -> None:
        pass

    def end(self, micro_batches: int) -> None:
        pass


class NoDetection(Detection):
    """Observes nothing, and sends as many words as the other does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.compute_time = NoTime()

    def start_iteration(self, iteration: int) -> None:
        pass

    def record_agreement(self, rows: Sequence[Sequence[int]]) -> None:
        pass

    def commit(self, iteration: int, duration_us: int, group: Any) -> None:
        pass

    def observe(self, iteration: int, micro_batches: int, norm: float) -> Sighting:
        return Sighting(0, 0, 0.0, 0)

    def judge(self, *_: Any) -> None:
        pass


class NoNorms(dict[int, torch.Tensor]):
    """Every norm is known: none is computed."""

    def __contains__(self, place: object) -> bool:
        return True


def main(traces: Path) -> None:
    here = context.current()
    spec = here.launch.spec
    text = Corpus(Path(spec.data), spec.model.seq)
    seed_all(spec.seed)
    model = pretrain_gpt.build_model(spec)
    optimizer, scheduler = pretrain_gpt.build_optimizer(spec, model)
    hook = Hook.attach(model, optimizer, scheduler, dataset_size=len(text))
    driver = hook._driver
    detections = {True: driver.detection, False: NoDetection(here, model.parameters())}
    marks = {True: here.mark, False: NoMarks(None)}
    began: tuple[float, float] | None = None
    on = False
    with (traces / here.launch.worker).open("w", buffering=1) as trace:
        for step in hook.steps():
            now = time.perf_counter(), time.process_time()
            if began is not None:  # from one step's beginning to the next one's: with its commit and what is told of it
                took = f"{now[0] - began[0]:.6f} {now[1] - began[1]:.6f}"
                trace.write(f"{step.iteration - 1} {'ON' if on else 'OFF'} {took}\n")
            on = step.iteration % 2 == 0
            driver.detection, here.mark = detections[on], marks[on]
            driver.comparison.detection = detections[on]
            driver.group.mark = marks[on]
            driver.accumulation.on_gradient = partial(setattr, marks[True], "phase", "backward") if on else _nothing
            if not on:
                driver.reduction._norms = NoNorms()
            began = time.perf_counter(), time.process_time()
            for micro_batches in step.lists(at_most=1):
                step.add(*pretrain_gpt.forward_backward(spec, model, text, step, micro_batches))
            optimizer.step()
            scheduler.step(increment=spec.global_batch)


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main(Path(sys.argv[1]))
