"""Blame: which node is at fault for broken connections, from the reports of all that noticed.

Rules
-----
* The reports are a set: their order says nothing, nor does the first one.
* Evidence is a *link*: two nodes, one of which has lost the other. A member that notices leaves the group and so ends
  all its connections: the loss of a member that has reported the break, and not this loss, may be the *echo* of that.
  (An agent of an older version reports a break, and no loss.) An echo only decides between explanations that are
  equal otherwise, and where there is nothing but echoes nothing is clear.
* The best explanation is the fewest nodes that have an end in every link. A node with bad links to all others is one,
  two bad nodes of five are two, a bad switch is its smaller side. More than half of the nodes explain nothing.
* Of explanations of one size: the nodes that were ends more often, in this break and since the last calm, of links to
  *different* peers (`Troubles.ends`: no echoes); else those of more echoes in this break; else those without whom the
  better state trains on (a live one, then the newest that is kept); else those without whom the first by name does.
* An explanation is *clear* if no other has its size, or none is an end half as often, or the links are those between
  two sides of several nodes: then it is the way between them, and one side has to go on alone. Of several links that
  one node alone has reported nothing is clear: they may be echoes of members that left and have not reported yet.
* Where no member knows which peer it has lost: two replicas have lost each other; of more there is no evidence, and
  nothing is clear.

What follows from it (which worker is given up, which node isolated) is decided in `deciding/response.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from unicrond.core.state.state import Incident, Task, WorkerStatus

#: Two nodes, the first by name first.
Link: TypeAlias = tuple[str, str]
#: How good the state of a node is: whether it is live, and the newest iteration that is kept there.
Quality: TypeAlias = tuple[int, int]
PLAIN, ECHO = 2, 1
#: How much better than all others an explanation must be to be clear.
_CLEARLY = 2
#: The steps that are spent in search of other explanations of the same size; fewer where each looks at more links than
#: 64 nodes can have.
_LOOKS_MAX = 10_000
_LINKS_OF_64 = 64 * 63 // 2


class BlameVerdict(NamedTuple):
    """The nodes at fault, by name, and those of them whose fault is clear."""

    blamed: tuple[str, ...] = ()
    clear: tuple[str, ...] = ()


def verdict(task: Task, incident: Incident) -> BlameVerdict:
    """Return whose fault it is that the task's group broke."""
    losses, nodes = reports(task, incident), {worker.worker: worker.node for worker in task.workers.values()}
    broken = links(losses, nodes)
    result = judge(broken, task.troubles.ends, {node: _quality(task, node) for link in broken for node in link})
    reporters = {nodes[name] for name, peers in losses.items() if peers and name in nodes}
    return result if len(broken) < 2 or len(reporters) > 1 else result._replace(clear=())


def evidence(task: Task, incident: Incident) -> dict[str, int]:
    """Return what the break adds to `Troubles.ends`: per node, the links that it is an end of."""
    broken = links(reports(task, incident), {worker.worker: worker.node for worker in task.workers.values()})
    return dict(sorted(weights(broken).items()))


def reports(task: Task, incident: Incident) -> dict[str, tuple[str, ...]]:
    """Return, per member that reported the break, the peers that it had lost; () where it does not know."""
    losses = {name: incident.links.get(name) or ((peer,) if peer else ()) for name, peer in incident.lost_peers.items()}
    members = task.membership.members if task.membership else ()
    if not any(losses.values()) and incident.kind == "connection_broken":
        placements = {member.worker: member for member in members}
        if len({member.replica for member in members}) == 2:
            for name in [name for name in losses if name in placements]:
                peers = [m.worker for m in members if m.shard == placements[name].shard and m.worker != name]
                losses[name] = tuple(peers)
    return losses


def links(losses: Mapping[str, Sequence[str]], nodes: Mapping[str, str]) -> dict[Link, int]:
    """Return the broken links, and whether each may be an echo (ECHO or PLAIN). `nodes`: by worker; losses of other
    workers are left out."""
    broken: dict[Link, int] = {}
    for reporter, peers in losses.items():
        for peer in peers:
            if reporter not in nodes or peer not in nodes or nodes[reporter] == nodes[peer]:
                continue
            first, second = sorted((nodes[reporter], nodes[peer]))
            weight = ECHO if peer in losses and reporter not in losses[peer] else PLAIN
            broken[first, second] = max(weight, broken.get((first, second), 0))
    return broken


def judge(broken: Mapping[Link, int], record: Mapping[str, int], quality: Mapping[str, Quality]) -> BlameVerdict:
    """Return the best explanation of these links. `record`: Troubles.ends; `quality`: of the state on each of their
    ends."""
    plain, certain = _plain(broken), PLAIN in broken.values()
    echoes = Counter(node for link in broken if link not in plain for node in link)
    score = {node: record.get(node, 0) + weight for node, weight in weights(broken).items()}
    blamed: list[str] = []
    clear: list[str] = []
    for part in _parts(plain):
        ends = _ends(part)
        covers = _smallest_covers(part)
        if not covers:  # nearly all are broken: the one that stands out, if one does
            covers = [frozenset([node]) for node in ends]
        scores = {cover: sum(score[node] for node in cover) for cover in covers}

        def goodness(cover: frozenset[str], ends: list[str] = ends, scores: dict = scores) -> tuple:  # type: ignore[type-arg]
            """Return the sort key of an explanation: the best one has the smallest."""
            remaining = [node for node in ends if node not in cover]
            echo = sum(echoes[node] for node in cover)
            return -scores[cover], -echo, [-n for n in max(quality.get(node, (0, 0)) for node in remaining)], remaining

        best, *rivals = sorted(covers, key=goodness)
        blamed += best
        sides = len(best) > 1 and len(part) == len(best) * (len(ends) - len(best))
        if certain and (sides or all(scores[best] >= _CLEARLY * scores[rival] for rival in rivals)):
            clear += best
    return BlameVerdict(tuple(sorted(blamed)), tuple(sorted(clear)))


def _quality(task: Task, node: str) -> Quality:
    live = any(worker.node == node and worker.status is WorkerStatus.MEMBER for worker in task.workers.values())
    return int(live), max((copy.iteration for copy in task.copies.holdings.values() if copy.node == node), default=0)


def _plain(broken: Mapping[Link, int]) -> frozenset[Link]:
    """Return the links that are no echo; all, if there are no others."""
    return frozenset(link for link, weight in broken.items() if weight == PLAIN) or frozenset(broken)


def weights(broken: Mapping[Link, int]) -> Counter[str]:
    """Return, per node, the links that it is an end of, as they are remembered: no echoes where there is anything
    else."""
    totals: Counter[str] = Counter()
    for link in _plain(broken):
        for node in link:
            totals[node] += broken[link]
    return totals


def _ends(part: frozenset[Link]) -> list[str]:
    return sorted({node for link in part for node in link})


def _parts(plain: frozenset[Link]) -> Iterator[frozenset[Link]]:
    """Yield the links that are connected, directly or through others, one component at a time."""
    remaining = set(plain)
    while remaining:
        ends = set(min(remaining))
        while more := {link for link in remaining if (link[0] in ends) != (link[1] in ends)}:
            ends |= {node for link in more for node in link}
        part = frozenset(link for link in remaining if link[0] in ends)
        yield part
        remaining -= part


def _smallest_covers(part: frozenset[Link]) -> list[frozenset[str]]:
    """Return all smallest sets of nodes with an end in every link, of at most half of the nodes; none if they need
    more."""
    most = len(_ends(part)) // 2
    covers: set[frozenset[str]] = set()
    open_ways: list[tuple[frozenset[str], frozenset[Link]]] = [(frozenset(), part)]
    for _ in range(_LOOKS_MAX * _LINKS_OF_64 // max(len(part), _LINKS_OF_64)):
        if not open_ways:
            break
        cover, uncovered = open_ways.pop()
        if len(cover) > most:
            continue
        if not uncovered:
            if len(cover) < most:
                most, covers = len(cover), set()
            covers.add(cover)
            continue
        degrees = Counter(node for link in uncovered for node in link)
        busiest = min(degrees, key=lambda node: (-degrees[node], node))
        peers = {node for link in uncovered if busiest in link for node in link} - {busiest}
        # Each link of the busiest is explained by it, or each by its other end.
        for choice in (peers, {busiest}):
            rest = frozenset(link for link in uncovered if not choice & {*link})
            open_ways.append((cover | choice, rest))
    return sorted(covers, key=sorted)
