"""What every EventLog promises (events/log/event_log.py), checked on every one there is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from tests.contracts.logs import LOGS, beat, command, envelope_of, fact, facts, history, started
from tests.golden.regenerate import example
from tests.strategies import EVENT_TYPES
from unicrond.events.log.event_log import MAX_BATCH, EventLog, Fence, Fenced
from unicrond.events.vocabulary import CoordinatorStarted, Heartbeat
from unicrond.events.wire.codec import BadEvent
from unicrond.events.wire.envelope import Entry


@pytest.fixture(params=sorted(LOGS))
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EventLog]:
    async with LOGS[request.param](tmp_path) as opened:
        yield opened
        entries = await history(opened)
        assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1)), "no gaps, whatever the test did"


async def test_empty_log_reads_as_empty(log: EventLog) -> None:
    assert await log.last_seq() == 0
    assert await history(log) == []
    assert await log.append([]) == []


async def test_log_returns_written_entries(log: EventLog) -> None:
    written = [example(kind) for kind in EVENT_TYPES if kind not in (Heartbeat, CoordinatorStarted)]
    written = [msgspec.structs.replace(envelope, number=i) for i, envelope in enumerate(written, start=1)]
    assert await log.append(written[:1]) == [1]
    assert await log.append(written[1:]) == list(range(2, len(written) + 1))
    entries = await history(log)
    assert [envelope_of(entry) for entry in entries] == written
    times = [entry.recorded_at_us for entry in entries]
    assert times == sorted(times)
    assert times[0] > 1_600_000_000_000_000


async def test_log_reads_parts_of_history(log: EventLog) -> None:
    await log.append(facts(1, 10))
    assert [entry.seq for entry in await history(log, after_seq=7)] == [8, 9, 10]
    assert [entry.seq async for entry in log.read(2, until_seq=4)] == [3, 4]
    assert [entry.seq async for entry in log.read(4, until_seq=4)] == []
    assert [entry.seq async for entry in log.read(9, until_seq=4)] == []


async def test_log_reads_history_then_live(log: EventLog) -> None:
    await log.append(facts(1, 3))
    seen: list[Entry] = []
    caught_up, complete = asyncio.Event(), asyncio.Event()

    async def follow() -> None:
        async for entry in log.read():
            seen.append(entry)
            if entry.seq == 3:
                caught_up.set()
            if entry.seq == 8:
                complete.set()

    readers = [asyncio.create_task(follow())]
    await asyncio.wait_for(caught_up.wait(), 20)
    await log.append([fact(4)])
    await log.append(facts(5, 7))
    await log.append([fact(8)])
    await asyncio.wait_for(complete.wait(), 20)
    assert [envelope_of(entry) for entry in seen] == facts(1, 8)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)


async def test_log_reader_may_start_after_end(log: EventLog) -> None:
    await log.append([fact(1)])
    async with aclosing(log.read(2, until_seq=4)) as reading:
        first = asyncio.ensure_future(anext(reading))
        await log.append(facts(2, 4))
        assert (await asyncio.wait_for(first, 20)).seq == 3
        assert [entry.seq async for entry in reading] == [4]


async def test_repeated_append_returns_same_sequence_numbers(log: EventLog) -> None:
    assert await log.append(facts(1, 3)) == [1, 2, 3]
    assert await log.append([fact(2)]) == [2], "a single one"
    assert await log.append(facts(1, 3)) == [1, 2, 3], "the same batch, after a lost acknowledgement"
    assert await log.append(facts(2, 5)) == [2, 3, 4, 5], "a longer one: only the rest is written"
    assert await log.append([fact(9), fact(4)]) == [6, 4]
    assert await log.last_seq() == 6


async def test_repeated_append_keeps_order_of_producer(log: EventLog) -> None:
    """As agents write: one by one; cut off anywhere, the same again."""
    for envelope in facts(1, 30):
        for turns in range(envelope.number % 4):
            attempt = asyncio.create_task(log.append([envelope]))
            for _ in range(turns * 3):
                await asyncio.sleep(0)
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
        assert await log.append([envelope]) == [envelope.number]
    assert [envelope_of(entry) for entry in await history(log)] == facts(1, 30)


async def test_log_accepts_largest_batch_only(log: EventLog) -> None:
    assert await log.append(facts(1, MAX_BATCH)) == list(range(1, MAX_BATCH + 1))
    with pytest.raises(ValueError, match=f"envelopes: at most {MAX_BATCH}"):
        await log.append(facts(MAX_BATCH + 1, 2 * MAX_BATCH + 1))
    assert await log.last_seq() == MAX_BATCH


async def test_append_is_atomic(log: EventLog) -> None:
    bad = msgspec.structs.replace(fact(2), term=5)
    for batch in ([fact(1), bad], [fact(1), fact(1)], [fact(1), beat(2)], [fact(1), started(1)]):
        with pytest.raises(BadEvent, match=r"^\$\."):
            await log.append(batch)
    assert await log.last_seq() == 0


async def test_concurrent_appends_keep_batches_together(log: EventLog) -> None:
    batches = [facts(i * 10 + 1, i * 10 + 1 + i % 4) for i in range(40)]
    numbers = await asyncio.gather(*(log.append(batch) for batch in batches))
    by_seq = {entry.seq: envelope_of(entry) for entry in await history(log)}
    assert len(by_seq) == sum(len(batch) for batch in batches)
    for batch, seqs in zip(batches, numbers, strict=True):
        assert seqs == list(range(seqs[0], seqs[0] + len(batch))), "a batch stands together"
        assert [by_seq[seq] for seq in seqs] == batch


async def test_fence_stops_stale_coordinator(log: EventLog) -> None:
    await log.append(facts(1, 2))
    first = await log.claim_term(started(1))
    assert first == Fence(1, 3)
    assert await log.append([command(1)], fence=first) == [4]
    assert await log.append([fact(3)]) == [5], "observations need no fence"
    assert await log.append([command(2), command(3)], fence=first) == [6, 7]
    second = await log.claim_term(started(2))
    assert second == Fence(2, 8)
    for stale in ([command(4)], [command(4), command(5)], [command(3), command(4)]):
        with pytest.raises(Fenced):
            await log.append(stale, fence=first)
    assert await log.last_seq() == 8, "nothing of it was written"
    assert await log.append([command(1)], fence=first) == [4], "what was written before stays written"
    assert await log.append([command(3), command(2)], fence=first) == [7, 6]
    assert await log.append([command(1, term=2), command(2, term=2)], fence=second) == [9, 10]


async def test_claims_only_increase(log: EventLog) -> None:
    fence = await log.claim_term(started(5))
    assert await log.claim_term(started(5)) == fence, "the same claim again, after a lost acknowledgement"
    for term, process in ((5, "other"), (4, "c"), (1, "c")):
        with pytest.raises(Fenced):
            await log.claim_term(started(term, process))
    assert await log.claim_term(started(6)) == Fence(6, 2)
    with pytest.raises(Fenced):
        await log.claim_term(started(5))
    with pytest.raises(BadEvent, match="claim_term needs a CoordinatorStarted"):
        await log.claim_term(fact(1))


async def test_concurrent_claims_have_one_winner(log: EventLog) -> None:
    # All of the same id and moment, as coordinators are that start from the same state.
    claims = [log.claim_term(started(7, f"head:{i}")) for i in range(8)]
    outcomes = await asyncio.gather(*claims, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Fence"] + ["Fenced"] * 7
    assert await log.last_seq() == 1


async def test_takeover_under_load_stops_old_term(log: EventLog) -> None:
    """After the new term nothing of the old one is written, and every number that was returned is true."""
    first = await log.claim_term(started(1))
    written: dict[int, str] = {}

    async def decide(number: int) -> None:
        batch = [command(3 * number + i) for i in range(1 + number % 3)]
        seqs = await log.append(batch, fence=first)
        written.update(zip(seqs, (envelope.event_id for envelope in batch), strict=True))

    storm = [asyncio.create_task(decide(number)) for number in range(1, 61)]
    await asyncio.wait(storm, return_when=asyncio.FIRST_COMPLETED)
    second = await log.claim_term(started(2))
    outcomes = await asyncio.gather(*storm, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {type(None), Fenced}
    entries = await history(log)
    assert all(entry.seq <= second.seq for entry in entries if envelope_of(entry).term == 1)
    stands = {entry.seq: envelope_of(entry).event_id for entry in entries if entry.seq not in (first.seq, second.seq)}
    assert stands == written
