"""With which keys the nodes' agents log in, as people have ordered it; the shell tells the NATS server."""

from __future__ import annotations

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from unicrond.core.state import ClusterState, NodeLogin


def node_enrolled(state: ClusterState, event: v.NodeEnrolled, _: Envelope) -> ClusterState:
    """The key is the node's from now on; another one that it had is not."""
    login = NodeLogin(key=event.key, expires_us=event.expires_us)
    return replace(state, logins={**state.logins, event.node: login})


def node_revoked(state: ClusterState, event: v.NodeRevoked, _: Envelope) -> ClusterState:
    """The node has no key any more. Silent, it is lost by its missing beats."""
    return replace(state, logins={node: login for node, login in state.logins.items() if node != event.node})


def used(state: ClusterState, node: str) -> ClusterState:
    """The node has joined."""
    login = state.logins.get(node)
    if login is None or login.is_used:
        return state
    return replace(state, logins={**state.logins, node: replace(login, is_used=True)})
