"""`unicrond run --skip SEQ`: an entry is passed over by every reader, wherever it begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.contracts.memory_log import MemoryBeatLog, MemoryLog
from tests.unicrond.coordinators import running
from tests.unicrond.test_coordinator import entries_until, joined, observation
from tests.unicrond.test_snapshots import MemoryStore
from unicrond.core.rules.skip_rules import SkipRefused
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import TaskStatus
from unicrond.core.state.state_bytes import digest
from unicrond.events import vocabulary as v
from unicrond.events.log.point import AtSeq
from unicrond.replay.reading.export import Export
from unicrond.replay.reading.opening import fold_to
from unicrond.replay.reading.source import FileSource
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.snapshots import Snapshots
from unicrond.service.coordinator.surroundings import HeadSettings


async def cancelled_by_mistake() -> tuple[MemoryLog, int]:
    """A log in which somebody has cancelled task "a"; the number of that entry."""
    log = MemoryLog()
    async with running(log) as coordinator:
        await log.append([observation(joined(), 1)])
        await coordinator.submit(observation(v.TaskSubmitted(spec=v.TaskSpec(name="a")), 1, "api"))
        await entries_until(log, lambda e: isinstance(e, v.StartWorker))
    (seq,) = await log.append([observation(v.TaskCancelled(task="a", reason="a mistake"), 2, "api")])
    return log, seq


async def started(log: MemoryLog, skip: Sequence[int], snapshots: Snapshots | None = None) -> Coordinator:
    """A coordinator that has been live with `skip`."""
    coordinator = Coordinator(
        log, MemoryBeatLog(), HeadSettings(policy=Policy(), heartbeat_s=0.2, skip=skip), snapshots=snapshots
    )
    task = asyncio.create_task(coordinator.run())
    live = asyncio.create_task(coordinator.live.wait())
    await asyncio.wait([task, live], return_when=asyncio.FIRST_COMPLETED, timeout=30)
    for each in (task, live):
        each.cancel()
    await asyncio.wait([task, live])
    if not task.cancelled():
        raise task.exception() or AssertionError("it ended")
    return coordinator


async def test_skip_applies_to_every_reader(tmp_path: Path) -> None:
    log, seq = await cancelled_by_mistake()
    async with running(log) as before:
        assert before.state.tasks["a"].status is TaskStatus.CANCELLED
    first = await started(log, [seq])
    assert first.state.tasks["a"].status is TaskStatus.ACTIVE
    assert list(await log.skips()) == [seq]
    again = await started(log, [])
    assert again.state.tasks["a"].status is TaskStatus.ACTIVE, "the skip stands in the log"
    assert len(await log.skips()) == 1

    # A replay of an export agrees, at the end and before the skip was ever asked for.
    with Export(tmp_path / "log") as export:
        export.write([entry async for entry in log.read(until_seq=await log.last_seq())])
    source = FileSource(tmp_path / "log")
    end = await fold_to(source, AtSeq(again.state.seq))
    assert digest(end) == digest(again.state)
    between = await fold_to(source, AtSeq(seq + 1))
    assert between.tasks["a"].status is TaskStatus.ACTIVE
    assert between.quarantined_messages == 1
    assert digest(await fold_to(source, AtSeq(first.state.seq))) == digest(first.state)


async def test_repeated_skip_writes_once() -> None:
    log, seq = await cancelled_by_mistake()
    await started(log, [seq, seq])
    length = await log.last_seq()
    await started(log, [seq])
    kinds = [type(e.envelope.event) for e in log._entries[length:]]  # type: ignore[union-attr]
    assert v.EntrySkipped not in kinds


async def test_skip_invalidates_older_snapshot() -> None:
    log, seq = await cancelled_by_mistake()
    store = MemoryStore()
    snapshots = Snapshots(store, every=1)
    before = Coordinator(log, MemoryBeatLog(), HeadSettings(policy=Policy(), heartbeat_s=0.2), snapshots=snapshots)
    running_before = asyncio.create_task(before.run())
    await asyncio.wait_for(before.live.wait(), 30)
    async with asyncio.timeout(30):
        while store.body is None:  # noqa: ASYNC110  (its own loop is what we wait for)
            await asyncio.sleep(0)
    running_before.cancel()
    await asyncio.wait([running_before])
    await started(log, [seq], Snapshots(store))
    again = await started(log, [], Snapshots(store))
    assert again.state.tasks["a"].status is TaskStatus.ACTIVE


async def test_skip_refuses_entries_that_log_needs() -> None:
    log, _ = await cancelled_by_mistake()
    async with aclosing(log.read(until_seq=await log.last_seq())) as entries:
        seqs = {type(entry.envelope.event): entry.seq async for entry in entries}  # type: ignore[union-attr]
    length = await log.last_seq()
    for skip, why in (
        (seqs[v.CoordinatorStarted], "is a claim or a skip"),
        (seqs[v.TaskSubmitted], r"worker a\.1 would be unknown"),
        (length + 1, f"which ends at entry {length}"),
        (0, "is not in the log"),
    ):
        with pytest.raises(SkipRefused, match=why):
            await started(log, [skip])
    assert await log.last_seq() == length, "nothing was written"


async def test_coordinator_that_folded_skipped_entry_stops() -> None:
    log, seq = await cancelled_by_mistake()
    old = Coordinator(log, MemoryBeatLog(), HeadSettings(policy=Policy(), heartbeat_s=0.2))
    running_old = asyncio.create_task(old.run())
    await asyncio.wait_for(old.live.wait(), 30)
    await started(log, [seq])
    done, _ = await asyncio.wait([running_old], timeout=30)
    assert done and running_old.exception() is not None
