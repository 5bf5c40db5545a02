"""The simulated world that every policy runs in: the clock, which nodes are up, what it all costs.

A policy is called for faults and repairs at the moment they happen: to notice them late is the policy's own affair. It
reports to the meter what each task does. Before time 0 it may start everything; that does not count."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from unicrond.replay.evaluation.model.assumptions import Assumptions
from unicrond.replay.evaluation.model.meter import Meter
from unicrond.replay.evaluation.model.traces import Trace, TraceFault
from unicrond.replay.evaluation.model.virtual_time import VirtualClock
from unicrond.replay.evaluation.model.workload import Workload


class EvaluationWorld:
    """The clock, the nodes and the meter around one policy."""

    def __init__(self, workload: Workload, trace: Trace, assumptions: Assumptions) -> None:
        self.workload = workload
        self.trace = trace
        self.assumptions = assumptions
        self.clock = VirtualClock()
        self.meter = Meter(self.clock, workload.failure_free)
        self._faults: Counter[int] = Counter()

    def up(self, node: int) -> bool:
        """Return whether the node is up (it may be up without anybody knowing)."""
        return not self._faults[node]

    def worth(self, task: str, nodes: int) -> int:
        """Return F(t, nodes) under Megatron, weighted FLOP/s; more nodes than the task may have are idle."""
        values = self.workload.worth[task]
        return values[min(nodes, len(values) - 1)]

    def play(self, policy: RecoveryPolicy) -> None:
        """Play the whole trace. Time 0 is when `policy.start` returns."""
        policy.start()
        start_us = self.clock.now_us
        self.meter.begin()
        for fault in self.trace.faults:
            self.clock.at(start_us + fault.at_us, lambda fault=fault: self._strike(policy, fault))  # type: ignore[misc]
        self.clock.run(start_us + self.trace.length_us)

    def _strike(self, policy: RecoveryPolicy, fault: TraceFault) -> None:
        if fault.severity != 1:
            if self.up(fault.node):
                policy.fault(fault.node, fault.severity)
            return
        was_up = self.up(fault.node)
        self._faults[fault.node] += 1
        self.clock.after(fault.repair_us, lambda: self._repair(policy, fault.node))
        if was_up:
            policy.node_lost(fault.node)

    def _repair(self, policy: RecoveryPolicy, node: int) -> None:
        self._faults[node] -= 1
        if self.up(node):
            policy.node_back(node)


class RecoveryPolicy(Protocol):
    """A way to run tasks on nodes that fail."""

    def start(self) -> None:
        """Start all tasks; they run when this returns."""

    def node_lost(self, node: int) -> None:
        """Handle that the node has just died (SEV1)."""

    def node_back(self, node: int) -> None:
        """Handle that the node is repaired."""

    def fault(self, node: int, severity: int) -> None:
        """Handle that a process (SEV2) or a connection (SEV3) on the node has just failed."""
