"""The rules of judgement: nobody pays for another's program, and no node for its head's trouble. Each is one small
function that returns the story of its breach, or "". `invariants.py` has the other rules, and the table of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

import msgspec
from msgspec.structs import replace

from unicrond.core.nodes.brakes import observes
from unicrond.core.nodes.gpu_types import node_types
from unicrond.core.planning.placement import place
from unicrond.core.state.state import ClusterState, Node, NodeStatus, Task, TaskStatus
from unicrond.core.tasks.reshaping import layouts_of
from unicrond.core.tasks.starvation import ranks
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.placements import expand
from unicrond.replay.simulation.faults.boundary_events import STRANGER

#: Name -> sentence; part of `invariants.RULES`.
JUDGEMENT_RULES: dict[str, str] = {
    "programs_accuse_no_node": "No node is isolated for what a garbage program did.",
    "programs_move_no_others": "No plan moves a task for another's failures, or stops it for one that fails.",
    "members_stay_within_max": "No task has more than max_workers members, but while its state is handed over.",
    "production_goes_first": "No task of a plan stands while those of lower priority have the room for it.",
    "deaf_heads_judge_nobody": "A head that hears none of its nodes loses, isolates and stops nobody.",
    "nodes_are_used": "A healthy node is in use within a minute of being wanted.",
    "observation_moves_nothing": "In mode observe nothing is taken out, and no plan moves living workers.",
    "other_bits_cost_one_check": "A replica's first other bits isolate no node where another task trains; those of a"
    " program that differs here and there one node at most.",
    "brakes_hold": "The coordinator takes no more nodes out than its brakes allow.",
}
#: How long a healthy node may be idle though a task wants it, and how long a handover may take.
USED_WITHIN_S = 60.0
#: Decisions by which somebody loses a node or a worker.
_JUDGEMENTS = (v.NodeIsolated, v.StopWorker, v.IncidentEscalated, v.TaskFailed, v.PlanAdopted, v.MembershipDecided)
HANDED_OVER_WITHIN_S = 30.0
_HOUR_US = 3_600_000_000


class PlanCauses(msgspec.Struct, frozen=True):
    """Hold what may move a task: nodes that may carry workers or are awaited, tasks as they were submitted or changed,
    in which mode each is, whose turn it is, and per task what was measured of it, and its troubles."""

    nodes: tuple[tuple[object, ...], ...]
    tasks: tuple[tuple[object, ...], ...]
    turns: tuple[str, ...]
    lessons: Mapping[str, tuple[object, ...]]

    def without(self, names: Collection[str]) -> PlanCauses:
        """Return the causes but for what these tasks have taught."""
        return replace(self, lessons={name: lesson for name, lesson in self.lessons.items() if name not in names})


def causes_of(state: ClusterState) -> PlanCauses:
    """Return the causes that a plan made in this state may have."""
    nodes = tuple(
        [
            (n.name, n.slots, n.gpu, n.agent.boot, n.schedulable, n.cordon.active, bool(n.departure.removal))
            for n in state.nodes.values()
        ]
    )
    tasks = tuple([(task.name, task.submitted_seq, task.spec.shape, observes(state, task)) for task in state.active])
    lessons = {
        task.name: (task.pace.measurements, task.pace.on_gpus, task.pace.other_layouts, task.troubles)
        for task in state.active
    }
    return PlanCauses(nodes, tasks, tuple(ranks(state)), lessons)


def programs_accuse_no_node(
    basis: ClusterState, isolated: v.NodeIsolated, garbage: Collection[str], touched: Collection[str], *, calm: bool
) -> str:
    """Check an isolation. `basis`: the state that it was decided in. `garbage`: tasks whose programs are garbage.
    `touched`: nodes that a fault names. `calm`: nothing of the cluster has failed."""
    if isolated.node in touched and not calm:
        return ""
    accusers = [task.name for task in basis.tasks.values() if task.troubles.names(isolated.node)]
    if calm or (accusers and all(name in garbage for name in accusers)):
        return f"{isolated.node} is isolated, and only programs are at fault: {isolated.reason}"
    return ""


def programs_move_no_others(
    basis: ClusterState,
    plan: v.PlanAdopted,
    failing: Mapping[str, int],
    before: PlanCauses | None,
    causes: PlanCauses,
) -> str:
    """Check a plan. `basis`: the state that it was decided in. `failing`: how often garbage tasks have failed since
    their last step; what they teach is no cause, and from the second time on they fail without progress. `before`: the
    causes of the plan in force. `causes`: those of this one."""
    shares = {assignment.task: expand(assignment) for assignment in plan.assignments}
    # A task that begins to fail counts as one that leaves: what it had is free for others.
    leaves = any(
        name in basis.plan.assignments and basis.plan.assignments[name].workers > _workers(shares.get(name))
        for name in failing
    )
    unchanged = (
        bool(failing) and not leaves and before is not None and before.without(failing) == causes.without(failing)
    )
    for task in basis.active:
        old, new = basis.plan.assignments.get(task.name), shares.get(task.name)
        workers = _workers(new)
        if task.name in failing or old is None or not old.workers:
            continue
        if unchanged and (new is None or Counter(old.replicas) - Counter(new.replicas)):
            return (
                f"plan {plan.epoch} moves {task.name} ({old.workers} -> {workers}), though nothing but programs failed"
            )
        if workers < min(old.workers, task.spec.min_workers):
            for name in [name for name, failures in failing.items() if failures > 1]:
                rival, share = basis.tasks[name], shares.get(name)
                if share and share.workers >= task.spec.min_workers and rival.spec.priority <= task.spec.priority:
                    return f"plan {plan.epoch} stops {task.name} for {name}, which fails without progress"
    return ""


def other_bits_cost_one_check(
    basis: ClusterState, isolated: v.NodeIsolated, accuser: str, checked: Collection[str]
) -> str:
    """Check an isolation for other bits. `accuser`: the task, with more words where they are not its first. `checked`:
    the nodes that were isolated for a program whose replicas differ here and there, this one as well."""
    neighbours = [
        task.name
        for task in basis.active
        if accuser in basis.tasks
        and task.name != accuser
        and any(w.alive and w.node == isolated.node for w in task.workers.values())
    ]
    if neighbours:
        return f"{isolated.node} is isolated for a replica of {accuser}, though {', '.join(neighbours)} trains there"
    if len(checked) > 1:
        return f"{' and '.join(sorted(checked))} are isolated for {accuser}, whose replicas differ on any node"
    return ""


def brakes_hold(before: ClusterState, basis: ClusterState, node: str, times_us: Collection[int]) -> str:
    """Check an isolation. `before`: the state that it is folded into, `basis`: that it was decided in. `times_us`: all
    isolations so far of nodes that nobody had drained, this one as well."""
    limits = basis.brakes
    if basis.nodes[node].cordon.draining:
        return ""
    recent = [time_us for time_us in times_us if time_us > basis.now_us - _HOUR_US]
    if len(recent) > limits.isolations_per_hour:
        return f"{node} is isolated, the {len(recent)}th within an hour (at most {limits.isolations_per_hour})"
    absentees = {name for outage in basis.outages.values() if not outage.is_over for name in outage.away}
    present = [
        peer
        for peer in basis.nodes.values()
        if peer.status is not NodeStatus.LEFT and peer.name not in {node, *absentees}
    ]
    isolations = {peer.name for peer in before.nodes.values() if peer.isolation.active}
    isolated_peers = [peer.name for peer in present if peer.name in isolations and not peer.cordon.active]
    losses = [peer.name for peer in present if peer.status is NodeStatus.LOST and not peer.cordon.active]
    count, of = len({*isolated_peers, *losses}) + 1, len(present) + 1
    if isolated_peers and count > limits.isolated_share * of:
        return f"{node} is isolated: {count} of {of} nodes are out, at most {limits.isolated_share:g} of them may be"
    return ""


def observation_moves_nothing(basis: ClusterState, event: v.AnyEvent) -> str:
    """Check a decision by the modes of the state that it was decided in."""
    names = [task.name for task in basis.active if "observe" in (basis.mode, task.mode)]
    if not names:
        return ""
    match event:
        case v.NodeIsolated() if basis.mode == "observe":
            return f"{event.node} is isolated while the cluster is observed"
        case v.WorkersWithdrawn(task=name) | v.TaskFailed(task=name) if name in names:
            return f"{type(event).__name__} of {name}, which is observed"
        case v.PlanAdopted():
            shares = {assignment.task: Counter(expand(assignment).replicas) for assignment in event.assignments}
            for name in names:
                task, old = basis.tasks[name], basis.plan.assignments.get(name)
                if old is None or not _is_plain(task) or old.workers > task.spec.max_workers:
                    continue
                if not all(task.spec.shape.fits(nodes) for nodes in old.replicas):
                    continue  # a person has given it another layout
                open_nodes = [nodes for nodes in old.replicas if all(_is_open(basis, node) for node in nodes)]
                if moves := Counter(open_nodes) - shares.get(name, Counter()):
                    return f"plan {event.epoch} moves {name} off {', '.join(map(str, moves))}, which is observed"
    return ""


def _is_open(state: ClusterState, node: str) -> bool:
    return node in state.nodes and state.nodes[node].schedulable and not state.nodes[node].cordon.active


def above_max(state: ClusterState) -> dict[str, str]:
    """Return the tasks with more members than they may have, each with its members."""
    above: dict[str, str] = {}
    for task in state.active:
        members = task.membership.members if task.membership else ()
        if len(members) > task.spec.max_workers:
            above[task.name] = ", ".join(f"{member.worker} on {member.node}" for member in members)
    return above


def members_stay_within_max(above_s: Mapping[str, float], members: Mapping[str, str], within_s: float) -> str:
    """Check for how long tasks have had more members than they may have. `members`: theirs, in words."""
    late = [task for task in members if above_s.get(task, 0.0) >= within_s]
    return "; ".join(f"{task} has too many members for {above_s[task]:.0f} s: {members[task]}" for task in late)


def production_goes_first(basis: ClusterState, plan: v.PlanAdopted, garbage: Collection[str]) -> str:
    """Check whom a plan lets stand. `basis`: the state that it was decided in. `garbage`: tasks that may."""
    shares = {assignment.task: expand(assignment) for assignment in plan.assignments}
    for task in basis.active:
        share = shares.get(task.name)
        if (share and share.workers) or task.name in garbage or not _is_plain(task):
            continue
        lower = [
            name
            for name, other_share in shares.items()
            if other_share.workers
            and name in basis.tasks
            and basis.tasks[name].spec.priority < task.spec.priority
            and "observe" not in (basis.mode, basis.tasks[name].mode)
        ]
        if not lower:
            continue
        free = _free_slots(basis, {name: s for name, s in shares.items() if name not in lower}, uncordoned=True)
        if _fits(basis, task, free, task.spec.min_workers):
            return f"plan {plan.epoch} lets {task.name} (priority {task.spec.priority}) stand for {', '.join(lower)}"
    return ""


def idle_nodes(state: ClusterState, garbage: Collection[str]) -> dict[str, str]:
    """Return the healthy nodes with room that a task below its maximum could use, each with that task."""
    free = _free_slots(state, state.plan.assignments, uncordoned=True)
    idle: dict[str, str] = {}
    for task in state.active:
        share = state.plan.assignments.get(task.name)
        unit = task.spec.replica_workers
        workers = _workers(share)
        if task.name in garbage or not _is_plain(task) or not workers or workers + unit > task.spec.max_workers:
            continue
        replicas, micro_batches = workers // unit, task.spec.micro_batches
        if -(-micro_batches // (replicas + 1)) == -(-micro_batches // replicas):
            continue  # the longest share stays as long
        gpus = {state.nodes[node].gpu for nodes in share.replicas for node in nodes} if share else set()
        near = {name: count for name, count in free.items() if state.nodes[name].gpu in gpus}
        if _fits(state, task, near, unit):
            idle.update({name: task.name for name, count in near.items() if count})
    return idle


def nodes_are_used(idle_s: Mapping[str, float], demand: Mapping[str, str], within_s: float) -> str:
    """Check how long nodes have been idle. `demand`: by node, a task that could use it."""
    late = [node for node in demand if idle_s.get(node, 0.0) >= within_s]
    return "; ".join(f"{node} is idle for {idle_s[node]:.0f} s, and {demand[node]} could use it" for node in late)


def deaf_heads_judge_nobody(basis: ClusterState, event: v.AnyEvent, silenced: Callable[[int], bool]) -> str:
    """Check a decision. `basis`: the state that it was decided in. `silenced`: whether a node whose last beat came then
    was cut off together with all others, which still are. A node that lies, and has joined since, is heard."""
    nodes_up = {node.name for node in basis.nodes.values() if node.status is NodeStatus.UP}
    up = len(nodes_up)
    if up >= 2 and isinstance(event, v.NodeLost) and silenced(event.evidence.beat_at_us):
        stranger = basis.nodes.get(STRANGER)
        if stranger is not None and stranger.joined_us > event.evidence.beat_at_us:
            return ""
        return f"{event.node} is lost, and none of {up} nodes is heard: {event.reason}"
    if up >= 2 and isinstance(event, v.NodesLost) and nodes_up <= set(event.nodes):
        return f"{', '.join(event.nodes)} are lost, and none of {up} nodes is heard: {event.reason}"
    if basis.silence is not None and isinstance(event, _JUDGEMENTS):
        return f"decided while no node is heard: {event.sentence()}"
    return ""


def _workers(share: v.TaskAssignment | None) -> int:
    return share.workers if share is not None else 0


def _is_plain(task: Task) -> bool:
    """Return whether the task has one layout on one type of GPU, so that its workers can be counted."""
    return task.status is TaskStatus.ACTIVE and not (
        task.spec.layouts or task.spec.gpus or task.spec.preemptible or task.reshaping.reshape
    )


def _free_slots(state: ClusterState, shares: Mapping[str, v.TaskAssignment], *, uncordoned: bool) -> dict[str, int]:
    def is_open(node: Node) -> bool:
        """Return whether new workers may start on the node."""
        return node.schedulable and not (uncordoned and node.cordon.active)

    free = Counter({node.name: node.slots for node in state.nodes.values() if is_open(node)})
    for share in shares.values():
        free.subtract(node for nodes in share.replicas for node in nodes)
    return {name: max(0, free[name]) for name, node in state.nodes.items() if is_open(node)}


def _fits(state: ClusterState, task: Task, free: Mapping[str, int], workers: int) -> bool:
    """Return whether so many workers of the task find seats on one type of GPU."""
    types = node_types(state.nodes.values())[1]
    shape = layouts_of(task.spec)[0]
    replicas = -(-workers // shape.workers)
    for gpu in sorted(set(types.values())) or [""]:
        pool = {name: count for name, count in free.items() if types.get(name, "") == gpu}
        if not place({task.name: replicas}, {task.name: shape}, pool, {}).short:
            return True
    return False
