"""Starting: from a command to a process in a slot. Rules: core.py."""

from __future__ import annotations

from pathlib import Path

from agents.handling.turn import Turn
from agents.log_layout import worker_log
from agents.protocol.messages import Launch, Spawn
from agents.state import ArmTimer, Link, Order, TellForkServer, Waiting, Worker
from agents.users import refusal as users_refusal
from events.task_env import refusal as variable_refusal
from events.vocabulary import StartWorker, TaskSpec, WorkerId, WorkerStarted


def start(turn: Turn, command: StartWorker, order: Order) -> None:
    """Spawn the worker, let it wait for a slot, or answer why not; a repeated start acts once."""
    worker = command.worker
    if turn.state.phase in ("draining", "leaving", "left"):
        turn.answer(order, "the node is leaving")
    elif worker.rpartition(".")[0] != command.spec.name:
        turn.answer(order, f"worker {worker} does not belong to task {command.spec.name}")
    elif worker in turn.memory.workers and turn.memory.workers[worker].foreign:
        turn.answer(order, f"a worker {worker} of an older log has not ended yet")
    elif is_known(turn, worker):
        turn.answer(order)  # it exists or has existed: this start has acted already
    elif turn.state.store_port and not free_slots(turn) and not is_slot_coming(turn):
        turn.answer(order, f"no free slot: all {turn.config.slots} slots hold a worker")
    else:
        turn.remember(waiting=(*turn.memory.waiting, Waiting(command=command, order=order)))
        fill_slots(turn)
        if any(w.command.worker == worker for w in turn.memory.waiting):
            arm_wait(turn, worker)


def is_known(turn: Turn, worker: WorkerId) -> bool:
    """Whether the worker waits, runs, or has ended here."""
    memory = turn.memory
    is_waiting = any(w.command.worker == worker for w in memory.waiting)
    return is_waiting or worker in memory.workers or worker in memory.gone


def free_slots(turn: Turn) -> list[int]:
    """The numbers of the free slots, ascending."""
    taken = {worker.slot for worker in turn.memory.workers.values()}
    return [slot for slot in range(turn.config.slots) if slot not in taken]


def is_slot_coming(turn: Turn) -> bool:
    """Some worker is about to end: told to, done, or its connection broke."""
    links = turn.state.links
    return any(
        w.stop != "no" or w.completed or not links.get(w.worker, Link()).connected for w in turn.memory.workers.values()
    )


def arm_wait(turn: Turn, worker: WorkerId) -> None:
    """Bound how long a start waits for a slot, or for the fork server."""
    config = turn.config
    after_s = config.slot_wait_s if turn.state.store_port else config.fork_server_wait_s
    turn.actions.append(ArmTimer(name="wait", key=worker, after_s=after_s))


def fill_slots(turn: Turn) -> None:
    """Spawn what waits, oldest first, as far as there are slots."""
    while turn.memory.waiting and turn.state.store_port and (free := free_slots(turn)):
        first, *rest = turn.memory.waiting
        command = first.command
        if reason := refusal(turn, command.spec):
            give_up_start(turn, first, reason)
            continue
        turn.remember(waiting=tuple(rest))
        record = Worker(worker=command.worker, task=command.spec.name, slot=free[0], starting=first)
        turn.remember(
            workers={**turn.memory.workers, command.worker: record},
            foreign_gone=tuple(w for w in turn.memory.foreign_gone if w != command.worker),
        )
        turn.actions.append(TellForkServer(message=spawn(turn, command, free[0])))


def refusal(turn: Turn, spec: TaskSpec) -> str:
    """Why this node does not run the task as it asks for; "" where it does."""
    users = turn.config.users
    if reason := users_refusal([user.name for user in users], spec.run_as):
        return reason
    if refused := next((name for name in spec.env if variable_refusal(name)), ""):
        return f"env.{refused}: {variable_refusal(refused)}"
    if users and not turn.state.separates:
        return (
            "the fork server is of an agent without --run-as, and its workers live; drain the node, then uncordon it, "
            "and a new one starts"
        )
    return ""


def spawn(turn: Turn, command: StartWorker, slot: int) -> Spawn:
    """The order to the fork server; its log path is a file of this node."""
    config, task = turn.config, command.spec.name
    launch = Launch(
        worker=command.worker,
        task=task,
        node=config.node,
        address=config.address,
        agent_socket=config.agent_socket,
        replica=command.replica,
        shard=command.shard,
        store=command.store,
        spec=command.spec,
    )
    log_path = str(worker_log(Path(config.logs), task, command.worker))
    return Spawn(launch=launch, log_path=log_path, slot=slot, user=config.user_of(command.spec))


def started(turn: Turn, worker: WorkerId, pid: int) -> None:
    """The process runs: append WorkerStarted and answer the start. A second call does nothing."""
    record = turn.memory.workers.get(worker)
    if record is None or record.pid:
        return
    waiting = record.starting
    record = turn.change(record, pid=pid, starting=None)
    started = WorkerStarted(node=turn.config.node, task=record.task, worker=worker, pid=pid)
    turn.append(started, waiting.order.cause if waiting else "")
    if waiting:
        turn.answer(waiting.order)


def give_up_start(turn: Turn, waiting: Waiting, reason: str) -> None:
    """A waiting start is answered with `reason`, and waits no more."""
    turn.remember(waiting=tuple(w for w in turn.memory.waiting if w is not waiting))
    turn.answer(waiting.order, reason)
