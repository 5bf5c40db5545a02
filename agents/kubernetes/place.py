"""The place of the node's Node object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from unicrond.agents.kubernetes.node_object import CordonMeans

#: The directory of a pod's account.
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NodeObject(NamedTuple):
    """The place of the node's Node object. `account`: the directory with `token` and `ca.crt`. `cordon_means`: see
    node_object.py."""

    url: str
    name: str
    account: Path
    cordon_means: CordonMeans


def in_cluster_url(environ: Mapping[str, str] = os.environ) -> str:
    """Return the URL of the API server for pods; "" outside of a cluster."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}" if host else ""
