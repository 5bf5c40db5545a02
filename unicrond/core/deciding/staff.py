"""Workers: started where they are missing, ended where they are unwanted."""

from __future__ import annotations

from events import vocabulary as v
from unicrond.core import reconcile
from unicrond.core.deciding.batch import Batch
from unicrond.core.deciding.ladder import waits_for_a_step
from unicrond.core.policy import Policy
from unicrond.core.state import Task, TaskStatus, WorkerStatus


def staff(batch: Batch, task: Task, policy: Policy) -> None:
    """Starts what is missing where a slot is free; ends what is surplus and in no group."""
    state = batch.state
    wanted = batch.survey.staffing(task)
    worker_number, replica_number = task.numbers.next_worker, task.numbers.next_replica
    together: dict[str, list[v.Start]] = {}
    for nodes in wanted.missing:
        if not batch.has_room(nodes):
            continue  # the slot is still another worker's; its end will bring us back
        if any(waits_for_a_step(task, node, policy) for node in nodes):
            continue
        store = state.nodes[nodes[0]].store
        for shard, node in enumerate(nodes):
            batch.started[node] += 1
            start = v.Start(number=worker_number, replica=replica_number, shard=shard, store=store)
            together.setdefault(node, []).append(start)
            worker_number += 1
        replica_number += 1
    for node, starts in together.items():
        if len(starts) == 1:
            _start(batch, task, node, starts[0])
        else:
            _start_together(batch, task, node, starts)
    # Where no member has state a surplus one waits for nothing, and no later membership would leave it out.
    awaited = task.member_names if wanted.surplus and reconcile.has_state(task) else frozenset()
    for workers in wanted.surplus.values():
        for worker in workers:
            in_group = worker.status is WorkerStatus.MEMBER
            has_left = task.confirmed and task.membership is not None and task.membership.members
            if worker.worker not in awaited and (not in_group or has_left):
                batch.stop(task, worker, f"plan {state.plan.epoch} no longer needs it")


def _start(batch: Batch, task: Task, node: str, start: v.Start) -> None:
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


def _start_together(batch: Batch, task: Task, node: str, starts: list[v.Start]) -> None:
    """One command for all workers of the task on the node: it carries the task's description once."""
    batch.add(
        v.StartWorkers(
            command_id=batch.command_id(node),
            node=node,
            epoch=batch.state.plan.epoch,
            spec=task.spec,
            starts=tuple(starts),
        )
    )


def end_unwanted(batch: Batch, task: Task) -> None:
    """Strays, workers given up, parked ones, the rest of broken replicas, and all of an ended task."""
    broken = batch.survey.staffing(task).broken
    overdue = [name for name in batch.survey.nodes.dated if batch.state.nodes[name].overdue]
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
