"""Answers requests for the logs of this node's workers (events/logs_request.py)."""

from __future__ import annotations

from pathlib import Path

from agents.log_layout import worker_log
from events.logs_request import (
    MAX_LOG_BYTES,
    BadLogsMessage,
    LogsReply,
    LogsRequest,
    decode_request,
    encode,
)
from events.vocabulary import Name, WorkerId


def answer(node: Name, logs: Path, body: bytes) -> bytes:
    """The reply to a request, whatever its bytes are. Reads at most MAX_LOG_BYTES of one file."""
    try:
        return encode(_read(node, logs, decode_request(body)))
    except BadLogsMessage as error:
        return encode(LogsReply(node=node, error=f"bad request: {error}"[:1024]))


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
            file.seek(start)
            data = file.read(MAX_LOG_BYTES)
    except OSError as error:
        return LogsReply(node=node, worker=worker, error=f"no log of {worker} on node {node}: {error.strerror}")
    return LogsReply(node=node, worker=worker, data=data, next_offset=start + len(data))


def _newest(logs: Path, task: Name) -> WorkerId | None:
    """The task's worker with the highest number that has a log here."""
    names = [path.name.removesuffix(".log") for path in (logs / task).glob(f"{task}.*.log")]
    numbers = [int(number) for name in names if (number := name.rpartition(".")[2]).isdecimal()]
    return f"{task}.{max(numbers)}" if numbers else None
