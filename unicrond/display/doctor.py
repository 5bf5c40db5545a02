"""Likely problems from what the coordinator knows: each finding with its fix. Pure.

This module judges the state, the health, and the last events; doctor_nodes.py judges the reports of the nodes' agents
about themselves and each other.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from unicrond.core.state.state import ClusterState, Node, NodeStatus
from unicrond.display.alarms import alarm_line
from unicrond.display.cluster_tables import node_status
from unicrond.display.event_lines import EventLine
from unicrond.events.queries.node_checks import Finding

#: Tolerated distances of a node's clock from the log's (seconds). An event takes time to reach the log, so a late one
#: means less.
AHEAD_MAX_S = 0.5
BEHIND_MAX_S = 5.0
#: The fewest events of a node from which its clock is judged.
EVENTS_MIN = 3
_CLOCK = "its clock is"


def findings(state: ClusterState, answer: Mapping[str, Any], events: Sequence[EventLine]) -> list[Finding]:
    """Return the likely problems of the cluster. `answer`: /healthz, with `outbox_backlog`. `events`: the last ones."""
    nodes = sorted((node for node in state.nodes.values() if node.status is not NodeStatus.LEFT), key=lambda n: n.name)
    up = [node for node in nodes if node.status is NodeStatus.UP]
    return [
        *_check_head(answer),
        *_check_presence(nodes),
        *_check_versions(up, state.schema),
        *_check_addresses(up),
        *_check_services(state, up),
        *_check_clocks(events, {node.name for node in up}),
        *_check_backlog(answer.get("outbox_backlog") or {}),
    ]


def _check_head(answer: Mapping[str, Any]) -> Iterator[Finding]:
    if answer.get("status") != "live":
        trouble = answer.get("trouble") or "no further word"
        yield Finding("coordinator", f"{answer.get('status')}: {trouble}", "docs/operate/runbook.md, TROUBLE and ALARM")
    for alarm in answer.get("alarms") or ():
        yield Finding("coordinator", alarm_line(alarm), "docs/operate/runbook.md, TROUBLE and ALARM")


def _check_presence(nodes: Sequence[Node]) -> Iterator[Finding]:
    if not nodes:
        yield Finding("nodes", "none has joined", "start unicron-agent on a node")
    for node in nodes:
        status = node_status(node)
        if status in ("lost", "isolated"):
            symptom = f"is {status}: {node.reason or 'no reason given'}"
            yield Finding(node.name, symptom, f"unicronctl story node {node.name}")
        elif node.slots < node.slots_max:
            symptom = f"has {node.slots} slots, and had {node.slots_max}"
            yield Finding(node.name, symptom, "look for a GPU that is gone (nvidia-smi), or set --slots")


def _check_versions(up: Sequence[Node], schema: int) -> Iterator[Finding]:
    versions: dict[str, list[str]] = defaultdict(list)
    for node in up:
        versions[node.agent.version.partition("+")[0] or "unknown"].append(node.name)
        if node.agent.schema < schema or node.agent.unreadable_commands:
            symptom = f"its agent reads schema {node.agent.schema}, the coordinator writes {schema}"
            yield Finding(node.name, symptom, "upgrade the agent (docs/operate/upgrading.md)")
    if len(versions) > 1:
        shares = "; ".join(f"{version}: {first_names(names)}" for version, names in sorted(versions.items()))
        yield Finding("nodes", f"run several versions: {shares}", "upgrade those that are behind")


def _check_addresses(up: Sequence[Node]) -> Iterator[Finding]:
    at: dict[str, list[str]] = defaultdict(list)
    for node in up:
        at[node.address].append(node.name)
    if len(at) < 2:
        return  # one machine
    for address, names in at.items():
        if _is_loopback(address):
            for name in names:
                symptom = f"says {address}, where no other node reaches it"
                yield Finding(name, symptom, "start its agent with --address and the address that other nodes use")
        elif len(names) > 1:
            symptom = f"{first_names(names)} say the same address, {address}"
            yield Finding("nodes", symptom, "correct --address, unless they are on one machine")


def _check_services(state: ClusterState, up: Sequence[Node]) -> Iterator[Finding]:
    some_keep = any(node.memory for node in up)
    for node in up:
        if some_keep and not node.memory:
            yield Finding(node.name, "takes no copies of states, as other nodes do", "give its agent --memory-gib")
        if state.logins and node.name not in state.logins:
            yield Finding(node.name, "has no key of its own, as other nodes have", f"unicrond enroll {node.name}")


def without_clocks(reports: Iterable[Finding], probed_nodes: Collection[str]) -> list[Finding]:
    """Drop the findings about clocks of `probed_nodes`: the nodes' own answers count instead."""
    return [
        finding for finding in reports if not (finding.problem.startswith(_CLOCK) and finding.about in probed_nodes)
    ]


def _check_clocks(events: Iterable[EventLine], names: set[str]) -> Iterator[Finding]:
    late_s: dict[str, list[float]] = defaultdict(list)
    for event in events:
        producer, observed_us = event.envelope.get("producer"), event.envelope.get("observed_at_us")
        if producer in names and isinstance(observed_us, int):
            late_s[producer].append((event.recorded_at_us - observed_us) / 1e6)
    for name, delays in sorted(late_s.items()):
        least = min(delays)
        if len(delays) >= EVENTS_MIN and not -AHEAD_MAX_S <= least <= BEHIND_MAX_S:
            way = f"ahead of the log's by {-least:.1f} s" if least < 0 else f"behind the log's by up to {least:.1f} s"
            yield Finding(name, f"{_CLOCK} {way}", "run a time service there (chrony)")


def _check_backlog(outbox_backlog: Mapping[str, Mapping[str, float]]) -> Iterator[Finding]:
    for name, backlog in outbox_backlog.items():
        symptom = f"holds back {backlog['entries']:.0f} observations, the oldest for {backlog['oldest_s']:.0f} s"
        yield Finding(name, symptom, "look at its route and login to NATS (journalctl -u unicron-agent)")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def first_names(names: Sequence[str], limit: int = 6) -> str:
    """Join the first few names, and say how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
