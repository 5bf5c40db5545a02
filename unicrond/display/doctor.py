"""What is likely to go wrong, from what the coordinator knows: each finding with its fix. Pure.

It judges the state, the health, and the last events. What the nodes' agents see of themselves and of each other judges
doctor_nodes.py.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from unicrond.core.state.state import ClusterState, Node, NodeStatus
from unicrond.display.cluster_tables import node_status
from unicrond.display.event_lines import EventLine
from unicrond.events.queries.finding import Finding

#: A node's clock may be so far from the log's (seconds). An event takes some time to the log, so late counts less.
AHEAD_MAX_S = 0.5
BEHIND_MAX_S = 5.0
#: Of so few events of a node nothing is concluded about its clock.
EVENTS_MIN = 3
_CLOCK = "its clock is"


def findings(state: ClusterState, answer: Mapping[str, Any], events: Sequence[EventLine]) -> list[Finding]:
    """`answer`: /healthz, with `outbox_backlog`. `events`: the last ones."""
    nodes = sorted((node for node in state.nodes.values() if node.status is not NodeStatus.LEFT), key=lambda n: n.name)
    up = [node for node in nodes if node.status is NodeStatus.UP]
    return [
        *_of_head(answer),
        *_of_presence(nodes),
        *_of_versions(up, state.schema),
        *_of_addresses(up),
        *_of_services(state, up),
        *_of_clocks(events, {node.name for node in up}),
        *_of_outbox_backlog(answer.get("outbox_backlog") or {}),
    ]


def _of_head(answer: Mapping[str, Any]) -> Iterator[Finding]:
    if answer.get("status") != "live":
        trouble = answer.get("trouble") or "no further word"
        yield Finding("coordinator", f"{answer.get('status')}: {trouble}", "docs/operate/runbook.md, TROUBLE and ALARM")
    for alarm in answer.get("alarms") or ():
        yield Finding("coordinator", str(alarm), "docs/operate/runbook.md, TROUBLE and ALARM")


def _of_presence(nodes: Sequence[Node]) -> Iterator[Finding]:
    if not nodes:
        yield Finding("nodes", "none has joined", "start unicron-agent on a node")
    for node in nodes:
        status = node_status(node)
        if status in ("lost", "isolated"):
            what = f"is {status}: {node.reason or 'no reason told'}"
            yield Finding(node.name, what, f"unicronctl story node:{node.name}")
        elif node.slots < node.slots_max:
            what = f"has {node.slots} slots, and had {node.slots_max}"
            yield Finding(node.name, what, "look for a GPU that is gone (nvidia-smi), or set --slots")


def _of_versions(up: Sequence[Node], schema: int) -> Iterator[Finding]:
    versions: dict[str, list[str]] = defaultdict(list)
    for node in up:
        versions[node.version.partition("+")[0] or "unknown"].append(node.name)
        if node.schema < schema or node.unread:
            what = f"its agent reads schema {node.schema}, the coordinator writes {schema}"
            yield Finding(node.name, what, "upgrade the agent (docs/operate/upgrading.md)")
    if len(versions) > 1:
        shares = "; ".join(f"{version}: {some(names)}" for version, names in sorted(versions.items()))
        yield Finding("nodes", f"run several versions: {shares}", "upgrade those that are behind")


def _of_addresses(up: Sequence[Node]) -> Iterator[Finding]:
    at: dict[str, list[str]] = defaultdict(list)
    for node in up:
        at[node.address].append(node.name)
    if len(at) < 2:
        return  # one machine
    for address, names in at.items():
        if _is_loopback(address):
            for name in names:
                what = f"says {address}, where no other node reaches it"
                yield Finding(name, what, "start its agent with --address and the address that other nodes use")
        elif len(names) > 1:
            what = f"{some(names)} say the same address, {address}"
            yield Finding("nodes", what, "correct --address, unless they are on one machine")


def _of_services(state: ClusterState, up: Sequence[Node]) -> Iterator[Finding]:
    some_keep = any(node.memory for node in up)
    for node in up:
        if some_keep and not node.memory:
            yield Finding(node.name, "takes no copies of states, as other nodes do", "give its agent --memory-gib")
        if state.logins and node.name not in state.logins:
            yield Finding(node.name, "has no key of its own, as other nodes have", f"unicrond enroll {node.name}")


def without_clocks(found: Iterable[Finding], asked: Collection[str]) -> list[Finding]:
    """Of nodes that have been asked what time it is, their answers count."""
    return [one for one in found if not (one.what.startswith(_CLOCK) and one.about in asked)]


def _of_clocks(events: Iterable[EventLine], names: set[str]) -> Iterator[Finding]:
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


def _of_outbox_backlog(outbox_backlog: Mapping[str, Mapping[str, float]]) -> Iterator[Finding]:
    for name, kept in outbox_backlog.items():
        what = f"holds back {kept['entries']:.0f} observations, the oldest for {kept['oldest_s']:.0f} s"
        yield Finding(name, what, "look at its route and login to NATS (journalctl -u unicron-agent)")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def some(names: Sequence[str], limit: int = 6) -> str:
    """The first few, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
