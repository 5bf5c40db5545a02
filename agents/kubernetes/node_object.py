"""Reads a machine's Node object of Kubernetes, and builds the patches that this cluster writes into it. Pure.

| in the object | is | until |
|---|---|---|
| a taint that drains: NoExecute, or one of DRAINS | a drain | it is removed |
| `spec.unschedulable` (`kubectl cordon`, `kubectl drain`) | as `cordon_means` | `kubectl uncordon` |
| the condition Ready is False | a cordon | it is True |
| the condition Ready is Unknown for UNKNOWN_S (`keeper.py`) | a cordon | it is True |

* The taints that Kubernetes itself sets on a machine that is not ready count as the last row, and nothing more: this
  cluster's own heartbeats detect a machine that is down.
* Unknown says that the API server has not heard of the kubelet, not that anything is wrong with the machine: after an
  outage of the API server it stands on all of them for some seconds.
* An isolation is the taint TAINT (NoSchedule: pods that run stay) and the condition CONDITION. Those of
  others are never touched, and the agent does not read this taint as a drain.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unicrond.events.vocabulary import MachineHold

TAINT = "unicron.dev/isolated"
CONDITION = "UnicronIsolated"
#: NoSchedule taints that announce the removal of the machine.
DRAINS = (
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "node.kubernetes.io/out-of-service",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/spot-itn",
)
#: Taints for a node that is not ready: the condition Ready covers them.
_NOT_READY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_REASON_MAX = 900

CordonMeans = Literal["cordon", "drain"]


class Hold(NamedTuple):
    """Whether Kubernetes drains or cordons the machine, and why; ("", "") where it is in use."""

    hold: MachineHold
    reason: str


def hold_of(node: Mapping[str, Any], cordon_means: CordonMeans) -> Hold:
    """Return the hold that a Node object demands. The strictest counts."""
    spec = node.get("spec") or {}
    for taint in spec.get("taints") or ():
        key = str(taint.get("key", ""))
        drains = taint.get("effect") == "NoExecute" and key not in _NOT_READY
        if drains or key in DRAINS:
            value = f"={taint['value']}" if taint.get("value") else ""
            return Hold("drain", f"the machine has the taint {key}{value}"[:_REASON_MAX])
    if spec.get("unschedulable"):
        return Hold(cordon_means, "the machine is cordoned")
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            return Hold("cordon", f"the machine is not ready: {condition.get('reason', 'unknown')}"[:_REASON_MAX])
    return Hold("", "")


def is_unknown(node: Mapping[str, Any]) -> bool:
    """Return whether nobody has heard of the machine's kubelet of late."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(condition.get("type") == "Ready" and condition.get("status") == "Unknown" for condition in conditions)


def is_marked(node: Mapping[str, Any]) -> bool:
    """Return whether the node's condition says that this cluster has isolated it."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(condition.get("type") == CONDITION and condition.get("status") == "True" for condition in conditions)


def has_taint(node: Mapping[str, Any]) -> bool:
    """Return whether the node has our taint."""
    return any(taint.get("key") == TAINT for taint in (node.get("spec") or {}).get("taints") or ())


def taint_patch(node: Mapping[str, Any], *, isolated: bool) -> dict[str, Any]:
    """Return a merge patch that sets or removes our taint, and fails where the object has changed since (409)."""
    taints = [taint for taint in (node.get("spec") or {}).get("taints") or () if taint.get("key") != TAINT]
    if isolated:
        taints.append({"key": TAINT, "value": "true", "effect": "NoSchedule"})
    version = (node.get("metadata") or {}).get("resourceVersion")
    return {"metadata": {"resourceVersion": version}, "spec": {"taints": taints or None}}


def condition_patch(*, isolated: bool, reason: str, now: str) -> dict[str, Any]:
    """Return a strategic merge patch of the status: conditions of other types stay. `now`: RFC 3339."""
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


def event_about(node: Mapping[str, Any], kind: str, message: str, *, is_warning: bool, now: str) -> dict[str, Any]:
    """Return an Event about the node, which `kubectl describe node` shows. `kind`: its reason, one word. `now`: RFC
    3339."""
    metadata = node.get("metadata") or {}
    name = str(metadata.get("name", ""))
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{name}.", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": name, "uid": str(metadata.get("uid", name))},
        "reason": kind,
        "message": message[:_REASON_MAX],
        "type": "Warning" if is_warning else "Normal",
        "source": {"component": "unicron-agent", "host": name},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


class NodeObject(NamedTuple):
    """Where the machine's Node object is. `url`: of the API server. `account`: the directory with `token` and `ca.crt`.
    `cordon_means`: what `kubectl cordon` is taken for."""

    url: str
    name: str
    account: Path
    cordon_means: CordonMeans
