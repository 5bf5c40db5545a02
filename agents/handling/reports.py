"""Reports: what workers, and the watches over them and over accelerators, say. Rules: core.py."""

from __future__ import annotations

from typing import TypeAlias, assert_never

from msgspec.structs import replace

from agents.handling import commits, joining, kept_states, memberships
from agents.handling.turn import MAX_TEXT, Turn
from agents.protocol.flight import Flight
from agents.protocol.messages import (
    Busy,
    Captured,
    CaughtUp,
    Committed,
    Completed,
    Degraded,
    FromWorker,
    Hello,
    Parked,
    Quit,
    Ready,
    Regrouped,
    Saved,
    StopWanted,
    Straggles,
    Suspected,
    Taken,
    Trouble,
    Unsaved,
    Waits,
)
from agents.state import AcceleratorSaw, ArmTimer, Disconnect, Link, Stalled, TellWorker, Worker
from events.vocabulary import (
    AcceleratorReported,
    CheckpointSaved,
    CorruptionSuspected,
    DegradationObserved,
    ErrorReported,
    HangSuspected,
    Observation,
    SaveFailed,
    StateTaken,
    StopAsked,
    StragglerObserved,
    StragglerRecovered,
    TaskCompleted,
    WorkerBusy,
    WorkerId,
    WorkerParked,
    WorkerReady,
    WorkerRegrouped,
    WorkerWaits,
)

#: Shorter work is not reported.
BUSY_TOLD_AFTER_S = 1.0

#: What a worker reports when a *peer* has failed: a symptom, not the cause of its own end.
SYMPTOMS = frozenset({"connection_broken", "collective_timeout"})
#: Reports that become an observation as they are: the event has the message's fields, and says of which worker.
Reported: TypeAlias = (
    Regrouped | Parked | Trouble | Degraded | Straggles | CaughtUp | Suspected | Taken | Saved | Completed | Busy
    | Waits | StopWanted | Unsaved
)  # fmt: skip
REPORTED: dict[type[Reported], type[Observation]] = {
    Regrouped: WorkerRegrouped,
    Parked: WorkerParked,
    Trouble: ErrorReported,
    Degraded: DegradationObserved,
    Straggles: StragglerObserved,
    CaughtUp: StragglerRecovered,
    Suspected: CorruptionSuspected,
    Taken: StateTaken,
    Saved: CheckpointSaved,
    Completed: TaskCompleted,
    Busy: WorkerBusy,
    Waits: WorkerWaits,
    StopWanted: StopAsked,
    Unsaved: SaveFailed,
}


def connected(turn: Turn, hello: Hello) -> None:
    """A worker has connected; one that was not started here is disconnected."""
    worker = hello.worker
    record = turn.memory.workers.get(worker)
    if record is None or record.task != hello.task or record.pid not in (0, hello.pid):
        turn.actions.append(Disconnect(worker=worker, why="this node started no such worker"))
        return
    turn.link(worker, Link(told=hello.generation))
    if hello.generation > record.generation:
        record = turn.change(record, generation=hello.generation, member=True)
    if hello.ready and not record.foreign:
        ready(turn, record, is_news=hello.generation == 0)
    record = turn.memory.workers[worker]
    memberships.tell_membership(turn, record)
    if record.stop == "quit":
        turn.actions.append(TellWorker(worker=worker, message=Quit(reason=record.stop_reason)))
    if worker in turn.state.unheard:
        turn.state = replace(turn.state, unheard=turn.state.unheard - {worker})
        joining.join_if_complete(turn)


def disconnected(turn: Turn, worker: WorkerId) -> None:
    """A worker's connection has ended; its process may live on."""
    link = turn.state.links.get(worker)
    if link:
        turn.link(worker, replace(link, connected=False))


def ready(turn: Turn, record: Worker, *, is_news: bool = True) -> None:
    """The worker has started up. `is_news`: the log has yet to know it."""
    if record.ready:
        return
    turn.change(record, ready=True)
    if is_news:
        turn.append(WorkerReady(node=turn.config.node, task=record.task, worker=record.worker))


def worker_said(turn: Turn, worker: WorkerId, message: FromWorker) -> None:  # noqa: C901  # one case for each kind of message
    """Hand a worker's message to its subject; what unknown and foreign workers say is passed over."""
    record = turn.memory.workers.get(worker)
    if record is None or record.foreign:
        return
    match message:
        case Hello():
            connected(turn, message)
        case Ready():
            ready(turn, record)
        case Committed():
            commits.committed(turn, record, message)
        case Regrouped():
            if message.generation <= record.regrouped:
                return  # told again to a new agent
            commits.close_sum(turn, record.task)
            generation = max(record.generation, message.generation)
            turn.change(record, regrouped=message.generation, generation=generation)
            turn.reached(worker, message.iteration)
            if (report := memberships.to_report(turn, record, message)) is not None:
                pass_on(turn, record, report)
        case Parked():
            commits.close_sum(turn, record.task)
            turn.reached(worker, message.iteration)
            pass_on(turn, record, message)
        case Trouble():
            commits.close_sum(turn, record.task)
            turn.reached(worker, message.iteration)
            if message.kind not in SYMPTOMS:
                turn.change(record, cause_told=True)
            pass_on(turn, record, message)
        case Degraded() | Straggles() | CaughtUp() | Suspected() | Taken() | Waits() | Unsaved():
            pass_on(turn, record, message)
        case Busy():
            busy(turn, record, message)
        case StopWanted():
            commits.close_sum(turn, record.task)
            turn.change(record, stopping=True)
            pass_on(turn, record, message)
        case Captured():
            kept_states.captured(turn, record.task, message)
        case Saved():
            if message.iteration == record.saved:
                return  # told again to a new agent
            turn.change(record, saved=message.iteration)
            pass_on(turn, record, message)
        case Completed():
            if record.completed:
                return
            commits.close_sum(turn, record.task)
            turn.change(record, completed=True)
            pass_on(turn, record, message)
        case Flight():
            pass  # for a person: the shell has it
        case _ as never:
            assert_never(never)


def pass_on(turn: Turn, record: Worker, message: Reported) -> None:
    """What a worker reports is an observation once it is said of which worker it is; its fields are the same."""
    said = {field: getattr(message, field) for field in message.__struct_fields__}
    kind = REPORTED[type(message)]
    turn.append(kind(node=turn.config.node, task=record.task, worker=record.worker, **said))


def busy(turn: Turn, record: Worker, message: Busy) -> None:
    """Short work is not reported, only work that has lasted for a while (core.py, timer "busy")."""
    link = turn.state.links.get(record.worker, Link())
    if link.busy_told and not message.what:
        pass_on(turn, record, message)
    elif message.what:
        turn.actions.append(ArmTimer(name="busy", key=record.worker, after_s=BUSY_TOLD_AFTER_S))
    turn.link(record.worker, replace(link, busy=message if message.what else None, busy_told=False))


def tell_busy(turn: Turn, worker: WorkerId) -> None:
    """It is still at it."""
    record, link = turn.memory.workers.get(worker), turn.state.links.get(worker, Link())
    if record is not None and link.busy is not None and not link.busy_told:
        turn.link(worker, replace(link, busy_told=True))
        pass_on(turn, record, link.busy)


def stalled(turn: Turn, stalled: Stalled) -> None:
    """A worker is late: append HangSuspected, unless it is being stopped."""
    record, mark = turn.memory.workers.get(stalled.worker), stalled.mark
    if record is None or record.foreign or record.stop != "no":
        return
    commits.close_sum(turn, record.task)  # what was committed says that it is not the last iteration which is late
    busy_with = turn.state.links.get(stalled.worker, Link()).busy
    turn.append(
        HangSuspected(
            node=turn.config.node,
            task=record.task,
            worker=stalled.worker,
            generation=mark.generation,
            iteration=mark.iteration,
            phase=mark.phase,
            micro_batch=mark.micro_batch,
            entered=mark.entered,
            waiting=mark.waiting,
            stopped=stalled.stopped,
            still_us=stalled.still_us,
            limit_us=mark.limit_us,
            busy=busy_with.what if busy_with and mark.phase == "busy" else "",
            told=stalled.times,
        )
    )


def accelerator_saw(turn: Turn, saw: AcceleratorSaw) -> None:
    """Where a worker has gone meanwhile, no worker runs."""
    turn.append(
        AcceleratorReported(
            node=turn.config.node,
            accelerator=saw.accelerator[:MAX_TEXT],
            worker=saw.worker if saw.worker in turn.memory.workers else "",
            kind=saw.kind,
            xid=saw.xid,
            message=saw.message[:MAX_TEXT],
            needs=saw.needs,
            foretells=saw.foretells,
        )
    )
