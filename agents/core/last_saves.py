"""Orders workers to save before their node leaves, where no coordinator moves them away. Rules: machine.py.

Rules
-----
* A coordinator answers a drain by a membership without the node's workers, and where no member stays, the leader's
  replica saves before it pauses. Where no such membership comes, the agent gives its workers one of its own: without
  members, above the newest in the log. No step can be made under it, and it is never remembered: a worker that follows
  it does what it does in any drain.
* First a planned one, at once where no log is in reach, else once the coordinator has had a quarter of the drain to
  answer. It is followed where all members hold it: all nodes of the task leave, and nothing is repeated.
* At half of the drain an urgent one to the leader's replica, which saves the last committed iteration. Others have
  nothing to save: while the log is away, no group trains on without its leader.
* At three quarters an urgent one to workers that the coordinator has ordered to leave, where no member stays and the
  iteration does not end in time.
* The agent relies on no copy in the memory of another node: without the log it cannot know whether that node stays.
* A worker that has paused has saved, and is ended.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from msgspec.structs import replace

from unicrond.agents.core import stopping
from unicrond.agents.core.state import ArmTimer, TellWorker, WorkerRecord
from unicrond.agents.core.transaction import Transition
from unicrond.agents.protocol.messages import GroupMembership
from unicrond.events.vocabulary import WorkerPaused

#: Which workers are ordered to save: at the boundary; now; now, where the coordinator's own order does not take effect.
Stage: TypeAlias = Literal["boundary", "now", "late"]
STAGES: tuple[Stage, ...] = get_args(Stage)


def arm(transition: Transition, limit_s: float) -> None:
    """Arm the orders to save of a drain that takes `limit_s` seconds at most."""
    for number, stage in enumerate(STAGES, 1):
        transition.actions.append(ArmTimer(name="save", key=stage, after_s=limit_s * number / (len(STAGES) + 1)))


def order(transition: Transition, stage: Stage) -> None:
    """Order the workers of a node that leaves to save, those whom the stage is for."""
    if transition.state.drain_s is None or transition.state.phase not in ("adopting", "draining"):
        return
    if transition.state.phase == "adopting":  # it has not joined, and joins no more
        transition.state = replace(transition.state, phase="draining")
    for worker in sorted(transition.memory.workers):
        record = transition.memory.workers[worker]
        newest = transition.memory.memberships.get(record.task)
        if record.stop != "no" or record.foreign:
            continue
        if not record.member:
            stopping.stop(transition, record, f"it has no state, and the node leaves: {transition.state.leave_reason}")
        elif newest is not None and transition.is_connected(worker) and _is_due(record, newest, stage):
            generation = newest.generation + 1 + (stage != "boundary")
            dismissal = replace(newest, generation=generation, members=(), joiners=(), peers=(), warrant="", stop="")
            transition.actions.append(TellWorker(worker=worker, message=replace(dismissal, urgent=stage != "boundary")))


def _is_due(record: WorkerRecord, newest: GroupMembership, stage: Stage) -> bool:
    """Return whether the worker is to save at this stage, by the newest membership in the log."""
    replica = next((member.replica for member in newest.members if member.worker == record.worker), None)
    if stage == "late":
        return replica is None and all(member.worker in newest.joiners for member in newest.members)
    return replica is not None and (stage == "boundary" or replica == newest.members[0].replica)


def has_saved(transition: Transition, record: WorkerRecord, paused: WorkerPaused) -> bool:
    """Return whether the worker has paused by this agent's own order; then end it."""
    newest = transition.memory.memberships.get(record.task)
    if newest is None or transition.state.drain_s is None:
        return False
    if paused.generation <= newest.generation and all(m.worker != record.worker for m in newest.members):
        return False  # it left by the log's membership: the coordinator ends it
    stopping.stop(transition, record, f"it has left its group, and the node leaves: {transition.state.leave_reason}")
    return True
