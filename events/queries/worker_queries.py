"""Reading a worker's log, the stacks of its threads or the marks of a task's workers from afar: one request and one
reply over NATS, outside of the event stream.

    unicron.v1.logs.<node>             served by the node's agent; it takes renewed warrants there too
    unicron.v1.logged.<node>.<token>   its answer, where no other node may write (logins.py)

A follower asks again with `offset` set to the last reply's `next_offset`. Names obey their patterns, so no
request can name a path outside of the node's log directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from unicrond.events.log.subjects import PREFIX
from unicrond.events.vocabulary import Count, Name, Phase, Text, WorkerId


class Collective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a flight recorder: what torch remembers of the collectives of a process.

    `library`: gloo or nccl. `group`: its number in the process. `number`: the collective's number in its group; for
    point-to-point transfers (`is_p2p`) the transfer's. `state`: scheduled, started or completed; gloo reports only the
    first. `is_over`: it has ended. `sizes`: of the inputs, with their types. `since_us`: how long ago it was recorded.
    """

    library: Text
    group: Count
    number: Count
    is_p2p: bool
    name: Text
    state: Text
    is_over: bool
    sizes: Text
    since_us: Count


#: Of one worker, in one reply.
COLLECTIVES_MAX = 64


#: What one reply carries at most.
MAX_LOG_BYTES = 64 * 1024
_MAX_BODY_BYTES = MAX_LOG_BYTES + 4096
T = TypeVar("T", "LogsRequest", "LogsReply", "WarrantRenewal")


class BadLogsMessage(ValueError):
    """The message is not a valid request or reply; the text names the field."""


class LogsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The end of a log, or what follows `offset`.

    `worker` None: the task's newest worker on the node. `offset`: a byte of the present part of the log;
    one beyond its end (the log was rotated since) means its beginning. `stacks`: what the worker's threads are doing,
    in place of its log. `marks`: where each worker of the task is on the node, in place of a log. `flight`: the
    collectives that the worker's flight recorder holds. An agent that does not know a field says so.
    """

    task: Name
    worker: WorkerId | None = None
    tail_bytes: Annotated[int, Meta(ge=1, le=MAX_LOG_BYTES)] = 8192
    offset: Count | None = None
    stacks: bool = False
    marks: bool = False
    flight: bool = False


class WarrantRenewal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new warrant of a membership that stands (events/trust/membership_certificates.py), without the node's place.
    The answer is a LogsReply without data."""

    task: Name
    generation: Count
    warrant: Annotated[str, Meta(max_length=4096)]


class LogsReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to LogsRequest. `data` stands at `next_offset - len(data)`. `error` is one plain sentence; then `data`
    is empty."""

    node: Name
    worker: WorkerId | None = None
    data: Annotated[bytes, Meta(max_length=MAX_LOG_BYTES)] = b""
    next_offset: Count = 0
    error: Text = ""


class WorkerMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The place of a worker, by its own phase mark, which its agent reads without its help (agents/protocol/marks.py).

    `collectives_entered`: the collectives across replicas that it has entered in `generation`; `is_waiting`: it has not
    left the last of them. `still_us`: for how long the mark has not changed. `section`: which part of
    its program it is in (hook.section), for `section_us`; "": none.
    """

    worker: WorkerId
    phase: Phase
    generation: Count
    iteration: Count
    micro_batch: Count
    collectives_entered: Count
    is_waiting: bool
    still_us: Count
    section: Text = ""
    section_us: Count = 0


def encode_flight(collectives: Sequence[Collective]) -> bytes:
    """Encode collectives for LogsReply.data."""
    return msgspec.msgpack.encode(collectives)


def decode_flight(data: bytes) -> list[Collective]:
    """Decode collectives from LogsReply.data. Raises BadLogsMessage."""
    try:
        return msgspec.msgpack.decode(data, type=list[Collective], strict=True)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadLogsMessage(" ".join(str(error).split())) from None


def encode_marks(marks: Sequence[WorkerMark]) -> bytes:
    """Encode marks for LogsReply.data."""
    return msgspec.msgpack.encode(marks)


def decode_marks(data: bytes) -> list[WorkerMark]:
    """Decode marks from LogsReply.data. Raises BadLogsMessage."""
    try:
        return msgspec.msgpack.decode(data, type=list[WorkerMark], strict=True)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadLogsMessage(" ".join(str(error).split())) from None


def logs_subject(node: Name) -> str:
    """Return the subject on which the node's agent serves its logs."""
    return f"{PREFIX}.logs.{node}"


#: Every answer of every node.
ANSWERS = f"{PREFIX}.logged.*.*"


def answer_subject(node: Name, token: str) -> str:
    """Return the subject on which the node's agent is to answer a request."""
    return f"{PREFIX}.logged.{node}.{token}"


def encode(message: LogsRequest | LogsReply | WarrantRenewal) -> bytes:
    """Encode a request or a reply."""
    return msgspec.msgpack.encode(message)


def decode_request(body: bytes) -> LogsRequest:
    """Decode a request. Raises BadLogsMessage, also where worker and task do not belong together."""
    request = _decode(body, LogsRequest)
    if request.worker is not None and request.worker.rpartition(".")[0] != request.task:
        raise BadLogsMessage(f"$.worker: {request.worker} is not a worker of task {request.task}")
    return request


def decode_renewal(body: bytes) -> WarrantRenewal | None:
    """Decode a renewal; return None where the body is another request."""
    try:
        return _decode(body, WarrantRenewal)
    except BadLogsMessage:
        return None


def decode_reply(body: bytes) -> LogsReply:
    """Decode a reply. Raises BadLogsMessage."""
    return _decode(body, LogsReply)


def _decode(body: bytes, kind: type[T]) -> T:
    if len(body) > _MAX_BODY_BYTES:
        raise BadLogsMessage(f"{len(body)} bytes long, more than the {_MAX_BODY_BYTES} allowed")
    try:
        return msgspec.msgpack.decode(body, type=kind, strict=True)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadLogsMessage(" ".join(str(error).split())) from None
