"""The proof that a task heals: one of its workers is killed, by a person's order, and what follows is watched. Pure.

Rules
-----
* A person asks for it (`unicronctl prove TASK`, `submit --prove`). The fault is ordered once the task trains in peace
  (`missing`), and it is one SIGKILL of one worker: of the last rank, which leads no group. It is held against nobody.
* It never happens where no worker would be given up on suspicion either: in mode observe, or beyond the limit of
  evictions. Nor beside another incident, or a decision about the task that is held.
* The task is armed when the worker has been seen to end by the signal, the task has committed an iteration without it,
  then one with as many workers as it is to have, and one more, in which all replicas have compared the parameters that
  came of that one. Where they differ the program diverges, and the task is not armed.
* That replicas agree says that the bits are those of a run without the fault where `numerics` is fixed. Of one replica,
  or without UNICRON_CHECKSUM_EVERY, nobody compares bits.

What does not live here: how a worker is killed (agents/core/commands.py), how the task heals (deciding/response.py).
"""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.nodes import brakes
from unicrond.core.state.changes import with_task
from unicrond.core.state.state import ClusterState, NodeStatus, Task, TaskStatus
from unicrond.core.state.task_parts import HealingProof
from unicrond.events import vocabulary as v

#: Begins the name of the fault of a proof, before that of its task.
_PREFIX = "proof:"
#: Iterations of the present group before the fault, and iterations that must be left for what follows.
_CALM_ITERATIONS, _LEFT_ITERATIONS = 3, 10
_NO_CHECKSUMS = ("UNICRON_CHECKSUM_EVERY", "0")
_SIGKILL = 9


# --- the order -------------------------------------------------------------------------------------


def missing(state: ClusterState, task: Task) -> str:
    """Return why the task's fault is not ordered yet, in words; "" where nothing is in its way."""
    progress, membership = task.progress, task.membership
    if membership is None or not membership.members or not task.confirmed or not _is_whole(state, task):
        return "its workers are not all in one group"
    if task.reshaping.reshape is not None:
        return "it is being reshaped"
    if limit := brakes.eviction_limit(state, task):
        return limit.detail
    if any(hold.task == task.name or hold.worker in task.workers for hold in state.holds.values()):
        return "a decision about it is held"
    if any(task.name in incident.generations for incident in state.incidents.values()):
        return "an incident of it is open"
    if task.troubles.program_diverges:
        return "its program diverges"
    if progress.iteration - task.group.formed_after < _CALM_ITERATIONS:
        return f"its group has committed fewer than {_CALM_ITERATIONS} iterations"
    if task.spec.iterations - progress.iteration < _LEFT_ITERATIONS:
        return f"fewer than {_LEFT_ITERATIONS} iterations are left"
    if _replicas(task) == 1 and not progress.checkpoint_iteration and not task.copies.holdings:
        return "it has one replica, and no state of it is saved yet"
    node = state.nodes.get(membership.members[-1].node)
    if node is None or node.status is not NodeStatus.UP or node.cordon.draining:
        return f"the node of its last rank, {membership.members[-1].node}, is not up"
    return ""


def order(state: ClusterState, task: Task, command_id: str) -> v.InjectFault:
    """Return the command by which the task's last rank is killed now."""
    assert task.membership is not None
    member = task.membership.members[-1]
    return v.InjectFault(
        command_id=command_id,
        node=member.node,
        epoch=state.plan.epoch,
        injection=f"{_PREFIX}{task.name}",
        fault=v.Fault(kind="kill", worker=member.worker, excluded_from_blame=True),
    )


# --- what follows ----------------------------------------------------------------------------------


def with_request(task: Task, now_us: int) -> Task:
    """Return the task that is to prove that it heals. One that is about to, or whose worker has just been killed, goes
    on with that; where the worker has not ended by the order, another is given."""
    proof = task.troubles.proof
    is_watched = proof is not None and proof.killed_iteration > 0 and not proof.armed_us
    is_watched &= not task.troubles.program_diverges
    if proof is not None and (not proof.worker or is_watched):
        return task
    return _with(task, HealingProof(requested_us=now_us))


def ordered(state: ClusterState, event: v.InjectFault) -> ClusterState:
    """Record the fault of a proof, which has gone out to the node."""
    task = state.tasks.get(event.injection.removeprefix(_PREFIX)) if event.injection.startswith(_PREFIX) else None
    if task is None or task.troubles.proof is None or task.membership is None:
        return state
    ranks = [member.worker for member in task.membership.members]
    rank = ranks.index(event.fault.worker) if event.fault.worker in ranks else 0
    proof = replace(task.troubles.proof, worker=event.fault.worker, rank=rank, generation=task.generation)
    return with_task(state, _with(task, proof))


def after_exit(state: ClusterState, event: v.WorkerExited) -> ClusterState:
    """Record that the worker has ended by the signal, and in which iteration."""
    task = state.tasks.get(event.task)
    proof = task.troubles.proof if task is not None else None
    if task is None or proof is None or event.worker != proof.worker or event.signal != _SIGKILL:
        return state
    iteration = event.iteration or task.progress.iteration + 1
    return with_task(state, _with(task, replace(proof, killed_iteration=iteration)))


def after_commit(state: ClusterState, task: Task, event: v.StepCommitted) -> Task:
    """Return the task after committed iterations of its newest group: resumed, whole again, compared."""
    proof, membership = task.troubles.proof, task.membership
    if proof is None or not proof.killed_iteration or proof.armed_us or membership is None:
        return task
    if not proof.generation < event.generation == task.generation:
        return task
    is_whole = _is_whole(state, task)
    if not proof.resumed_iteration:
        proof = replace(proof, resumed_iteration=event.first)
    if proof.whole_iteration and is_whole and event.last > proof.whole_iteration:
        proof = replace(proof, armed_us=state.now_us, bits=_bits(task))
    elif is_whole and not proof.whole_iteration:
        proof = replace(proof, whole_iteration=event.last)
    return _with(task, proof)


def _bits(task: Task) -> str:
    """Say what the replicas' comparison tells."""
    name, value = _NO_CHECKSUMS
    if task.spec.env.get(name) == value:
        return f"bits not compared ({name} is {value})"
    if task.troubles.divergence is not None:
        return "bits may differ (its replicas compute on different things)"
    if _replicas(task) == 1:
        return "bits not compared (it has one replica)"
    return "same bits" if task.spec.lanes else "all replicas agree"


def _is_whole(state: ClusterState, task: Task) -> bool:
    """Return whether the newest group has all workers that the plan gives the task."""
    assignment, members = state.plan.assignments.get(task.name), task.membership.members if task.membership else ()
    return len(members) >= (assignment.workers if assignment is not None else 1)


def _replicas(task: Task) -> int:
    members = task.membership.members if task.membership is not None else ()
    return len({member.replica for member in members})


def _with(task: Task, proof: HealingProof) -> Task:
    if proof == task.troubles.proof:
        return task
    return replace(task, troubles=replace(task.troubles, proof=proof))


# --- for people ------------------------------------------------------------------------------------


def proof_text(state: ClusterState, task: Task) -> str:
    """Say how the task's proof stands, like "armed: SIGKILL of rank 2 at iteration 8, same bits"; "" where none was
    asked for."""
    proof = task.troubles.proof
    if proof is None:
        return ""
    kill = f"SIGKILL of rank {proof.rank} at iteration {proof.killed_iteration}"
    divergence = task.troubles.divergence
    if proof.killed_iteration and divergence is not None and divergence.is_programs:
        return f"not armed: {kill}; {v.divergence_text(divergence.since_iteration, divergence.sign)}"
    if proof.armed_us:
        return f"armed: {kill}, {proof.bits}"
    if task.status is not TaskStatus.ACTIVE:
        return "not armed: the task ended before it was proved"
    if not proof.worker:
        return f"to be armed: {missing(state, task) or 'its fault is next'}"
    if not proof.killed_iteration:
        return f"to be armed: SIGKILL of rank {proof.rank} is ordered, and {proof.worker} has not ended by it"
    if not proof.resumed_iteration:
        return f"to be armed: {kill}, no iteration is committed since"
    return f"to be armed: {kill}, resumed; all its workers have not computed since"
