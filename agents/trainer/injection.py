"""Faults on order, for tests and demonstrations: active only where UNICRON_FAULT is set.

    UNICRON_FAULT="kill@worker=gpt.3,iteration=3,micro_batch=2;stop@iteration=7,at=reducing"

Each rule is `action@condition,...`. Actions: `kill` (SIGKILL), `stop` (SIGSTOP), `raise` (a RuntimeError), `exit`
(exit code 3). Conditions: `worker`, `iteration`, `generation`, `at` (a point below) and `micro_batch` (short for
`at=micro_batch`, after that many have been finished in the iteration). A rule fires once per process.

Points, in the order of an iteration: `micro_batch` (before each), `forward` and `backward` (in the middle of one),
`partly` (one bucket's sum is complete, no other has been started), `computed` (all own micro-batches finished),
`reducing` (reductions in flight), `reduced` (sums complete), `agreeing` (agreement in flight), `agreed` (before
the optimizer's step), `committed` (after it), `saving` (half a checkpoint is written). While regrouping: `forming`,
`formed`, `exchanged`, `giving` (state is being broadcast).
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Point: TypeAlias = Literal[
    "micro_batch", "forward", "backward", "partly", "computed", "reducing", "reduced", "agreeing", "agreed",
    "committed", "saving", "forming", "formed", "exchanged", "giving",
]  # fmt: skip
POINTS: tuple[Point, ...] = get_args(Point)
ACTIONS = ("kill", "stop", "raise", "exit")
_EXIT_CODE = 3


@dataclass(slots=True)
class Rule:
    """One ordered fault; None matches anything."""

    action: str
    worker: str | None = None
    iteration: int | None = None
    generation: int | None = None
    at: str = "micro_batch"
    micro_batch: int | None = None
    fired: bool = False


def parse(text: str) -> tuple[Rule, ...]:
    """The rules in `text`. Raises ValueError naming the part that is wrong."""
    rules = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        action, _, conditions = part.partition("@")
        if action not in ACTIONS:
            raise ValueError(f"UNICRON_FAULT: action {action!r} in {part!r}; use one of {', '.join(ACTIONS)}")
        rule = Rule(action=action)
        for condition in filter(None, conditions.split(",")):
            key, _, value = condition.partition("=")
            if key in ("iteration", "generation", "micro_batch") and value.isdigit():
                setattr(rule, key, int(value))
            elif key == "worker" or (key == "at" and value in POINTS):
                setattr(rule, key, value)
            else:
                raise ValueError(f"UNICRON_FAULT: condition {condition!r} in {part!r}; see agents/trainer/injection.py")
        rules.append(rule)
    return tuple(rules)


class Injection:
    """The rules of this process."""

    def __init__(self, worker: str, text: str) -> None:
        self._worker = worker
        self._rules = parse(text)

    def expects(self, point: Point) -> bool:
        """Whether a fault is ordered for such a point: some are looked for only then."""
        return any(rule.at == point and not rule.fired and rule.worker in (None, self._worker) for rule in self._rules)

    def fire(self, point: Point, iteration: int, generation: int, finished: int = 0) -> None:
        """Let the fault happen that was ordered for this moment, if any."""
        for rule in self._rules:
            if rule.fired or rule.at != point or rule.worker not in (None, self._worker):
                continue
            if rule.iteration not in (None, iteration) or rule.generation not in (None, generation):
                continue
            if rule.micro_batch not in (None, finished):
                continue
            rule.fired = True
            if rule.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif rule.action == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif rule.action == "exit":
                os._exit(_EXIT_CODE)
            else:
                raise RuntimeError(f"injected at {point} of iteration {iteration}")
