"""Values that are shown beside a state and follow from it: each task's WAF and work, and the costs of faults. Pure."""

from __future__ import annotations

from typing import Any

from unicrond.core.state.state import ClusterState
from unicrond.core.state.work import achieved_waf, delivered_flop
from unicrond.core.worth.costs import costs_at


def derived_values(state: ClusterState, now_us: int) -> dict[str, Any]:
    """Return {"derived": {"waf", "delivered_flop"} by task, "costs"}, in FLOP/s and FLOP. `now_us`: wall clock."""
    by_task = {
        "waf": {task.name: achieved_waf(task, state.now_us) for task in state.tasks.values()},
        "delivered_flop": {task.name: delivered_flop(task) for task in state.tasks.values()},
    }
    # As floats: JSON's integers end long before a large cluster's work does.
    costs = {name: float(flop) for name, flop in costs_at(state, now_us)._asdict().items()}
    return {"derived": by_task, "costs": costs}
