"""Commands to nodes, and what the agents answer."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from events.seats import starts, starts_of
from unicrond.core import isolation
from unicrond.core.changes import with_moved, with_node, with_task, with_worker, without_workers, worker_known
from unicrond.core.folding import strikes
from unicrond.core.state import UNREAD_MAX, ClusterState, NodeStatus, Task, Worker, WorkerStatus
from unicrond.core.task_parts import Numbers
from unicrond.core.worker_life import can_move, status_after


def count_command(state: ClusterState, node: str) -> ClusterState:
    """One more command to `node`; an unknown node counts none."""
    known = state.nodes.get(node)
    return with_node(state, replace(known, commands=known.commands + 1)) if known else state


def start_worker(state: ClusterState, event: v.StartWorker, _: Envelope) -> ClusterState:
    """A new worker is starting; a worker id that the task knows already is not begun again. A void command starts
    none: its agent is gone, and with it the run directory."""
    return _starting(count_command(state, event.node), event)


def start_workers(state: ClusterState, event: v.StartWorkers, _: Envelope) -> ClusterState:
    """New workers are starting, by one command."""
    state = count_command(state, event.node)
    for start in starts(event):
        state = _starting(state, start)
    return state


def _starting(state: ClusterState, event: v.StartWorker) -> ClusterState:
    task = state.tasks.get(event.spec.name)
    if task is None or event.worker in task.workers:
        return state
    number = int(event.worker.rpartition(".")[2])
    numbers = Numbers(
        next_worker=max(task.numbers.next_worker, number + 1),
        next_replica=max(task.numbers.next_replica, event.replica + 1),
    )
    task, node = replace(task, numbers=numbers), state.nodes.get(event.node)
    if node is not None and 0 < event.agent_boot < node.since_boot:
        return with_task(state, task)
    worker = Worker(
        worker=event.worker,
        node=event.node,
        replica=event.replica,
        shard=event.shard,
        status=status_after(None, v.StartWorker),
        command_id=event.command_id,
    )
    return with_task(state, with_worker(task, worker))


def stop_worker(state: ClusterState, event: v.StopWorker, _: Envelope) -> ClusterState:
    """A known worker gets the order to stop."""
    state = count_command(state, event.node)
    known = worker_known(state, event.task, event.worker)
    if known is None:
        return state
    task, worker = known
    return with_task(state, with_moved(task, worker, v.StopWorker, command_id=event.command_id))


def with_peers(state: ClusterState, name: str, peers: tuple[v.MemoryService, ...]) -> ClusterState:
    """The nodes that take copies of the task's state are these."""
    task = state.tasks.get(name)
    if task is None or task.copies.peers == peers:
        return state
    return with_task(state, replace(task, copies=replace(task.copies, peers=peers)))


def command_applied(state: ClusterState, event: v.CommandApplied, _: Envelope) -> ClusterState:
    """A stop is applied once the process is gone; of one that never was, nothing else is ever told."""
    for task, worker in _commanded(state, event):
        if can_move(worker, v.CommandApplied):
            return with_task(state, without_workers(task, [worker.worker]))
    return state


def _commanded(state: ClusterState, event: v.CommandApplied | v.CommandFailed) -> Iterator[tuple[Task, Worker]]:
    """The worker that the command is about, where it is about one; of one that starts several, all."""
    for name, worker in state.by_node.on(event.node):
        task = state.tasks[name]
        if starts_of(event.command_id, task.workers[worker].command_id):
            yield task, task.workers[worker]


def command_failed(state: ClusterState, event: v.CommandFailed, envelope: Envelope) -> ClusterState:
    """A start that failed takes the worker away as a strike; a schema that the agent cannot read is learned."""
    state = isolation.check_refused(state, event)
    if event.reads:
        state, is_new = _learn_what_it_reads(state, event)
        if is_new:
            return _unread(state, event)
    node = state.nodes.get(event.node)
    for task, worker in _commanded(state, event):
        if worker.status is WorkerStatus.STARTING:
            without = with_task(state, without_workers(task, [worker.worker]))
            # It leaves, or a start that was decided before its end was known came after it.
            if node is not None and (node.leaving or node.status is NodeStatus.LEFT):
                return without
            return strikes.strike(
                without,
                task=task.name,
                worker=worker,
                kind="start_failed",
                broken=task.generation - 1,
                message=f"{event.node} could not start {worker.worker}: {event.reason}",
                occurred_us=envelope.observed_at_us,
            )
    return state


def _learn_what_it_reads(state: ClusterState, event: v.CommandFailed) -> tuple[ClusterState, bool]:
    """An agent got a command that was written for a younger one, which it has replaced. Whether that may be all."""
    node = state.nodes.get(event.node)
    if node is None:
        return state, False
    node = replace(node, schema=min(node.schema, event.reads), unread=node.unread + 1)
    return with_node(state, node), node.unread <= UNREAD_MAX


def _unread(state: ClusterState, event: v.CommandFailed) -> ClusterState:
    """No fault: the command is to be sent again, in the agent's schema."""
    commanded = list(_commanded(state, event))
    starting = [worker.worker for _, worker in commanded if worker.status is WorkerStatus.STARTING]
    if starting:
        return with_task(state, without_workers(commanded[0][0], starting))
    for task, worker in commanded:
        if worker.status is WorkerStatus.STOPPING:
            return with_task(state, with_moved(task, worker, v.CommandFailed))
    return state


def unheard(state: ClusterState, node: str) -> ClusterState:
    """The node's agent may not have heard of memberships that its workers are not in yet: they are to be told again."""
    for task in state.tasks.values():
        there = [task.workers[name] for name in state.by_node.of_task(node, task.name)]
        here = [worker for worker in there if worker.alive]
        if any(task.generation_of(worker) < task.generation for worker in here) and not task.confirmed:
            state = with_task(state, replace(task, group=replace(task.group, unread=task.generation)))
    return state
