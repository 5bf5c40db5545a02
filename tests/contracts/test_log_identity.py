"""Every log is known by its entries: it is itself when it is opened again, and no other with the same events."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.logs import LOGS, facts, history
from unicrond.events.log.event_log import EventLog
from unicrond.events.log.log_identity import LogPoints, difference, mark_of


async def points(log: EventLog) -> LogPoints:
    entries = await history(log)
    return LogPoints("", len(entries), (mark_of(entries[0]), mark_of(entries[-1])))


@pytest.mark.parametrize("name", sorted(LOGS))
async def test_log_is_known_by_entries(name: str, tmp_path: Path) -> None:
    places = [tmp_path / "one", tmp_path / "other"]
    for place in places:
        place.mkdir()
    async with LOGS[name](places[0]) as log:
        await log.append(facts(1, 3))
        known = await points(log)
        assert difference(known, await points(log), "this head") is None
        await log.append(facts(4, 5))
        grown = await points(log)
        first = grown._replace(marks=grown.marks[:1])
        assert difference(known, first, "this head") is None
        assert (found := difference(grown, known, "this head")) and found.is_behind
    async with LOGS[name](places[1]) as other:
        await other.append(facts(1, 3))
        found = difference(known, await points(other), "this head")
        assert found is not None and not found.is_behind, "the same events, in another log"
