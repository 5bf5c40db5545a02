"""Handles the end of a worker: its cause, its reports, and its record in the memory. Rules: machine.py."""

from __future__ import annotations

import signal

from msgspec.structs import replace

from unicrond.agents.core import commits, floods, reports, starting
from unicrond.agents.core.exit_causes import Exit, classify
from unicrond.agents.core.state import MAX_GONE, EndedWorker, TellForkServer, WorkerLink, WorkerRecord
from unicrond.agents.core.transaction import Transition, newest_of
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.messages import ProcessExitAck
from unicrond.events.vocabulary import ErrorReported, WorkerExited, WorkerId


def exited(transition: Transition, worker: WorkerId, pid: int, end: Exit, log_tail: str, mark: Mark | None) -> None:
    """Report the cause and the exit of an ended process, and forget it when the log has them."""
    if worker in transition.state.confirming:
        return
    record = transition.memory.workers.get(worker)
    if record is None:
        exited_before(transition, worker, end, log_tail)
        return
    if record.foreign:
        forget(transition, record, None)
        transition.actions.append(TellForkServer(message=ProcessExitAck(worker=worker)))
        return
    reports.take_waiting(transition, worker)
    starting.started(transition, worker, pid)  # in case that it ended so soon that its ProcessForked was lost
    record = transition.memory.workers[worker]
    task = record.task
    commits.close_sum(transition, task)
    expected = record.stop != "no" or (end.exit_code == 0 and record.member and not left_early(record, mark))
    if not expected and not record.cause_told:
        tell_cause(transition, record, end, log_tail, mark)
    forget(transition, record, EndedWorker(expected=expected, durable=False))
    tell_exit(transition, worker, end, expected, log_tail, mark if record.member else None)
    for order in record.stop_orders:
        transition.answer(order)


def left_early(record: WorkerRecord, mark: Mark | None) -> bool:
    """Return whether a member that ended with code 0 had neither done its part nor asked to stop. Unknown without a
    mark: False."""
    return mark is not None and mark.phase != "done" and not (record.completed or record.stopping)


def exited_before(transition: Transition, worker: WorkerId, end: Exit, log_tail: str) -> None:
    """Handle an exit of a worker that is not in the memory, or that was in the outbox of the agent before."""
    ended_worker = transition.memory.ended_workers.get(worker)
    if (ended_worker and ended_worker.durable) or worker in transition.memory.foreign_workers:
        transition.actions.append(TellForkServer(message=ProcessExitAck(worker=worker)))
        return
    expected = ended_worker.expected if ended_worker else False
    remember_end(transition, worker, EndedWorker(expected=expected, durable=False))
    tell_exit(transition, worker, end, expected, log_tail)


def tell_again(transition: Transition) -> None:
    """Report the exits that the log may lack: the agent before has noted them, and neither it nor the fork server,
    which keeps an exit until the log has it, lives any more (a container that was killed as a whole)."""
    for worker, ended_worker in transition.memory.ended_workers.items():
        if not ended_worker.durable and worker not in transition.state.confirming:
            tell_exit(
                transition, worker, Exit(None, signal.SIGKILL, transition.config.vanished), ended_worker.expected, ""
            )


def tell_cause(transition: Transition, record: WorkerRecord, end: Exit, log_tail: str, mark: Mark | None) -> None:
    """Append ErrorReported for an unexpected exit."""
    kind, text = classify(end, ready=record.ready, member=record.member)
    link = transition.state.links.get(record.worker, WorkerLink())
    generation, committed = transition.state.summed.get(record.task, (0, 0))
    at_work = committed + 1 if generation == record.generation else 0
    transition.append(
        ErrorReported(
            node=transition.config.node,
            task=record.task,
            worker=record.worker,
            kind=kind,
            generation=max(record.generation, link.sent_generation),
            iteration=mark.iteration if mark else max(link.iteration, at_work),
            phase=mark.phase if mark else "unknown" if record.ready else "start",
            message=text,
            detail=log_tail,
        )
    )


def tell_exit(
    transition: Transition, worker: WorkerId, end: Exit, expected: bool, log_tail: str, mark: Mark | None = None
) -> None:
    """Append WorkerExited, and remember that the log is still to confirm it. `mark`: a member's."""
    transition.state = replace(transition.state, confirming=transition.state.confirming | {worker})
    transition.append(
        WorkerExited(
            node=transition.config.node,
            task=worker.rpartition(".")[0],
            worker=worker,
            exit_code=end.exit_code,
            signal=end.signal,
            is_expected=expected,
            log_tail="" if expected else log_tail,
            cause=end.cause,
            iteration=mark.iteration if mark else 0,
            micro_batches_finished=computed(mark) if mark else 0,
        ),
        confirm=True,
    )


def computed(mark: Mark) -> int:
    """Return how many micro-batches of its iteration the worker had finished, at least: the last one may be over where
    it regroups."""
    return mark.micro_batch + (mark.phase in ("reduce", "step"))


def forget(transition: Transition, record: WorkerRecord, ended_worker: EndedWorker | None) -> None:
    """Forget the worker; `ended_worker`: the record to keep of it, None for nothing."""
    floods.forget(transition, record.worker)
    worker, state = record.worker, transition.state
    transition.remember(workers={w: r for w, r in transition.memory.workers.items() if w != worker})
    if ended_worker:
        remember_end(transition, worker, ended_worker)
    links = {w: link for w, link in state.links.items() if w != worker}
    transition.state = replace(transition.state, links=links, unheard=state.unheard - {worker})


def remember_end(transition: Transition, worker: WorkerId, ended_worker: EndedWorker) -> None:
    """Remember how the worker ended, of at most MAX_GONE workers."""
    transition.remember(ended_workers=newest_of({**transition.memory.ended_workers, worker: ended_worker}, MAX_GONE))
