"""Stopping: Quit, SIGTERM, SIGKILL, one after the other. Rules: core.py."""

from __future__ import annotations

import signal
from typing import assert_never

from agents.handling import starting
from agents.handling.turn import MAX_TEXT, Turn
from agents.protocol.messages import Kill, Quit
from agents.state import ArmTimer, Order, TellForkServer, TellWorker, Worker
from events.vocabulary import StopWorker


def stop_commanded(turn: Turn, command: StopWorker, order: Order) -> None:
    """Begin to end the worker; the order is answered when it is gone. `kill`: with SIGKILL at once."""
    for waiting in turn.memory.waiting:
        if waiting.command.worker == command.worker:
            starting.give_up_start(turn, waiting, f"stopped before it started: {command.reason}")
    record = turn.memory.workers.get(command.worker)
    if record is None:
        turn.answer(order)  # gone, or never here: nothing runs
        return
    record = turn.change(record, stop_orders=(*record.stop_orders, order))
    if command.kill and record.stop != "kill":
        press(turn, turn.change(record, stop="kill", stop_reason=command.reason))
    stop(turn, turn.memory.workers[command.worker], command.reason)


def stop(turn: Turn, record: Worker, reason: str) -> None:
    """Begin to end a worker; nothing where that has begun already."""
    if record.stop == "no":
        # A worker that was never a member has nothing to finish; if it cannot hear either, do not wait for it.
        stage = "quit" if record.member or turn.is_connected(record.worker) else "term"
        press(turn, turn.change(record, stop=stage, stop_reason=reason[:MAX_TEXT]))


def press(turn: Turn, record: Worker) -> None:
    """Do what the stage of the stop asks for, and arm the next stage."""
    worker, config = record.worker, turn.config
    match record.stop:
        case "quit" if turn.is_connected(worker):
            turn.actions.append(TellWorker(worker=worker, message=Quit(reason=record.stop_reason)))
            after_s = config.grace_s
        case "quit":  # it cannot hear now: it gets the Quit if it connects within the grace time
            after_s = config.grace_s
        case "term":
            turn.actions.append(TellForkServer(message=Kill(worker=worker, signal=signal.SIGTERM)))
            after_s = config.kill_after_s
        case "kill":
            turn.actions.append(TellForkServer(message=Kill(worker=worker, signal=signal.SIGKILL)))
            after_s = config.kill_after_s  # and again: a Kill may be lost with a connection
        case "no":
            return
        case _ as never:
            assert_never(never)
    turn.actions.append(ArmTimer(name="stop", key=worker, after_s=after_s))
