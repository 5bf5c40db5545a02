"""Exits: the end of a worker, its cause, and what is remembered of it. Rules: core.py."""

from __future__ import annotations

from msgspec.structs import replace

from agents.classify import Exit, classify
from agents.handling import commits, starting
from agents.handling.turn import Turn, newest_of
from agents.protocol.marks import Mark
from agents.protocol.messages import ExitedAck
from agents.state import MAX_GONE, Gone, Link, TellForkServer, Worker
from events.vocabulary import ErrorReported, WorkerExited, WorkerId


def exited(turn: Turn, worker: WorkerId, pid: int, end: Exit, log_tail: str, mark: Mark | None) -> None:
    """A process has ended: tell its cause and its end, and forget it when the log has them."""
    if worker in turn.state.confirming:
        return
    record = turn.memory.workers.get(worker)
    if record is None:
        exited_before(turn, worker, end, log_tail)
        return
    if record.foreign:
        forget(turn, record, None)
        turn.actions.append(TellForkServer(message=ExitedAck(worker=worker)))
        return
    starting.started(turn, worker, pid)  # in case that it ended so soon that its Forked was lost
    record = turn.memory.workers[worker]
    task = record.task
    commits.close_sum(turn, task)
    expected = record.stop != "no" or (end.exit_code == 0 and record.member and not left_early(record, mark))
    if not expected and not record.cause_told:
        tell_cause(turn, record, end, log_tail, mark)
    forget(turn, record, Gone(expected=expected, durable=False))
    tell_exit(turn, worker, end, expected, log_tail, mark if record.member else None)
    for order in record.stop_orders:
        turn.answer(order)


def left_early(record: Worker, mark: Mark | None) -> bool:
    """A member that ended with code 0 had not done its part, nor asked to stop. Without a mark one cannot tell."""
    return mark is not None and mark.phase != "done" and not (record.completed or record.stopping)


def exited_before(turn: Turn, worker: WorkerId, end: Exit, log_tail: str) -> None:
    """An exit of a worker that is not in the memory, or that was in the outbox of the agent before."""
    gone = turn.memory.gone.get(worker)
    if (gone and gone.durable) or worker in turn.memory.foreign_gone:
        turn.actions.append(TellForkServer(message=ExitedAck(worker=worker)))
        return
    expected = gone.expected if gone else False
    put_gone(turn, worker, Gone(expected=expected, durable=False))
    tell_exit(turn, worker, end, expected, log_tail)


def tell_cause(turn: Turn, record: Worker, end: Exit, log_tail: str, mark: Mark | None) -> None:
    """Append ErrorReported for an end that was not expected."""
    kind, text = classify(end, ready=record.ready, member=record.member)
    link = turn.state.links.get(record.worker, Link())
    generation, committed = turn.state.summed.get(record.task, (0, 0))
    at_work = committed + 1 if generation == record.generation else 0
    turn.append(
        ErrorReported(
            node=turn.config.node,
            task=record.task,
            worker=record.worker,
            kind=kind,
            generation=max(record.generation, link.told),
            iteration=mark.iteration if mark else max(link.iteration, at_work),
            phase=mark.phase if mark else "unknown" if record.ready else "start",
            message=text,
            detail=log_tail,
        )
    )


def tell_exit(turn: Turn, worker: WorkerId, end: Exit, expected: bool, log_tail: str, mark: Mark | None = None) -> None:
    """Append WorkerExited, and remember that the log is still to confirm it. `mark`: a member's."""
    turn.state = replace(turn.state, confirming=turn.state.confirming | {worker})
    turn.append(
        WorkerExited(
            node=turn.config.node,
            task=worker.rpartition(".")[0],
            worker=worker,
            exit_code=end.exit_code,
            signal=end.signal,
            expected=expected,
            log_tail="" if expected else log_tail,
            cause=end.cause,
            iteration=mark.iteration if mark else 0,
            computed=computed(mark) if mark else 0,
        ),
        confirm=True,
    )


def computed(mark: Mark) -> int:
    """How many micro-batches of its iteration the worker had finished, at least: the one that it began last may be
    over where it regroups."""
    return mark.micro_batch + (mark.phase in ("reduce", "step"))


def forget(turn: Turn, record: Worker, gone: Gone | None) -> None:
    """Forget the worker; `gone`: what to keep of it, None for nothing."""
    worker, state = record.worker, turn.state
    turn.remember(workers={w: r for w, r in turn.memory.workers.items() if w != worker})
    if gone:
        put_gone(turn, worker, gone)
    links = {w: link for w, link in state.links.items() if w != worker}
    turn.state = replace(turn.state, links=links, unheard=state.unheard - {worker})


def put_gone(turn: Turn, worker: WorkerId, gone: Gone) -> None:
    """Keep how the worker ended, of at most MAX_GONE workers."""
    turn.remember(gone=newest_of({**turn.memory.gone, worker: gone}, MAX_GONE))
