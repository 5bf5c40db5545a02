"""What the trainers' statistics point to: hangs, damaged parameters, programs that diverge, and slow members.
People see these stragglers; no decision depends on them: their own groups deal them less."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from unicrond.core.faults import local_faults
from unicrond.core.faults.hangs import is_stale, judge
from unicrond.core.folding import holds, incidents
from unicrond.core.folding.incidents import Fact
from unicrond.core.nodes import brakes
from unicrond.core.state.changes import find_worker, has_trained, with_task
from unicrond.core.state.ordered_map import put
from unicrond.core.state.state import ClusterState, Task, TaskStatus, Worker
from unicrond.core.state.task_parts import ProgramDivergence, Straggler
from unicrond.core.state.workers import Membership
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope

#: The signs of corruption that convict a replica, where enough others say so, and what it does then.
_CONVICTING: Mapping[v.CorruptionSign, str] = {
    "checksum": "has other parameters than the other replicas before iteration {iteration}",
    "micro_batch": "computes other gradients from the same micro-batch than the other replicas",
}

#: On so many nodes others must have computed something else before a conviction speaks against the suspect's.
_NODES_MIN = 2


def hang_suspected(state: ClusterState, event: v.HangSuspected, envelope: Envelope) -> ClusterState:
    """Record that one worker is late; when the members' suspicions agree on a verdict, that is an incident."""
    pair = find_worker(state, event.task, event.worker)
    if pair is None or not pair[1].alive or pair[0].status is not TaskStatus.ACTIVE:
        return state
    task, worker = pair
    newest = event.generation == task.generation and task.is_member(worker.worker)
    # The group before a planned membership works until the boundary; where all members leave, until they have left.
    at_work = event.generation in task.in_use or worker in task.leavers
    before = bool(event.report_number) and at_work and task.generation_of(worker) == event.generation
    if not (newest or before) or is_stale(task, event):
        return state
    task = _with_suspicions(task, put(task.group.suspicions, worker.worker, event))
    verdict = judge(task, event.generation)
    if verdict is None:
        return with_task(state, task)
    state = with_task(state, _with_suspicions(task, {}))
    if verdict.stuck:
        fact = Fact(
            kind="collective_timeout",
            node=worker.node,
            worker=worker.worker,
            generations={task.name: event.generation},
            message=verdict.reason,
            occurred_us=envelope.observed_at_us,
            place=f"iteration {event.iteration}, {event.phase}",
            lost_peers={worker.worker: ""},
        )
        return incidents.blame(state, fact)
    for culprit in verdict.culprits:
        since_us = max(0, envelope.observed_at_us - culprit.still_us)
        failure = f"hangs in {culprit.phase} of iteration {culprit.iteration}: {verdict.reason}"
        state = holds.suspect(state, task.name, task.workers[culprit.worker], "hang", failure, since_us)
    return state


def _with_suspicions(task: Task, suspicions: Mapping[str, v.HangSuspected]) -> Task:
    return replace(task, group=replace(task.group, suspicions=suspicions))


def corruption_suspected(state: ClusterState, event: v.CorruptionSuspected, envelope: Envelope) -> ClusterState:
    """Evict a worker whose parameters differ from the majority's, once more than half of all replicas have said so:
    that is more than a suspicion. Replicas of a program that diverges differ, whatever their nodes are like."""
    pair = find_worker(state, event.task, event.suspect)
    if event.sign not in _CONVICTING or pair is None or not pair[1].alive or pair[0].status is not TaskStatus.ACTIVE:
        return state
    task, worker = pair
    if event.generation != task.generation or not task.is_member(worker.worker) or task.troubles.program_diverges:
        return state
    before, accusers = task, task.group.accusations.get(worker.worker, {}) | {event.worker: event.iteration}
    task = replace(task, group=replace(task.group, accusations=task.group.accusations | {worker.worker: accusers}))
    if not _is_convicted(task, worker.worker, event.iteration):
        return with_task(state, task)
    failure = _CONVICTING[event.sign].format(iteration=event.iteration)
    if _speaks_against_node(before, task, worker, event.iteration) and brakes.eviction_limit(state, task) is None:
        task = local_faults.convicted(task, worker, f"its replica {failure}", state.now_us)
    state = with_task(state, task)
    return holds.suspect(state, task.name, worker, "corruption", failure, envelope.observed_at_us)


def divergence_observed(state: ClusterState, event: v.DivergenceObserved, _: Envelope) -> ClusterState:
    """Record that the program of an active task diverges, once more than half of its replicas say so since the same
    iteration. It stays so: what is trained from then on is not what the program alone would train."""
    pair = find_worker(state, event.task, event.worker)
    if pair is None or pair[0].status is not TaskStatus.ACTIVE:
        return state
    task, worker = pair
    divergence = task.troubles.divergence
    if divergence is not None and (divergence.is_programs or event.sign == divergence.sign):
        return state
    if event.generation != task.generation or not task.is_member(worker.worker):
        return state
    reports = put(task.group.divergence_reports, worker.worker, (event.iteration, event.sign))
    task = replace(task, group=replace(task.group, divergence_reports=reports))
    if task.membership is not None and _most_agree(reports, task.membership, event):
        divergence = ProgramDivergence(since_iteration=event.iteration, sign=event.sign, at_us=state.now_us)
        task = replace(task, troubles=replace(task.troubles, divergence=divergence))
    return with_task(state, task)


def _most_agree(
    reports: Mapping[str, tuple[int, v.DivergenceSign]], membership: Membership, event: v.DivergenceObserved
) -> bool:
    """Return whether members of more than half of the replicas name the event's iteration and sign."""
    replicas = membership.replica_count
    if 2 * len(reports) <= replicas:  # what each report of many costs
        return False
    report = event.iteration, event.sign
    agreeing = {member.replica for member in membership.members if reports.get(member.worker) == report}
    return 2 * len(agreeing) > replicas


def _speaks_against_node(before: Task, after: Task, suspect: Worker, iteration: int) -> bool:
    """Return whether the conviction is its replica's first in this iteration, the replica stands on one node, and its
    accusers stand on others, two at least: two replicas of one node may be wrong alike. `before`, `after`: without the
    last accusation and with it."""
    members = after.membership.members if after.membership else ()
    seat = next(member for member in members if member.worker == suspect.worker)
    replica = [member for member in members if member.replica == seat.replica]
    if {member.node for member in replica} != {seat.node}:
        return False
    accusers = after.group.accusations[suspect.worker]
    nodes = {member.node for member in members if accusers.get(member.worker) == iteration}
    if len(nodes - {seat.node}) < _NODES_MIN:
        return False
    suspects = [member.worker for member in replica if member.worker in before.group.accusations]
    return not any(_is_convicted(before, name, iteration) for name in suspects)


def _is_convicted(task: Task, suspect: str, iteration: int) -> bool:
    """Return whether enough replicas accuse the suspect before the same iteration: more than half of all replicas of
    the task, the suspect among them, whoever speaks. So no innocent is evicted unless most replicas lie, and of two
    neither's word is enough. A replica has one vote, that of its worker with the suspect's shard, which alone has the
    same parameters to compare."""
    members = task.membership.members if task.membership else ()
    shard = next((member.shard for member in members if member.worker == suspect), None)
    peers = {member.worker for member in members if member.shard == shard} - {suspect}
    accusers = task.group.accusations[suspect]
    votes = sum(accusers.get(peer) == iteration for peer in peers)
    replicas = len(peers) + 1
    return 2 * votes > replicas


def straggler_observed(state: ClusterState, event: v.StragglerObserved, _: Envelope) -> ClusterState:
    """Record that a member is slower than the others, by `factor`; its start is that of its first report."""
    pair = find_worker(state, event.task, event.straggler)
    if pair is None or pair[0].status is not TaskStatus.ACTIVE or not pair[0].is_member(event.straggler):
        return state
    task, worker = pair
    if not has_trained(task, event.worker):
        return state
    before = task.group.stragglers.get(event.straggler)
    straggler = Straggler(
        worker=worker.worker,
        node=worker.node,
        factor=event.factor,
        compute_us=event.compute_us,
        others_us=event.others_us,
        since_iteration=before.since_iteration if before else event.since_iteration,
        since_us=before.since_us if before else event.since_us,
        deal=event.deal,
    )
    return with_task(state, _with_stragglers(task, task.group.stragglers | {straggler.worker: straggler}))


def straggler_recovered(state: ClusterState, event: v.StragglerRecovered, _: Envelope) -> ClusterState:
    """Record that the member is as fast as the others again."""
    task = state.tasks.get(event.task)
    if task is None or event.straggler not in task.group.stragglers or not has_trained(task, event.worker):
        return state
    rest = {name: straggler for name, straggler in task.group.stragglers.items() if name != event.straggler}
    return with_task(state, _with_stragglers(task, rest))


def keep_members(task: Task) -> Task:
    """Drop the stragglers that are members of the task no longer."""
    if not task.group.stragglers:
        return task
    members = task.member_names
    return _with_stragglers(
        task, {name: straggler for name, straggler in task.group.stragglers.items() if name in members}
    )


def _with_stragglers(task: Task, stragglers: dict[str, Straggler]) -> Task:
    return replace(task, group=replace(task.group, stragglers=stragglers))
