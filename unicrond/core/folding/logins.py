"""The keys with which the nodes' agents log in, as people have ordered it; the shell passes them to the NATS server."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.state.state import ClusterState, NodeLogin
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope


def node_enrolled(state: ClusterState, event: v.NodeEnrolled, _: Envelope) -> ClusterState:
    """Store the node's key, in place of any earlier one."""
    login = NodeLogin(key=event.key, expires_us=event.expires_us)
    return replace(state, logins={**state.logins, event.node: login})


def node_revoked(state: ClusterState, event: v.NodeRevoked, _: Envelope) -> ClusterState:
    """Remove the node's key. Once it is silent, the node is lost by its missing beats."""
    return replace(state, logins={node: login for node, login in state.logins.items() if node != event.node})


def mark_used(state: ClusterState, node: str) -> ClusterState:
    """Record that the node has joined with its login."""
    login = state.logins.get(node)
    if login is None or login.is_used:
        return state
    return replace(state, logins={**state.logins, node: replace(login, is_used=True)})
