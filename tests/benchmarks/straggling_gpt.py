"""A task's entry for the benchmark of stragglers: the built-in training, in which one replica takes longer.

    args: [HOW, PERCENT, REPLICA, ITERATION]

HOW: "busy" (a loop that computes) or "sleep"; "none" leaves all alike. From ITERATION on, each micro-batch of replica
REPLICA takes PERCENT longer than its own usual time, the median of its last ones so far.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from statistics import median
from typing import Any

from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.process import context

FORWARD_BACKWARD = pretrain_gpt.forward_backward


def main() -> None:
    how, percent, replica, first = sys.argv[1], *map(int, sys.argv[2:5])
    here = context.current()
    own_s: deque[float] = deque(maxlen=64)

    def forward_backward(spec: Any, model: Any, text: Any, step: Any, micro_batches: list[int]) -> tuple[float, int]:
        began_s = time.perf_counter()
        told = FORWARD_BACKWARD(spec, model, text, step, micro_batches)
        own_s.append(time.perf_counter() - began_s)
        if step.iteration >= first:
            more_s = median(own_s) * percent / 100
            if how == "sleep":
                time.sleep(more_s)
            elif how == "busy":
                work(more_s)
        return told

    if here.launch.replica == replica:
        pretrain_gpt.forward_backward = forward_backward
    pretrain_gpt.main(here.launch.spec)


def work(for_s: float) -> None:
    """Compute, for so long of this thread's own CPU time."""
    until_s = time.thread_time() + for_s
    while time.thread_time() < until_s:
        pass


if __name__ == "__main__":
    main()
