"""Commands to nodes, and the answers of their agents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from unicrond.core.faults.program_faults import judge_refusal
from unicrond.core.folding import failure_counts as strikes
from unicrond.core.folding import strays
from unicrond.core.nodes import isolation
from unicrond.core.state.changes import find_worker, with_moved, with_node, with_task, with_worker, without_workers
from unicrond.core.state.ordered_map import put_all
from unicrond.core.state.state import UNREAD_MAX, ClusterState, NodeStatus, Task, Worker, WorkerStatus
from unicrond.core.state.task_parts import Copies, Numbers
from unicrond.core.state.worker_lifecycle import can_move, status_after
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.placements import starts, starts_of
from unicrond.events.wire.envelope import Envelope


def count_command(state: ClusterState, node: str) -> ClusterState:
    """Count one more command to `node`; the state is unchanged where the node is unknown."""
    target = state.nodes.get(node)
    return with_node(state, replace(target, commands=target.commands + 1)) if target else state


def start_worker(state: ClusterState, event: v.StartWorker, _: Envelope) -> ClusterState:
    """Add a starting worker. A worker id that the task knows is not added again, nor is a worker whose command is void:
    its agent has ended, and another has joined since."""
    state = strays.without_started(count_command(state, event.node), event)
    return _add_starting_worker(state, event)


def start_workers(state: ClusterState, event: v.StartWorkers, _: Envelope) -> ClusterState:
    """Add the starting workers of one command."""
    state = strays.without_started(count_command(state, event.node), event)
    for start in starts(event):
        state = _add_starting_worker(state, start)
    return state


def _add_starting_worker(state: ClusterState, event: v.StartWorker) -> ClusterState:
    task = state.tasks.get(event.spec.name)
    if task is None or event.worker in task.workers:
        return state
    number = int(event.worker.rpartition(".")[2])
    numbers = Numbers(
        next_worker=max(task.numbers.next_worker, number + 1),
        next_replica=max(task.numbers.next_replica, event.replica + 1),
    )
    task = replace(task, numbers=numbers, copies=with_carriers(task.copies, [event.node]))
    node = state.nodes.get(event.node)
    if node is not None and 0 < event.agent_boot < node.agent.boot:
        return with_task(state, task)
    worker = Worker(
        worker=event.worker,
        node=event.node,
        replica=event.replica,
        shard=event.shard,
        status=status_after(None, v.StartWorker),
        command_id=event.command_id,
    )
    if not any(other.can_train for other in task.workers.values()):  # it starts, or starts again, from nothing
        task = replace(task, pace=replace(task.pace, starting_since_us=state.now_us))
    return with_task(state, with_worker(task, worker))


def stop_worker(state: ClusterState, event: v.StopWorker, _: Envelope) -> ClusterState:
    """Count the command, and mark the worker as stopping if it is known."""
    state = count_command(state, event.node)
    pair = find_worker(state, event.task, event.worker)
    if pair is None:
        return strays.stop_ordered(state, event)
    task, worker = pair
    return with_task(state, with_moved(task, worker, v.StopWorker, command_id=event.command_id))


def with_peers(state: ClusterState, name: str, peers: tuple[v.MemoryService, ...]) -> ClusterState:
    """Return the state in which `peers` are the nodes that take copies of the task's state."""
    task = state.tasks.get(name)
    if task is None or task.copies.peers == peers:
        return state
    copies = with_carriers(task.copies, [peer.node for peer in peers])
    return with_task(state, replace(task, copies=replace(copies, peers=peers)))


def with_carriers(copies: Copies, nodes: Iterable[str]) -> Copies:
    """Return the copies with these nodes among those that may hold a state."""
    new = [node for node in nodes if node not in copies.carriers]
    return replace(copies, carriers=put_all(copies.carriers, dict.fromkeys(new, True))) if new else copies


def command_applied(state: ClusterState, event: v.CommandApplied, _: Envelope) -> ClusterState:
    """Remove the worker of an applied stop: its process is gone, and of one that never ran nothing else is reported."""
    for task, worker in _commanded(state, event):
        if can_move(worker, v.CommandApplied):
            return with_task(state, without_workers(task, [worker.worker]))
    return strays.stop_answered(state, event)


def _commanded(state: ClusterState, event: v.CommandApplied | v.CommandFailed) -> Iterator[tuple[Task, Worker]]:
    """Yield each task and worker that the command is about: one, several where it starts several, or none."""
    for name, worker in state.by_node.on(event.node):
        task = state.tasks[name]
        if starts_of(event.command_id, task.workers[worker].command_id):
            yield task, task.workers[worker]


def command_failed(state: ClusterState, event: v.CommandFailed, envelope: Envelope) -> ClusterState:
    """Remove the worker of a refused start, which is nobody's strike; learn the schema of an agent that cannot read the
    command."""
    node = state.nodes.get(event.node)
    # The next agent, which is about to join, finds what has not begun void; the head does so when it has joined.
    is_void = node is not None and envelope.boot > node.agent.boot
    state = isolation.check_refused(state, event) if not is_void else state
    state = strays.stop_answered(state, event)
    if event.readable_schema:
        state, is_new = _learn_schema(state, event)
        if is_new:
            return _resend(state, event)
    for task, worker in _commanded(state, event):
        if worker.status is WorkerStatus.STARTING and not is_void:
            without = with_task(state, without_workers(task, [worker.worker]))
            # It leaves, or a start that was decided before its end was known came after it.
            if node is not None and (node.departure.announced or node.status is NodeStatus.LEFT):
                return without
            return strikes.strike(
                without,
                task=task.name,
                worker=worker,
                kind="start_failed",
                broken=task.generation - 1,
                message=f"{event.node} could not start {worker.worker}: {event.reason}",
                occurred_us=envelope.observed_at_us,
                verdict=judge_refusal(event.reason),
            )
    return state


def _learn_schema(state: ClusterState, event: v.CommandFailed) -> tuple[ClusterState, bool]:
    """Lower the node's schema to what its agent reads: the command was written for a younger agent, which this one has
    replaced. Return also whether that explains the failure; after UNREAD_MAX times it does not."""
    node = state.nodes.get(event.node)
    if node is None:
        return state, False
    agent = node.agent
    agent = replace(
        agent, schema=min(agent.schema, event.readable_schema), unreadable_commands=agent.unreadable_commands + 1
    )
    return with_node(state, replace(node, agent=agent)), agent.unreadable_commands <= UNREAD_MAX


def _resend(state: ClusterState, event: v.CommandFailed) -> ClusterState:
    """Make the command be sent again, in the agent's schema; its failure counts as no fault."""
    commanded = list(_commanded(state, event))
    starting = [worker.worker for _, worker in commanded if worker.status is WorkerStatus.STARTING]
    if starting:
        return with_task(state, without_workers(commanded[0][0], starting))
    for task, worker in commanded:
        if worker.status is WorkerStatus.STOPPING:
            return with_task(state, with_moved(task, worker, v.CommandFailed))
    return state


def resend_memberships(state: ClusterState, node: str) -> ClusterState:
    """Make memberships be sent again where workers of the node are not in the newest one yet: the agent may have missed
    it."""
    for task in state.tasks.values():
        workers = [task.workers[name] for name in state.by_node.of_task(node, task.name)]
        alive = [worker for worker in workers if worker.alive]
        if any(task.generation_of(worker) < task.generation for worker in alive) and not task.confirmed:
            state = with_task(state, replace(task, group=replace(task.group, unread_generation=task.generation)))
    return state
