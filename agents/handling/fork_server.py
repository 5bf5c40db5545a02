"""Adoption: what the fork server says; its inventory is what there is. Rules: core.py."""

from __future__ import annotations

import signal
from typing import assert_never

from msgspec.structs import replace

from agents.classify import Exit
from agents.handling import exits, joining, starting, stopping
from agents.handling.turn import MAX_TEXT, Turn
from agents.protocol.marks import Mark
from agents.protocol.messages import Exited, Forked, FromForkServer, Inventory, KeepFailed, Kept, SpawnFailed
from agents.state import ArmTimer, Gone, Worker
from events.vocabulary import ExitCause, WorkerId


def fork_server_said(turn: Turn, said: FromForkServer, log_tail: str, mark: Mark | None) -> None:
    """Hand a message of the fork server to its subject. `log_tail`, `mark`: of the worker that it names."""
    match said:
        case Forked(worker=worker, pid=pid):
            starting.started(turn, worker, pid)
        case SpawnFailed(worker=worker, reason=reason):
            spawn_failed(turn, worker, reason)
        case Exited(worker=worker, pid=pid, status=status, oom=oom):
            exits.exited(turn, worker, pid, Exit.of(status, oom), log_tail, mark)
            after_an_end(turn)
        case Inventory():
            take_inventory(turn, said)
        case Kept() | KeepFailed():
            pass  # descriptors are the shell's
        case _ as never:
            assert_never(never)


def spawn_failed(turn: Turn, worker: WorkerId, reason: str) -> None:
    """A process that could not be started: its start is answered with `reason`, and its slot is free."""
    record = turn.memory.workers.get(worker)
    if record is None or record.pid:
        return
    exits.forget(turn, record, Gone(expected=True, durable=True))
    if record.starting:
        turn.answer(record.starting.order, f"the process could not be started: {reason}"[:MAX_TEXT])
    for order in record.stop_orders:
        turn.answer(order)
    after_an_end(turn)


def take_inventory(turn: Turn, inventory: Inventory) -> None:
    """What the fork server holds is what there is; exits that it still knows came before this."""
    is_first = turn.state.phase == "adopting" and not turn.state.store_port
    turn.state = replace(turn.state, store_port=inventory.store_port, separates=inventory.separates)
    listed = {entry.worker: entry for entry in inventory.workers}
    if is_first:
        begin_adoption(turn, frozenset(listed))
    for worker, entry in sorted(listed.items()):
        if worker not in turn.memory.workers:
            record = Worker(worker=worker, task=entry.task, slot=entry.slot, pid=entry.pid)
            turn.remember(workers={**turn.memory.workers, worker: record})
            continue
        starting.started(turn, worker, entry.pid)
        stopping.press(turn, turn.change(turn.memory.workers[worker], pid=entry.pid, slot=entry.slot))
    end_all_but(turn, frozenset(listed), turn.config.vanished)
    after_an_end(turn)
    if turn.state.phase == "up" and turn.state.joined_port != turn.state.store_port:
        joining.join(turn)


def begin_adoption(turn: Turn, listed: frozenset[WorkerId]) -> None:
    """The fork server has listed its workers: wait `hello_wait_s` at most for those that are not connected."""
    for waiting in turn.memory.waiting:
        starting.arm_wait(turn, waiting.command.worker)
    connected = {worker for worker, link in turn.state.links.items() if link.connected}
    turn.state = replace(turn.state, unheard=listed - connected)
    if turn.state.unheard:
        turn.actions.append(ArmTimer(name="adopt", key="", after_s=turn.config.hello_wait_s))


def fork_server_died(turn: Turn, cause: ExitCause) -> None:
    """All workers have died with the fork server, which `cause` has ended."""
    turn.state = replace(turn.state, store_port=0)
    end_all_but(turn, frozenset(), cause)
    after_an_end(turn)


def end_all_but(turn: Turn, listed: frozenset[WorkerId], cause: ExitCause) -> None:
    """What the fork server does not list went with an earlier one, or was never asked of this one."""
    for worker in sorted(turn.memory.workers.keys() - listed):
        record = turn.memory.workers[worker]
        if record.pid:
            exits.exited(turn, worker, record.pid, Exit(None, signal.SIGKILL, cause), "", None)
        else:
            requeue(turn, record)


def requeue(turn: Turn, record: Worker) -> None:
    """The Spawn was lost with the fork server or its connection."""
    turn.remember(workers={w: r for w, r in turn.memory.workers.items() if w != record.worker})
    if record.starting and record.stop == "no":
        turn.remember(waiting=(record.starting, *turn.memory.waiting))
        starting.arm_wait(turn, record.worker)
        return
    if record.starting:
        turn.answer(record.starting.order, f"stopped before it started: {record.stop_reason}"[:MAX_TEXT])
    for order in record.stop_orders:
        turn.answer(order)


def after_an_end(turn: Turn) -> None:
    """A worker is gone: waiting starts get its slot, and the node may now be able to join or leave."""
    starting.fill_slots(turn)
    joining.join_if_complete(turn)
    joining.leave_if_empty(turn)
