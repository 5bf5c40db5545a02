"""The bound: every fault known at once, every plan the best for the nodes that are there, nothing ever stands still.

No system can do better on the same T table; what Unicron is short of it is what detection and transition cost,
and what its plan gives away by moving less.
"""

from __future__ import annotations

from unicrond.replay.evaluation.model.world import EvaluationWorld


class Ideal:
    """Follows the best plan without cost."""

    def __init__(self, world: EvaluationWorld) -> None:
        self._world = world
        self._plans: dict[int, dict[str, int]] = {}

    def start(self) -> None:
        """Run the best plan."""
        self._follow_best_plan()

    def node_lost(self, node: int) -> None:
        """Run the best plan without the node."""
        self._follow_best_plan()

    def node_back(self, node: int) -> None:
        """Run the best plan with the node."""
        self._follow_best_plan()

    def fault(self, node: int, severity: int) -> None:
        """Ignore the fault: here it costs nothing."""

    def _follow_best_plan(self) -> None:
        nodes = [node for node in range(self._world.workload.cluster.nodes) if self._world.up(node)]
        if len(nodes) not in self._plans:
            self._plans[len(nodes)] = self._world.workload.best_plan(len(nodes))
        first = 0
        for task, count in self._plans[len(nodes)].items():
            self._world.meter.run(task, self._world.worth(task, count), nodes[first : first + count])
            first += count
