"""Workers: started where they are missing, stopped where they are not needed."""

from __future__ import annotations

from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.deciding.response import waits_for_restart, waits_for_step
from unicrond.core.nodes import brakes
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import Task, TaskStatus, WorkerStatus
from unicrond.core.tasks import reconcile
from unicrond.events import vocabulary as v


def staff(batch: DecisionBatch, task: Task, policy: Policy) -> None:
    """Start the missing workers of the task where a slot is free; stop those that are surplus and in no group."""
    state = batch.state
    staffing = batch.survey.staffing(task)
    worker_number, replica_number = task.numbers.next_worker, task.numbers.next_replica
    by_node: dict[str, list[v.Start]] = {}
    waits = _ends_soon(task) or waits_for_restart(task) or brakes.waits_in_vain(state, task)
    for nodes in staffing.missing if not waits else ():
        if not batch.has_room(nodes):
            continue  # another worker still has the slot; its end leads to the next decision
        if any(waits_for_step(task, node, policy) or brakes.waits(state, node) for node in nodes):
            continue
        store = state.nodes[nodes[0]].store
        for shard, node in enumerate(nodes):
            batch.started[node] += 1
            start = v.Start(number=worker_number, replica=replica_number, shard=shard, store=store)
            by_node.setdefault(node, []).append(start)
            worker_number += 1
        replica_number += 1
    for node, starts in by_node.items():
        if len(starts) == 1:
            _start(batch, task, node, starts[0])
        else:
            _start_together(batch, task, node, starts)
    # Where no member has state a surplus one waits for nothing, and no later membership would leave it out.
    members_to_leave = task.member_names if staffing.surplus and reconcile.has_state(task) else frozenset()
    for workers in staffing.surplus.values():
        for worker in workers:
            in_group = worker.status is WorkerStatus.MEMBER
            has_left = task.confirmed and task.membership is not None and task.membership.members
            if worker.worker not in members_to_leave and (not in_group or has_left):
                batch.stop(task, worker, f"plan {state.plan.epoch} no longer needs it")


def _ends_soon(task: Task) -> bool:
    """Return whether the remaining members end the task by themselves, since its program has asked for the end. The log
    may hold a member's exit before it holds the end of the task."""
    members = sum(worker.alive and task.is_member(worker.worker) for worker in task.workers.values())
    return bool(task.ending.stop) and members >= task.spec.min_workers


def _start(batch: DecisionBatch, task: Task, node: str, start: v.Start) -> None:
    batch.add(
        v.StartWorker(
            command_id=batch.command_id(node),
            node=node,
            epoch=batch.state.plan.epoch,
            spec=task.spec,
            worker=f"{task.name}.{start.number}",
            replica=start.replica,
            shard=start.shard,
            store=start.store,
        )
    )


def _start_together(batch: DecisionBatch, task: Task, node: str, starts: list[v.Start]) -> None:
    """Add one command for all workers of the task on the node, which carries the task's description once."""
    batch.add(
        v.StartWorkers(
            command_id=batch.command_id(node),
            node=node,
            epoch=batch.state.plan.epoch,
            spec=task.spec,
            starts=tuple(starts),
        )
    )


def end_unwanted(batch: DecisionBatch, task: Task) -> None:
    """Stop workers that were given up, parked workers, the rest of broken replicas, and all workers of an ended
    task."""
    broken = batch.survey.staffing(task).broken
    overdue = [name for name in batch.survey.nodes.dated if batch.state.nodes[name].cordon.overdue]
    every = task.workers.values() if task.status is not TaskStatus.ACTIVE or broken or overdue else task.apart
    for worker in every:
        if task.status is not TaskStatus.ACTIVE:
            batch.stop(task, worker, f"task {task.status.value}")
        elif worker.status is WorkerStatus.LOST:
            batch.stop(task, worker, "it is lost to its task", kill=True)
        elif worker.status is WorkerStatus.PARKED:
            batch.stop(task, worker, "it left its group")
        elif worker.replica in broken:
            batch.stop(task, worker, "another rank of its replica is lost")
        elif worker.node in overdue:
            batch.stop(task, worker, f"node {worker.node} was to be empty by now")
