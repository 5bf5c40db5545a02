"""Stops workers: Quit, then SIGTERM, then SIGKILL; and orders the stacks of those that hang. Rules: machine.py.

Rules of stacks
---------------
* A stack is read of each worker once per generation: a kill and a membership that ask for the same one come together.
* The order precedes what moves the worker: the shell carries actions out in this order, and a worker reads its messages
  in this order (trainer/process/channel.py). So only the SIGKILL of a process waits for the stack of that process,
  for a bounded time (stack_keeper.py).
* A worker that no membership has named is looked at only where it is killed: it may hang while it starts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import assert_never

from msgspec.structs import replace

from unicrond.agents.core import starting
from unicrond.agents.core.state import (
    MAX_GONE,
    ArmTimer,
    PendingCommand,
    TakeStacks,
    TellForkServer,
    TellWorker,
    WorkerRecord,
)
from unicrond.agents.core.transaction import MAX_TEXT, Transition, newest_of
from unicrond.agents.protocol.messages import Kill, Quit
from unicrond.events.vocabulary import Name, StopWorker


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
        take_stacks(transition, record.task, [record])
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


def take_members_stacks(transition: Transition, task: Name, generation: int) -> None:
    """Order the stacks of the task's workers here that are in an older group than `generation`."""
    records = [record for record in transition.memory.workers.values() if record.task == task and record.member]
    take_stacks(transition, task, [record for record in records if 0 < record.generation < generation])


def take_stacks(transition: Transition, task: Name, records: Iterable[WorkerRecord]) -> None:
    """Order the stacks of these workers of one task, of those that have a process and were not looked at yet."""
    generations = transition.state.stack_generations
    targets = [
        record
        for record in records
        if record.pid and not record.foreign and generations.get(record.worker) != record.generation
    ]
    if not targets:
        return
    generations = {**generations, **{record.worker: record.generation for record in targets}}
    transition.state = replace(transition.state, stack_generations=newest_of(generations, MAX_GONE))
    transition.actions.append(
        TakeStacks(
            task=task,
            generation=max(record.generation for record in targets),
            processes={record.worker: record.pid for record in targets},
        )
    )
