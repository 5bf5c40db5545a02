"""Answers requests about this node's workers: logs, stacks, marks, flight recorders (events/queries/worker_queries.py).

Text that looks like a secret is masked; values of a task's secrets do not come into a log at all
(fork_server/masked_output.py). A piece is read with its surroundings, so that a secret across two pieces is masked too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from unicrond.agents.host.paths import worker_log
from unicrond.agents.output.stacks import NoStacks, Questions, stacks
from unicrond.agents.protocol.marks import Mark, now_us
from unicrond.agents.protocol.messages import Flight
from unicrond.events.host.masking import PATTERN_MASK, REACH_BYTES
from unicrond.events.queries.worker_queries import (
    MAX_LOG_BYTES,
    BadLogsMessage,
    LogsReply,
    LogsRequest,
    WorkerMark,
    decode_request,
    encode,
    encode_flight,
    encode_marks,
)
from unicrond.events.vocabulary import Name, WorkerId

#: The most marks of one node in one reply.
_MARKS_MAX = 256
_NUMBER_MAX = 2**53 - 1


def _no_marks(_: Name) -> Mapping[WorkerId, Mark]:
    return {}


async def answer(
    node: Name,
    logs: Path,
    pid_of: Callable[[WorkerId], int],
    body: bytes,
    marks_of: Callable[[Name], Mapping[WorkerId, Mark]] = _no_marks,
    questions: Questions | None = None,
) -> bytes:
    """Return the reply to a request, whatever its bytes are; read at most MAX_LOG_BYTES of one file.

    `pid_of` returns the pid of a worker's process, 0 where none runs; `marks_of` the marks of a task's workers that run
    here; `questions` asks the workers themselves, None: nobody does.
    """
    try:
        request = decode_request(body)
    except BadLogsMessage as error:
        return encode(LogsReply(node=node, error=f"bad request: {error}"[:1024]))
    if request.marks:
        return encode(LogsReply(node=node, data=encode_marks(_worker_marks(marks_of(request.task), now_us()))))
    if request.flight:
        flight = await questions.flight(request.worker or "") if questions else Flight(trouble="no worker is asked")
        trouble = f"node {node}: {flight.trouble}"[:1024] if flight.trouble else ""
        return encode(
            LogsReply(node=node, worker=request.worker, data=encode_flight(flight.collectives), error=trouble)
        )
    return encode(await _stacks(node, pid_of, request, questions) if request.stacks else _read(node, logs, request))


def _worker_marks(marks: Mapping[WorkerId, Mark], at_us: int) -> list[WorkerMark]:
    """Return the marks for the reply. A worker may write anything into its mark: each number is cut to its bounds."""
    return [
        WorkerMark(
            worker=worker,
            phase=mark.phase,
            generation=min(mark.generation, _NUMBER_MAX),
            iteration=min(mark.iteration, _NUMBER_MAX),
            micro_batch=min(mark.micro_batch, _NUMBER_MAX),
            collectives_entered=min(mark.collectives_entered, _NUMBER_MAX),
            is_waiting=mark.is_waiting,
            still_us=max(0, at_us - mark.changed_us),
            section=mark.section,
            section_us=mark.section_us(at_us),
        )
        for worker, mark in list(marks.items())[:_MARKS_MAX]
    ]


async def _stacks(
    node: Name, pid_of: Callable[[WorkerId], int], request: LogsRequest, questions: Questions | None
) -> LogsReply:
    pid = pid_of(request.worker) if request.worker is not None else 0
    if not pid:
        return LogsReply(node=node, worker=request.worker, error=f"worker {request.worker} does not run on node {node}")
    try:
        return LogsReply(node=node, worker=request.worker, data=await stacks(pid))
    except NoStacks as error:
        trouble = f"node {node}: {error}"
    try:
        text = await questions.stacks(request.worker or "") if questions else ""
    except NoStacks as error:
        trouble, text = f"{trouble}; {error}", ""
    if text:
        return LogsReply(node=node, worker=request.worker, data=text.encode()[:MAX_LOG_BYTES])
    return LogsReply(node=node, worker=request.worker, error=trouble[:1024])


def _read(node: Name, logs: Path, request: LogsRequest) -> LogsReply:
    worker = request.worker or _newest(logs, request.task)
    if worker is None:
        return LogsReply(node=node, error=f"no worker of task {request.task} has run on node {node}")
    try:
        with worker_log(logs, request.task, worker).open("rb") as file:
            size_bytes = file.seek(0, 2)
            start = max(0, size_bytes - request.tail_bytes) if request.offset is None else request.offset
            if start > size_bytes:
                start = 0
            before = min(start, REACH_BYTES)
            file.seek(start - before)
            read = file.read(before + MAX_LOG_BYTES + REACH_BYTES)
            data = PATTERN_MASK.overwrite(read)[before : before + MAX_LOG_BYTES]
    except OSError as error:
        return LogsReply(node=node, worker=worker, error=f"no log of {worker} on node {node}: {error.strerror}")
    return LogsReply(node=node, worker=worker, data=data, next_offset=start + len(data))


def _newest(logs: Path, task: Name) -> WorkerId | None:
    """Return the task's worker with the highest number that has a log here."""
    names = [path.name.removesuffix(".log") for path in (logs / task).glob(f"{task}.*.log")]
    numbers = [int(number) for name in names if (number := name.rpartition(".")[2]).isdecimal()]
    return f"{task}.{max(numbers)}" if numbers else None
