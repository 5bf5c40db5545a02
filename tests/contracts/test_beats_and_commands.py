"""What every BeatLog and every CommandFeed promises (events/log/event_log.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.contracts.logs import BUSES, Bus, beat, command, decision, envelope_of, fact, membership
from unicrond.events.log.event_log import CommandFeed
from unicrond.events.vocabulary import PeersDecided, ThroughputCorrected
from unicrond.events.wire.envelope import Entry, RecordedEvent


@pytest.fixture(params=sorted(BUSES))
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    async with BUSES[request.param](tmp_path) as opened:
        yield opened


async def take(feed: CommandFeed, count: int) -> list[RecordedEvent]:
    """`count` commands; the last one is left unacknowledged."""
    taken: list[RecordedEvent] = []
    async with asyncio.timeout(20), aclosing(feed.read()) as commands:
        async for recorded in commands:
            taken.append(recorded)
            if len(taken) == count:
                break
    return taken


async def hear(bus: Bus, node: str, count: int) -> list[Entry]:
    """`count` beats of a node that beats all the time, and everything else that comes meanwhile."""
    numbers = iter(range(1, 10_000))
    said = 0

    async def pulse() -> None:
        nonlocal said
        for number in numbers:
            said = number
            await bus.beats.publish(beat(number, node))
            await asyncio.sleep(0.002)

    seen: list[Entry] = []
    pulsing = asyncio.create_task(pulse())
    async with asyncio.timeout(20), aclosing(bus.beats.subscribe()) as beats:
        async for entry in beats:
            seen.append(entry)
            if len(seen) == count:
                pulsing.cancel()
            if len(seen) >= count and envelope_of(entry).number == said:  # nothing is on its way any more
                break
    return seen


async def test_beat_log_delivers_beats_from_subscription_on(bus: Bus) -> None:
    """What was said before the subscription is not told; what is said during it comes in order."""
    old = await hear(bus, "old", 3)
    seen = await hear(bus, "n1", 10)
    # A server of a cluster may be one message behind the one that has delivered it.
    late = [entry for entry in seen if envelope_of(entry).producer == "old"]
    assert late in ([], old[-1:])
    first = envelope_of(seen[len(late)]).number
    assert [envelope_of(entry) for entry in seen[len(late) :]] == [
        beat(first + i) for i in range(len(seen) - len(late))
    ]
    assert [entry.seq for entry in seen] == [seen[0].seq + i for i in range(len(seen))]


async def test_beat_log_takes_only_beats(bus: Bus) -> None:
    with pytest.raises(TypeError, match="expected a Heartbeat"):
        await bus.beats.publish(fact(1))


async def test_command_feed_delivers_own_commands_in_order(bus: Bus) -> None:
    await bus.log.append([command(1), command(2, "n2"), fact(3), command(4)])
    await bus.log.append([command(5)])
    taken = await take(bus.feed("n1"), 3)
    assert [recorded.envelope for recorded in taken] == [command(1), command(4), command(5)]
    assert [recorded.seq for recorded in taken] == [1, 4, 5]


async def test_command_feed_acknowledges_on_next_read(bus: Bus) -> None:
    await bus.log.append([command(number) for number in range(1, 5)])
    feed = bus.feed("n1")
    assert [recorded.seq for recorded in await take(feed, 2)] == [1, 2]
    assert [recorded.seq for recorded in await take(feed, 3)] == [2, 3, 4], "2 was not acknowledged"


async def test_command_feed_repeats_command_after_failed_handler(bus: Bus) -> None:
    await bus.log.append([command(1)])
    feed = bus.feed("n1")
    with pytest.raises(RuntimeError, match="handler"):
        async with aclosing(feed.read()) as commands:
            async for _ in commands:
                raise RuntimeError("the handler fails")
    assert [recorded.seq for recorded in await take(feed, 1)] == [1]


async def test_command_feed_delivers_live(bus: Bus) -> None:
    taking = asyncio.create_task(take(bus.feed("n1"), 2))
    await bus.log.append([command(1)])
    await bus.log.append([command(2)])
    assert [recorded.envelope for recorded in await taking] == [command(1), command(2)]


async def test_command_feed_delivers_decisions_of_followed_task(bus: Bus) -> None:
    """Of other tasks nothing, of this one what came before it was followed neither; and no other decision."""
    feed = bus.feed("n1")
    await feed.follow(["a"])
    adopted = decision(2, ThroughputCorrected(task="a", workers=1, flops=1, iteration_us=1, reports=1, reason=""))
    told = [decision(4, PeersDecided(task="a", peers=())), decision(5, membership("a", 1))]
    await bus.log.append([command(1), adopted, decision(3, membership("b", 1)), *told, command(6)])
    assert [recorded.seq for recorded in await take(feed, 4)] == [1, 4, 5, 6]


async def test_follow_during_entry_misses_no_later_entry(bus: Bus) -> None:
    """The membership stands in the log before its task is followed: the feed has not looked at it yet."""
    feed = bus.feed("n1")
    await feed.follow([])
    await bus.log.append([decision(1, membership("a", 1)), command(2), decision(3, membership("a", 2)), command(4)])
    seen: list[int] = []
    async with asyncio.timeout(20), aclosing(feed.read()) as entries:
        async for entry in entries:
            seen.append(entry.seq)
            if entry.seq == 2:
                await asyncio.sleep(0.2)  # time to look ahead, for a feed that does
                await bus.log.append([decision(5, membership("a", 3))])
                await feed.follow(["a"])
            if len(seen) == 4:
                break
    assert seen == [2, 3, 4, 5]


async def test_idle_feed_follows_newly_matching_entries(bus: Bus) -> None:
    """It is ahead of many entries that do not concern it; a task is followed meanwhile, and given up again."""
    feed = bus.feed("n1")
    await feed.follow([])
    seen: list[int] = []

    async def listen() -> None:
        async with aclosing(feed.read()) as entries:
            async for entry in entries:
                seen.append(entry.seq)  # noqa: PERF401  # one after the other, while it goes on

    listening = asyncio.create_task(listen())
    try:
        await bus.log.append([command(1)])
        await until(lambda: seen == [1])
        await bus.log.append([decision(number, membership("a", number)) for number in range(2, 52)])
        await asyncio.sleep(0.2)
        await feed.follow(["a"])
        await bus.log.append([decision(52, membership("a", 52)), command(53)])
        await until(lambda: seen[-1] == 53)
        assert seen[-2:] == [52, 53]
        assert set(seen[1:-2]) <= set(range(2, 52)), "what came while the task was not followed may come or not"
        await feed.follow([])
        await bus.log.append([decision(54, membership("a", 54)), command(55)])
        await until(lambda: seen[-1] == 55)
        assert 54 not in seen
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not there():  # noqa: ASYNC110  # of four implementations
            await asyncio.sleep(0.01)
