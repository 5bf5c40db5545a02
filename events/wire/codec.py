"""Envelope <-> bytes. The wire is one plain msgpack map; decoding is strict and total.

Rules
-----
* `decode` either returns an envelope that obeys every rule of the vocabulary or raises `BadEvent`,
  whatever the bytes are. `encode` passes its own output through `decode`: what we could not read back
  is never written.
* Types, unknown and missing fields, ranges and patterns are msgspec's; what concerns two fields at
  once, or a float's finiteness, is in `check`.
* What an observation says beyond what this version knows is set aside, not refused (`tolerance.py`).
* What was written under an older schema is raised to today's (`upcast.py`).
* A message says the lowest schema that holds it (`schemas.py`), so that older versions read what they can.
* Encoding is canonical: equal envelopes have equal bytes (fields in declared order, dict keys sorted).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.phrases import task_of
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.events.wire.schemas import FIRST, schema_of
from unicrond.events.wire.tolerance import set_aside
from unicrond.events.wire.upcast import NoStep, upcast

#: With its headers below NATS' own default limit of 1 MiB for a message.
MAX_EVENT_BYTES = 768 * 1024
#: The producers of what people ask for, of decisions, and of what operators do to the log itself.
API_PRODUCER = "api"
COORDINATOR = "coordinator"
OPERATOR = "operator"
#: No node may have one of these names: what it said would be taken for theirs, and theirs for a repetition.
RESERVED_NAMES = (API_PRODUCER, COORDINATOR, OPERATOR)

#: Why JSON is refused: NATS checks no reply subject, so within the log's account an answer can be stored anywhere
#: (accounts.py).
_NATS_SAYS = "JSON, not an event: most likely an answer of NATS to a request that had it sent to this subject"

#: How msgspec says that an array has more items than its type allows.
_TOO_LONG = "of length <="

_Rule: TypeAlias = Callable[[Envelope, Any], None]
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Envelope, strict=True)


class BadEvent(ValueError):
    """The bytes are no valid event. `reason` is one line that names the field (`$.event.node`) where there is one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def encode(envelope: Envelope) -> bytes:
    """Encode a valid envelope as canonical msgpack of at most MAX_EVENT_BYTES. Raises BadEvent."""
    try:
        body = _encoder.encode(_with_schema(envelope))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadEvent(f"cannot be encoded: {_one_line(error)}") from None
    decode(body)
    return body


def decode(body: bytes) -> Envelope:
    """Decode the envelope in `body`. Raises BadEvent and nothing else."""
    return read(body)[0]


def read(body: bytes) -> tuple[Envelope, tuple[str, ...]]:
    """Decode the envelope in `body`; return it, and the fields of an observation that this version does not know.
    Raises BadEvent."""
    unknown: tuple[str, ...] = ()
    if len(body) > MAX_EVENT_BYTES:
        raise BadEvent(f"{len(body)} bytes long, more than the {MAX_EVENT_BYTES} allowed")
    try:
        envelope = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        envelope, unknown = _decode_other(body, error)
    check(envelope)
    return (envelope if envelope.schema == FIRST else msgspec.structs.replace(envelope, schema=FIRST)), unknown


def _with_schema(envelope: Envelope) -> Envelope:
    """Return the envelope with the lowest schema whose readers can read it."""
    schema = schema_of(envelope.event)
    return envelope if schema == envelope.schema else msgspec.structs.replace(envelope, schema=schema)


def _decode_other(body: bytes, error: Exception) -> tuple[Envelope, tuple[str, ...]]:
    """Decode a body of an older or newer schema for `read`. Raises BadEvent with `error` where it is neither."""
    for form in (_upcast_body, set_aside):
        if form is set_aside and _TOO_LONG in str(error):
            break  # without what is unknown it would be as long, and to look for that takes a hundred times as long
        try:
            rewritten = form(body)
            if rewritten is not None:
                body, unknown = rewritten
                return _decoder.decode(body), unknown
        except NoStep as too_old:
            raise BadEvent(_one_line(too_old)) from None
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as next_error:
            error = next_error
    raise BadEvent(_NATS_SAYS if body.startswith(b"{") else _one_line(error)) from None


def _upcast_body(body: bytes) -> tuple[bytes, tuple[str, ...]] | None:
    """Return the body raised to today's schema; None where it is not of an older one."""
    raised = upcast(body)
    return None if raised is None else (raised, ())


def check(envelope: Envelope) -> None:
    """Raise BadEvent where fields that are valid one by one contradict each other."""
    event = envelope.event
    for rule in _rules(type(event)):
        rule(envelope, event)


@functools.cache
def _rules(kind: type[v.AnyEvent]) -> tuple[_Rule, ...]:
    """Return the rules for events of this type and their envelopes."""
    producer_rule = _check_decision if kind.is_decided else _check_request if kind.is_request else _check_observation
    return (producer_rule, *(rule for kinds, rule in _RULES if issubclass(kind, kinds)))


def _check_decision(envelope: Envelope, _event: Any) -> None:
    if envelope.term < 1:
        raise BadEvent("$.term: a decision or command needs the coordinator's term, got 0")
    if envelope.producer != COORDINATOR:
        raise BadEvent(f"$.producer: only {COORDINATOR!r} decides, got {envelope.producer!r}")


def _check_term(envelope: Envelope, event: v.CoordinatorStarted) -> None:
    if event.term != envelope.term:
        raise BadEvent(f"$.event.term: {event.term} differs from the envelope's term {envelope.term}")


def _check_command(envelope: Envelope, event: v.AnyCommand) -> None:
    start = f"{envelope.term}.{event.epoch}.{event.node}."
    number = event.command_id.removeprefix(start)
    if number == event.command_id or not (number.isascii() and number.isdigit()):
        raise BadEvent(f"$.event.command_id: expected {start}<number>, got {event.command_id!r}")


def _check_request(envelope: Envelope, _event: Any) -> None:
    _require_no_term(envelope)
    if envelope.producer != API_PRODUCER:
        raise BadEvent(f"$.producer: expected {API_PRODUCER!r}, got {envelope.producer!r}")


def _check_observation(envelope: Envelope, event: Any) -> None:
    _require_no_term(envelope)
    if event.node != envelope.producer:
        raise BadEvent(f"$.event.node: {event.node!r} differs from the producer {envelope.producer!r}")
    if event.node in RESERVED_NAMES and not (isinstance(event, v.Heartbeat) and event.node == COORDINATOR):
        raise BadEvent(f"$.event.node: {event.node!r} is not a node's name; give the node another name")


def _require_no_term(envelope: Envelope) -> None:
    if envelope.term != 0:
        raise BadEvent(f"$.term: an observation has term 0, got {envelope.term}")


def _check_exit(_: Envelope, event: v.WorkerExited) -> None:
    if (event.exit_code is None) == (event.signal is None):
        raise BadEvent("$.event.exit_code: exactly one of exit_code and signal must be set")


def _check_stacks(_: Envelope, event: v.StacksTaken) -> None:
    for number, worker in enumerate(event.workers):
        if task_of(worker.worker) != event.task:
            raise BadEvent(f"$.event.workers[{number}].worker: {worker.worker} is no worker of {event.task}")
        if worker.stack > len(event.stacks):
            raise BadEvent(f"$.event.workers[{number}].stack: {worker.stack} of {len(event.stacks)} stacks")


def _check_workers(_: Envelope, event: v.PlanAdopted | v.MembershipDecided | v.MembershipPart) -> None:
    if v.workers_in(_runs(event)) > v.WORKERS_MAX:  # a few bytes stand for many
        raise BadEvent(f"$.event: more than {v.WORKERS_MAX} workers")


def _check_spec(_: Envelope, event: v.TaskSubmitted | v.StartWorker | v.StartWorkers) -> None:
    _check_finite(event.spec)


def _runs(event: v.PlanAdopted | v.MembershipDecided | v.MembershipPart) -> Sequence[v.SeatRun | v.NodeRun]:
    """Return the runs of workers that the event names."""
    match event:
        case v.PlanAdopted(assignments=assignments):
            return [node_run for assignment in assignments for node_run in assignment.nodes]
        case v.MembershipDecided(seats=seats) | v.MembershipPart(seats=seats):
            return seats


def _check_finite(spec: v.TaskSpec) -> None:
    """Raise BadEvent where a setting is NaN or infinite. (A loss may be NaN: that is an observation.)"""
    for path, part in (("", spec), ("model.", spec.model), ("optimizer.", spec.optimizer)):
        for field in part.__struct_fields__:
            value = getattr(part, field)
            if isinstance(value, float) and not math.isfinite(value):
                raise BadEvent(f"$.event.spec.{path}{field}: must be finite, got {value}")


#: Types of events, and what else is to be obeyed.
_RULES: tuple[tuple[tuple[type, ...], _Rule], ...] = (
    ((v.CoordinatorStarted,), _check_term),
    ((v.Command,), _check_command),
    ((v.WorkerExited,), _check_exit),
    ((v.StacksTaken,), _check_stacks),
    ((v.PlanAdopted, v.MembershipDecided, v.MembershipPart), _check_workers),
    ((v.TaskSubmitted, v.StartWorker, v.StartWorkers), _check_spec),
)


def _one_line(error: BaseException) -> str:
    """Return the error's text on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def body_of(entry: RecordedEvent) -> bytes:
    """Return the entry's envelope as bytes, as it stands in the log."""
    return entry.body or encode(entry.envelope)
