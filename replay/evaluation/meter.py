"""What a run costs: every moment of every task goes into exactly one account (paper, "the cost").

Theory
------
A task that runs on x nodes is worth F(t, x), weighted FLOP/s. The measure is the failure-free cluster: all
nodes there, the best plan, nothing ever wrong. In every moment a task is in one phase:

    running      F(t, x) is delivered; what is missing to failure-free is sub-healthy
    detection    it stands still, unnoticed: F(t, x) of before the fault is lost to detection
    transition   somebody knows; it does not train yet: F(t, x) of before is lost to transition
    idle         it has no nodes to run on: all that is missing is sub-healthy

and the rest of the detection's and the transition's failure-free worth is sub-healthy, too. So

    delivered + detection + transition + sub-healthy = failure-free

holds in integers (FLOP/s times microseconds), however long the run. One task alone may be worth more than in
the failure-free plan (it got another's nodes): its sub-healthy share is negative then; the sum never pays
twice. Work done again after a step back to a checkpoint is transition: it was delivered before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from replay.evaluation.virtual_time import Clock


class Phase(StrEnum):
    """The account that a moment of a task goes into."""

    RUNNING = "running"
    DETECTION = "detection"
    TRANSITION = "transition"
    IDLE = "idle"


@dataclass
class Costs:
    """Weighted FLOP times 10**6 (FLOP/s times microseconds), exact; times in microseconds.

    `stalled_us`: summed over tasks, the time that they did not train. `moves`: how often a node began to
    work for a task that it did not work for just before. `productive_us`: summed over nodes, the time in which
    they trained.
    """

    failure_free: int = 0
    delivered: int = 0
    detection: int = 0
    transition: int = 0
    sub_healthy: int = 0
    stalled_us: int = 0
    moves: int = 0
    productive_us: int = 0

    @property
    def balanced(self) -> bool:
        """The identity of the module's theory."""
        return self.delivered + self.detection + self.transition + self.sub_healthy == self.failure_free


@dataclass
class _Account:
    """One task. `rate`: F of its last running configuration; `nodes`: those it ran on."""

    failure_free: int
    phase: Phase = Phase.IDLE
    rate: int = 0
    nodes: frozenset[int] = frozenset()
    since_us: int = 0


@dataclass
class Meter:
    """Told of each change of a task, and asked for the sums. `rates`: (time, WAF delivered) at every change."""

    clock: Clock
    failure_free: Mapping[str, int]
    costs: Costs = field(default_factory=Costs)
    rates: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._accounts = {task: _Account(worth) for task, worth in self.failure_free.items()}
        self._total_rate = 0

    def begin(self) -> None:
        """Whatever was before now does not count."""
        self.total()
        self.costs = Costs()
        self.rates = [(self.clock.now_us, self._total_rate)]

    def run(self, task: str, rate: int, nodes: Iterable[int]) -> None:
        """The task trains on `nodes`, worth `rate` weighted FLOP/s."""
        self._change(task, Phase.RUNNING, rate, frozenset(nodes))

    def stall(self, task: str, phase: Phase) -> None:
        """The task stands still: DETECTION or TRANSITION."""
        self._change(task, phase)

    def idle(self, task: str) -> None:
        """The task has no nodes to run on."""
        self._change(task, Phase.IDLE)

    def phase(self, task: str) -> Phase:
        """What the task is doing."""
        return self._accounts[task].phase

    def total(self) -> Costs:
        """The sums up to now."""
        for account in self._accounts.values():
            self._book(account)
        return self.costs

    def _change(self, task: str, phase: Phase, rate: int | None = None, nodes: frozenset[int] | None = None) -> None:
        account = self._accounts[task]
        self._book(account)
        delivered_before = account.rate if account.phase is Phase.RUNNING else 0
        if nodes is not None:
            self.costs.moves += len(nodes - account.nodes)
            account.nodes = nodes
        account.rate = account.rate if rate is None else rate
        account.phase = phase
        self._note_rate((account.rate if phase is Phase.RUNNING else 0) - delivered_before)

    def _note_rate(self, change: int) -> None:
        self._total_rate += change
        if self.rates and self.rates[-1][0] == self.clock.now_us:
            self.rates.pop()
        if not self.rates or self.rates[-1][1] != self._total_rate:
            self.rates.append((self.clock.now_us, self._total_rate))

    def _book(self, account: _Account) -> None:
        """The time since the account was booked last."""
        costs = self.costs
        length_us, account.since_us = self.clock.now_us - account.since_us, self.clock.now_us
        costs.failure_free += account.failure_free * length_us
        priced = 0 if account.phase is Phase.IDLE else account.rate
        costs.sub_healthy += (account.failure_free - priced) * length_us
        if account.phase is not Phase.RUNNING:
            costs.stalled_us += length_us
        match account.phase:
            case Phase.RUNNING:
                costs.delivered += priced * length_us
                costs.productive_us += len(account.nodes) * length_us
            case Phase.DETECTION:
                costs.detection += priced * length_us
            case Phase.TRANSITION:
                costs.transition += priced * length_us
            case Phase.IDLE:
                pass
