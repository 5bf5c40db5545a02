"""What is likely to go wrong on and between nodes, from what their agents have seen (service/node_checks.py). Pure.

`seen`: the API's JSON, {"nodes", "facts", "links", "tried", "pairs", "storage", "silent"}.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from unicrond.display.doctor import some
from unicrond.events.queries.finding import Finding, clock_finding

_SILENT = "look at its agent's log (journalctl -u unicron-agent) and its route to NATS"
_OPEN = "open all TCP ports between the nodes of the training network (firewall, route), and look at --address"
_MTU = "try `ping -M do -s SIZE` with the MTU less 28; groups listen on any port, so no port may be closed"
_WRONG = "drain both, and look for a bad network card or memory (unicronctl drain; the health check)"
#: What has to be alike on all nodes: field -> (what it is, the fix).
_ALIKE = {
    "mtu": ("MTUs of the training network", "give all interfaces and switches one MTU: larger packets vanish"),
    "driver": ("GPU drivers", "install one version on all nodes"),
    "torch": ("versions of torch", "install one version on all nodes: their sums and messages may differ"),
}


class Look(NamedTuple):
    """`notes`: what could not be looked at, and why: no finding."""

    findings: list[Finding]
    notes: list[str]


def of_nodes(seen: Mapping[str, Any]) -> Look:
    """All findings of what the agents have seen."""
    storage = [_of_storage(one) for one in seen["storage"]]
    findings = [
        *(Finding(node, f"does not answer: {why}", _SILENT) for node, why in seen["silent"].items()),
        *_of_facts(seen["facts"]),
        *_of_links(seen),
        *(finding for look in storage for finding in look.findings),
    ]
    without = {node: told["no_sums"] for node, told in seen["links"].items() if told["no_sums"]}
    unsummed = [f"sums of {node} with other nodes: {why}" for node, why in without.items()]
    return Look(findings, [*unsummed, *(note for look in storage for note in look.notes)])


def _of_facts(facts: Mapping[str, Any]) -> Iterator[Finding]:
    for node, its in facts.items():
        for about, what, fix in its["findings"]:
            yield Finding(node, f"{about}: {what}", fix)
        yield from clock_finding(node, its["ahead_s"], its["took_s"] / 2, "the head's")
    for field, (what, fix) in _ALIKE.items():
        values: dict[str, list[str]] = defaultdict(list)
        for node, its in facts.items():
            if its[field]:
                values[str(its[field])].append(node)
        if len(values) > 1:
            shares = "; ".join(f"{value}: {some(nodes)}" for value, nodes in sorted(values.items()))
            yield Finding("nodes", f"have several {what}: {shares}", fix)


# --- links ---------------------------------------------------------------------------------------


def _of_links(seen: Mapping[str, Any]) -> Iterator[Finding]:
    """One for each bad link; one for a node that no other reaches, or that reaches no other."""
    links = seen["links"]
    lost = {(node, one["peer"]): one for node, told in links.items() for one in told["unreached"]}
    bad = {_link(link) for link in lost}
    for finding, explains in _cut_off(lost, {node: seen["tried"][node] for node in links}):
        yield finding
        lost = {link: one for link, one in lost.items() if link not in explains}
    for one, other in sorted({_link(link) for link in lost}):
        yield _unreached(one, other, lost)
    for one, other in seen["pairs"]:
        failed = None if _link((one, other)) in bad else _of_sum(one, other, links)
        if failed:
            yield failed


def _cut_off(
    lost: Mapping[tuple[str, str], Any], tried: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Finding, set[tuple[str, str]]]]:
    """Nodes of which several links have been tried, and none is sound one way; with the links that this explains."""
    for node, others in tried.items():
        from_it = [(node, other) for other in others]
        to_it = [(other, node) for other in others if node in tried.get(other, ())]
        into, out = (len(way) > 1 and all(link in lost for link in way) for way in (to_it, from_it))
        if not (into or out):
            continue
        words = "no other node reaches it" if into else "it reaches no other node"
        words = f"{words}, and it reaches none" if into and out else words
        example = lost[to_it[0] if into else from_it[0]]
        explains = {*(to_it if into else ()), *(from_it if out else ())}
        yield Finding(node, f"{words} ({_says(example)})", _OPEN), explains


def _unreached(one: str, other: str, lost: Mapping[tuple[str, str], Any]) -> Finding:
    there, back = lost.get((one, other)), lost.get((other, one))
    if there and back:
        return Finding(f"{one}, {other}", f"do not reach each other ({_says(there)}; {_says(back)})", _OPEN)
    source, target = (one, other) if there else (other, one)
    return Finding(f"{one}, {other}", f"{source} does not reach {target} ({_says(there or back)})", _OPEN)


def _says(unreached: Any) -> str:
    return f"{unreached['what']} at {unreached['at']}: {unreached['why']}"


def _of_sum(one: str, other: str, links: Mapping[str, Any]) -> Finding | None:
    """Connections stand, and a sum fails all the same. What is wrong counts before what only did not end."""
    about = ", ".join(_link((one, other)))
    troubles = [
        (result["trouble"], node)
        for node, peer in ((one, other), (other, one))
        for result in links.get(node, {"sums": ()})["sums"]
        if result["peer"] == peer and result["trouble"]
    ]
    if not troubles or any(links.get(node, {"no_sums": "silent"})["no_sums"] for node in (one, other)):
        return None  # a node that had none to make is told of elsewhere
    wrong = [node for trouble, node in troubles if "wrong" in trouble]
    if wrong:
        return Finding(about, f"a sum of 4 MiB between them is wrong (on {some(wrong)})", _WRONG)
    trouble, node = troubles[0]
    return Finding(about, f"connect, but a sum of 4 MiB between them fails: {trouble} (on {node})", _MTU)


def _link(link: tuple[str, str]) -> tuple[str, str]:
    one, other = sorted(link)
    return one, other


# --- storage -------------------------------------------------------------------------------------


def _of_storage(told: Mapping[str, Any]) -> Look:
    """Whether a task's directory is one and the same on all nodes, and can be written to."""
    about, directory = f"task {told['task']}", told["directory"]
    writer, seen = told["writer"], told["seen"]
    findings = [
        Finding(about, f"{node} cannot write to {its['directory']}: {its['why']}", "look at that node's mount of it")
        for node, its in seen.items()
        if its["result"] == "failed"
    ]
    if not writer:
        refused = [its for its in seen.values() if its["result"] == "refused"]
        if any(its["runs_as_others"] for its in refused):
            unknown = f"{about}: no agent may write to {directory}, so whether all nodes share it is not known"
            return Look(findings, [unknown])
        if refused:
            what = f"no agent may write to {directory}: {refused[0]['why']}"
            findings.append(Finding(about, what, "give the agents' user the right to write there"))
        return Look(findings, [])
    blind = [node for node, its in seen.items() if its["result"] == "missing"]
    if blind:
        verb = "do" if len(blind) > 1 else "does"
        what = f"{some(blind)} {verb} not see what {writer} writes to {seen[writer]['directory']}"
        fix = "mount the same storage there on all nodes, or give the task a checkpoint.dir that all nodes share"
        findings.append(Finding(about, what, fix))
    own = {node: its for node, its in seen.items() if not its["runs_as_others"]}
    locked = [n for n, its in own.items() if its["result"] == "refused" or (n not in blind and not its["writable"])]
    if locked:
        fix = "mount it writable, and give the agents' user the right to write there"
        findings.append(Finding(about, f"{some(locked)} may not write to {directory}", fix))
    return Look(findings, [])
