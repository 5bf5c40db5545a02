"""The rules of outages: nobody pays for nodes that were lost together (unicrond/core/nodes/outages.py), and they come
back as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from unicrond.core.faults.program_faults import is_failing
from unicrond.core.nodes.brakes import held_nodes
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, Node, NodeStatus
from unicrond.core.tasks.starvation import ranks
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.placements import expand
from unicrond.events.wire.envelope import RecordedEvent

#: Name -> sentence; part of `invariants.RULES`.
OUTAGE_RULES: dict[str, str] = {
    "outages_move_nobody": "While nodes that were lost together are awaited, no plan moves anybody for that.",
    "outages_accuse_no_node": "No node of an outage is isolated, unless a fault names it.",
    "returns_are_one": "No plan uses a node that is back and waits for the others of its outage.",
}


class OtherCauses(msgspec.Struct, frozen=True):
    """What a plan may be made for besides an outage. `nodes`: all, by name, as they are, and as far as they would be if
    they were up."""

    present: Mapping[str, tuple[object, ...]]
    lasting: Mapping[str, tuple[object, ...]]
    rest: tuple[object, ...]


def other_causes(state: ClusterState) -> OtherCauses:
    """Return the causes that a plan made in this state may have."""
    tasks = [(t.name, t.submitted_seq, t.spec.shape, t.mode, t.troubles, t.reshaping) for t in state.active]
    more = (state.mode, state.links, state.holds, state.plan.revised_for, state.quotas, tuple(ranks(state)))
    nodes = state.nodes.values()
    waiting = {name for outage in state.outages.values() if outage.is_over for name in outage.back}
    return OtherCauses(
        {n.name: (*_lasting(n), n.schedulable and n.name not in waiting, n.agent.boot) for n in nodes},
        {node.name: _lasting(node) for node in nodes},
        (*tasks, *more),
    )


def _lasting(node: Node) -> tuple[object, ...]:
    use = node.cordon.active, node.cordon.draining, node.isolation.active, node.departure.announced
    return node.slots, node.gpu, *use, node.departure.removal, node.status is NodeStatus.LEFT


def members_of_outages(state: ClusterState) -> frozenset[str]:
    """Return the nodes that were lost together and are away, or back before the others."""
    return frozenset([name for outage in state.outages.values() for name in (*outage.away, *outage.back)])


def nodes_given_up(state: ClusterState) -> frozenset[str]:
    """Return the nodes of outages that are awaited no longer."""
    outages = [outage for outage in state.outages.values() if outage.is_over]
    return frozenset([name for outage in outages for name in (*outage.away, *outage.back)])


def outages_move_nobody(
    basis: ClusterState, plan: v.PlanAdopted, before: OtherCauses | None, members: Collection[str], policy: Policy
) -> str:
    """Check a plan. `basis`: the state that it was decided in. `before`: the causes of the plan in force. `members`:
    nodes that were in an outage since that plan, but those whose hold was over: their return is a cause."""
    drained = {node.name for node in basis.nodes.values() if node.cordon.draining}  # awaited no longer
    standing = [
        name
        for name, outage in basis.outages.items()
        if not outage.is_over and policy.outage_hold_s and not drained.issuperset(outage.away)
    ]
    if not standing or len(standing) < len(basis.outages) or before is None:
        return ""
    shares = {share.task: expand(share).replicas for share in plan.assignments}
    old = {name: share.replicas for name, share in basis.plan.assignments.items()}
    suspects, nodes_of_outage = set(held_nodes(basis)), set(members)
    # What starts anew on a node that is accused gets another, if there is one; so do the other nodes of its replica.
    starters = {
        name
        for name, replicas in old.items()
        if any(suspects.intersection(nodes) and nodes_of_outage.intersection(nodes) for nodes in replicas)
    }
    vacancies = {node for name in starters for node in _seats(old[name]) - _seats(shares.get(name, ()))}
    # A task that fails keeps off the nodes where its program fails.
    movers = [
        t.name
        for t in basis.active
        if t.name not in starters
        and not is_failing(t)
        and not _keeps(old.get(t.name, ()), shares.get(t.name, ()), vacancies)
    ]
    if not movers:
        return ""
    now = other_causes(basis)
    if now.rest != before.rest or now.lasting != before.lasting:
        return ""
    if any(now.present[name] != before.present[name] for name in now.present if name not in members):
        return ""
    return f"plan {plan.epoch} moves {', '.join(movers)} for nothing but {', '.join(standing)}: {plan.trigger}"


def _seats(replicas: Sequence[Sequence[str]]) -> Counter[str]:
    return Counter(node for nodes in replicas for node in nodes)


def _keeps(old: Sequence[tuple[str, ...]], new: Sequence[tuple[str, ...]], vacancies: Collection[str]) -> bool:
    """Return whether a task has what it had, and no more but what another has left."""
    more = Counter(new) - Counter(old)
    return not Counter(old) - Counter(new) and all(node in vacancies for nodes in more for node in nodes)


def outages_accuse_no_node(basis: ClusterState, isolated: v.NodeIsolated, touched: Collection[str]) -> str:
    """Check an isolation. `basis`: the state that it was decided in. `touched`: nodes that a fault names."""
    if isolated.node in touched or isolated.node not in members_of_outages(basis):
        return ""
    return f"{isolated.node}, which was lost with others, is isolated: {isolated.reason}"


def returns_are_one(basis: ClusterState, plan: v.PlanAdopted, policy: Policy) -> str:
    """Check a plan. `basis`: the state that it was decided in."""
    gathering = {
        name: incident
        for incident, outage in basis.outages.items()
        for name in (outage.back if outage.is_over or not policy.outage_hold_s else ())
    }
    for assignment in map(expand, plan.assignments):
        for name in (name for nodes in assignment.replicas for name in nodes if name in gathering):
            return f"plan {plan.epoch} uses {name}, which waits for the others of {gathering[name]}"
    return ""


class OutageRecord:
    """Checks every entry by these rules."""

    def __init__(self) -> None:
        self._causes: OtherCauses | None = None
        #: Nodes that were in an outage since the plan in force, and awaited.
        self._members: set[str] = set()

    def on_entry(
        self,
        before: ClusterState,
        states: Sequence[ClusterState],
        entry: RecordedEvent,
        touched: Collection[str],
        policy: Policy,
    ) -> Iterator[tuple[str, str]]:
        """Check an entry that has become durable, and yield (rule, story). `states`: see InvariantChecker."""
        event = entry.envelope.event
        self._members |= members_of_outages(before)
        self._members -= nodes_given_up(before)
        if not entry.envelope.term or entry.envelope.term != before.term:
            return
        basis = states[entry.envelope.based_on]
        match event:
            case v.NodeIsolated():
                yield "outages_accuse_no_node", outages_accuse_no_node(basis, event, touched)
            case v.PlanAdopted():
                story = outages_move_nobody(basis, event, self._causes, self._members, policy)
                yield "outages_move_nobody", story
                yield "returns_are_one", returns_are_one(basis, event, policy)
                self._causes = other_causes(basis)
                self._members = set(members_of_outages(basis) - nodes_given_up(basis))
