"""A task's entry for the benchmark of detection: the built-in training with micro-batches that last longer (asleep, so
that a small machine can hold several workers), and an exception on SIGUSR1 that says when it was raised.

    args: [SECONDS_PER_MICRO_BATCH]
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.process import context

FORWARD_BACKWARD = pretrain_gpt.forward_backward


def forward_backward(spec: Any, model: Any, text: Any, step: Any, micro_batches: list[int]) -> tuple[float, int]:
    time.sleep(float(sys.argv[1]) * len(micro_batches))
    return FORWARD_BACKWARD(spec, model, text, step, micro_batches)


def fail(*_: object) -> None:
    raise RuntimeError(f"raised at {time.time_ns() // 1000}")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, fail)
    pretrain_gpt.forward_backward = forward_backward
    pretrain_gpt.main(context.current().launch.spec)
