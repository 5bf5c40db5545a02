"""Stops workers: Quit, then SIGTERM, then SIGKILL. Rules: machine.py."""

from __future__ import annotations

import signal
from typing import assert_never

from unicrond.agents.core import starting
from unicrond.agents.core.state import ArmTimer, PendingCommand, TellForkServer, TellWorker, WorkerRecord
from unicrond.agents.core.transaction import MAX_TEXT, Transition
from unicrond.agents.protocol.messages import Kill, Quit
from unicrond.events.vocabulary import StopWorker


def stop_commanded(transition: Transition, command: StopWorker, order: PendingCommand) -> None:
    """Begin to end the worker; the order is answered when it has ended. `kill`: with SIGKILL at once."""
    for waiting in transition.memory.waiting_starts:
        if waiting.command.worker == command.worker:
            starting.give_up_start(transition, waiting, f"stopped before it started: {command.reason}")
    record = transition.memory.workers.get(command.worker)
    if record is None:
        transition.answer(order)  # it has ended, or never was here: nothing runs
        return
    record = transition.change(record, stop_orders=(*record.stop_orders, order))
    if command.kill and record.stop != "kill":
        press(transition, transition.change(record, stop="kill", stop_reason=command.reason))
    stop(transition, transition.memory.workers[command.worker], command.reason)


def stop(transition: Transition, record: WorkerRecord, reason: str) -> None:
    """Begin to end a worker; nothing where that has begun already."""
    if record.stop == "no":
        # A worker that was never a member has nothing to finish; if it is not connected either, do not wait for it.
        stage = "quit" if record.member or transition.is_connected(record.worker) else "term"
        press(transition, transition.change(record, stop=stage, stop_reason=reason[:MAX_TEXT]))


def press(transition: Transition, record: WorkerRecord) -> None:
    """Carry out the present stage of the stop, and arm the next stage."""
    worker, config = record.worker, transition.config
    match record.stop:
        case "quit" if transition.is_connected(worker):
            transition.actions.append(TellWorker(worker=worker, message=Quit(reason=record.stop_reason)))
            after_s = config.grace_s
        case "quit":  # it is not connected now: it gets the Quit if it connects within the grace time
            after_s = config.grace_s
        case "term":
            transition.actions.append(TellForkServer(message=Kill(worker=worker, signal=signal.SIGTERM)))
            after_s = config.kill_after_s
        case "kill":
            transition.actions.append(TellForkServer(message=Kill(worker=worker, signal=signal.SIGKILL)))
            after_s = config.kill_after_s  # and again: a Kill may be lost with a connection
        case "no":
            return
        case _ as never:
            assert_never(never)
    transition.actions.append(ArmTimer(name="stop", key=worker, after_s=after_s))
