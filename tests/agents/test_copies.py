"""Copies of states go to the first peer that takes them; only a state that nobody took is worth a warning."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from unicrond.agents.memory.copies import StateCopier
from unicrond.agents.memory.regions import MemoryRegions
from unicrond.agents.protocol import memory_exchange
from unicrond.agents.protocol.memory import Memory
from unicrond.agents.protocol.memory_exchange import ExchangeFailed
from unicrond.events.vocabulary import MemoryService

PEERS = tuple(MemoryService(node=name, host="127.0.0.1", port=1, token="t") for name in ("n2", "n3"))


class Regions:
    """One sealed state, opened anew for each copy."""

    def open(self, _task: str, _shard: int) -> Memory:
        memory = Memory.private(1 << 16)
        draft = memory.draft(5)
        assert draft is not None
        draft.view[:] = b"state"
        draft.seal(4, 1)
        return memory


@pytest.mark.parametrize(
    ("away", "asked", "warnings"),
    [
        ((), ["n2"], []),
        (("n2",), ["n2", "n3"], []),  # it has just left, say
        (("n2", "n3"), ["n2", "n3"], ["no copy of a/0 after iteration 4: n2: it is away; n3: it is away"]),
    ],
)
async def test_copy_warns_only_if_no_peer_accepts(
    away: tuple[str, ...],
    asked: list[str],
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    def push(peer: MemoryService, *_: Any) -> None:
        seen.append(peer.node)
        if peer.node in away:
            raise ExchangeFailed("it is away")

    monkeypatch.setattr(memory_exchange, "push", push)
    caplog.set_level(logging.INFO, "unicrond.agents.memory.copies")
    copies = StateCopier("n1", cast(MemoryRegions, Regions()))
    copies.copy("a", 0, PEERS)
    async with asyncio.timeout(20):
        await asyncio.gather(*copies._tasks.values())
    assert seen == asked
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == warnings
    assert sum("is not copied to" in record.getMessage() for record in caplog.records) == len(away)
