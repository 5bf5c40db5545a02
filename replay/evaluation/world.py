"""The simulated world that every policy lives in: the clock, which nodes are there, what it all costs.

A policy hears of faults and repairs at the moment they happen: noticing them late is the policy's own
affair. It tells the meter what each task does. Before time 0 it may start everything; that does not count.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from replay.evaluation.assumptions import Assumptions
from replay.evaluation.meter import Meter
from replay.evaluation.traces import Fault, Trace
from replay.evaluation.virtual_time import Clock
from replay.evaluation.workload import Workload


class World:
    """Where a policy lives."""

    def __init__(self, workload: Workload, trace: Trace, assumptions: Assumptions) -> None:
        self.workload = workload
        self.trace = trace
        self.assumptions = assumptions
        self.clock = Clock()
        self.meter = Meter(self.clock, workload.failure_free)
        self._faults: Counter[int] = Counter()

    def up(self, node: int) -> bool:
        """The node is there (it may be there without anybody knowing)."""
        return not self._faults[node]

    def worth(self, task: str, nodes: int) -> int:
        """F(t, nodes) under Megatron, weighted FLOP/s; more nodes than the task may have are idle."""
        values = self.workload.worth[task]
        return values[min(nodes, len(values) - 1)]

    def play(self, policy: Policy) -> None:
        """The whole trace. Time 0 is when `policy.start` has come to rest."""
        policy.start()
        start_us = self.clock.now_us
        self.meter.begin()
        for fault in self.trace.faults:
            self.clock.at(start_us + fault.at_us, lambda fault=fault: self._strike(policy, fault))  # type: ignore[misc]
        self.clock.run(start_us + self.trace.length_us)

    def _strike(self, policy: Policy, fault: Fault) -> None:
        if fault.severity != 1:
            if self.up(fault.node):
                policy.fault(fault.node, fault.severity)
            return
        was_up = self.up(fault.node)
        self._faults[fault.node] += 1
        self.clock.after(fault.repair_us, lambda: self._repair(policy, fault.node))
        if was_up:
            policy.node_lost(fault.node)

    def _repair(self, policy: Policy, node: int) -> None:
        self._faults[node] -= 1
        if self.up(node):
            policy.node_back(node)


class Policy(Protocol):
    """A way to run tasks on nodes that fail."""

    def start(self) -> None:
        """Everything runs when this returns."""

    def node_lost(self, node: int) -> None:
        """The node has just died (SEV1)."""

    def node_back(self, node: int) -> None:
        """The node is repaired."""

    def fault(self, node: int, severity: int) -> None:
        """A process (SEV2) or a connection (SEV3) on the node has just failed."""
