"""Decide: reconcile the whole state with what should be; `decide(state, solutions, policy) -> decisions`.

Rules
-----
* Level-triggered: nothing is remembered between calls. What is wrong in the state is decided upon; once
  those decisions are folded, decide is quiet. A burst coalesces, a restart needs no memory.
* Pure and quick: plan problems that the state poses (`needed_solves`) are solved elsewhere and handed in.
* What is returned is one batch: a membership and the commands that carry it commit together.
* A regroup never waits for a plan: survivors go on at once, with what they have. Everything else
  (workers to start, to add, to leave) waits for the plan that fits the present nodes and tasks.

Order in one call: escalate incidents, isolate and readmit nodes, fail tasks; adopt a plan; per task regroup,
staff; end what nobody wants; close incidents; pass on ordered faults; where none of this is asked for, learn.

The ladder, for one task's incident; each step is a decision with its reason:
  SEV3  a new generation of the same members; breaks it again before it is calm, `reattempts_max` times -> SEV2
  SEV2  the process ends by itself or is given up, another takes its place; `strikes_max` times -> SEV1
  SEV1  the node is isolated, all tasks get a new plan
  `stuck_max` blows without a new iteration, or two nodes struck: it is the task that fails.
  A broken connection has two ends, either of which may be at fault: three nodes struck then.

A task's membership changes for four reasons:
  a member is gone            -> urgent, without its replica, at once
  the group broke, all live   -> urgent, same members (SEV3 reattempt in place)
  nobody has state            -> all that are ready; state from a checkpoint, or from the seed
  the plan says otherwise     -> planned, at an iteration boundary, when all newcomers are ready
  it is to have another tp, pp -> planned, with no members at all: all hand over at an iteration boundary and park.
                                 When the last has ended the task is described anew, and planned for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import cast

from events import vocabulary as v
from unicrond import memory_places, reconcile
from unicrond.costs import charge_of, sub_health_flops
from unicrond.estimates import corrections, failure_rate
from unicrond.plan_problems import (
    active_tasks,
    basis,
    healthy_problem_of,
    is_fresh,
    present_replicas,
    problem_of,
    worker_mtbf_us,
)
from unicrond.planning.placement import Shape, place
from unicrond.planning.problem import Problem
from unicrond.planning.solver import Solution
from unicrond.policy import Policy
from unicrond.reshaping import is_in_place
from unicrond.severity import RESPONSE
from unicrond.state import (
    ClusterState,
    Incident,
    Node,
    NodeStatus,
    Severity,
    Task,
    TaskStatus,
    Worker,
    WorkerStatus,
)
from unicrond.waf import linear_flops, waf

_SECOND_US = 1_000_000
#: Of two ends the wrong one may have been isolated first, and then the other; a third says that it is the task.
_BROKEN_NODES_MAX = 3
#: What the log's integers hold; a sum beyond it (9.2e18 weighted FLOP/s) is told as this much.
FLOPS_MAX = 2**63 - 1


class Batch:
    """The decisions of one call, with command ids that are unique by construction."""

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self.events: list[v.AnyEvent] = []
        self._numbers: dict[str, int] = {}
        self._started: dict[str, int] = {}
        self.worker_mtbf_us = 0
        self.occupied = reconcile.occupied(state)

    def add(self, event: v.AnyEvent) -> None:
        """Takes a decision into the batch."""
        self.events.append(event)

    def command_id(self, node: str) -> str:
        """The next command id of the node: "term.epoch.node.number"."""
        number = self._numbers.get(node, self.state.nodes[node].commands) + 1
        self._numbers[node] = number
        return f"{self.state.term}.{self.state.plan.epoch}.{node}.{number}"

    def stop(self, task: Task, worker: Worker, reason: str, *, kill: bool = False) -> None:
        """Orders the worker's end, where its node can hear it. `kill`: it may not be able to end itself."""
        node = self.state.nodes.get(worker.node)
        if node is None or node.status is not NodeStatus.UP or worker.status is WorkerStatus.STOPPING:
            return
        self.add(
            v.StopWorker(
                command_id=self.command_id(worker.node),
                node=worker.node,
                epoch=self.state.plan.epoch,
                task=task.name,
                worker=worker.worker,
                reason=reason,
                kill=kill,
            )
        )


def decide(state: ClusterState, solutions: Mapping[Problem, Solution], policy: Policy) -> list[v.AnyEvent]:
    """The decisions that `state` asks for, in order; empty at rest.

    `solutions`: answers to `needed_solves(state, policy)`, as far as they are known.
    """
    batch = Batch(state)
    batch.worker_mtbf_us = worker_mtbf_us(state, policy)
    for incident in state.incidents.values():
        _escalate(batch, incident, policy)
    for task in active_tasks(state):
        _fail_task(batch, task, policy)
    _isolate_nodes(batch, policy)
    _readmit_nodes(batch)
    if batch.events:
        return batch.events  # who may work has changed: plan with that
    fresh = is_fresh(state)
    if not fresh:
        plan = planned(state, solutions, policy)
        if plan is not None:
            batch.add(plan)
    unsettled = [task for task in state.tasks.values() if not _settled(state, task)]
    for task in unsettled:
        if task.status is TaskStatus.ACTIVE and task.reshape is not None:
            _reshape(batch, task, task.reshape)
        elif task.status is TaskStatus.ACTIVE:
            _regroup(batch, task, fresh)
            if fresh:
                _staff(batch, task)
    for task in unsettled:
        _end_unwanted(batch, task)
    serving = memory_places.serving(state)
    for task in state.tasks.values():
        _tell_peers(batch, task, serving)
        _drop_state(batch, task)
    for incident in state.incidents.values():
        _close_incident(batch, incident, fresh)
    _inject(batch)
    if not batch.events and fresh:
        _learn(batch, policy)
    return batch.events


# --- what cannot go on as it is ------------------------------------------------------------------


def _escalate(batch: Batch, incident: Incident, policy: Policy) -> None:
    """A reattempt that has failed, and a process that should have ended but has not: its worker is given up."""
    state = batch.state
    task = state.tasks.get(incident.worker.rpartition(".")[0])
    worker = task.workers.get(incident.worker) if task else None
    if not incident.ripe or task is None or worker is None or not worker.alive:
        return
    if task.status is not TaskStatus.ACTIVE:
        return
    if incident.severity is not Severity.SEV3:
        severity, reason = incident.severity, f"it has reported {incident.kind} and still runs"
    elif task.reattempts >= policy.reattempts_max and incident.generations.get(task.name) == task.generation:
        severity, worker = Severity.SEV2, _suspect(task, incident) or worker
        reason = f"the group broke again, reattempted in place {_times(task.reattempts)}; {_why(task, worker)}"
    else:
        return
    batch.add(
        v.IncidentEscalated(
            incident=incident.id,
            severity=cast(v.SeverityLevel, severity.value),
            worker=worker.worker,
            reason=f"{reason}: {incident.message}"[:1024],
        )
    )


def _suspect(task: Task, incident: Incident) -> Worker | None:
    """Which end of a broken connection is given up: the one whose node was suspected before; else the one whose process
    is older, for it may have been there when others broke with their peers, and a new one was not."""
    ends = [task.workers[name] for name in incident.ends if name in task.workers and task.workers[name].alive]
    return max(ends, key=lambda worker: (task.breaks.get(worker.node, 0), -_number(worker)), default=None)


def _why(task: Task, suspect: Worker) -> str:
    before = task.breaks.get(suspect.node, 0)
    if before:
        return f"its node was one end {_times(before)} before"
    return "it is one end, and the older process"


def _number(worker: Worker) -> int:
    return int(worker.worker.rpartition(".")[2])


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _struck_nodes(task: Task, policy: Policy) -> list[str]:
    return [node for node, count in task.strikes.items() if count >= policy.strikes_max]


def _broken_nodes(task: Task, policy: Policy) -> list[str]:
    return [node for node, count in task.breaks.items() if count >= policy.strikes_max]


def _fail_task(batch: Batch, task: Task, policy: Policy) -> None:
    """The same failure on two nodes is the task's, not the nodes'; and nothing restarts for ever."""
    struck, broken = _struck_nodes(task, policy), _broken_nodes(task, policy)
    if len(struck) < 2 and len(broken) < _BROKEN_NODES_MAX and task.stuck < policy.stuck_max:
        return
    own = [incident for incident in batch.state.incidents.values() if task.name in incident.generations]
    last = own[-1] if own else None
    why = (
        f"its workers failed to restart on {' and '.join(struck)}"
        if len(struck) >= 2
        else f"its groups broke again and again on {', '.join(broken)}"
        if len(broken) >= _BROKEN_NODES_MAX
        else f"struck {task.stuck} times without a new iteration after {task.best_iteration}: its workers ended"
    )
    where = f" ({last.place})" if last and last.place else ""
    tail = f"; last: {last.kind}{where}: {last.message}\n{last.log_tail}" if last else ""
    batch.add(v.TaskFailed(task=task.name, reason=f"{why}{tail}"))


def _at_fault(task: Task, policy: Policy) -> Iterator[tuple[str, str]]:
    """Nodes that the task's failures accuse, and why; none where the task itself is to blame."""
    struck, broken = _struck_nodes(task, policy), _broken_nodes(task, policy)
    if len(struck) == 1:
        times = _times(task.strikes[struck[0]])
        yield struck[0], f"workers of {task.name} ended here {times} without a step between"
    if len(broken) < _BROKEN_NODES_MAX:
        for node in broken:
            given_up = _times(task.breaks[node])
            yield node, f"connections of {task.name} broke here again and again: workers given up for it {given_up}"


def _isolate_nodes(batch: Batch, policy: Policy) -> None:
    state = batch.state
    struck = [found for task in active_tasks(state) for found in _at_fault(task, policy)]
    window_us = int(policy.flap_window_s * _SECOND_US)
    blamed = [i for i in state.incidents.values() if i.severity is Severity.SEV1 and i.kind != "node_lost"]
    accused = {node for node, _ in struck} | {incident.node for incident in blamed}
    flaps_max = policy.flaps_max
    suspects = [node for node in state.nodes.values() if len(node.returns_us) >= flaps_max or node.name in accused]
    for node in suspects:
        if node.isolated or node.status is not NodeStatus.UP:
            continue
        reasons = [reason for name, reason in struck if name == node.name]
        reasons += [incident.message for incident in blamed if incident.node == node.name]
        flaps = [at_us for at_us in node.returns_us if at_us > state.now_us - window_us]
        if len(flaps) >= flaps_max:
            reasons.append(f"flapping: lost and returned {_times(len(flaps))} within {policy.flap_window_s:g} s")
        if reasons:
            batch.add(v.NodeIsolated(node=node.name, until_us=None, reason=reasons[0][:1024]))


def _readmit_nodes(batch: Batch) -> None:
    state = batch.state
    for node in state.nodes.values():
        if not node.isolated:
            continue
        strikers = [task for task in state.tasks.values() if node.name in task.strikes or node.name in task.breaks]
        if node.isolation_over:
            batch.add(v.NodeReadmitted(node=node.name, reason="its isolation is over"))
        elif strikers and all(task.status is TaskStatus.FAILED for task in strikers):
            batch.add(v.NodeReadmitted(node=node.name, reason=f"task {strikers[0].name} was at fault, not the node"))


# --- the plan ------------------------------------------------------------------------------------


def needed_solves(state: ClusterState, policy: Policy) -> list[Problem]:
    """Plan problems that must be solved before `decide` can go on: the plan's, and the healthy cluster's."""
    return [] if is_fresh(state) else [problem_of(state, policy), healthy_problem_of(state)]


def planned(state: ClusterState, solutions: Mapping[Problem, Solution], policy: Policy) -> v.PlanAdopted | None:
    """The plan for the present nodes and tasks, whether it is needed or not; None without its `solutions`."""
    solution, healthy = solutions.get(problem_of(state, policy)), solutions.get(healthy_problem_of(state))
    if solution is None or healthy is None:
        return None
    linear = linear_flops(state)
    active = active_tasks(state)
    shapes = {task.name: Shape(task.spec.tp, task.spec.pp) for task in active}
    counts = {
        task.name: workers // task.spec.replica_workers for task, workers in zip(active, solution.workers, strict=True)
    }
    placed = place(
        counts, shapes, reconcile.capacity(state), {task.name: present_replicas(state, task) for task in active}
    )
    assignments = []
    for task in active:
        replicas = placed.replicas[task.name]
        workers = len(replicas) * task.spec.replica_workers
        if workers < task.spec.min_workers:
            replicas, workers = (), 0  # what could not be seated together is worth nothing
        assignments.append(
            v.TaskAssignment(task=task.name, workers=workers, replicas=replicas, waf=waf(task, workers, linear))
        )
    short = "".join(f"; no seat for {count} replicas of {task}" for task, count in placed.short.items())
    return v.PlanAdopted(
        epoch=state.plan.epoch + 1,
        assignments=tuple(assignments),
        waf=min(sum(assignment.waf for assignment in assignments), FLOPS_MAX),
        basis=basis(state),
        trigger=_trigger(state),
        reason=(solution.reason + short)[:1024],
        healthy={task.name: workers for task, workers in healthy},
        healthy_waf=min(healthy.waf, FLOPS_MAX),
        transition_flop=_transition_flop(solution),
    )


def _transition_flop(solution: Solution) -> float:
    """What the change is expected to cost: what its tasks would have achieved meanwhile."""
    problem = solution.problem
    moved = [task for task, workers in solution if task.faulty or workers != task.workers]
    cost = sum((task.waf(task.workers) * Fraction(problem.transition_of(task)) for task in moved), Fraction(0))
    return float(cost / _SECOND_US)


def _trigger(state: ClusterState) -> str:
    """What changed since the last plan, in words."""
    planned = {node for a in state.plan.assignments.values() for nodes in a.replicas for node in nodes}
    changes = [f"node {n.name} {_why_not(n)}" for n in state.nodes.values() if n.name in planned and not n.schedulable]
    changes += [f"node {n.name} joined" for n in state.nodes.values() if n.joined_us > state.plan.adopted_us]
    changes += [f"task {t.name} reshaped" for t in active_tasks(state) if t.reshaped_us > state.plan.adopted_us]
    changes += [f"node {n.name} cordoned" for n in state.nodes.values() if n.cordoned and n.schedulable]
    active = [task.name for task in active_tasks(state)]
    changes += [f"task {name} launched" for name in active if name not in state.plan.assignments]
    changes += [
        f"task {name} {state.tasks[name].status.value}" for name in state.plan.assignments if name not in active
    ]
    return ", ".join(changes)[:1024] or "nodes changed"


def _why_not(node: Node) -> str:
    """Why the node is not schedulable."""
    if node.status is not NodeStatus.UP:
        return node.status.value
    return "isolated" if node.isolated else "drained"


# --- memberships ---------------------------------------------------------------------------------


def _mend(batch: Batch, task: Task) -> bool:
    """The urgent membership that a broken group asks for; whether it did."""
    current = task.membership.members if task.membership else ()
    living = reconcile.living_members(task)
    if len(living) < len(current):
        # Who was to leave at the next boundary has not left yet: its state and its work still count.
        survivors = living + reconcile.leaving_members(task)
        if any(task.workers[m.worker].status is WorkerStatus.MEMBER for m in survivors):
            gone = len(current) - len(living)
            reason = f"{gone} of {len(current)} members are gone"
            _set_membership(batch, task, survivors, urgent=True, reason=reason)
            return True
    if _with_state(task, living) and _ripe(batch.state, task):
        _set_membership(batch, task, living, urgent=True, reason="the group broke and all members live")
        return True
    return False


def _with_state(task: Task, members: tuple[v.Member, ...]) -> list[v.Member]:
    return [member for member in members if task.workers[member.worker].status is WorkerStatus.MEMBER]


def _regroup(batch: Batch, task: Task, fresh: bool) -> None:
    """At most one new membership for the task (see the reasons above)."""
    if _mend(batch, task) or not fresh:
        return
    current = task.membership.members if task.membership else ()
    living = reconcile.living_members(task)
    with_state = _with_state(task, living)
    staff = reconcile.staffing(batch.state, task)
    if staff.starting:
        return
    wanted = reconcile.members_of(staff.kept)
    if not with_state:
        untried = _places(wanted) != _places(living) or _ripe(batch.state, task)
        if wanted and untried and not staff.missing and not task.leavers:
            source = memory_places.nearest(batch.state, task)
            _set_membership(batch, task, wanted, urgent=True, reason=f"nobody has state: start from {source}")
        return
    if not task.confirmed or task.leavers or _places(wanted) == _places(current):
        return
    if any(_breaks(batch.state, task)):
        return  # who has left the broken group reaches no boundary with who has not noticed: first all meet again
    stay = tuple(member for member in current if member in wanted)
    newcomers = tuple(member for member in wanted if member not in current)
    if len(stay) == len(current) and staff.missing:
        return  # others are still to come: one change for all of them
    if not stay and not newcomers and any(_has_room(batch, nodes) for nodes in staff.missing):
        return  # who is to take the state over is about to be started
    if not stay and newcomers:
        stay = current  # newcomers take state from those who leave afterwards
    target = stay + newcomers
    reason = f"plan {batch.state.plan.epoch}: {len(newcomers)} join, {len(current) - len(stay)} leave"
    _set_membership(batch, task, target, urgent=False, reason=reason)


def _reshape(batch: Batch, task: Task, asked: v.ReshapeRequested) -> None:
    """The next step of a task to another layout: hand over and park, end, be described anew."""
    if is_in_place(task.spec, asked) or task.at_rest:
        fields = ("task", "tp", "pp", "min_workers", "max_workers", "reason")
        batch.add(v.TaskReshaped(**{name: getattr(asked, name) for name in fields}))
        return
    if _mend(batch, task):
        return
    members = task.membership.members if task.membership else ()
    with_state = _with_state(task, reconcile.living_members(task))
    if task.leavers or (with_state and (not task.confirmed or any(_breaks(batch.state, task)))):
        return  # on the way from one group to the next, or about to be
    if members and with_state:
        before, after = (f"tp {form.tp}, pp {form.pp}" for form in (task.spec, asked))
        _set_membership(batch, task, (), urgent=False, reason=f"{before} is to be {after}: all leave", handover=True)
        return
    broken = reconcile.staffing(batch.state, task).broken  # those end anyway, as those that have parked do
    for worker in task.workers.values():
        if worker.can_train and worker.replica not in broken:
            batch.stop(task, worker, "the task is to have another layout")


def _settled(state: ClusterState, task: Task) -> bool:
    """Nothing is to be done for the task: in a large cluster this is nearly every one."""
    if task.reshape is not None:
        return False
    return task.status is TaskStatus.ACTIVE and reconcile.staffing(state, task).settled and not _ripe(state, task)


def _places(members: tuple[v.Member, ...]) -> list[str]:
    return sorted(member.worker for member in members)


def _ripe(state: ClusterState, task: Task) -> bool:
    """The newest generation's group broke, and no death has explained it in time."""
    return any(incident.ripe for incident in _breaks(state, task))


def _breaks(state: ClusterState, task: Task) -> Iterator[Incident]:
    """The incidents in which the newest generation's group broke, as far as is known by itself."""
    for incident in state.incidents.values():
        if incident.severity is Severity.SEV3 and incident.generations.get(task.name) == task.generation:
            yield incident


def _set_membership(
    batch: Batch, task: Task, members: tuple[v.Member, ...], *, urgent: bool, reason: str, handover: bool = False
) -> None:
    state = batch.state
    generation = task.generation + 1
    # A newcomer to a live group has no state; where nobody has any, all are joiners.
    joiners = tuple(m.worker for m in members if task.workers[m.worker].status is not WorkerStatus.MEMBER)
    told = [state.nodes[name] for name in _nodes_to_tell(task, members) if state.nodes[name].status is NodeStatus.UP]
    store = state.nodes[members[0].node].store if members else told[0].store
    peers = memory_places.peers(state, task)
    mtbf_us = batch.worker_mtbf_us // max(1, len(members))
    incidents = [incident.id for incident in state.incidents.values() if task.name in incident.generations]
    batch.add(
        v.MembershipDecided(
            task=task.name,
            generation=generation,
            members=members,
            joiners=joiners,
            urgent=urgent,
            store=store,
            incident=incidents[0] if incidents else "",
            reason=reason,
        )
    )
    for node in told:
        batch.add(
            v.SetMembership(
                command_id=batch.command_id(node.name),
                node=node.name,
                epoch=state.plan.epoch,
                task=task.name,
                generation=generation,
                members=members,
                joiners=joiners,
                urgent=urgent,
                store=store,
                peers=peers,
                mtbf_us=mtbf_us,
                handover=handover,
            )
        )


def _nodes_to_tell(task: Task, members: tuple[v.Member, ...]) -> list[str]:
    """Nodes of the members, and of those whom the change leaves out."""
    nodes = [member.node for member in members]
    nodes += [worker.node for worker in task.workers.values() if worker.status is WorkerStatus.MEMBER]
    return list(dict.fromkeys(nodes))


# --- workers -------------------------------------------------------------------------------------


def _staff(batch: Batch, task: Task) -> None:
    """Starts what is missing where a slot is free; ends what is surplus and in no group."""
    state = batch.state
    staff = reconcile.staffing(state, task)
    worker_number, replica_number = task.next_worker, task.next_replica
    for nodes in staff.missing:
        if not _has_room(batch, nodes):
            continue  # the slot is still another worker's; its end will bring us back
        for shard, node in enumerate(nodes):
            batch.occupied[node] += 1
            batch.add(
                v.StartWorker(
                    command_id=batch.command_id(node),
                    node=node,
                    epoch=state.plan.epoch,
                    spec=task.spec,
                    worker=f"{task.name}.{worker_number}",
                    replica=replica_number,
                    shard=shard,
                    store=state.nodes[nodes[0]].store,
                )
            )
            worker_number += 1
        replica_number += 1
    for workers in staff.surplus.values():
        for worker in workers:
            in_group = worker.status is WorkerStatus.MEMBER
            has_left = task.confirmed and task.membership is not None and task.membership.members
            if not task.is_member(worker.worker) and (not in_group or has_left):
                batch.stop(task, worker, f"plan {state.plan.epoch} needs it no more")


def _has_room(batch: Batch, nodes: tuple[str, ...]) -> bool:
    known = batch.state.nodes
    return all(batch.occupied[n] + nodes.count(n) <= known[n].slots and not known[n].cordoned for n in nodes)


def _end_unwanted(batch: Batch, task: Task) -> None:
    """Strays, workers given up, parked ones, the rest of broken replicas, and all of an ended task."""
    broken = reconcile.staffing(batch.state, task).broken
    for worker in task.workers.values():
        if task.status is not TaskStatus.ACTIVE:
            batch.stop(task, worker, f"task {task.status.value}")
        elif worker.status is WorkerStatus.LOST:
            batch.stop(task, worker, "it was given up", kill=True)
        elif worker.status is WorkerStatus.PARKED:
            batch.stop(task, worker, "it has left its group")
        elif worker.replica in broken:
            batch.stop(task, worker, "another rank of its replica is gone")


# --- incidents -----------------------------------------------------------------------------------


def _close_incident(batch: Batch, incident: Incident, fresh: bool) -> None:
    state = batch.state
    if not fresh:
        return
    for name, broken in incident.generations.items():
        task = state.tasks.get(name)
        if task is not None and task.status is TaskStatus.ACTIVE and not _healed(state, task, broken):
            return
    end_us = incident.resumed_us or state.now_us
    detection_flop, transition_flop = charge_of(state, incident.id)
    batch.add(
        v.TransitionCompleted(
            incident=incident.id,
            response=RESPONSE[incident.severity],
            detection_us=max(0, incident.detected_us - incident.occurred_us),
            transition_us=max(0, end_us - incident.detected_us),
            micro_batches_redone=incident.redone,
            reason=_outcome(state, incident),
            detection_flop=detection_flop,
            transition_flop=transition_flop,
            sub_health_flops=min(sub_health_flops(state), FLOPS_MAX),
        )
    )


def _healed(state: ClusterState, task: Task, broken: int) -> bool:
    """The task has left the broken generation, and has what the plan gives it."""
    assignment = state.plan.assignments.get(task.name)
    if assignment is not None and not assignment.workers:
        return True  # it waits for workers; that is the plan, not the incident
    staff = reconcile.staffing(state, task)
    if staff.missing or staff.starting or not task.confirmed or task.generation <= broken:
        return False
    wanted = reconcile.members_of(staff.kept)
    return task.membership is not None and _places(wanted) == _places(task.membership.members)


def _tell_peers(batch: Batch, task: Task, serving: memory_places.Serving) -> None:
    """Nodes have come or gone since the membership was told: copies go elsewhere from now on."""
    if task.status is not TaskStatus.ACTIVE or not memory_places.peers_are_stale(serving, task) or not task.confirmed:
        return
    peers = memory_places.peers(batch.state, task)
    for name in _nodes_to_tell(task, task.membership.members if task.membership else ()):
        if batch.state.nodes[name].status is NodeStatus.UP:
            batch.add(
                v.SetPeers(
                    command_id=batch.command_id(name),
                    node=name,
                    epoch=batch.state.plan.epoch,
                    task=task.name,
                    peers=peers,
                )
            )


def _drop_state(batch: Batch, task: Task) -> None:
    """The memory that a task's state takes is free again once the task has ended and no process writes to it."""
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


def _outcome(state: ClusterState, incident: Incident) -> str:
    parts = []
    for name in incident.tasks:
        task = state.tasks.get(name)
        if task is None or task.status is not TaskStatus.ACTIVE:
            parts.append(f"{name} {task.status.value if task else 'unknown'}")
        else:
            members = len(task.membership.members) if task.membership else 0
            parts.append(f"{name} goes on with {members} workers in generation {task.generation}")
    if incident.state_from:
        source = _SOURCES.get(incident.state_from, incident.state_from)
        whole = any(state.tasks[name].spec.optimizer.distributed for name in incident.tasks if name in state.tasks)
        what = "whole optimizer state" if whole else "replica"
        parts.append(f"no {what} was left: {incident.iterations_lost} iterations lost, state from {source}")
    return "; ".join(parts)[:1024] or "no task was hit"


_SOURCES = {
    "memory": "a member's node's memory",
    "peer": "another node's memory",
    "checkpoint": "storage",
    "init": "the seed",
}


# --- what the log teaches ------------------------------------------------------------------------


def _learn(batch: Batch, policy: Policy) -> None:
    """At rest: the next plan is to know better (see estimates.py)."""
    for correction in corrections(batch.state):
        batch.add(correction)
    estimate = failure_rate(batch.state, policy)
    if estimate is not None:
        batch.add(estimate)


# --- faults that people order --------------------------------------------------------------------


def _inject(batch: Batch) -> None:
    for name, injection in batch.state.injections.items():
        batch.add(
            v.InjectFault(
                command_id=batch.command_id(injection.node),
                node=injection.node,
                epoch=batch.state.plan.epoch,
                injection=name,
                fault=injection.fault,
            )
        )
