"""What every BeatLog and every CommandFeed promises (events/log.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from events.envelope import Entry, Recorded
from events.log import CommandFeed
from tests.contracts.logs import BUSES, Bus, beat, command, envelope_of, fact


@pytest.fixture(params=sorted(BUSES))
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    async with BUSES[request.param](tmp_path) as opened:
        yield opened


async def take(feed: CommandFeed, count: int) -> list[Recorded]:
    """`count` commands; the last one is left unacknowledged."""
    taken: list[Recorded] = []
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


async def test_beats_from_now_on(bus: Bus) -> None:
    """What was said before the subscription is not told; what is said during it comes in order."""
    await hear(bus, "old", 3)
    seen = await hear(bus, "n1", 10)
    first = envelope_of(seen[0]).number
    assert [envelope_of(entry) for entry in seen] == [beat(first + i) for i in range(len(seen))]
    assert [entry.seq for entry in seen] == [seen[0].seq + i for i in range(len(seen))]


async def test_only_beats_are_beats(bus: Bus) -> None:
    with pytest.raises(TypeError, match="expected a Heartbeat"):
        await bus.beats.publish(fact(1))


async def test_a_node_gets_its_own_commands_in_order(bus: Bus) -> None:
    await bus.log.append([command(1), command(2, "n2"), fact(3), command(4)])
    await bus.log.append([command(5)])
    taken = await take(bus.feed("n1"), 3)
    assert [recorded.envelope for recorded in taken] == [command(1), command(4), command(5)]
    assert [recorded.seq for recorded in taken] == [1, 4, 5]


async def test_asking_for_the_next_acknowledges(bus: Bus) -> None:
    await bus.log.append([command(number) for number in range(1, 5)])
    feed = bus.feed("n1")
    assert [recorded.seq for recorded in await take(feed, 2)] == [1, 2]
    assert [recorded.seq for recorded in await take(feed, 3)] == [2, 3, 4], "2 was not acknowledged"


async def test_a_command_whose_handler_fails_comes_again(bus: Bus) -> None:
    await bus.log.append([command(1)])
    feed = bus.feed("n1")
    with pytest.raises(RuntimeError, match="handler"):
        async with aclosing(feed.read()) as commands:
            async for _ in commands:
                raise RuntimeError("the handler fails")
    assert [recorded.seq for recorded in await take(feed, 1)] == [1]


async def test_commands_come_live(bus: Bus) -> None:
    taking = asyncio.create_task(take(bus.feed("n1"), 2))
    await bus.log.append([command(1)])
    await bus.log.append([command(2)])
    assert [recorded.envelope for recorded in await taking] == [command(1), command(2)]
