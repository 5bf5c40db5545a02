"""Logins for pods of Kubernetes as configured: which tokens are exchanged for a node's key."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

#: The node that a pod may be. "machine": it has the machine's name (DaemonSet). "pod": the pod's (StatefulSet).
#: "index": the pod's without its last part, which an indexed Job makes anew for each pod.
NodeOfPod: TypeAlias = Literal["machine", "pod", "index"]
_AccountName: TypeAlias = Annotated[str, Meta(pattern=r"^([a-z0-9.-]{1,253}:)?[a-z0-9.-]{1,253}\Z|^\Z")]


class PodLogins(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Define which pods get the key of their node for their token (service/trust/pod_tokens.py).

    `service_account`: of the agents' pods, NAMESPACE:NAME, or NAME in the head's own namespace; "": no pod gets one.
    `audience`: for which the tokens were made. `unused_h`: a key that is not used so long ends. `url`: the API server,
    "" that of the head's own pod. `account_dir`: the directory with the head's `token`, `ca.crt` and `namespace`.
    """

    service_account: _AccountName = ""
    node: NodeOfPod = "machine"
    audience: Annotated[str, Meta(min_length=1, max_length=253)] = "unicrond"
    unused_h: Annotated[float, Meta(gt=0.0, le=8784.0)] = 1.0
    url: str = ""
    account_dir: str = "/var/run/secrets/kubernetes.io/serviceaccount"
