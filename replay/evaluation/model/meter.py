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

from unicrond.replay.evaluation.model.virtual_time import VirtualClock


class CostPhase(StrEnum):
    """The account that a moment of a task goes into."""

    RUNNING = "running"
    DETECTION = "detection"
    TRANSITION = "transition"
    IDLE = "idle"


@dataclass
class RunCosts:
    """The costs of a run. Weighted FLOP times 10**6 (FLOP/s times microseconds), exact; times in microseconds.

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
        """Check the identity of the module's theory."""
        return self.delivered + self.detection + self.transition + self.sub_healthy == self.failure_free


@dataclass
class _Account:
    """The running account of one task. `rate`: F of its last running configuration; `nodes`: those it ran on."""

    failure_free: int
    phase: CostPhase = CostPhase.IDLE
    rate: int = 0
    nodes: frozenset[int] = frozenset()
    since_us: int = 0


@dataclass
class Meter:
    """Books each change of a task, and sums the costs. `rates`: (time, WAF delivered) at every change."""

    clock: VirtualClock
    failure_free: Mapping[str, int]
    costs: RunCosts = field(default_factory=RunCosts)
    rates: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._accounts = {task: _Account(worth) for task, worth in self.failure_free.items()}
        self._total_rate = 0

    def begin(self) -> None:
        """Start counting now; nothing from before counts."""
        self.total()
        self.costs = RunCosts()
        self.rates = [(self.clock.now_us, self._total_rate)]

    def run(self, task: str, rate: int, nodes: Iterable[int]) -> None:
        """Record that the task trains on `nodes`, worth `rate` weighted FLOP/s."""
        self._change(task, CostPhase.RUNNING, rate, frozenset(nodes))

    def stall(self, task: str, phase: CostPhase) -> None:
        """Record that the task stands still: DETECTION or TRANSITION."""
        self._change(task, phase)

    def idle(self, task: str) -> None:
        """Record that the task has no nodes to run on."""
        self._change(task, CostPhase.IDLE)

    def phase(self, task: str) -> CostPhase:
        """Return the phase that the task is in."""
        return self._accounts[task].phase

    def total(self) -> RunCosts:
        """Return the sums up to now."""
        for account in self._accounts.values():
            self._book(account)
        return self.costs

    def _change(
        self, task: str, phase: CostPhase, rate: int | None = None, nodes: frozenset[int] | None = None
    ) -> None:
        account = self._accounts[task]
        self._book(account)
        delivered_before = account.rate if account.phase is CostPhase.RUNNING else 0
        if nodes is not None:
            self.costs.moves += len(nodes - account.nodes)
            account.nodes = nodes
        account.rate = account.rate if rate is None else rate
        account.phase = phase
        self._note_rate((account.rate if phase is CostPhase.RUNNING else 0) - delivered_before)

    def _note_rate(self, change: int) -> None:
        self._total_rate += change
        if self.rates and self.rates[-1][0] == self.clock.now_us:
            self.rates.pop()
        if not self.rates or self.rates[-1][1] != self._total_rate:
            self.rates.append((self.clock.now_us, self._total_rate))

    def _book(self, account: _Account) -> None:
        """Add the time since the account was booked last."""
        costs = self.costs
        length_us, account.since_us = self.clock.now_us - account.since_us, self.clock.now_us
        costs.failure_free += account.failure_free * length_us
        rate = 0 if account.phase is CostPhase.IDLE else account.rate
        costs.sub_healthy += (account.failure_free - rate) * length_us
        if account.phase is not CostPhase.RUNNING:
            costs.stalled_us += length_us
        match account.phase:
            case CostPhase.RUNNING:
                costs.delivered += rate * length_us
                costs.productive_us += len(account.nodes) * length_us
            case CostPhase.DETECTION:
                costs.detection += rate * length_us
            case CostPhase.TRANSITION:
                costs.transition += rate * length_us
            case CostPhase.IDLE:
                pass
