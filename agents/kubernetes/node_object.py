"""What a Node object of Kubernetes says of its machine, and what this cluster writes into it. Pure.

| in the object | is | until |
|---|---|---|
| a taint that drains: NoExecute, or one of DRAINS | a drain | it is gone |
| `spec.unschedulable` (`kubectl cordon`, `kubectl drain`) | as `cordon_means` | `kubectl uncordon` |
| the condition Ready is not True | a cordon | it is |

* What Kubernetes itself taints a machine with that is not ready is the last row, and nothing more: this cluster's own
  heartbeats find a machine that is gone.
* An isolation is the taint TAINT (NoSchedule: pods that run stay) and the condition CONDITION. Others' are never
  touched, and the agent does not take this taint for a drain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from events.vocabulary import MachineHold

TAINT = "unicron.dev/isolated"
CONDITION = "UnicronIsolated"
#: NoSchedule taints that come before the machine is taken away.
DRAINS = (
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "node.kubernetes.io/out-of-service",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/spot-itn",
)
#: Of the node's life: the condition Ready says it.
_NOT_READY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_REASON_MAX = 900

CordonMeans = Literal["cordon", "drain"]


class Held(NamedTuple):
    """What the machine is held for, and why; ("", "") where it is in use."""

    hold: MachineHold
    reason: str


def held(node: Mapping[str, Any], cordon_means: CordonMeans) -> Held:
    """Of a Node object. The strictest counts."""
    spec = node.get("spec") or {}
    for taint in spec.get("taints") or ():
        key = str(taint.get("key", ""))
        drains = taint.get("effect") == "NoExecute" and key not in _NOT_READY
        if drains or key in DRAINS:
            value = f"={taint['value']}" if taint.get("value") else ""
            return Held("drain", f"the machine has the taint {key}{value}"[:_REASON_MAX])
    if spec.get("unschedulable"):
        return Held(cordon_means, "the machine is cordoned")
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            return Held("cordon", f"the machine is not ready: {condition.get('reason', 'unknown')}"[:_REASON_MAX])
    return Held("", "")


def has_taint(node: Mapping[str, Any]) -> bool:
    """Our own."""
    return any(taint.get("key") == TAINT for taint in (node.get("spec") or {}).get("taints") or ())


def taint_patch(node: Mapping[str, Any], *, isolated: bool) -> dict[str, Any]:
    """A merge patch that sets or takes away our taint, and fails where the object has changed since (409)."""
    taints = [taint for taint in (node.get("spec") or {}).get("taints") or () if taint.get("key") != TAINT]
    if isolated:
        taints.append({"key": TAINT, "value": "true", "effect": "NoSchedule"})
    version = (node.get("metadata") or {}).get("resourceVersion")
    return {"metadata": {"resourceVersion": version}, "spec": {"taints": taints or None}}


def condition_patch(*, isolated: bool, reason: str, now: str) -> dict[str, Any]:
    """A strategic merge patch of the status: conditions of other types stay. `now`: RFC 3339."""
    return {
        "status": {
            "conditions": [
                {
                    "type": CONDITION,
                    "status": "True" if isolated else "False",
                    "reason": "Isolated" if isolated else "InService",
                    "message": reason[:_REASON_MAX] or "unicrond gives the node workers",
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": now,
                }
            ]
        }
    }
