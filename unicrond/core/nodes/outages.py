"""When many nodes are lost at once: one cause, and no machine to blame. Pure.

Rules
-----
* At least OUTAGE_NODES nodes that fall silent within one heartbeat of each other, and at least one in OUTAGE_PART of
  those that are up, are one outage (a rack, a switch, power): by chance alone as many machines do not fail together.
* Nodes whose agents tell the same *domain* need fewer: two of them, and more than half of those of the domain that are
  up. What follows of a domain that is out, while its outage is held, belongs to it.
* It is one incident (`domain_lost`), and one failure in the failure rate. Nobody is isolated for it: the return of its
  nodes is no flap, and counts for no score.
* The first node at its limit waits for the others that are late, which are at theirs a heartbeat later; for
  longer it waits for nobody. Where fewer are late nobody waits: a single death is found as fast as ever.
* Such nodes most often come back, and together. So the outage is *held*, for `policy.outage_hold_s`: the plan counts on
  them as if they were there. Survivors of their tasks go on at once with what is left; no spare, and no other task's
  worker, takes their place, and no other task moves. A task of which nothing is left, or which has lost its state,
  waits, unless what is left of its plan meets its `min_workers`. Whatever fails by itself meanwhile is healed as ever:
  where that takes a plan, the tasks that were hit keep their seats, those on the lost nodes too (rules/pinning.py).
* They come back as one. Once the first is back, its workers start, and join their group with those of the others that
  come within GATHER_US of each other, GATHER_MAX_US at most, and at once when all are there.
* The hold ends when all are back, or its time is over: then those that are away are lost as any node is, and the next
  plan does without them. They are still awaited together: those that come later are counted in one plan, by the same
  times.

What does not live here: the silence of all nodes (deafness.py), the fold (folding/outages.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from unicrond.core.state.holds import Outage
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, Incident, NodeStatus
from unicrond.events.vocabulary.phrases import abridge, count, to_the_second

#: The fewest nodes of an outage; and it takes one at least of so many that are up.
OUTAGE_NODES, OUTAGE_PART = 3, 3
#: The fewest nodes of one domain that make an outage.
DOMAIN_NODES = 2
#: How long those that are back wait for the next one, and for all of them.
GATHER_US, GATHER_MAX_US = 10_000_000, 60_000_000
#: The most nodes that one line names.
_NAMES_MAX = 4
_SECOND_US = 1_000_000


# --- who is lost together ------------------------------------------------------------------------


def is_outage(silent: int, up: int) -> bool:
    """Return whether so many silent nodes, of those that are up, have one cause."""
    return silent >= OUTAGE_NODES and OUTAGE_PART * silent >= up


def is_domain_lost(silent: int, up: int) -> bool:
    """Return whether so many silent nodes of one domain, of those of it that are up, have one cause."""
    return silent >= DOMAIN_NODES and 2 * silent > up


def waits_for(late: int, overdue: int, up: int) -> bool:
    """Return whether those that are overdue are judged later, together with the others that are late by now."""
    return late > overdue and is_outage(late, up)


class Domains(NamedTuple):
    """The labels of the nodes that are up. `of`: node -> label; `sizes`: label -> nodes. `out`: those whose outage is
    held."""

    of: Mapping[str, str]
    sizes: Mapping[str, int]
    out: Collection[str] = ()


class Loss(NamedTuple):
    """Nodes that are lost together. `joins`: with those that were lost before."""

    domain: str
    nodes: tuple[str, ...]
    joins: bool = False


class Losses(NamedTuple):
    """Nodes to be judged: together, each by itself, or later, with others of their domain."""

    joint: tuple[Loss, ...]
    single: tuple[str, ...]
    later: tuple[str, ...]


def losses(overdue: Mapping[str, int], late: Collection[str], domains: Domains, up: int, expired_us: int) -> Losses:
    """Sort the nodes that are overdue, node -> its silence. `late`: they and those that are late; `up`: how many are
    up. Who has been silent for longer than `expired_us` waits for nobody."""
    if not overdue:
        return Losses((), (), ())
    labels = {domains.of.get(name, "") for name in overdue}
    if is_outage(len(overdue), up):
        label = labels.pop() if len(labels) == 1 else ""
        return Losses((Loss(label, tuple(overdue), joins=label in domains.out),), (), ())
    joint: list[Loss] = []
    later: set[str] = set()
    late_of = Counter(domains.of.get(name, "") for name in late)
    for label in sorted(labels - {""}):
        names = tuple([name for name in overdue if domains.of.get(name) == label])
        size = domains.sizes[label]
        if label in domains.out:
            joint.append(Loss(label, names, joins=True))
        elif late_of[label] > len(names) and is_domain_lost(late_of[label], size):
            if max(overdue[name] for name in names) <= expired_us:
                later.update(names)
            elif is_domain_lost(len(names), size):
                joint.append(Loss(label, names))
        elif is_domain_lost(len(names), size):
            joint.append(Loss(label, names))
    together = {name for loss in joint for name in loss.nodes}
    single = tuple([name for name in overdue if name not in together and name not in later])
    return Losses(tuple(joint), single, tuple([name for name in overdue if name in later]))


# --- what is held for them -----------------------------------------------------------------------


class Absence(NamedTuple):
    """What outages mean for the plan. `absentees`: lost nodes that it counts on; `incoming`: those of them that the
    workers on others of their domain wait for. `arrivals`: nodes that are up, and that it does not count on yet."""

    absentees: frozenset[str] = frozenset()
    incoming: frozenset[str] = frozenset()
    arrivals: frozenset[str] = frozenset()


NOBODY = Absence()


def absence(state: ClusterState, policy: Policy) -> Absence:
    """Return who is awaited, and who comes."""
    if not state.outages:
        return NOBODY
    absentees: set[str] = set()
    incoming: set[str] = set()
    arrivals: set[str] = set()
    for outage in state.outages.values():
        if is_held(outage, policy):
            names = [name for name in outage.away if _may_come(state, name)]
            absentees.update(names)
            incoming.update(names if outage.back else ())
        else:
            arrivals.update(outage.back)
    return Absence(frozenset(absentees), frozenset(incoming), frozenset(arrivals))


def is_held(outage: Outage, policy: Policy) -> bool:
    """Return whether the plan counts on the nodes that are away."""
    return not outage.is_over and policy.outage_hold_s > 0


def is_awaited(state: ClusterState, incident: str, policy: Policy) -> bool:
    """Return whether the incident stays open for nodes that are awaited."""
    outage = state.outages.get(incident)
    return outage is not None and is_held(outage, policy)


def held_domains(state: ClusterState) -> frozenset[str]:
    """Return the domains whose outage is held."""
    domains = [outage.domain for outage in state.outages.values() if not outage.is_over]
    return frozenset(domains) - {""}


def _may_come(state: ClusterState, name: str) -> bool:
    """Return whether the node would carry workers if it were up."""
    node = state.nodes.get(name)
    if node is None or node.status is not NodeStatus.LOST:
        return False
    return not (node.isolation.active or node.cordon.draining or node.departure.announced or node.departure.removal)


def deadlines(state: ClusterState, policy: Policy) -> Iterator[tuple[str, int]]:
    """Yield (id, length in microseconds): `outage:` of a hold, `return:` of those that are back and wait."""
    for name, outage in state.outages.items():
        if not outage.is_over:
            hold_us = int(policy.outage_hold_s * _SECOND_US)
            yield f"outage:{name}", max(0, outage.since_us + hold_us - state.now_us)
        if outage.back:
            left_us = outage.first_back_us + GATHER_MAX_US - outage.last_back_us
            yield f"return:{name}#{outage.last_back_us}", max(0, min(GATHER_US, left_us))


# --- for people ----------------------------------------------------------------------------------


def held_nodes(state: ClusterState) -> frozenset[str]:
    """Return the nodes that are away together, while their outage is held."""
    return frozenset([name for outage in state.outages.values() if not outage.is_over for name in outage.away])


def outage_texts(state: ClusterState) -> dict[str, str]:
    """Return, for each incident whose outage is held, what is away and what is done about it, in words."""
    texts: dict[str, str] = {}
    for incident, outage in state.outages.items():
        if not outage.is_over:
            domain = f" of {outage.domain}" if outage.domain else ""
            away = count(len(outage.away), f"node{domain} is", f"nodes{domain} are")
            since, back = (
                to_the_second(outage.since_us),
                f", {count(len(outage.back), 'is', 'are')} back" if outage.back else "",
            )
            names = abridge(outage.away, _NAMES_MAX)
            texts[incident] = f"{away} away together since {since} ({names}){back}: awaited, nothing takes their place"
    return texts


def outcome(incident: Incident) -> str:
    """Say how many of an outage's nodes are back, and how long it took; "" for any other incident."""
    number = len(incident.nodes)
    if not number or not incident.nodes_back:
        return f"none of {count(number, 'node')} is back" if number else ""
    lasted_s = (incident.back_us - incident.detected_us) / _SECOND_US
    verb = "is" if incident.nodes_back == 1 else "are"
    return f"{incident.nodes_back} of {count(number, 'node')} {verb} back, the last after {lasted_s:.1f} s"
