"""Likely problems on and between nodes, from the checks of their agents (service/api/node_checks.py). Pure.

`answers`: the API's JSON, {"nodes", "facts", "links", "tried", "pairs", "storage", "silent"}.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from unicrond.display.doctor import first_names
from unicrond.events.queries.node_checks import Finding, clock_finding

_SILENT = "look at its agent's log (journalctl -u unicron-agent) and its route to NATS"
_OPEN = "open all TCP ports between the nodes of the training network (firewall, route), and look at --address"
_MTU = "try `ping -M do -s SIZE` with the MTU less 28; groups listen on any port, so no port may be closed"
_WRONG = "drain both, and look for a bad network card or memory (unicronctl drain; the health check)"
#: Facts that must be the same on all nodes: field -> (its name, the fix).
_UNIFORM_FACTS = {
    "mtu": ("MTUs of the training network", "give all interfaces and switches one MTU: larger packets vanish"),
    "driver": ("GPU drivers", "install one version on all nodes"),
    "torch": ("versions of torch", "install one version on all nodes: their sums and messages may differ"),
}


class NodeDiagnosis(NamedTuple):
    """Findings about nodes. `notes`: checks that could not be made, and why; these are no findings."""

    findings: list[Finding]
    notes: list[str]


def diagnose_nodes(answers: Mapping[str, Any]) -> NodeDiagnosis:
    """Return all findings that follow from the agents' answers."""
    storage = [_check_storage(check) for check in answers["storage"]]
    findings = [
        *(Finding(node, f"does not answer: {reason}", _SILENT) for node, reason in answers["silent"].items()),
        *_check_facts(answers["facts"]),
        *_check_links(answers),
        *(finding for look in storage for finding in look.findings),
    ]
    without = {node: link["no_sums"] for node, link in answers["links"].items() if link["no_sums"]}
    unsummed = [f"sums of {node} with other nodes: {reason}" for node, reason in without.items()]
    return NodeDiagnosis(findings, [*unsummed, *(note for look in storage for note in look.notes)])


def _check_facts(facts: Mapping[str, Any]) -> Iterator[Finding]:
    for node, answer in facts.items():
        for about, symptom, fix in answer["findings"]:
            yield Finding(node, f"{about}: {symptom}", fix)
        yield from clock_finding(node, answer["ahead_s"], answer["took_s"] / 2, "the head's")
    for field, (subject, fix) in _UNIFORM_FACTS.items():
        values: dict[str, list[str]] = defaultdict(list)
        for node, answer in facts.items():
            if answer[field]:
                values[str(answer[field])].append(node)
        if len(values) > 1:
            shares = "; ".join(f"{value}: {first_names(nodes)}" for value, nodes in sorted(values.items()))
            yield Finding("nodes", f"have several {subject}: {shares}", fix)


# --- links ---------------------------------------------------------------------------------------


def _check_links(answers: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each bad link; only one for a node that no other reaches, or that reaches no other."""
    links = answers["links"]
    unreached = {
        (node, failure["peer"]): failure for node, report in links.items() for failure in report["unreachable_ports"]
    }
    bad = {_sorted_pair(link) for link in unreached}
    for finding, explains in _unreachable_nodes(unreached, {node: answers["tried"][node] for node in links}):
        yield finding
        unreached = {link: failure for link, failure in unreached.items() if link not in explains}
    for node, other_node in sorted({_sorted_pair(link) for link in unreached}):
        yield _broken_link(node, other_node, unreached)
    for node, other_node in answers["pairs"]:
        sum_finding = None if _sorted_pair((node, other_node)) in bad else _check_sum(node, other_node, links)
        if sum_finding:
            yield sum_finding


def _unreachable_nodes(
    unreached: Mapping[tuple[str, str], Any], targets: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Finding, set[tuple[str, str]]]]:
    """Yield nodes of which several links have been tried and none works in one direction, with the links that this
    explains."""
    for node, peers in targets.items():
        from_it = [(node, peer) for peer in peers]
        to_it = [(peer, node) for peer in peers if node in targets.get(peer, ())]
        into, out = (len(links) > 1 and all(link in unreached for link in links) for links in (to_it, from_it))
        if not (into or out):
            continue
        words = "no other node reaches it" if into else "it reaches no other node"
        words = f"{words}, and it reaches none" if into and out else words
        example = unreached[to_it[0] if into else from_it[0]]
        explains = {*(to_it if into else ()), *(from_it if out else ())}
        yield Finding(node, f"{words} ({_failure_text(example)})", _OPEN), explains


def _broken_link(node: str, peer: str, unreached: Mapping[tuple[str, str], Any]) -> Finding:
    forward, backward = unreached.get((node, peer)), unreached.get((peer, node))
    if forward and backward:
        return Finding(
            f"{node}, {peer}", f"do not reach each other ({_failure_text(forward)}; {_failure_text(backward)})", _OPEN
        )
    source, target = (node, peer) if forward else (peer, node)
    return Finding(f"{node}, {peer}", f"{source} does not reach {target} ({_failure_text(forward or backward)})", _OPEN)


def _failure_text(unreached: Any) -> str:
    return f"{unreached['service']} at {unreached['address']}: {unreached['reason']}"


def _check_sum(first: str, second: str, links: Mapping[str, Any]) -> Finding | None:
    """Return a finding where connections work but a sum fails, else None. A wrong sum counts before one that only did
    not end."""
    about = ", ".join(_sorted_pair((first, second)))
    troubles = [
        (result["trouble"], node)
        for node, peer in ((first, second), (second, first))
        for result in links.get(node, {"sums": ()})["sums"]
        if result["peer"] == peer and result["trouble"]
    ]
    if not troubles or any(links.get(node, {"no_sums": "silent"})["no_sums"] for node in (first, second)):
        return None  # a node that had no sum to make is reported elsewhere
    wrong = [node for trouble, node in troubles if "wrong" in trouble]
    if wrong:
        return Finding(about, f"a sum of 4 MiB between them is wrong (on {first_names(wrong)})", _WRONG)
    trouble, node = troubles[0]
    return Finding(about, f"connect, but a sum of 4 MiB between them fails: {trouble} (on {node})", _MTU)


def _sorted_pair(link: tuple[str, str]) -> tuple[str, str]:
    node, peer = sorted(link)
    return node, peer


# --- storage -------------------------------------------------------------------------------------


def _check_storage(check: Mapping[str, Any]) -> NodeDiagnosis:
    """Return findings about a task's directory: whether it is the same on all nodes, and can be written to."""
    about, directory = f"task {check['task']}", check["directory"]
    writer, answers = check["writer"], check["seen"]
    findings = [
        Finding(
            about,
            f"{node} cannot write to {answer['directory']}: {answer['reason']}",
            "look at that node's mount of it",
        )
        for node, answer in answers.items()
        if answer["result"] == "failed"
    ]
    if not writer:
        refused = [answer for answer in answers.values() if answer["result"] == "refused"]
        if any(answer["runs_as_others"] for answer in refused):
            unknown = f"{about}: no agent may write to {directory}, so whether all nodes share it is not known"
            return NodeDiagnosis(findings, [unknown])
        if refused:
            symptom = f"no agent may write to {directory}: {refused[0]['reason']}"
            findings.append(Finding(about, symptom, "give the agents' user the right to write there"))
        return NodeDiagnosis(findings, [])
    blind = [node for node, answer in answers.items() if answer["result"] == "missing"]
    if blind:
        verb = "do" if len(blind) > 1 else "does"
        symptom = f"{first_names(blind)} {verb} not see what {writer} writes to {answers[writer]['directory']}"
        fix = "mount the same storage there on all nodes, or give the task a checkpoint.dir that all nodes share"
        findings.append(Finding(about, symptom, fix))
    own_user = {node: answer for node, answer in answers.items() if not answer["runs_as_others"]}
    locked = [
        n
        for n, answer in own_user.items()
        if answer["result"] == "refused" or (n not in blind and not answer["writable"])
    ]
    if locked:
        fix = "mount it writable, and give the agents' user the right to write there"
        findings.append(Finding(about, f"{first_names(locked)} may not write to {directory}", fix))
    return NodeDiagnosis(findings, [])
