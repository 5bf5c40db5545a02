"""A snapshot and the tail of the log are the log; without the snapshot, or with a wrong one, nothing changes."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import msgspec
import pytest

from tests.contracts.memory_log import MemoryBeatLog, MemoryLog
from tests.replay.command import unicron_replay
from tests.replay.logs import eventful, fill, troubled
from tests.unicrond.coordinators import running
from tests.unicrond.stories import states_of
from unicrond.core.replayer import replay
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import digest
from unicrond.events import vocabulary as v
from unicrond.events.log.event_log import EventLog, LogUnavailable
from unicrond.events.log.log_identity import mark_of
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.wire.envelope import Entry, Envelope
from unicrond.service.coordinator import code_identity
from unicrond.service.coordinator import snapshots as module
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.nats_snapshots import NAME, NatsSnapshotStore
from unicrond.service.coordinator.snapshots import (
    BadSnapshot,
    Snapshots,
    decode_snapshot,
    encode_snapshot,
)
from unicrond.service.coordinator.surroundings import HeadSettings


class MemoryStore:
    """A SnapshotStore; `fails`: it cannot be reached."""

    def __init__(self, body: bytes | None = None, *, fails: bool = False) -> None:
        self.body = body
        self.fails = fails
        self.saved = 0
        self.tried = asyncio.Event()

    async def load(self) -> bytes | None:
        if self.fails:
            raise LogUnavailable("away")
        return self.body

    async def save(self, body: bytes) -> None:
        self.tried.set()
        if self.fails:
            raise LogUnavailable("away")
        self.body = body
        self.saved += 1


def states(entries: list[Entry]) -> list[ClusterState]:
    return [ClusterState(), *states_of(entries)]


@pytest.mark.parametrize("seed", range(5))
def test_snapshot_and_tail_match_full_fold(seed: int) -> None:
    entries = eventful(seed)
    full = states(entries)
    for seq in range(1, len(entries), 37):
        state, mark, _ = decode_snapshot(encode_snapshot(full[seq], mark_of(entries[seq - 1])))
        assert repr(state) == repr(full[seq]), "insertion order included"
        assert mark.seq == seq
        state = replay(entries[seq:], start=state)
        assert digest(state) == digest(full[-1])
        assert repr(state) == repr(full[-1])


def snapshot_of(seed: int = 1, seq: int = 60) -> tuple[bytes, list[Entry]]:
    entries = list(troubled(seed).log)
    return encode_snapshot(states(entries)[seq], mark_of(entries[seq - 1])), list(entries)


def broken(body: bytes, **fields: object) -> bytes:
    raw = msgspec.msgpack.decode(body)
    return msgspec.msgpack.encode({**raw, **fields})


def test_snapshot_decoder_refuses_mismatch_with_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    body, _ = snapshot_of()
    state = msgspec.msgpack.decode(body)["state"]
    for bad, why in [
        (b"", "not a snapshot"),
        (b"\x80", "not a snapshot"),
        (body[:-40], "not a snapshot"),
        (broken(body, state=state[:-1]), "its checksum is wrong"),
        (broken(body, digest="00"), "its state has another digest"),
        (broken(body, mark={"seq": 61, "recorded_at_us": 1, "event_id": ""}), "its state has another digest"),
        (broken(body, fingerprint="other"), "another version's fold"),
    ]:
        with pytest.raises(BadSnapshot, match=why):
            decode_snapshot(bad)
    monkeypatch.setattr(module, "fingerprint", lambda: "tomorrow")
    with pytest.raises(BadSnapshot, match="another version's fold"):
        decode_snapshot(body)


def test_fingerprint_covers_folding_code_alone(tmp_path: Path) -> None:
    before = code_identity.fingerprint.__wrapped__()
    assert code_identity.fingerprint.__wrapped__() == before == code_identity.fingerprint()
    copy = tmp_path / "unicrond"
    shutil.copytree(code_identity.FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert code_identity.fingerprint(copy) == before, "links to the folders beside it are followed"
    (copy / "agents" / "more.py").write_text("# it folds nothing\n")
    assert code_identity.fingerprint.__wrapped__(copy) == before
    (copy / "events" / "more.py").write_text("# a change\n")
    assert code_identity.fingerprint.__wrapped__(copy) != before


# --- a coordinator with a store ----------------------------------------------------------------


async def filled_log(seed: int = 1) -> MemoryLog:
    log = MemoryLog()
    await fill(log, troubled(seed).log)
    return log


async def snapshot_at(log: EventLog, seq: int) -> bytes:
    entries = [entry async for entry in log.read(until_seq=seq)]
    return encode_snapshot(replay(entries), mark_of(entries[-1]))


async def test_restart_reads_only_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    log = await filled_log()
    last = await log.last_seq()
    store = MemoryStore(await snapshot_at(log, last - 5))
    asked: list[int] = []
    real_read = log.read

    def read(after_seq: int = 0, *, until_seq: int | None = None):
        asked.append(after_seq)
        return real_read(after_seq, until_seq=until_seq)

    monkeypatch.setattr(log, "read", read)
    async with running(log, heartbeat_s=30.0, snapshots=Snapshots(store)) as coordinator:
        assert min(asked) == last - 6, "the entry that the snapshot ends with, and what came after"
        assert coordinator.state.seq > last


@pytest.mark.parametrize("seq", [1, 40, -1])
async def test_state_matches_with_and_without_snapshot(seq: int) -> None:
    log = await filled_log(2)
    at = seq if seq > 0 else await log.last_seq()
    found: list[str] = []
    for store in (None, MemoryStore(await snapshot_at(log, at))):
        coordinator = Coordinator(
            log,
            MemoryBeatLog(),
            HeadSettings(policy=Policy(), heartbeat_s=30.0),
            snapshots=Snapshots(store) if store else None,
        )
        await coordinator._catch_up()
        found.append(repr(coordinator.state) + coordinator._cause)
    assert found[0] == found[1]


@pytest.mark.parametrize("fault", ["of another log", "of a longer log", "garbage", "away"])
async def test_coordinator_ignores_wrong_snapshot_in_one_line(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    log = await filled_log(3)
    other = await filled_log(4)
    for number in range(300):
        event = v.CommandApplied(node="n1", command_id="x")
        await other.append([Envelope(producer="n1", boot=999, number=number + 1, observed_at_us=1, event=event)])
    store = {
        "of another log": MemoryStore(await snapshot_at(other, 50)),
        "of a longer log": MemoryStore(await snapshot_at(other, await other.last_seq())),
        "garbage": MemoryStore(b"\x00garbage"),
        "away": MemoryStore(fails=True),
    }[fault]
    with caplog.at_level(logging.WARNING, logger="unicrond"):
        assert await Snapshots(store).restore(log) is None
    assert len(caplog.records) == 1 and "not using the snapshot" in caplog.text
    async with running(log, heartbeat_s=30.0, snapshots=Snapshots(store)) as coordinator:
        assert coordinator.state.tasks


async def chatter(log: MemoryLog, first: int, count: int) -> None:
    for number in range(first, first + count):
        event = v.CommandApplied(node="n1", command_id="x")
        await log.append([Envelope(producer="n1", boot=1, number=number, observed_at_us=1, event=event)])


async def test_coordinator_writes_snapshot_at_interval() -> None:
    log, store = MemoryLog(), MemoryStore()
    async with running(log, heartbeat_s=30.0, snapshots=Snapshots(store, every=50)):
        for turn in range(4):
            store.tried.clear()
            await chatter(log, turn * 60 + 1, 60)
            await asyncio.wait_for(store.tried.wait(), 30)
    assert store.body is not None
    state, mark, _ = decode_snapshot(store.body)
    assert mark.seq >= 200 and state.seq == mark.seq
    assert store.saved == 4


async def test_absent_store_never_stops_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    log, store = MemoryLog(), MemoryStore(fails=True)
    async with running(log, heartbeat_s=30.0, snapshots=Snapshots(store, every=5)):
        for turn in range(2):
            store.tried.clear()
            await chatter(log, turn * 6 + 1, 6)
            await asyncio.wait_for(store.tried.wait(), 30)
    assert caplog.text.count("could not write a snapshot of entry") == 2


async def test_replay_starts_from_snapshot_on_request(nats_server: EmbeddedServer, nats_connection: Connection) -> None:
    log = NatsEventLog(nats_connection)
    await fill(log, troubled(5).log)
    ask = ("digest", "--nats", nats_server.url, "--json")
    none = await asyncio.to_thread(unicron_replay, *ask, "--from-snapshot")
    assert none.returncode == 2 and "no snapshot fits" in none.stderr
    await NatsSnapshotStore(nats_connection).save(await snapshot_at(log, 80))
    full = await asyncio.to_thread(unicron_replay, *ask)
    quick = await asyncio.to_thread(unicron_replay, *ask, "--from-snapshot")
    assert full.stdout == quick.stdout and quick.returncode == 0, quick.stderr
    early = await asyncio.to_thread(unicron_replay, *ask, "--from-snapshot", "--at", "79")
    assert early.returncode == 2 and "is of entry 80, after --at" in early.stderr


async def test_bucket_keeps_newest_snapshot(nats_connection: Connection) -> None:
    store = NatsSnapshotStore(nats_connection)
    assert await store.load() is None
    body, _ = snapshot_of()
    large = body + bytes(3_000_000)
    for content in (body, large, body):
        await store.save(content)
        assert await store.load() == content
    session = await nats_connection.session()
    bucket = await session.client.jetstream().object_store("UNICRON_SNAPSHOTS")
    status = await bucket.status()
    assert status.size < len(body) + 10_000, "what was replaced is gone"
    assert [info.name for info in await bucket.list()] == [NAME]
    await bucket.delete(NAME)
    assert await store.load() is None
