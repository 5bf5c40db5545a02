"""Faults on order, for tests and demonstrations: from the agent (unicronctl inject), or where UNICRON_FAULT is set.

    UNICRON_FAULT="kill@worker=gpt.3,iteration=3,micro_batch=2;stop@iteration=7,at=reducing"

Each rule is `action@condition,...`. Actions: `kill` (SIGKILL), `stop` (SIGSTOP), `raise` (a RuntimeError), `exit`
(exit code 3), `hang` (without end), `oom` (a MemoryError), `nan` (the next loss is none), and, from the agent alone,
`slow` (from then on, once per iteration, a sleep). Conditions:
`worker`, `iteration`, `generation`, `at` (a point below) and `micro_batch` (short for
`at=micro_batch`, after that many have been finished in the iteration). A rule fires once per process.

Points, in the order of an iteration: `micro_batch` (before each), `forward` and `backward` (in the middle of one),
`partly` (one bucket's sum is complete, no other has been started), `computed` (all own micro-batches finished),
`reducing` (reductions in flight), `reduced` (sums complete), `agreeing` (agreement in flight), `agreed` (before
the optimizer's step), `committed` (after it), `saving` (half a checkpoint is written). With sharded optimizer state:
`stepped` (before the stepped parameters are gathered), `gathering` (while they are). While regrouping: `forming`,
`formed`, `exchanged`, `giving` (state is being broadcast), `dividing` (parts have arrived, the old ones are still
held).

The phases that people name are the points of PHASES: every process reaches these, whatever was expected when it
started.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from unicrond.events.vocabulary import Fault, FaultPhase

Point: TypeAlias = Literal[
    "micro_batch", "forward", "backward", "partly", "computed", "reducing", "reduced", "agreeing", "agreed",
    "stepped", "gathering", "committed", "saving", "forming", "formed", "exchanged", "giving", "dividing",
]  # fmt: skip
POINTS: tuple[Point, ...] = get_args(Point)
ACTIONS = ("kill", "stop", "raise", "exit", "hang", "oom", "nan")
PHASES: dict[FaultPhase, Point] = {
    "": "micro_batch",
    "forward": "micro_batch",
    "backward": "computed",
    "reduce": "reducing",
    "step": "agreed",
    "checkpoint": "saving",
    "regroup": "formed",
}
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
    #: For `slow`, which fires again and again, from `iteration` on.
    seconds: float = 0.0
    slowed: int = 0


def parse(text: str) -> tuple[Rule, ...]:
    """Return the rules in `text`. Raise ValueError naming the part that is wrong."""
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
                raise ValueError(
                    f"UNICRON_FAULT: condition {condition!r} in {part!r}; see agents/protocol/injection.py"
                )
        rules.append(rule)
    return tuple(rules)


def rule_of(fault: Fault) -> Rule:
    """Return the agent's order as a rule."""
    action = "raise" if fault.kind == "exception" else fault.kind
    return Rule(action, fault.worker, fault.at_iteration or None, at=PHASES[fault.phase], seconds=fault.seconds)


class FaultInjector:
    """Injects the faults of this process by its rules. `ordered`: where the agent's orders arrive, from another
    thread."""

    def __init__(self, worker: str, text: str, ordered: deque[Fault] | None = None) -> None:
        self._worker = worker
        self._rules = list(parse(text))
        self._ordered = deque() if ordered is None else ordered
        self._spoils_loss = False

    def spoil_loss(self, loss_sum: float) -> float:
        """Return the loss that the training loop is to see."""
        if self._spoils_loss:
            self._spoils_loss = False
            return float("nan")
        return loss_sum

    def expects(self, point: Point) -> bool:
        """Return whether a fault is ordered for such a point: some points are only reached then."""
        return any(rule.at == point and not rule.fired and rule.worker in (None, self._worker) for rule in self._rules)

    def fire(self, point: Point, iteration: int, generation: int, finished: int = 0) -> None:  # noqa: C901  # a filter, then one branch for each fault
        """Inject the fault that was ordered for this moment, if any."""
        while self._ordered:
            self._rules.append(rule_of(self._ordered.popleft()))
        for rule in self._rules:
            if rule.fired or rule.at != point or rule.worker not in (None, self._worker):
                continue
            if rule.action == "slow":
                self._slow_down(rule, iteration)
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
            elif rule.action == "nan":
                self._spoils_loss = True
            elif rule.action == "hang":
                while True:
                    time.sleep(3600.0)
            elif rule.action == "oom":
                raise MemoryError(f"injected at {point} of iteration {iteration}")
            else:
                raise RuntimeError(f"injected at {point} of iteration {iteration}")

    @staticmethod
    def _slow_down(rule: Rule, iteration: int) -> None:
        if iteration >= (rule.iteration or 0) and iteration > rule.slowed:
            rule.slowed = iteration
            time.sleep(rule.seconds)
