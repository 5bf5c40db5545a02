"""One run: a policy on a workload through a trace, and what it cost.

Policies, by name:

    unicron                            the real core with its real planner, each task in one layout for good
    unicron-free                       the same, as if a task had the best layout at every size, at no cost
    unicron-stay, -equal, -weighted, -sized
                                       the real core, another plan (`plan_rules.py`)
    megatron-wait, megatron-shrink, hot-spare[:N], oobleck, varuna, bamboo, recycle, ft-hsdp
                                       job by job (`policies/`)
    ideal                              the bound (`policies/ideal.py`)

The simulator has no policy of Unicron's own; it drives `unicrond`'s (see `core_driver.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unicrond.events.vocabulary.phrases import guess
from unicrond.replay.evaluation.model.assumptions import DEFAULTS, Assumptions
from unicrond.replay.evaluation.model.meter import RunCosts
from unicrond.replay.evaluation.model.traces import Trace
from unicrond.replay.evaluation.model.workload import Workload
from unicrond.replay.evaluation.model.world import EvaluationWorld, RecoveryPolicy
from unicrond.replay.evaluation.policies.bamboo import Bamboo
from unicrond.replay.evaluation.policies.ft_hsdp import FtHsdp
from unicrond.replay.evaluation.policies.ideal import Ideal
from unicrond.replay.evaluation.policies.megatron import HotSpare, MegatronShrink, MegatronWait
from unicrond.replay.evaluation.policies.oobleck import Oobleck
from unicrond.replay.evaluation.policies.recycle import ReCycle
from unicrond.replay.evaluation.policies.varuna import Varuna
from unicrond.replay.evaluation.simulator.core_driver import CoreDriver, CoreWork
from unicrond.replay.evaluation.simulator.plan_rules import equal, optimal, sized, stay, weighted
from unicrond.replay.evaluation.simulator.submission import first_plan
from unicrond.throughput.presets import MODELS


@dataclass(frozen=True)
class SimulationOutcome:
    """What one run delivered, and what it cost. `costs` in exact integers; `rates`: (virtual time, WAF delivered) at
    every change; `core`: None for others.

    `nodes`, `tasks`: how many there are.
    """

    policy: str
    trace: Trace
    nodes: int
    tasks: int
    costs: RunCosts
    rates: tuple[tuple[int, int], ...]
    core: CoreWork | None

    @property
    def share(self) -> float:
        """Divide the accumulated WAF by failure-free."""
        return self.costs.delivered / self.costs.failure_free

    @property
    def ratio(self) -> float:
        """Return the WAF before the first fault over failure-free: what the mechanism and spare nodes leave."""
        return self.rates[0][1] * self.trace.length_us / self.costs.failure_free

    @property
    def ettr(self) -> float:
        """Compute the effective training time ratio: productive over all time of a job, mean over tasks (arXiv
        2410.21680).

        Detection, transition, standing idle and work done again are not productive."""
        return 1 - self.costs.stalled_us / (self.tasks * self.trace.length_us)

    @property
    def goodput(self) -> float:
        """Divide productive node time by that of all nodes, spare and broken ones included (the same source)."""
        return self.costs.productive_us / (self.nodes * self.trace.length_us)


def _build_sized(world: EvaluationWorld) -> RecoveryPolicy:
    return CoreDriver(world, sized({task.name: MODELS[task.model].parameters for task in world.workload.tasks}))


def _build_staying(world: EvaluationWorld) -> RecoveryPolicy:
    return CoreDriver(world, stay(first_plan(world.workload, optimal)))


_POLICIES: dict[str, Callable[[EvaluationWorld], RecoveryPolicy]] = {
    "unicron": CoreDriver,
    "unicron-free": lambda world: CoreDriver(world, speeds=world.workload.speeds),
    "unicron-stay": _build_staying,
    "unicron-equal": lambda world: CoreDriver(world, equal),
    "unicron-weighted": lambda world: CoreDriver(world, weighted),
    "unicron-sized": _build_sized,
    "megatron-wait": MegatronWait,
    "megatron-shrink": MegatronShrink,
    "hot-spare": HotSpare,
    "oobleck": Oobleck,
    "varuna": Varuna,
    "bamboo": Bamboo,
    "recycle": ReCycle,
    "ft-hsdp": FtHsdp,
    "ideal": Ideal,
}
POLICIES = tuple(_POLICIES)


class PolicyError(ValueError):
    """No such policy; names the fix."""


def check_policy(name: str, nodes: int) -> None:
    """Raise PolicyError for a name that `simulate` would not accept."""
    kind, colon, count = name.partition(":")
    if kind not in _POLICIES or (colon and kind != "hot-spare"):
        raise PolicyError(f"--policy: unknown {name!r}; {guess(kind, list(POLICIES))}")
    if colon and not (count.isascii() and count.isdigit() and 0 < int(count) < nodes):
        raise PolicyError(f"--policy {name}: give a number of spare nodes from 1 to {nodes - 1}")


def published_ratio(name: str, assumptions: Assumptions) -> float | None:
    """Return the policy's published failure-free throughput over Megatron's (see Assumptions); None without one."""
    ratio: float | None = getattr(assumptions, f"{name}_ratio", None)
    return ratio


def build_policy(policy: str, world: EvaluationWorld) -> RecoveryPolicy:
    """Build the policy in its world. Raises PolicyError."""
    check_policy(policy, world.workload.cluster.nodes)
    kind, _, count = policy.partition(":")
    return HotSpare(world, int(count or 1)) if kind == "hot-spare" else _POLICIES[kind](world)


def simulate(workload: Workload, trace: Trace, policy: str, assumptions: Assumptions = DEFAULTS) -> SimulationOutcome:
    """Run `policy` through `trace`. Raises PolicyError."""
    world = EvaluationWorld(workload, trace, assumptions)
    running = build_policy(policy, world)
    world.play(running)
    core = running.finish() if isinstance(running, CoreDriver) else None
    rates = tuple(world.meter.rates)
    return SimulationOutcome(
        policy, trace, workload.cluster.nodes, len(workload.tasks), world.meter.total(), rates, core
    )
