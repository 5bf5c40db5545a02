"""Timeouts that contradict each other, in the configuration and in a task's environment: one sentence each.

Operators should not have to tune them: the trainer derives its limits from the iterations that it sees
(agents/trainer/detection/baseline.py). A timeout that somebody has set may defeat another; that is reported, never
refused.

Not part of this module: whether a value is a time at all (config.py, agents/trainer/process/context.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from unicrond.core.nodes.liveness import GRACE_US
from unicrond.core.state.policy import Policy

#: Defaults of a worker where the task's `env` sets no other (agents/trainer/process/context.py), seconds.
TRAINER_DEFAULTS: dict[str, float] = {
    "UNICRON_FAULT_WAIT_S": 120.0,
    "UNICRON_LEASE_S": 60.0,
    "UNICRON_COLLECTIVE_TIMEOUT_S": 600.0,
    "UNICRON_HANG_FLOOR_S": 1.0,
    "UNICRON_START_S": 600.0,
}
#: People set timeouts of this length and more because of slow starts; that is not needed here.
_LONG_S = 1800.0
#: How long a coordinator or an agent may take to come back.
_RESTART_S = 10.0


def contradictions(policy: Policy, heartbeat_s: float, env: Mapping[str, str]) -> list[str]:
    """Return the contradictions, worst first. `env`: of a task; {} for the configuration alone."""
    wait_s, lease_s, collective_s, floor_s, start_s = (_seconds(env, name) for name in TRAINER_DEFAULTS)
    lost_s = 2 * heartbeat_s + GRACE_US / 1e6
    decided_s = lost_s + policy.regroup_s
    checks = [
        (
            wait_s <= decided_s,
            f"UNICRON_FAULT_WAIT_S: workers give up after {wait_s:g} s without a membership, but a lost node and a "
            f"regroup may take {decided_s:g} s; set it above that, or policy.regroup_s lower",
        ),
        (
            lease_s <= max(lost_s, _RESTART_S),
            f"UNICRON_LEASE_S: workers end after {lease_s:g} s without an agent, before one can be back "
            f"({max(lost_s, _RESTART_S):g} s); set it above that",
        ),
        (
            collective_s <= 3 * floor_s,
            f"UNICRON_COLLECTIVE_TIMEOUT_S: collectives fail after {collective_s:g} s, before a hang is looked for at "
            f"all (UNICRON_HANG_FLOOR_S: {floor_s:g}); hangs would be tried again in place; leave it out",
        ),
        (
            "UNICRON_COLLECTIVE_TIMEOUT_S" in env and collective_s >= _LONG_S,
            f"UNICRON_COLLECTIVE_TIMEOUT_S: {collective_s:g} s is only an upper bound here, the limit follows from the "
            "iterations; leave it out",
        ),
        (
            start_s < floor_s,
            f"UNICRON_START_S: the first iterations may last {start_s:g} s, later ones {floor_s:g} s at least; "
            "set it above UNICRON_HANG_FLOOR_S",
        ),
        (
            policy.symptom_window_s >= policy.regroup_s,
            f"policy.symptom_window_s: {policy.symptom_window_s:g} s for an explanation are no less than a "
            f"whole regroup may take ({policy.regroup_s:g} s); set it to less than a second",
        ),
        (
            policy.symptom_window_s > 3 * max(floor_s, 1.0),
            f"policy.symptom_window_s: a broken connection waits {policy.symptom_window_s:g} s, longer than a hang may "
            f"last ({3 * max(floor_s, 1.0):g} s); set it to less than a second",
        ),
        (
            policy.exit_s >= policy.regroup_s,
            f"policy.exit_s: a failed process gets {policy.exit_s:g} s, longer than a regroup may take "
            f"({policy.regroup_s:g} s)",
        ),
    ]
    return [sentence for applies, sentence in checks if applies]


def _seconds(env: Mapping[str, str], name: str) -> float:
    try:
        return float(env.get(name, ""))
    except ValueError:
        return TRAINER_DEFAULTS[name]
