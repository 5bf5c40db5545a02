"""Decisions about whole tasks: plans, memberships, and the estimates that plans are based on."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.faults import blame
from unicrond.core.folding import commands, incidents
from unicrond.core.folding import failure_counts as strikes
from unicrond.core.folding.suspicions import keep_members
from unicrond.core.nodes import gpu_types
from unicrond.core.state.changes import with_task
from unicrond.core.state.node_links import LinkProbing
from unicrond.core.state.state import ClusterState, Membership, Plan, Task, TaskStatus
from unicrond.core.state.task_parts import LEADS_MAX, Lead
from unicrond.core.tasks import starvation as turns
from unicrond.core.tasks.reshaping import reshape_of_plan
from unicrond.core.worth import evidence
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.placements import (
    PartialMembership,
    add_part,
    broadcast_seats,
    expand,
    joiners_of,
    members_of,
)
from unicrond.events.wire.envelope import Envelope


def plan_adopted(state: ClusterState, event: v.PlanAdopted, _: Envelope) -> ClusterState:
    """Put the plan in force, if its epoch is the next one."""
    if event.epoch != state.plan.epoch + 1:
        return state
    plan = Plan(
        epoch=event.epoch,
        assignments={assignment.task: expand(assignment) for assignment in event.assignments},
        waf=event.waf,
        basis=event.basis,
        trigger=event.trigger,
        reason=event.reason,
        adopted_us=state.now_us,
        healthy=event.healthy,
        waf_if_healthy=event.waf_if_healthy,
        transition_flop=event.transition_flop,
        method=event.method,
        duration_us=event.duration_us,
        rows_reused=event.rows_reused,
        healthy_gpus=event.healthy_gpus,
        gap_ppm=event.gap_ppm,
    )
    state = turns.plan_adopted(replace(state, plan=plan), event)
    for assignment in event.assignments:
        state = _request_layout(state, assignment, event.epoch)
    return state


def _request_layout(state: ClusterState, assignment: v.TaskAssignment, epoch: int) -> ClusterState:
    """Request the layout that the plan chose for the task, or drop what an older plan requested. A person's request
    stands."""
    task = state.tasks.get(assignment.task)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    if task.reshaping.reshape is not None and not task.reshaping.plan:
        return state
    request = reshape_of_plan(task.spec, assignment, epoch)
    if request is None and task.reshaping.reshape is None:
        return state
    reshaping = replace(task.reshaping, reshape=request, plan=epoch if request else 0)
    return with_task(state, replace(task, reshaping=reshaping))


def membership_part(state: ClusterState, event: v.MembershipPart, envelope: Envelope) -> ClusterState:
    """Store a part of the task's next membership until the decision follows (events/vocabulary/placements.py)."""
    task = state.tasks.get(event.task)
    return (
        state
        if task is None
        else _with_telling(state, task, add_part(task.group.membership_parts, event, envelope.term))
    )


def drop_partial_memberships(state: ClusterState) -> ClusterState:
    """Drop the parts of memberships that an earlier term has left incomplete."""
    for task in state.tasks.values():
        state = _with_telling(state, task, None)
    return state


def _with_telling(state: ClusterState, task: Task, telling: PartialMembership | None) -> ClusterState:
    """Return the state with `telling` as the partial membership of the task; None drops it."""
    if task.group.membership_parts is telling:
        return state
    return with_task(state, replace(task, group=replace(task.group, membership_parts=telling)))


def membership_decided(state: ClusterState, event: v.MembershipDecided, envelope: Envelope) -> ClusterState:
    """Set the task's membership, if its generation is the next one and all its parts are present."""
    task = state.tasks.get(event.task)
    if task is None:
        return state
    seats = broadcast_seats(task.group.membership_parts, event, envelope.term)
    state = _with_telling(state, task, None)
    task = state.tasks[event.task]
    if seats is None:
        return state
    members, joiners = members_of(event.task, seats, event.size), joiners_of(event.task, seats)
    if event.generation != task.generation + 1:
        return state
    membership = Membership(
        generation=event.generation,
        members=members,
        joiners=joiners,
        urgent=event.urgent,
        store=event.store,
        decided_us=state.now_us,
        leader_confirms=event.leader_confirms,
    )
    again = event.urgent and task.membership is not None and task.membership.members == members
    if again:
        task = _count_evidence(state, task)
    group_nodes = {member.node for member in members}
    group = replace(
        task.group,
        formed_after=task.progress.iteration,
        reattempts=task.group.reattempts + 1 if again else 0,
        suspicions={},
        accusations={},
        divergence_reports={},
        leads=_leads(task, membership),
        lead_confirmed=False,
        last_membership=task.membership if task.group.lead_confirmed else task.group.last_membership,
        # Answers of probes say as much of the next group; of a node that is in none of it no answer is awaited.
        probing=LinkProbing(
            orders={node: order for node, order in task.group.probing.orders.items() if node in group_nodes},
            ordered_us=task.group.probing.ordered_us,
            # The same members take as long as before, were their links as they were.
            usual_us=task.group.probing.usual_us if again else 0,
        ),
    )
    task = replace(task, pace=evidence.pace_at_regroup(task, state.now_us))
    task = gpu_types.on_type(task, gpu_types.of_members(state, members) if members else task.pace.gpu)
    pace = replace(evidence.put_in_force(task.pace, state.now_us), timings=(), warm_up_reports=0)
    state = with_task(state, keep_members(replace(task, membership=membership, group=group, pace=pace)))
    return commands.with_peers(state, event.task, event.peers)


def _leads(task: Task, membership: Membership) -> tuple[Lead, ...]:
    """Return the leads of the generations that may still report, with the new one's."""
    since = task.progress.committed_generation
    leads = [lead for lead in task.group.leads if lead.generation >= since]
    if membership.members:
        first = membership.members[0]
        leads.append(Lead(generation=membership.generation, worker=first.worker, node=first.node))
    return tuple(leads[-LEADS_MAX:])


def peers_decided(state: ClusterState, event: v.PeersDecided, _: Envelope) -> ClusterState:
    """Set the nodes that take copies of the task's state."""
    return commands.with_peers(state, event.task, event.peers)


def _count_evidence(state: ClusterState, task: Task) -> Task:
    """Count the evidence against nodes of a break that is reattempted in place."""
    for incident in state.incidents.values():
        if incidents.is_symptom(incident) and incident.links and incident.generations.get(task.name) in task.in_use:
            task = strikes.count_ends(task, blame.evidence(task, incident))
    return task


def throughput_corrected(state: ClusterState, event: v.ThroughputCorrected, _: Envelope) -> ClusterState:
    """Record the FLOP/s that an active task was measured to achieve with so many workers, and on which nodes; or that
    what had been measured counts less by now."""
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    pace = evidence.pace_after(task, event, state.now_us)
    if event.asks_for_plan:
        pace = replace(pace, revised_us=state.now_us)
        state = replace(state, plan=replace(state.plan, basis="", revised_for=task.name))
    return with_task(state, replace(task, pace=pace))


def failure_rate_estimated(state: ClusterState, event: v.FailureRateEstimated, _: Envelope) -> ClusterState:
    """Record the mean time between failures of one worker, in microseconds."""
    return replace(state, worker_mtbf_us=event.worker_mtbf_us)
