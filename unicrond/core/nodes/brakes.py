"""Brakes: how much may be taken out of service without a person. Pure.

Rules
-----
* At most `isolations_per_hour` nodes are isolated within an hour, and at most `isolated_share` of the nodes are out at
  once. Out is what is isolated or lost. Nodes that are lost together, while they are awaited (outages.py), count
  neither as out nor as there: a rack without power does not keep a bad node in service, and of what is left the same
  share may go. One node may be isolated in any cluster, however small.
* Of one task at most `evictions_per_hour` workers are given up on suspicion within an hour: they hang, their group
  breaks again and again, a link of their node is silent. Those that go together, within ROUND_US, are one. The limit is
  a task's own: one whose workers are suspected without end keeps none from healing.
* What a person does neither counts nor is stopped: `cordon`, `drain`, `maintain`, and an isolated node that a person
  has cordoned. Nor does the isolation of a node that is drained, which has been taken out already. `uncordon` of a node
  that is not isolated for a brake takes back what is held against it.
* A worker that has died, or says that it fails, is replaced whatever the brakes say. So is one that does not start, or
  answer its membership, in time.
* Beyond a limit the decision is *held*: it stands in the log once (DecisionHeld), people are told, and the task is
  healed by restarts. Others' slots are preferred for what starts anew, and on the accused node it starts after a
  back-off that doubles with each blow (BACK_OFF_US to BACK_OFF_MAX_US).
* In mode *observe*, of the cluster or of a task, every such decision is held: no node is isolated that carries the
  task or is accused by it, no worker of it is given up on suspicion, the task is not failed, and no plan moves its
  workers (rules/pinning.py). What died is started again in its place, or on a free slot if its node is gone; with the
  same back-off where it would have failed. The newest word on the mode counts, a person's or a changed configuration's.
* A hold ends when the decision is carried out, since the limit allows it again, or is wanted no longer. What the
  machine itself is blamed for stays wanted until the node has been isolated, or a person has answered for it. What a
  bad link asks for does until the link is good: while probes are awaited nothing is decided about it.

What does not live here: who is to be isolated or evicted (deciding/response.py, deciding/links.py), how a hold gets
into the log (deciding/batch.py), its fold (folding/holds.py), where workers go (rules/survey.py, deciding/plans.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unicrond.core.faults import links
from unicrond.core.faults.program_faults import BACK_OFF_MAX_US
from unicrond.core.faults.severity import severity_of
from unicrond.core.state.holds import StandingHold
from unicrond.core.state.state import ClusterState, NodeStatus, Severity, Task, TaskStatus
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.phrases import clean, to_the_second

HOUR_US = 3_600_000_000
#: Workers that are given up within so long go together.
ROUND_US = 10_000_000
BACK_OFF_US = 1_000_000
#: Kinds of incident that are a suspicion: nobody has seen the process fail.
SUSPICIONS = ("hang", "corruption")


class BrakeLimit(NamedTuple):
    """A limit that holds a decision, and how it stands, in words."""

    name: v.HoldLimit
    detail: str


def limit_on(state: ClusterState, event: v.AnyEvent, batch: Sequence[v.AnyEvent] = ()) -> BrakeLimit | None:
    """Return the limit that holds the decision; None where it may be carried out. `batch`: what the same batch does
    already."""
    match event:
        case v.NodeIsolated() if watcher := _watcher_of(state, event.node):
            return BrakeLimit("observe", f"{watcher} is in mode observe")
        case v.TaskFailed() if event.task in state.tasks and observes(state, state.tasks[event.task]):
            return _observe_limit(state, state.tasks[event.task])
        case v.NodeIsolated():
            companions = [e.node for e in batch if isinstance(e, v.NodeIsolated) and not is_drained(state, e.node)]
            return isolation_limit(state, event.node, companions)
        case v.IncidentEscalated() if is_on_suspicion(state, event):
            return eviction_limit(state, state.tasks[event.worker.rpartition(".")[0]])
        case v.WorkersWithdrawn() if event.task in state.tasks:
            return eviction_limit(state, state.tasks[event.task])
    return None


def isolation_limit(state: ClusterState, node: str, companions: Sequence[str] = ()) -> BrakeLimit | None:
    """Return the limit that keeps the node from being isolated. `companions`: those that are isolated with it."""
    if is_drained(state, node):
        return None
    brakes = state.brakes
    recent = len(within_hour(state.isolations_us, state.now_us)) + len(companions)
    if recent >= brakes.isolations_per_hour:
        detail = f"{recent} were isolated within an hour (policy.isolations_per_hour: {brakes.isolations_per_hour})"
        return BrakeLimit("isolations_per_hour", detail)
    awaited = {name for outage in state.outages.values() if not outage.is_over for name in outage.away}
    present = [p for p in state.nodes.values() if p.status is not NodeStatus.LEFT and p.name not in awaited]
    isolations = {peer.name for peer in present if peer.isolation.active and not peer.cordon.active} | {*companions}
    losses = {peer.name for peer in present if peer.status is NodeStatus.LOST and not peer.cordon.active}
    out = (isolations | losses) - {node}
    if isolations and len(out) + 1 > brakes.isolated_share * len(present):
        detail = f"{len(out)} of {len(present)} nodes are out (policy.isolated_share: {brakes.isolated_share:g})"
        return BrakeLimit("isolated_share", detail)
    return None


def is_drained(state: ClusterState, node: str) -> bool:
    """Return whether a person has taken the node out: its isolation costs nobody anything, and counts nowhere."""
    return node in state.nodes and state.nodes[node].cordon.draining


def eviction_limit(state: ClusterState, task: Task) -> BrakeLimit | None:
    """Return the limit that keeps workers of the task from being given up on suspicion."""
    if observes(state, task):
        return _observe_limit(state, task)
    times_us, most = within_hour(task.troubles.evictions_us, state.now_us), state.brakes.evictions_per_hour
    if len(times_us) < most or (times_us and state.now_us - times_us[-1] < ROUND_US):
        return None
    detail = f"workers of {task.name} were evicted {len(times_us)} times within an hour"
    return BrakeLimit("evictions_per_hour", f"{detail} (policy.evictions_per_hour: {most})")


def observes(state: ClusterState, task: Task) -> bool:
    """Return whether decisions that take workers of the task out, or move them, are told and not carried out."""
    return "observe" in (state.mode, task.mode)


def _observe_limit(state: ClusterState, task: Task) -> BrakeLimit:
    watcher = "the cluster" if state.mode == "observe" else f"task {task.name}"
    return BrakeLimit("observe", f"{watcher} is in mode observe")


def _watcher_of(state: ClusterState, node: str) -> str:
    """Return whose mode keeps the node in service: the cluster's, or that of a task that is there or accuses it."""
    if state.mode == "observe":
        return "the cluster"
    for task in state.active:
        if task.mode == "observe" and (task.troubles.names(node) or state.by_node.of_task(node, task.name)):
            return f"task {task.name}"
    return ""


def within_hour(times_us: Sequence[int], now_us: int) -> tuple[int, ...]:
    """Return the times that are less than an hour ago."""
    return tuple([time_us for time_us in times_us if time_us > now_us - HOUR_US])


def with_eviction(task: Task, now_us: int) -> tuple[int, ...]:
    """Return the task's evictions of the last hour with one that happens now."""
    times_us = within_hour(task.troubles.evictions_us, now_us)
    return times_us if times_us and now_us - times_us[-1] < ROUND_US else (*times_us, now_us)


def is_on_suspicion(state: ClusterState, event: v.IncidentEscalated) -> bool:
    """Return whether the worker is given up though nobody has seen it fail."""
    incident = state.incidents.get(event.incident)
    if incident is None or event.worker.rpartition(".")[0] not in state.tasks:
        return False
    return incident.kind in SUSPICIONS or severity_of(incident.kind, state.severity) is Severity.SEV3


# --- holds ---------------------------------------------------------------------------------------


def isolation_hold(state: ClusterState, node: str) -> StandingHold | None:
    """Return the hold on the node's isolation."""
    return state.holds.get(v.hold_key("isolation", node=node)) if state.holds else None


def held_nodes(state: ClusterState) -> tuple[str, ...]:
    """Return the nodes that are in service for a hold alone, in the order of their holds."""
    return tuple([hold.node for hold in state.holds.values() if hold.action == "isolation"])


def stands(state: ClusterState, hold: StandingHold) -> bool:
    """Return whether the hold stands though the decision is not wanted right now: what it accuses the node of is not
    over, or only the next plan says. Blows that are too few for the decision hold nothing that a limit does not."""
    if hold.action == "plan":
        return True
    if hold.action in ("withdrawal", "eviction"):
        return _is_open(state, hold)
    if hold.action != "isolation" or hold.node not in state.nodes or state.nodes[hold.node].isolation.active:
        return False
    blamed = any(i.node == hold.node and i.severity is Severity.SEV1 for i in state.incidents.values())
    if hold.cause == "hardware" or blamed:
        return True
    isolation = v.NodeIsolated(node=hold.node, until_us=None, reason=hold.reason)
    return blows(state, hold.node) > 0 and limit_on(state, isolation) is not None


def _is_open(state: ClusterState, hold: StandingHold) -> bool:
    """Return whether the links that ask for the task to go on without workers are bad still, or probed just now."""
    task = state.tasks.get(hold.task)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return False
    if hold.action == "eviction":
        return hold.worker in task.workers and task.workers[hold.worker].alive and links.is_awaited(task)
    alive = {worker.node for worker in task.workers.values() if worker.alive}
    pairs = [pair for pair in links.among(links.poor_pairs(state), alive) if hold.node in pair]
    return hold.node in alive and (bool(pairs) or links.is_awaited(task))


def blows(state: ClusterState, node: str) -> int:
    """Count what active tasks hold against the node."""
    troubles = [task.troubles for task in state.active]
    return sum([trouble.strikes.get(node, 0) + trouble.breaks.get(node, 0) for trouble in troubles])


def blows_of(state: ClusterState, hold: StandingHold) -> int:
    """Count the blows that the back-off of the hold goes by."""
    if hold.action == "failure":
        return state.tasks[hold.task].troubles.stuck if hold.task in state.tasks else 0
    return blows(state, hold.node) if hold.action == "isolation" else 0


def waits(state: ClusterState, node: str) -> bool:
    """Return whether no worker is started on the node now: its isolation is held, and the back-off is not over."""
    hold = isolation_hold(state, node)
    return hold is not None and blows_of(state, hold) > hold.blows_over


def waits_in_vain(state: ClusterState, task: Task) -> bool:
    """Return whether no worker of the task is started now: it would have failed, and the back-off is not over."""
    hold = state.holds.get(v.hold_key("failure", task=task.name)) if state.holds else None
    return hold is not None and blows_of(state, hold) > hold.blows_over


def start_nodes(missing: Sequence[tuple[str, ...]], nodes: Sequence[str]) -> tuple[str, ...]:
    """Return those of the nodes on which replicas are to start. `missing`: their nodes (reconcile.Staffing)."""
    return tuple([node for node in nodes if any(node in replica for replica in missing)])


def deadlines(state: ClusterState) -> Iterator[tuple[str, int]]:
    """Yield (id, length in microseconds): `hold:` of back-offs on accused nodes; `brake:` of the times from which on a
    limit allows one more."""
    for key, hold in state.holds.items():
        number = blows_of(state, hold)
        if number > hold.blows_over:
            yield f"hold:{key}#{number}", min(BACK_OFF_MAX_US, BACK_OFF_US << min(number - 1, 6))
    for hold in state.holds.values():
        if hold.limit == "isolations_per_hour" and state.isolations_us:
            yield _release("", state.isolations_us[0], state.now_us)
        elif hold.limit == "evictions_per_hour" and hold.task in state.tasks:
            times_us = state.tasks[hold.task].troubles.evictions_us
            if times_us:
                yield _release(hold.task, times_us[0], state.now_us)


def _release(task: str, time_us: int, now_us: int) -> tuple[str, int]:
    return f"brake:{task}#{time_us}", max(0, time_us + HOUR_US - now_us)


# --- for people ----------------------------------------------------------------------------------


def open_holds(state: ClusterState) -> list[StandingHold]:
    """Return the holds that need somebody: not those of a node that has left, which carries nothing. What it is accused
    of is known all the same, should it come back."""
    leavers = {node.name for node in state.nodes.values() if node.status is NodeStatus.LEFT} if state.holds else set()
    return [hold for hold in state.holds.values() if hold.action != "isolation" or hold.node not in leavers]


def hold_text(hold: StandingHold) -> str:
    """Say what is not done, and why it would be."""
    action = v.held_action(hold.action, node=hold.node, task=hold.task, worker=hold.worker)
    limit = "mode observe" if hold.limit == "observe" else f"policy.{hold.limit}"
    return f"{action}: {hold.reason}; held by {limit}"


def remedy(hold: StandingHold) -> str:
    """Return the commands that help a person who is called for the hold."""
    if hold.node:
        return f"unicronctl drain {hold.node}"
    return f"unicronctl describe task {hold.task}" if hold.task else "unicronctl plan show"


def hold_lines(state: ClusterState, *, node: str = "", task: str = "") -> list[str]:
    """Return a line for each hold, or for those that name the node or the task."""
    return [
        clean(f"{hold_text(hold)} since {to_the_second(hold.since_us)}")
        for hold in state.holds.values()
        if (not node or hold.node == node) and (not task or hold.task == task)
    ]


def hold_subject(hold: StandingHold) -> str:
    """Return what an alarm of the hold is about: "isolation.node3", "eviction.big.7", "plan"."""
    parts = (hold.worker,) if hold.worker else (hold.task, hold.node)
    return ".".join(filter(None, (hold.action, *parts)))


def mode_text(state: ClusterState) -> str:
    """Say which tasks are in mode observe; "" where none is."""
    tasks = [task.name for task in state.active if task.mode == "observe"]
    if state.mode != "observe" and not tasks:
        return ""
    names = "" if state.mode == "observe" else f" for {', '.join(tasks)}"
    return f"observe{names}: the head restarts what died, and only says what else it would do"
