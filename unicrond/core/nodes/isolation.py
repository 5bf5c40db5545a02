"""A node's isolation, from NodeIsolated to NodeReadmitted: its states, and what moves it from one to the next. Pure.

Rules
-----
* An isolation for hardware (SEV1 by a code, ECC or NVLink errors; a failure that is predicted; workers that ended there
  again and again) is over when a health check of the node has passed, or a person says so (`unicronctl uncordon`), not
  before. A node that was lost and returned too often rests for a time, as ever; and so does every node under a
  coordinator without checks.
* A node whose hardware needs a reboot or another part (`NodeHealth.needs`, by its vendor's or its driver's word) is not
  even checked before a person or the operator's repair command has been there.
* Each isolation rests first (`isolation_s`, twice as long with each isolation of the node). A failed check, a failed
  repair, and a check whose node or agent went away meanwhile make it rest again, twice as long as before, at most
  2**BACK_OFF_MAX times `isolation_s`: the log grows by a few entries in each.
* Nodes whose agents are too old to run a check are readmitted after a time, as they always were.
* A node that turns out to be innocent is readmitted at any time: the tasks whose workers ended there have failed
  elsewhere too. Not where the hardware itself was blamed.
* A node that was isolated for ends of unknown cause keeps the suspicion when it returns, passed check or not: one more
  such end of that task isolates it again, and ends on two suspected nodes are the task's fault. A person, or the
  failure of that task, clears it.
* None is readmitted while an incident blames it: it would be isolated for that again.

| phase | is | until |
|---|---|---|
| in service | not isolated | NodeIsolated |
| resting | the time is not over | DeadlineExpired `isolation:` |
| awaits a person | it needs hands, without a repair command | NodeUncordoned; a coordinator with such a command |
| in repair | it needs hands; the head runs the repair command | RepairEnded: on to the check, or resting again |
| away | a check is due, and the node is lost or has left | NodeJoined, NodeReturned |
| to be checked | a check is due | CheckNode |
| checking | its agent runs the check | NodeChecked; resting again: failed, too late, another agent, node lost |
| cleared | checked, or pardoned, or its time was all there was | NodeReadmitted |

NodeUncordoned clears a node from each of them.

What does not live here: which nodes are isolated and why (deciding/response.py), the commands' processes
(service/coordinator/repairs.py, agents/health/health_check.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from msgspec.structs import replace

from unicrond.core.state.changes import with_node
from unicrond.core.state.node_parts import Isolation, Probation, Suspicion
from unicrond.core.state.state import ClusterState, Node, NodeStatus, Severity
from unicrond.events import vocabulary as v

#: Doublings of a rest, at most.
BACK_OFF_MAX = 10
#: From the end of a check to its NodeChecked in the log, at most.
ANSWER_US = 15_000_000
#: Needs that only a person, or the operator's command, can meet. Whether a reset has helped shows in the check.
_NEEDS_HANDS: tuple[v.RepairNeed, ...] = ("reboot", "replace", "other")
#: All needs, the worst last.
_NEEDS: tuple[v.RepairNeed, ...] = ("", "reset", "reboot", "other", "replace")
_LIMIT_MAX_S = 86_400.0


class IsolationPhase(StrEnum):
    """See the table above."""

    IN_SERVICE = "in service"
    RESTING = "resting"
    AWAITS_PERSON = "awaits a person"
    IN_REPAIR = "in repair"
    AWAY = "away"
    TO_CHECK = "to be checked"
    CHECKING = "checking"
    CLEARED = "cleared"


def phase(state: ClusterState, node: Node) -> IsolationPhase:
    """Return where the node's isolation stands."""
    if not node.isolation.active:
        return IsolationPhase.IN_SERVICE
    probation = _probation(node)
    if probation.check_passed or probation.pardon:
        return IsolationPhase.CLEARED
    if probation.command_id:
        return IsolationPhase.CHECKING
    if not node.isolation.over:
        return IsolationPhase.RESTING
    if not probation.cause:
        return IsolationPhase.CLEARED
    if needs_hands(node):
        return IsolationPhase.IN_REPAIR if state.repair_limit_us else IsolationPhase.AWAITS_PERSON
    if not state.check_limit_us:
        return IsolationPhase.CLEARED
    return IsolationPhase.TO_CHECK if node.status is NodeStatus.UP else IsolationPhase.AWAY


def needs_hands(node: Node) -> bool:
    """Return whether somebody has to reboot the node or replace a part, and has not yet."""
    return node.health.repair_need in _NEEDS_HANDS and not _probation(node).repaired


def _probation(node: Node) -> Probation:
    return node.isolation.probation or Probation()


def _with_probation(node: Node, probation: Probation) -> Node:
    return replace(node, isolation=replace(node.isolation, probation=probation))


# --- what the fold does --------------------------------------------------------------------------


def limit_us(policy: dict[str, float], name: str) -> int:
    """Return a time limit among a coordinator's numbers, microseconds; 0 where it has none."""
    length_s = policy.get(name, 0.0)
    return int(length_s * 1e6) if 0.0 < length_s <= _LIMIT_MAX_S else 0


def begin(state: ClusterState, node: Node, reason: str) -> Node:
    """Return the node isolated, once more."""
    suspicion = _suspicion(state, node, reason)
    return replace(
        node,
        reason=reason,
        isolation=Isolation(active=True, count=node.isolation.count + 1, probation=_initial_probation(state, node)),
        health=replace(node.health, returns_us=(), suspicion=suspicion),
    )


def _suspicion(state: ClusterState, node: Node, reason: str) -> Suspicion | None:
    tasks = tuple([task.name for task in state.active if task.troubles.names(node.name)])
    old = node.health.suspicion
    if not tasks:
        return old
    count, since_us = (old.count, old.since_us) if old else (0, state.now_us)
    return Suspicion(count=count + 1, since_us=since_us, cause=reason, tasks=tasks)


def without_suspicion(node: Node) -> Node:
    """Return the node, of which nothing is suspected any more."""
    return replace(node, health=replace(node.health, suspicion=None)) if node.health.suspicion else node


def _initial_probation(state: ClusterState, node: Node) -> Probation | None:
    """Return what a node waits for that is isolated now; None: only for a time."""
    return Probation(cause=cause_of(state, node)) if state.check_limit_us else None


def cause_of(state: ClusterState, node: Node) -> str:
    """Return what the node is accused of (Probation.cause)."""
    return "hardware" if node.health.failure_forecast else cause_beside_forecast(state, node)


def cause_beside_forecast(state: ClusterState, node: Node) -> str:
    """Return what the node is accused of by what has happened already; a forecast stands in the node itself."""
    hold = state.holds.get(v.hold_key("isolation", node=node.name))
    if hold is not None and hold.cause == "hardware":
        return "hardware"
    blamed = (i for i in state.incidents.values() if i.severity is Severity.SEV1 and i.kind != "node_lost")
    if any(incident.node == node.name for incident in blamed):
        return "hardware"
    return "strikes" if any(task.troubles.names(node.name) for task in state.tasks.values()) else ""


def with_repair_need(node: Node, needs: v.RepairNeed) -> Node:
    """Return the node with what a driver says its hardware needs; the worst need counts. Said after a repair: it rests
    again."""
    if not needs:
        return node
    if needs in _NEEDS_HANDS and _probation(node).repaired:
        node = replace(node, health=replace(node.health, repair_need=needs))
        return _rest_again(node, f"after the repair it needs {needs} again", 0)
    worst = max(node.health.repair_need, needs, key=_NEEDS.index)
    return replace(node, health=replace(node.health, repair_need=worst))


def check_begun(state: ClusterState, event: v.CheckNode) -> ClusterState:
    """Note that the isolation waits for the answer to this check."""
    node = state.nodes.get(event.node)
    if node is None or not node.isolation.active or node.isolation.probation is None:
        return state
    return with_node(state, _with_probation(node, replace(node.isolation.probation, command_id=event.command_id)))


def node_checked(state: ClusterState, event: v.NodeChecked) -> ClusterState:
    """Fold the outcome of a health check; an answer to another question than the last changes nothing."""
    node = state.nodes.get(event.node)
    if node is None or not _awaits_answer(node, event.command_id):
        return state
    if not event.has_passed:
        return with_node(state, _rest_again(node, f"its check failed: {event.detail}", state.now_us))
    outcome = replace(_probation(node), command_id="", check_passed=True, last=event.detail, last_us=state.now_us)
    return with_node(state, _with_probation(node, outcome))


def check_refused(state: ClusterState, event: v.CommandFailed) -> ClusterState:
    """Let the node rest again: its agent could not run the check that was asked for."""
    node = state.nodes.get(event.node)
    if node is None or not _awaits_answer(node, event.command_id):
        return state
    return with_node(state, _rest_again(node, f"its agent could not check it: {event.reason}", state.now_us))


def check_lost(state: ClusterState, name: str, reason: str) -> ClusterState:
    """Let the node rest again: the agent that was to answer is gone."""
    node = state.nodes.get(name)
    if node is None or not _probation(node).command_id:
        return state
    return with_node(state, _rest_again(node, f"its check had no end: {reason}", state.now_us))


def deadline_passed(state: ClusterState, kind: str, subject: str) -> ClusterState:
    """Fold the end of `isolation:` or `check:`; one that no longer stands changes nothing."""
    node = state.nodes.get(subject.partition("#")[0])
    if node is None or not node.isolation.active or subject != _nth(node):
        return state
    if kind == "isolation":
        return with_node(state, replace(node, isolation=replace(node.isolation, over=True)))
    return check_lost(state, node.name, "no answer came in time")


def repair_ended(state: ClusterState, event: v.RepairEnded) -> ClusterState:
    """Fold the end of this isolation's repair command; one that failed sends the node to rest again."""
    node = state.nodes.get(event.node)
    if node is None or not node.isolation.active or event.isolation != node.isolation.count:
        return state
    if node.isolation.probation is None:
        return state
    if not event.has_passed:
        return with_node(state, _rest_again(node, f"its repair failed: {event.detail}", state.now_us))
    last = f"its repair has done its work: {event.detail}"
    return with_node(state, _with_probation(node, replace(node.isolation.probation, repaired=True, last=last)))


def pardon(state: ClusterState, node: Node, reason: str) -> Node:
    """Return the node after a person has said that it may work again."""
    node = without_suspicion(node)
    if not node.isolation.active or not (state.check_limit_us or node.isolation.probation):
        return node
    return _with_probation(node, replace(_probation(node), pardon=f"a person asked for it: {reason}"))


def end(node: Node) -> Node:
    """Return the node in service again, with nothing held against its hardware."""
    return replace(
        node,
        reason="",
        isolation=Isolation(count=node.isolation.count),
        health=replace(node.health, repair_need="", failure_forecast=""),
    )


def _awaits_answer(node: Node, command_id: str) -> bool:
    return bool(command_id) and _probation(node).command_id == command_id


def _rest_again(node: Node, outcome: str, now_us: int) -> Node:
    probation = _probation(node)
    probation = replace(
        probation,
        attempts=probation.attempts + 1,
        command_id="",
        repaired=False,
        last=outcome[:1024],
        last_us=now_us or probation.last_us,
    )
    return replace(node, isolation=replace(node.isolation, over=False, probation=probation))


# --- deadlines -----------------------------------------------------------------------------------


def deadlines(state: ClusterState, isolated: Iterable[str], isolation_s: float) -> Iterator[tuple[str, int]]:
    """Yield (id, length in microseconds) of every isolated node that rests or is being checked. `isolated`: all that
    are."""
    for name in isolated:
        node = state.nodes[name]
        now = phase(state, node)
        if now is IsolationPhase.RESTING:
            attempts = _probation(node).attempts
            doublings = min(node.isolation.count - 1 + attempts, BACK_OFF_MAX)
            yield f"isolation:{_nth(node)}", int(isolation_s * 2**doublings * 1_000_000)
        elif now is IsolationPhase.CHECKING:
            yield f"check:{_nth(node)}", state.check_limit_us + ANSWER_US


def _nth(node: Node) -> str:
    attempts = _probation(node).attempts
    return f"{node.name}#{node.isolation.count}{f'.{attempts}' if attempts else ''}"


# --- decisions, repairs, text for people ---------------------------------------------------------


def why_cleared(state: ClusterState, node: Node) -> str:
    """Return the reason of a readmission."""
    probation = _probation(node)
    if probation.pardon:
        return probation.pardon[:1024]
    if probation.check_passed:
        return f"its health check passed: {probation.last}"[:1024]
    return "its isolation is over"


class Repair(NamedTuple):
    """A run of the operator's command that is due. `nth`: names it: node, isolation and attempt."""

    nth: str
    node: str
    address: str
    isolation: int
    needs: str
    reason: str


def repairs_due(state: ClusterState, isolated: Iterable[str]) -> list[Repair]:
    """Return the repairs that are due, in the order of nodes. `isolated`: all nodes that are."""
    return [
        Repair(_nth(node), node.name, node.address, node.isolation.count, node.health.repair_need, node.reason)
        for node in (state.nodes[name] for name in isolated)
        if phase(state, node) is IsolationPhase.IN_REPAIR and node.status is not NodeStatus.LEFT
    ]


_WAITS: dict[IsolationPhase, str] = {
    IsolationPhase.RESTING: "rests",
    IsolationPhase.AWAITS_PERSON: "waits for a person: unicronctl uncordon",
    IsolationPhase.IN_REPAIR: "is being repaired",
    IsolationPhase.AWAY: "is to be checked when it is back",
    IsolationPhase.TO_CHECK: "is about to be checked",
    IsolationPhase.CHECKING: "is being checked",
    IsolationPhase.CLEARED: "is about to be readmitted",
}
_HANDS: dict[str, str] = {
    "reboot": "it needs a reboot",
    "replace": "it needs another part",
    "other": "its driver asks for what this version does not know",
}


def waits_for(state: ClusterState, node: Node) -> str:
    """Say, for people, what an isolated node waits for, and how its last check went."""
    now = phase(state, node)
    if now is IsolationPhase.IN_SERVICE:
        return ""
    probation = _probation(node)
    text = _WAITS[now]
    if now is IsolationPhase.RESTING and probation.cause:
        then = IsolationPhase.IN_REPAIR if state.repair_limit_us else IsolationPhase.AWAITS_PERSON
        if not needs_hands(node):
            then = IsolationPhase.TO_CHECK if state.check_limit_us else IsolationPhase.CLEARED
        text += f", then {_WAITS[then].removeprefix('is about to be ')}"
    if needs_hands(node):
        text += f" ({_HANDS[node.health.repair_need]})"
    if probation.attempts:
        text += f"; {probation.attempts} {'attempt' if probation.attempts == 1 else 'attempts'} failed"
    if probation.last:
        text += f"; last: {probation.last}"
    return text
