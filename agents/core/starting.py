"""Starts workers: from a StartWorker command to a process in a slot. Rules: machine.py."""

from __future__ import annotations

from pathlib import Path

from unicrond.agents.core.state import ArmTimer, PendingCommand, PendingStart, TellForkServer, WorkerLink, WorkerRecord
from unicrond.agents.core.transaction import Transition
from unicrond.agents.host.paths import worker_log
from unicrond.agents.host.task_users import refusal as users_refusal
from unicrond.agents.protocol.messages import Launch, Spawn
from unicrond.events.host.task_environment import refusal as variable_refusal
from unicrond.events.vocabulary import CheckNode, StartWorker, TaskSpec, WorkerId, WorkerStarted
from unicrond.events.vocabulary.shape import Shape

VOID = "void: it was for an agent that has ended; the coordinator orders anew"


def is_void(transition: Transition, command: StartWorker | CheckNode) -> bool:
    """Return whether the command was for an earlier agent: when this one joins, the coordinator counts it as void."""
    return 0 < command.agent_boot < transition.config.agent_boot


def start(transition: Transition, command: StartWorker, order: PendingCommand) -> None:
    """Spawn the worker, let it wait for a slot, or answer why not; a repeated start acts once."""
    worker = command.worker
    if transition.state.phase in ("draining", "leaving", "left"):
        transition.answer(order, "the node is leaving")
    elif worker.rpartition(".")[0] != command.spec.name:
        transition.answer(order, f"worker {worker} does not belong to task {command.spec.name}")
    elif worker in transition.memory.workers and transition.memory.workers[worker].foreign:
        transition.answer(order, f"a worker {worker} of an older log has not ended yet")
    elif is_known(transition, worker):
        transition.answer(order)  # it exists or has existed: this start has acted already
    elif transition.state.store_port and not free_slots(transition) and not is_slot_coming(transition):
        transition.answer(order, f"no free slot: all {transition.config.slots} slots hold a worker")
    else:
        transition.remember(
            waiting_starts=(*transition.memory.waiting_starts, PendingStart(command=command, order=order))
        )
        fill_slots(transition)
        if any(w.command.worker == worker for w in transition.memory.waiting_starts):
            arm_wait(transition, worker)


def is_known(transition: Transition, worker: WorkerId) -> bool:
    """Return whether the worker waits, runs, or has ended here."""
    memory = transition.memory
    is_waiting = any(w.command.worker == worker for w in memory.waiting_starts)
    return is_waiting or worker in memory.workers or worker in memory.ended_workers


def free_slots(transition: Transition) -> list[int]:
    """Return the numbers of the free slots, ascending."""
    occupied = {worker.slot for worker in transition.memory.workers.values()}
    return [slot for slot in range(transition.config.slots) if slot not in occupied]


def is_slot_coming(transition: Transition) -> bool:
    """Return whether some worker is about to end: stopped, done, or its connection broke."""
    links = transition.state.links
    return any(
        w.stop != "no" or w.completed or not links.get(w.worker, WorkerLink()).connected
        for w in transition.memory.workers.values()
    )


def arm_wait(transition: Transition, worker: WorkerId) -> None:
    """Set a limit on how long a start waits for a slot, or for the fork server."""
    config = transition.config
    after_s = config.slot_wait_s if transition.state.store_port else config.fork_server_wait_s
    transition.actions.append(ArmTimer(name="wait", key=worker, after_s=after_s))


def fill_slots(transition: Transition) -> None:
    """Spawn the waiting starts, oldest first, as far as there are slots."""
    while transition.memory.waiting_starts and transition.state.store_port and (free := free_slots(transition)):
        first, *later = transition.memory.waiting_starts
        command = first.command
        if reason := refusal(transition, command.spec):
            give_up_start(transition, first, reason)
            continue
        transition.remember(waiting_starts=tuple(later))
        record = WorkerRecord(worker=command.worker, task=command.spec.name, slot=free[0], starting=first)
        transition.remember(
            workers={**transition.memory.workers, command.worker: record},
            foreign_workers=tuple(w for w in transition.memory.foreign_workers if w != command.worker),
        )
        transition.actions.append(TellForkServer(message=spawn(transition, command, free[0])))


def refusal(transition: Transition, spec: TaskSpec) -> str:
    """Return why this node cannot run the task as its specification demands; "" where it can."""
    users = transition.config.users
    if reason := users_refusal([user.name for user in users], spec.run_as):
        return reason
    if refused := next((name for name in spec.env if variable_refusal(name)), ""):
        return f"env.{refused}: {variable_refusal(refused)}"
    if users and not transition.state.separates:
        return _of_older_agent("without --run-as")
    # It would set aside what it does not know, and its hook train in another layout. Those that the task may have
    # decide in how many lanes it is summed.
    layouts = (spec.cut, *(layout.shape for layout in spec.layouts))
    usual = Shape()._asdict()
    for name in ("cp", "etp"):
        if name not in transition.state.degrees and any(getattr(layout, name) != usual[name] for layout in layouts):
            return _of_older_agent(f"that does not know {name}")
    if "cp" not in transition.state.degrees and any(layout.data > 1 for layout in layouts):
        return _of_older_agent("that does not know experts over more workers than tp")
    return ""


def _of_older_agent(lack: str) -> str:
    return (
        f"the fork server is of an agent {lack}, and its workers live; drain the node, then uncordon it, and a new one "
        "starts"
    )


def spawn(transition: Transition, command: StartWorker, slot: int) -> Spawn:
    """Return the order to the fork server; its log path is a file of this node."""
    config, task = transition.config, command.spec.name
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


def started(transition: Transition, worker: WorkerId, pid: int) -> None:
    """Append WorkerStarted for a running process and answer the start. A second call does nothing."""
    record = transition.memory.workers.get(worker)
    if record is None or record.pid:
        return
    waiting = record.starting
    record = transition.change(record, pid=pid, starting=None)
    started = WorkerStarted(node=transition.config.node, task=record.task, worker=worker, pid=pid)
    transition.append(started, waiting.order.cause if waiting else "")
    if waiting:
        transition.answer(waiting.order)


def give_up_start(transition: Transition, waiting: PendingStart, reason: str) -> None:
    """Answer a waiting start with `reason`, and drop it."""
    transition.remember(waiting_starts=tuple(w for w in transition.memory.waiting_starts if w is not waiting))
    transition.answer(waiting.order, reason)
