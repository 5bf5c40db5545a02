"""Time that jumps."""

from __future__ import annotations

import asyncio
import time

import pytest

from unicrond.replay.simulation.models.virtual_time import Deadlock, VirtualLoop


def test_virtual_loop_passes_day_at_once() -> None:
    loop = VirtualLoop()
    began_s = time.monotonic()

    async def sleep() -> list[str]:
        said: list[str] = []
        loop.call_later(3600, said.append, "an hour")
        loop.call_later(60, said.append, "a minute")
        await asyncio.sleep(86400)
        return said

    assert loop.run_until_complete(sleep()) == ["a minute", "an hour"]
    assert loop.time() == 86400 and time.monotonic() - began_s < 5
    loop.close()


def test_virtual_loop_charges_thread_work() -> None:
    loop = VirtualLoop(thread_s=lambda: 2.5)
    assert loop.run_until_complete(asyncio.to_thread(lambda: 7)) == 7
    assert loop.time() == 2.5
    loop.close()


def test_virtual_loop_raises_on_deadlock() -> None:
    loop = VirtualLoop()
    waiting = loop.create_future()
    with pytest.raises(Deadlock):
        loop.run_until_complete(waiting)
    loop.close()
