"""Turns what workers, and the watches over workers and GPUs, report into observations for the log. Rules:
machine.py."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.agents.core import commits, floods, joining, last_saves, memberships
from unicrond.agents.core import stored_states as kept_states
from unicrond.agents.core.state import (
    AcceleratorSaw,
    ArmTimer,
    Disconnect,
    Stalled,
    TellWorker,
    WorkerLink,
    WorkerRecord,
)
from unicrond.agents.core.transaction import MAX_TEXT, Transition
from unicrond.agents.protocol.messages import Flight, FromWorker, Hello, IterationCommitted, Quit, Stacks
from unicrond.events.vocabulary import (
    AcceleratorReported,
    CheckpointSaved,
    ErrorReported,
    HangSuspected,
    SnapshotStored,
    StopRequested,
    TaskCompleted,
    WorkerBusy,
    WorkerId,
    WorkerJoinedGroup,
    WorkerObservation,
    WorkerPaused,
    WorkerReady,
)

#: Shorter work is not reported.
BUSY_TOLD_AFTER_S = 1.0

#: What a worker reports when a *peer* has failed: a symptom, not the cause of its own end.
SYMPTOMS = frozenset({"connection_broken", "collective_timeout"})


def connected(transition: Transition, hello: Hello) -> None:
    """Note that a worker has connected; one that was not started here is disconnected."""
    worker = hello.worker
    record = transition.memory.workers.get(worker)
    if record is None or record.task != hello.task or record.pid not in (0, hello.pid):
        transition.actions.append(Disconnect(worker=worker, reason="this node started no such worker"))
        return
    transition.link(worker, WorkerLink(sent_generation=hello.generation))
    if hello.generation > record.generation:
        record = transition.change(record, generation=hello.generation, member=True)
    if hello.ready and not record.foreign:
        ready(transition, record, is_news=hello.generation == 0)
    record = transition.memory.workers[worker]
    memberships.tell_membership(transition, record)
    if record.stop == "quit":
        transition.actions.append(TellWorker(worker=worker, message=Quit(reason=record.stop_reason)))
    if worker in transition.state.unheard:
        transition.state = replace(transition.state, unheard=transition.state.unheard - {worker})
        joining.join_if_complete(transition)


def disconnected(transition: Transition, worker: WorkerId) -> None:
    """Note that a worker's connection has ended; its process may live on."""
    link = transition.state.links.get(worker)
    if link:
        transition.link(worker, replace(link, connected=False))


def ready(transition: Transition, record: WorkerRecord, *, is_news: bool = True) -> None:
    """Note that the worker has started up. `is_news`: the log does not know it yet."""
    if record.ready:
        return
    transition.change(record, ready=True)
    if is_news:
        transition.append(WorkerReady(node=transition.config.node, task=record.task, worker=record.worker))


def worker_said(transition: Transition, worker: WorkerId, message: FromWorker, now_us: int) -> None:
    """Take a worker's message within the worker's budgets; messages of unknown and foreign workers are ignored.
    Disconnect a worker that speaks of another one."""
    record = transition.memory.workers.get(worker)
    if record is None or record.foreign:
        return
    if not is_own(transition, record, message):
        transition.actions.append(
            Disconnect(worker=worker, reason=f"it sent {type(message).__name__} of another worker")
        )
        return
    if isinstance(message, IterationCommitted):
        commits.committed(transition, record, message, now_us)
    elif floods.admits(transition, worker, message, now_us):
        if isinstance(message, TaskCompleted | StopRequested):
            take_waiting(transition, worker)
        take(transition, worker, message)


def take_due(transition: Transition, key: str) -> None:
    """Take what has waited until the bucket of its kind allows it (timer "budget")."""
    worker, message = floods.due_message(transition, key)
    if message is not None and worker in transition.memory.workers:
        take(transition, worker, message)


def take_waiting(transition: Transition, worker: WorkerId) -> None:
    """Take all that waits: no more comes of the worker, or its last word."""
    for message in floods.take_waiting(transition, worker):
        take(transition, worker, message)


def take(transition: Transition, worker: WorkerId, message: FromWorker) -> None:  # noqa: C901  # one case for each kind of message
    """Dispatch a message of a worker of this node to its subject."""
    record = transition.memory.workers[worker]
    match message:
        case Hello():
            connected(transition, message)
        case WorkerReady():
            ready(transition, record)
        case WorkerJoinedGroup():
            if message.generation <= record.regrouped:
                return  # repeated to a new agent
            commits.close_sum(transition, record.task)
            generation = max(record.generation, message.generation)
            transition.change(record, regrouped=message.generation, generation=generation)
            transition.reached(worker, message.iteration)
            if (report := memberships.to_report(transition, record, message)) is not None:
                transition.append(report)
        case WorkerPaused():
            commits.close_sum(transition, record.task)
            transition.reached(worker, message.iteration)
            if not last_saves.has_saved(transition, record, message):
                transition.append(message)
        case ErrorReported():
            commits.close_sum(transition, record.task)
            transition.reached(worker, message.iteration)
            if message.kind not in SYMPTOMS:
                transition.change(record, cause_told=True)
            transition.append(message)
        case WorkerBusy():
            busy(transition, record, message)
        case StopRequested():
            commits.close_sum(transition, record.task)
            transition.change(record, stopping=True)
            transition.append(message)
        case SnapshotStored():
            kept_states.captured(transition, message)
        case CheckpointSaved():
            if message.iteration == record.saved:
                return  # repeated to a new agent
            transition.change(record, saved=message.iteration)
            transition.append(message)
        case TaskCompleted():
            if record.completed:
                return
            commits.close_sum(transition, record.task)
            transition.change(record, completed=True)
            transition.append(message)
        case Flight() | Stacks() | IterationCommitted():
            pass  # the shell has it; the sums have it
        case _:
            transition.append(message)


def is_own(transition: Transition, record: WorkerRecord, message: FromWorker) -> bool:
    """Return whether the worker reports about itself, its own task and node; a message that is no event names none."""
    about = (transition.config.node, record.task)
    match message:
        case SnapshotStored():
            return (message.node, message.task) == about and message.origin == message.node
        case WorkerObservation():
            return (message.node, message.task) == about and message.worker == record.worker
        case _:
            return True


def busy(transition: Transition, record: WorkerRecord, message: WorkerBusy) -> None:
    """Record the declared work. Short work is not reported, only work that has lasted for a while (machine.py, timer
    "busy")."""
    link = transition.state.links.get(record.worker, WorkerLink())
    if link.busy_told and not message.section:
        transition.append(message)
    elif message.section:
        transition.actions.append(ArmTimer(name="busy", key=record.worker, after_s=BUSY_TOLD_AFTER_S))
    transition.link(record.worker, replace(link, busy=message if message.section else None, busy_told=False))


def tell_busy(transition: Transition, worker: WorkerId) -> None:
    """Report that the worker is still busy."""
    record, link = transition.memory.workers.get(worker), transition.state.links.get(worker, WorkerLink())
    if record is not None and link.busy is not None and not link.busy_told:
        transition.link(worker, replace(link, busy_told=True))
        transition.append(link.busy)


def stalled(transition: Transition, stalled: Stalled) -> None:
    """Append HangSuspected for a late worker, unless it is being stopped."""
    record, mark = transition.memory.workers.get(stalled.worker), stalled.mark
    if record is None or record.foreign or record.stop != "no":
        return
    commits.close_sum(transition, record.task)  # the commits show that it is not the last iteration which is late
    busy_with = transition.state.links.get(stalled.worker, WorkerLink()).busy
    has_declared = busy_with is not None and mark.phase == "busy" and not mark.section_limit_us
    is_slow = 0 < mark.section_limit_us <= stalled.still_us and not mark.is_waiting
    transition.append(
        HangSuspected(
            node=transition.config.node,
            task=record.task,
            worker=stalled.worker,
            generation=mark.generation,
            iteration=mark.iteration,
            phase=mark.phase,
            micro_batch=mark.micro_batch,
            collectives_entered=mark.collectives_entered,
            is_waiting=mark.is_waiting,
            is_stopped=stalled.is_stopped,
            still_us=stalled.still_us,
            limit_us=mark.limit_us,
            section=busy_with.section if busy_with and has_declared else "",
            slow_section=mark.section if is_slow else "",
            slow_limit_us=mark.section_limit_us if is_slow else 0,
            report_number=stalled.times,
        )
    )


def accelerator_saw(transition: Transition, saw: AcceleratorSaw) -> None:
    """Append a finding about an accelerator; a worker that has ended in between is left out."""
    transition.append(
        AcceleratorReported(
            node=transition.config.node,
            accelerator=saw.accelerator[:MAX_TEXT],
            worker=saw.worker if saw.worker in transition.memory.workers else "",
            kind=saw.kind,
            xid=saw.xid,
            message=saw.message[:MAX_TEXT],
            repair_need=saw.repair_need,
            predicts_failure=saw.predicts_failure,
        )
    )
