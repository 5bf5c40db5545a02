"""The outbox against a real log on a real server, which is killed."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import aclosing, suppress

import pytest
from msgspec.structs import replace
from nats.aio.msg import Msg

from tests.contracts.memory_log import MemoryLog
from tests.younger import NEXT, younger
from unicrond.agents.shell.outbox import Outbox
from unicrond.events.log.event_log import LogError
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.vocabulary import (
    CommandApplied,
    CommandFailed,
    ErrorReported,
    NodeLeft,
    PeersRemembered,
    StepCommitted,
)
from unicrond.events.vocabulary.field_defaults import Since
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.events.wire.schemas import FIRST


def fact(number: int) -> NodeLeft:
    return NodeLeft(node="n1", reason=str(number))


def step(number: int) -> StepCommitted:
    return StepCommitted(
        node="n1",
        task="a",
        worker="a.1",
        generation=1,
        first=number,
        last=number,
        samples=1,
        samples_digest=1,
        loss=1.0,
        duration_us=1,
        micro_batches_by_rank=(1,),
    )


def outbox(**options: int) -> Outbox:
    ticks = itertools.count(1)
    return Outbox("n1", 5, lambda: next(ticks), **options)


async def reasons(log: NatsEventLog | MemoryLog) -> list[str]:
    async with aclosing(log.read(0, until_seq=await log.last_seq())) as entries:
        return [e.envelope.event.reason async for e in entries if isinstance(e, RecordedEvent)]  # type: ignore[union-attr]


async def test_outbox_loses_and_repeats_nothing_when_server_dies(
    nats_server: EmbeddedServer, nats_connection: Connection
) -> None:
    log = NatsEventLog(nats_connection)
    box = outbox()
    confirmed: list[int] = []
    sending = asyncio.create_task(box.run(log))
    for number in range(300):
        box.put(fact(number), on_durable=lambda number=number: confirmed.append(number))  # type: ignore[misc]
        if number in (100, 200):
            await nats_server.kill()
            box.put(fact(1000 + number))
            await nats_server.restart()
        await asyncio.sleep(0)
    assert await box.drained(30)
    sending.cancel()
    with suppress(asyncio.CancelledError):
        await sending
    expected = [*range(101), 1100, *range(101, 201), 1200, *range(201, 300)]
    assert await reasons(log) == [str(number) for number in expected]
    assert confirmed == list(range(300))


async def test_outbox_sends_one_observation_at_a_time() -> None:
    """Several at once cost the server no less, and one that it refused would come after later ones."""
    log = MemoryLog()
    box = outbox()
    calls: list[int] = []
    under_way = 0
    append = log.append

    async def counted(envelopes, *, fence=None):  # type: ignore[no-untyped-def]
        nonlocal under_way
        under_way += 1
        assert under_way == 1
        calls.append(len(envelopes))
        await asyncio.sleep(0)
        under_way -= 1
        return await append(envelopes, fence=fence)

    log.append = counted  # type: ignore[method-assign]
    sending = asyncio.create_task(box.run(log))
    for number in range(10):
        box.put(fact(number))
    assert await box.drained(5)
    sending.cancel()
    assert calls == [1] * 10
    assert await reasons(log) == [str(number) for number in range(10)]


async def test_outbox_keeps_order_after_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fold takes a number below one that it has seen for a repetition, and drops it."""
    monkeypatch.setattr("unicrond.agents.shell.outbox._PAUSE_S", 0.001)
    log, box = MemoryLog(), outbox()
    append = log.append
    refused: list[int] = []

    async def moody(envelopes, *, fence=None):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0)
        number = envelopes[0].number
        if number % 3 == 0 and refused.count(number) < 2:
            refused.append(number)
            raise LogError("no room")
        return await append(envelopes, fence=fence)

    log.append = moody  # type: ignore[method-assign]
    sending = asyncio.create_task(box.run(log))
    for number in range(1, 13):
        box.put(fact(number))
    assert await box.drained(5)
    sending.cancel()
    assert refused == [3, 3, 6, 6, 9, 9, 12, 12]
    assert await reasons(log) == [str(number) for number in range(1, 13)]


async def test_lost_answers_cause_no_stream_read(nats_connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicrond.events.nats.event_log.REQUEST_TIMEOUT_S", 0.05)

    async def find(*_: object) -> dict[str, int]:
        raise AssertionError("the stream is read to find out what was written")

    monkeypatch.setattr(NatsEventLog, "_find", find)
    log, boxes = NatsEventLog(nats_connection), [Outbox(f"n{n}", 5, lambda: 1) for n in range(4)]
    session = await nats_connection.session()
    on_answer, answers = session._on_answer, itertools.count()

    async def lossy(message: Msg) -> None:
        if next(answers) % 3:
            await on_answer(message)

    session.client._subs[1]._cb = lossy  # the inbox for answers
    sending = [asyncio.create_task(box.run(log)) for box in boxes]
    for number in range(10):
        for n, box in enumerate(boxes):
            box.put(NodeLeft(node=f"n{n}", reason=str(number)))
    for box in boxes:
        assert await box.drained(20)
    for task in sending:
        task.cancel()
    session.client._subs[1]._cb = on_answer
    async with aclosing(log.read(0, until_seq=await log.last_seq())) as entries:
        told = [(e.envelope.producer, e.envelope.number) async for e in entries if isinstance(e, RecordedEvent)]
    assert len(told) == 40, "each once"
    for n in range(4):
        assert [number for producer, number in told if producer == f"n{n}"] == list(range(1, 11))


async def test_full_outbox_drops_progress_reports_first(caplog: pytest.LogCaptureFixture) -> None:
    box = outbox(capacity=4)
    for event in (fact(1), step(1), fact(2), step(2), fact(3), fact(4), fact(5)):
        box.put(event)
    assert (len(box), box.lost_count) == (4, 3)
    log = MemoryLog()
    sending = asyncio.create_task(box.run(log))
    assert await box.drained(5)
    sending.cancel()
    assert await reasons(log) == ["2", "3", "4", "5"]
    assert "OBSERVATION LOST" in caplog.text


async def test_outbox_drops_invalid_event_on_put(caplog: pytest.LogCaptureFixture) -> None:
    box = outbox()
    box.put(CommandApplied(node="n2", command_id="1.1.n2.1"))  # another node's name
    assert (len(box), box.lost_count) == (0, 1)
    assert "differs from the producer" in caplog.text


async def test_largest_error_fits_into_event() -> None:
    box = outbox()
    box.put(
        ErrorReported(
            node="n1",
            task="a",
            worker="a.1",
            kind="exception",
            generation=1,
            iteration=1,
            phase="forward",
            message="m" * 1024,
            detail="\N{PILE OF POO}" * 32768,
        )
    )
    assert (len(box), box.lost_count) == (1, 0)


async def test_outbox_translates_or_drops_events_for_older_schema() -> None:
    log = MemoryLog()
    box = outbox()
    failed = CommandFailed(node="n1", command_id="1.1.n1.1", reason="", readable_schema=2)
    remembered = PeersRemembered(node="n1", task="a", peers=())
    confirmed: list[int] = []
    # What is written for the next schema says so, and no log of today takes it: none is.
    with younger(PeersRemembered, fields={CommandFailed: {"readable_schema": Since(NEXT)}}):
        sending = asyncio.create_task(box.run(log))
        for event in (failed, remembered):
            box.put(event, on_durable=lambda: confirmed.append(box.schema))
        assert await box.drained(5)
        sending.cancel()
    async with aclosing(log.read(0, until_seq=await log.last_seq())) as entries:
        told = [entry.envelope.event async for entry in entries if isinstance(entry, RecordedEvent)]
    assert told == [replace(failed, readable_schema=0)]
    assert confirmed == [FIRST, FIRST], "what is not told is done with, too"


async def test_backlog_counts_unsent_after_a_second() -> None:
    log, box = MemoryLog(), outbox()
    now_s = time.monotonic()
    assert box.backlog(now_s + 100) == (0, 0)
    box.put(fact(1))
    box.put(fact(2))
    assert box.backlog(now_s + 0.5) == (0, 0), "on its way"
    count, age_us = box.backlog(now_s + 10)
    assert count == 2 and 9e6 < age_us <= 10e6
    running = asyncio.create_task(box.run(log))
    assert await box.drained(10)
    running.cancel()
    assert box.backlog(now_s + 100) == (0, 0)
