"""Memberships: the workers that train a task from now on, the nodes that must know, and those that keep copies of its
state in memory."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.deciding import response
from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import NodeStatus, Task, TaskStatus, WorkerStatus
from unicrond.core.tasks import memory_places, reconcile
from unicrond.core.tasks.reshaping import change, is_in_place
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.placements import cut, runs_of

#: Kinds of incidents whose group stands still: where its members stand tells why.
HANGS = frozenset({"hang", "collective_timeout"})


def repair_membership(batch: DecisionBatch, task: Task) -> bool:
    """Decide the urgent membership that a broken group needs, and return whether one was decided."""
    current = task.membership.members if task.membership else ()
    living = reconcile.living_members(task)
    if len(living) < len(current):
        # A worker that was to leave at the next boundary has not left yet: its state and its work still count.
        survivors = living + reconcile.leaving_members(task)
        if reconcile.has_state(task):
            dead = len(current) - len(living)
            reason = f"{dead} of {len(current)} members are lost"
            set_membership(batch, task, survivors, urgent=True, reason=reason)
            return True
    if _with_state(task, living) and response.is_reattempted(batch.state, task):
        # A worker that was to leave has not, so its work counts here too.
        stay = living + reconcile.leaving_members(task)
        set_membership(batch, task, stay, urgent=True, reason="the group broke and all members are alive")
        return True
    if _with_state(task, living) and task.group.overdue_generation == task.generation:
        stay = living + reconcile.leaving_members(task)
        set_membership(batch, task, stay, urgent=True, reason="the membership was not met in time")
        return True
    if task.membership is not None and task.group.unread_generation == task.generation and len(living) == len(current):
        urgent, handover = task.membership.urgent, not current
        reason = "a node could not read the membership: sent again in its schema"
        set_membership(batch, task, current, urgent=urgent, reason=reason, handover=handover)
        return True
    return False


def _with_state(task: Task, members: tuple[v.Member, ...]) -> bool:
    """Return whether one of the members has state."""
    return any(task.workers[member.worker].status is WorkerStatus.MEMBER for member in members)


def regroup(batch: DecisionBatch, task: Task, fresh: bool) -> None:
    """Decide at most one new membership for the task (the reasons: `unicrond/core/decide.py`)."""
    if repair_membership(batch, task) or not fresh:
        return
    current = task.membership.members if task.membership else ()
    living = reconcile.living_members(task)
    with_state = _with_state(task, living)
    if with_state and (not task.confirmed or task.leavers):
        return
    staff = batch.survey.staffing(task)
    if staff.starting:
        return
    target_names, names, pending = staff.workers, task.member_names, batch.survey.pending(task)
    if not with_state:
        # Members may wait for others that have ended since: the one that was tried is the membership as it was sent.
        untried = target_names != names or response.is_reattempted(batch.state, task)
        if target_names and untried and not pending and not task.leavers and _suffices(batch, task, target_names):
            reason = f"no member has state: start from {memory_places.nearest(batch.state, task)}"
            set_membership(batch, task, reconcile.members_of(staff.replicas), urgent=True, reason=reason)
        return
    if target_names == names:
        return
    if any(response.breaks(batch.state, task)):
        return  # members that left the broken group meet no boundary with those still in it: first all meet again
    stay = tuple([member for member in current if member.worker in target_names])
    replicas = {task.workers[name].replica for name in target_names.difference(names)}
    seats = reconcile.members_of({number: staff.replicas[number] for number in replicas})
    newcomers = tuple([member for member in seats if member.worker not in names])
    if len(stay) == len(current) and pending:
        return  # others are still to come: one change for all of them
    if not stay and not newcomers and any(batch.has_room(nodes) for nodes in staff.missing):
        return  # the workers that take the state over are about to start
    if not stay and newcomers:
        stay = current  # newcomers take state from the leavers, which leave afterwards
    target = stay + newcomers
    reason = f"plan {batch.state.plan.epoch}: {len(newcomers)} join, {len(current) - len(stay)} leave"
    set_membership(batch, task, target, urgent=False, reason=reason)


def _suffices(batch: DecisionBatch, task: Task, workers: frozenset[str]) -> bool:
    """Return whether the task may begin with these workers: with all that the plan gives it, or, while nodes are
    awaited, with its fewest."""
    return not batch.survey.staffing(task).missing or len(workers) >= task.spec.min_workers


def reshape(batch: DecisionBatch, task: Task, request: v.ReshapeRequested) -> None:
    """Take the next step of a task to another layout: its members hand over and park, the workers end, and the task
    gets its new description."""
    if is_in_place(task.spec, request) or task.at_rest:
        fields = ("task", "min_workers", "max_workers", "reason", "iterations", "lr")
        options = {name: getattr(request, name) for name in fields}
        batch.add(v.TaskReshaped(**options, **request.shape._asdict(), plan=task.reshaping.plan))
        return
    if repair_membership(batch, task):
        return
    members = task.membership.members if task.membership else ()
    with_state = _with_state(task, reconcile.living_members(task))
    if task.leavers or (with_state and (not task.confirmed or any(response.breaks(batch.state, task)))):
        return  # on the way from one group to the next, or about to be
    if members and with_state:
        set_membership(batch, task, (), urgent=False, reason=f"{change(task.spec, request)}: all leave", handover=True)
        return
    broken = batch.survey.staffing(task).broken  # those end anyway, as those that have parked do
    for worker in task.workers.values():
        if worker.can_train and worker.replica not in broken:
            batch.stop(task, worker, "the task gets another layout")


def settled(survey: Survey, task: Task) -> bool:
    """Return whether nothing is to be done for the task. In a large cluster this holds for nearly every task."""
    if task.reshaping.reshape is not None:
        return False
    return task.status is TaskStatus.ACTIVE and survey.settled(task) and not response.is_reattempted(survey.state, task)


def set_membership(
    batch: DecisionBatch,
    task: Task,
    members: tuple[v.Member, ...],
    *,
    urgent: bool,
    reason: str,
    handover: bool = False,
) -> None:
    """Decide the task's next membership, in parts where it is large. `handover`: see MembershipDecided."""
    state = batch.state
    # A newcomer to a live group has no state; where no member has any, all are joiners.
    new = {worker.worker for worker in task.apart if worker.status is not WorkerStatus.MEMBER}
    joiners = frozenset([member.worker for member in members if member.worker in new])
    audience = Audience(batch, task, members)
    incidents = [incident for incident in state.incidents.values() if task.name in incident.generations]
    newest = max(incidents, key=lambda incident: incident.generations[task.name], default=None)
    decision = v.MembershipDecided(
        task=task.name,
        generation=task.generation + 1,
        size=task.spec.replica_workers,
        seats=runs_of(members, joiners, task.spec.replica_workers),
        urgent=urgent,
        store=state.nodes[members[0].node].store if members else audience.nodes[0].store,
        incident=newest.id if newest else "",
        reason=reason,
        peers=memory_places.peers(state, task, batch.survey.targets(task)),
        mtbf_us=batch.survey.worker_mtbf_us // max(1, len(members)),
        handover=handover,
        stop=task.ending.stop,
        leader_confirms=_lead_confirms(task, members, joiners),
        storage_iteration=memory_places.newest_stored(task),
        takes_stacks=urgent and newest is not None and newest.kind in HANGS and not newest.resumed_us,
    )
    for event in split_decision(decision, batch.survey.policy.part_bytes):
        batch.add(event, audience.schemas)


def _lead_confirms(task: Task, members: tuple[v.Member, ...], joiners: frozenset[str]) -> bool:
    """Return whether the lead can confirm the group for all members that keep their state. After a group that did not
    meet, each member confirms for itself: that shows which one is missing."""
    return bool(members) and members[0].worker not in joiners and task.rest_joined


def split_decision(decision: v.MembershipDecided, part_bytes: int) -> list[v.MembershipPart | v.MembershipDecided]:
    """Split a decision that has all its seats into parts; the decision itself comes last, with the last part's
    seats."""
    *parts, last = cut(decision.seats, part_bytes)
    task, generation = decision.task, decision.generation
    return [
        *(v.MembershipPart(task=task, generation=generation, part=n, seats=part) for n, part in enumerate(parts, 1)),
        replace(decision, seats=last, parts=len(parts)),
    ]


def tell_peers(batch: DecisionBatch, task: Task) -> None:
    """Decide anew which nodes take copies, where nodes have joined or left since the membership was sent."""
    if task.status is not TaskStatus.ACTIVE:
        return
    targets = batch.survey.targets(task)
    if not memory_places.peers_are_stale(task, targets) or not task.confirmed:
        return
    peers = memory_places.peers(batch.state, task, targets)
    audience = Audience(batch, task, task.membership.members if task.membership else ())
    batch.add(v.PeersDecided(task=task.name, peers=peers), audience.schemas)


def drop_state(batch: DecisionBatch, task: Task) -> None:
    """Free the memory that holds a task's state, once the task has ended and no process writes to it."""
    if task.status is TaskStatus.ACTIVE or not task.at_rest:
        return
    for node in memory_places.to_drop(batch.state, task):
        batch.add(
            v.DropState(
                command_id=batch.command_id(node.name),
                node=node.name,
                epoch=batch.state.plan.epoch,
                task=task.name,
            )
        )


class Audience:
    """The nodes that a decision about a task's members concerns and that are up: those of `members`, and those of
    members that it leaves out. `schemas`: what they read."""

    def __init__(self, batch: DecisionBatch, task: Task, members: tuple[v.Member, ...]) -> None:
        all_nodes = batch.state.nodes
        names = [member.node for member in members]
        names += [worker.node for worker in task.workers.values() if worker.status is WorkerStatus.MEMBER]
        self.nodes = [node for name in dict.fromkeys(names) if (node := all_nodes[name]).status is NodeStatus.UP]
        self.schemas = [node.agent.schema for node in self.nodes]
