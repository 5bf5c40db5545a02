"""One run: a policy on a workload through a trace, and what it cost.

Policies, by name:

    unicron                            the real core with its real planner
    unicron-stay, -equal, -weighted, -sized
                                       the real core, another plan (`plan_rules.py`)
    megatron-wait, megatron-shrink, hot-spare[:N], oobleck, varuna, bamboo
                                       job by job (`policies/`)
    ideal                              the bound (`policies/ideal.py`)

The simulator has no policy of Unicron's own; it drives `unicrond`'s (see `core_driver.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from events.guess import guess
from replay.evaluation.assumptions import DEFAULTS, Assumptions
from replay.evaluation.core_driver import CoreDriver, CoreWork
from replay.evaluation.meter import Costs
from replay.evaluation.plan_rules import equal, sized, stay, weighted
from replay.evaluation.policies.bamboo import Bamboo
from replay.evaluation.policies.ideal import Ideal
from replay.evaluation.policies.megatron import HotSpare, MegatronShrink, MegatronWait
from replay.evaluation.policies.oobleck import Oobleck
from replay.evaluation.policies.varuna import Varuna
from replay.evaluation.traces import Trace
from replay.evaluation.workload import Workload
from replay.evaluation.world import Policy, World
from unicrond.throughput.presets import MODELS


@dataclass(frozen=True)
class Outcome:
    """`costs` in exact integers; `rates`: (virtual time, WAF delivered) at every change; `core`: None for others.

    `ratio`: the failure-free throughput over Megatron's that the run assumed.
    """

    policy: str
    ratio: float
    trace: Trace
    costs: Costs
    rates: tuple[tuple[int, int], ...]
    core: CoreWork | None

    @property
    def share(self) -> float:
        """Accumulated WAF over failure-free."""
        return self.costs.delivered / self.costs.failure_free


def _with_sizes(world: World) -> Policy:
    return CoreDriver(world, sized({task.name: MODELS[task.model].parameters for task in world.workload.tasks}))


def _staying(world: World) -> Policy:
    home = world.workload.best_plan(world.workload.cluster.nodes)
    return CoreDriver(world, stay(home))


_POLICIES: dict[str, Callable[[World], Policy]] = {
    "unicron": CoreDriver,
    "unicron-stay": _staying,
    "unicron-equal": lambda world: CoreDriver(world, equal),
    "unicron-weighted": lambda world: CoreDriver(world, weighted),
    "unicron-sized": _with_sizes,
    "megatron-wait": MegatronWait,
    "megatron-shrink": MegatronShrink,
    "hot-spare": HotSpare,
    "oobleck": Oobleck,
    "varuna": Varuna,
    "bamboo": Bamboo,
    "ideal": Ideal,
}
POLICIES = tuple(_POLICIES)


class PolicyError(ValueError):
    """No such policy; names the fix."""


def check_policy(name: str, nodes: int) -> None:
    """Raises PolicyError for what `simulate` would not know."""
    kind, colon, count = name.partition(":")
    if kind not in _POLICIES or (colon and kind != "hot-spare"):
        raise PolicyError(f"--policy: unknown {name!r}; {guess(kind, list(POLICIES))}")
    if colon and not (count.isascii() and count.isdigit() and 0 < int(count) < nodes):
        raise PolicyError(f"--policy {name}: give a number of spare nodes from 1 to {nodes - 1}")


def published_ratio(name: str, assumptions: Assumptions) -> float:
    """Failure-free throughput over Megatron's that the policy has by `assumptions`; 1.0 where none is named."""
    return float(getattr(assumptions, f"{name}_ratio", 1.0))


def simulate(
    workload: Workload,
    trace: Trace,
    policy: str,
    assumptions: Assumptions = DEFAULTS,
    *,
    ratio: float | None = None,
) -> Outcome:
    """Run `policy` through `trace`. `ratio`: see `Outcome`; None = the policy's own. Raises PolicyError."""
    check_policy(policy, workload.cluster.nodes)
    own_ratio = published_ratio(policy, assumptions) if ratio is None else ratio
    world = World(workload, trace, assumptions, own_ratio)
    kind, _, count = policy.partition(":")
    running = HotSpare(world, int(count or 1)) if kind == "hot-spare" else _POLICIES[kind](world)
    began_s = time.process_time()
    world.play(running)
    core = running.work if isinstance(running, CoreDriver) else None
    if core is not None:
        core.cpu_s = time.process_time() - began_s
    return Outcome(policy, own_ratio, trace, world.meter.total(), tuple(world.meter.rates), core)
