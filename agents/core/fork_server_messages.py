"""Handles the fork server's messages, and adopts the workers in its inventory, which is complete. Rules: machine.py."""

from __future__ import annotations

import signal
from typing import assert_never

from msgspec.structs import replace

from unicrond.agents.core import exits, joining, starting, stopping
from unicrond.agents.core.exit_causes import Exit
from unicrond.agents.core.state import ArmTimer, EndedWorker, WorkerRecord
from unicrond.agents.core.transaction import MAX_TEXT, Transition
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.messages import (
    FromForkServer,
    Inventory,
    MemoryReserved,
    ProcessExited,
    ProcessForked,
    ReserveFailed,
    SpawnFailed,
)
from unicrond.events.vocabulary import ExitCause, WorkerId


def fork_server_said(transition: Transition, message: FromForkServer, log_tail: str, mark: Mark | None) -> None:
    """Dispatch a message of the fork server to its subject. `log_tail`, `mark`: of the worker that it names."""
    match message:
        case ProcessForked(worker=worker, pid=pid):
            starting.started(transition, worker, pid)
        case SpawnFailed(worker=worker, reason=reason):
            spawn_failed(transition, worker, reason)
        case ProcessExited(worker=worker, pid=pid, status=status, oom=oom):
            exits.exited(transition, worker, pid, Exit.of(status, oom), log_tail, mark)
            after_an_end(transition)
        case Inventory():
            take_inventory(transition, message)
        case MemoryReserved() | ReserveFailed():
            pass  # descriptors are the shell's
        case _ as never:
            assert_never(never)


def spawn_failed(transition: Transition, worker: WorkerId, reason: str) -> None:
    """Answer the start of a process that could not be started with `reason`, and free its slot."""
    record = transition.memory.workers.get(worker)
    if record is None or record.pid:
        return
    exits.forget(transition, record, EndedWorker(expected=True, durable=True))
    if record.starting:
        transition.answer(record.starting.order, f"the process could not be started: {reason}"[:MAX_TEXT])
    for order in record.stop_orders:
        transition.answer(order)
    after_an_end(transition)


def take_inventory(transition: Transition, inventory: Inventory) -> None:
    """Accept the fork server's inventory: there are no other workers. Exits that it still knows came before this."""
    is_first = transition.state.phase == "adopting" and not transition.state.store_port
    transition.state = replace(
        transition.state,
        store_port=inventory.store_port,
        separates=inventory.separates,
        degrees=inventory.degrees,
    )
    listed = {entry.worker: entry for entry in inventory.workers}
    if is_first:
        begin_adoption(transition, frozenset(listed))
    for worker, entry in sorted(listed.items()):
        if worker not in transition.memory.workers:
            record = WorkerRecord(worker=worker, task=entry.task, slot=entry.slot, pid=entry.pid)
            transition.remember(workers={**transition.memory.workers, worker: record})
            continue
        starting.started(transition, worker, entry.pid)
        stopping.press(transition, transition.change(transition.memory.workers[worker], pid=entry.pid, slot=entry.slot))
    end_all_but(transition, frozenset(listed), transition.config.vanished)
    if is_first:
        exits.tell_again(transition)
    after_an_end(transition)
    if transition.state.phase == "up" and transition.state.joined_port != transition.state.store_port:
        joining.join(transition)


def begin_adoption(transition: Transition, listed: frozenset[WorkerId]) -> None:
    """Wait `hello_wait_s` at most for the listed workers that are not connected."""
    for waiting in transition.memory.waiting_starts:
        if starting.is_void(transition, waiting.command):
            starting.give_up_start(transition, waiting, starting.VOID)
        else:
            starting.arm_wait(transition, waiting.command.worker)
    connected = {worker for worker, link in transition.state.links.items() if link.connected}
    transition.state = replace(transition.state, unheard=listed - connected)
    if transition.state.unheard:
        transition.actions.append(ArmTimer(name="adopt", key="", after_s=transition.config.hello_wait_s))


def fork_server_died(transition: Transition, cause: ExitCause) -> None:
    """End all workers, which have died with the fork server. `cause`: what ended it."""
    transition.state = replace(transition.state, store_port=0)
    end_all_but(transition, frozenset(), cause)
    after_an_end(transition)


def end_all_but(transition: Transition, listed: frozenset[WorkerId], cause: ExitCause) -> None:
    """End the workers that the fork server does not list: they died with an earlier one, or were never ordered from
    this one."""
    for worker in sorted(transition.memory.workers.keys() - listed):
        record = transition.memory.workers[worker]
        if record.pid:
            exits.exited(transition, worker, record.pid, Exit(None, signal.SIGKILL, cause), "", None)
        else:
            requeue(transition, record)


def requeue(transition: Transition, record: WorkerRecord) -> None:
    """Let a start wait again whose Spawn was lost with the fork server or its connection."""
    transition.remember(workers={w: r for w, r in transition.memory.workers.items() if w != record.worker})
    if record.starting and record.stop == "no" and starting.is_void(transition, record.starting.command):
        transition.answer(record.starting.order, starting.VOID)
        return
    if record.starting and record.stop == "no":
        transition.remember(waiting_starts=(record.starting, *transition.memory.waiting_starts))
        starting.arm_wait(transition, record.worker)
        return
    if record.starting:
        transition.answer(record.starting.order, f"stopped before it started: {record.stop_reason}"[:MAX_TEXT])
    for order in record.stop_orders:
        transition.answer(order)


def after_an_end(transition: Transition) -> None:
    """Give the slot of an ended worker to waiting starts; the node may now be able to join or leave."""
    starting.fill_slots(transition)
    joining.join_if_complete(transition)
    joining.leave_if_empty(transition)
