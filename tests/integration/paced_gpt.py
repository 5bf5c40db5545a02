"""A task's entry: the built-in training, each of whose micro-batches takes a given time, and of some replica longer.

    args: [MILLISECONDS, FACTOR, REPLICA, FIRST, LAST, HOW]

Of replica REPLICA each micro-batch takes FACTOR times as long in the iterations FIRST to LAST. HOW: what is left of the
time is spent asleep ("sleep"), or computing ("busy").
"""

from __future__ import annotations

import sys
import time
from typing import Any

from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.process import context

FORWARD_BACKWARD = pretrain_gpt.forward_backward


def main() -> None:
    here = context.current()
    base_ms, factor, (replica, first, last), how = *map(float, sys.argv[1:3]), map(int, sys.argv[3:6]), sys.argv[6]

    def forward_backward(spec: Any, model: Any, text: Any, step: Any, micro_batches: list[int]) -> tuple[float, int]:
        began_s = time.monotonic()
        sums = FORWARD_BACKWARD(spec, model, text, step, micro_batches)
        is_slow = here.launch.replica == replica and first <= step.iteration <= last
        until_s = began_s + len(micro_batches) * base_ms / 1000 * (factor if is_slow else 1.0)
        if how == "sleep":
            time.sleep(max(0.0, until_s - time.monotonic()))
        while time.monotonic() < until_s:
            pass
        return sums

    pretrain_gpt.forward_backward = forward_backward
    pretrain_gpt.main(here.launch.spec)


if __name__ == "__main__":
    main()
