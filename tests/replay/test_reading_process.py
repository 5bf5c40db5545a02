"""A stream read by a process of its own gives what it gives without one, and that process never stays behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.contracts.logs import fact, facts
from tests.integration.nats_cluster import nats_cluster
from tests.replay.command import ROOT
from tests.replay.logs import fill, troubled
from unicrond.events.log.event_log import LogDamaged, LogUnavailable
from unicrond.events.log.point import AtSeq, Point
from unicrond.events.log.subjects import EVENT_STREAM, subject
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, create_streams, event_stream_config
from unicrond.events.vocabulary import ErrorReported
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Entry, Envelope, QuarantinedMessage
from unicrond.replay.reading import reading_process
from unicrond.replay.reading.nats_source import NatsSource, open_nats
from unicrond.replay.reading.source import Source, read

HERE, APART = 10**9, 1
BIG = 400


async def entries_of(source: Source, *, after: Point | None = None, until: Point | None = None) -> list[Entry]:
    async with aclosing(read(source, after=after, until=until)) as chunks:
        return [entry async for chunk in chunks for entry in chunk.entries]


def big_facts() -> list[Envelope]:
    """BIG observations of 30 KB, several times what the buffers on the way hold."""
    event = ErrorReported(
        node="n1",
        task="t",
        worker="t.1",
        kind="exception",
        generation=1,
        iteration=1,
        phase="forward",
        message="long",
        detail="x" * 30_000,
    )
    return [Envelope(producer="n1", boot=1, number=n, observed_at_us=n, event=event) for n in range(1, BIG + 1)]


async def write_big(connection: Connection) -> None:
    envelopes = big_facts()
    for begin in range(0, BIG, 20):
        await NatsEventLog(connection).append(envelopes[begin : begin + 20])


class Started(NamedTuple):
    """A reading process as it was when it began: that of a short log may have ended before one looks."""

    process: psutil.Process
    words: list[str]
    environment: dict[str, str]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """The reading processes that have been started."""
    processes: list[Started] = []
    create = asyncio.create_subprocess_exec

    async def record(*words: Any, **options: Any) -> asyncio.subprocess.Process:
        child = await create(*words, **options)
        process = psutil.Process(child.pid)
        processes.append(Started(process, process.cmdline(), process.environ()))
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", record)
    return processes


def readers() -> list[psutil.Process]:
    """Children of ours that read, or did and were not reaped."""
    children = psutil.Process().children()
    return [c for c in children if c.status() == psutil.STATUS_ZOMBIE or reading_process.__name__ in c.cmdline()]


async def test_reading_process_gives_same_entries(nats_server: EmbeddedServer, nats_connection: Connection) -> None:
    log, session = NatsEventLog(nats_connection), await nats_connection.session()
    recorded = troubled(6).log
    await fill(log, recorded[:100])
    await session.request("unicron.v1.obs.n1.Nonsense", b"no event")
    await session.request("unicron.v1.obs.n2.NodeLeft", encode(fact(1)))
    await session.request("unicron.v1.obs.n1.NodeLeft", b"")
    await fill(log, recorded[100:])
    async with (
        open_nats([nats_server.url], apart_from=HERE) as one,
        open_nats([nats_server.url], apart_from=APART) as two,
    ):
        entries = await entries_of(one)
        assert sum(isinstance(entry, QuarantinedMessage) for entry in entries) == 3
        assert repr(await entries_of(two)) == repr(entries)  # by repr: a loss may be NaN
        for after, until in [(0, 1), (10, 200), (len(entries) - 1, len(entries)), (len(entries), len(entries))]:
            stretch = await entries_of(two, after=AtSeq(after), until=AtSeq(until))
            assert repr(stretch) == repr(entries[after:until])
        async with aclosing(read(two)) as chunks:
            done = [chunk.fraction async for chunk in chunks]
        assert done == sorted(done) and done[-1] == 1.0
    assert not readers()


async def test_reading_process_starts_only_for_long_log(
    nats_server: EmbeddedServer, nats_connection: Connection, started: list[Started]
) -> None:
    await NatsEventLog(nats_connection).append(facts(1, 100))
    for apart_from, after, expected in [(101, 0, 0), (100, 0, 1), (100, 1, 0)]:
        started.clear()
        async with (
            open_nats([nats_server.url], apart_from=apart_from) as source,
            aclosing(source.chunks(after)) as chunks,
        ):
            await anext(chunks)
            assert len(started) == expected


async def test_reading_process_delivers_large_log_and_ends_early(
    nats_server: EmbeddedServer, nats_connection: Connection, started: list[Started]
) -> None:
    await write_big(nats_connection)
    async with open_nats([nats_server.url], apart_from=APART) as source:
        entries = await entries_of(source)
        assert [entry.seq for entry in entries] == list(range(1, BIG + 1))
        for last in (1, BIG // 2):  # while it starts; while it is held back
            async with aclosing(source.chunks()) as chunks:
                async for chunk in chunks:
                    if chunk.entries[-1].seq >= last:
                        started[-1].process.suspend()  # nor does it matter whether it can hear us
                        break
            assert not readers()


async def test_killed_reading_process_is_reported(
    nats_server: EmbeddedServer, nats_connection: Connection, started: list[Started]
) -> None:
    await write_big(nats_connection)
    for kill_at in (1, BIG // 2):
        async with open_nats([nats_server.url], apart_from=APART) as source:
            killed = False
            with pytest.raises(LogUnavailable, match=rf"process that reads the log .* after entry \d+ of {BIG}"):
                async with aclosing(source.chunks()) as chunks:
                    async for chunk in chunks:
                        if not killed and chunk.entries[-1].seq >= kill_at:
                            started[-1].process.kill()
                            killed = True
        assert killed and not readers()


@pytest.mark.parametrize("apart_from", [HERE, APART], ids=["here", "apart"])
@pytest.mark.parametrize("kill_at", [1, 100])
async def test_server_death_gives_same_error(
    nats_server: EmbeddedServer,
    nats_connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    apart_from: int,
    kill_at: int,
) -> None:
    await NatsEventLog(nats_connection).append(facts(1, 100))
    source = NatsSource(nats_connection, 110, 0, apart_from=apart_from)
    with pytest.raises(LogUnavailable, match=rf"^{nats_server.url}: nothing after entry \d+ of 110 in 0\.5 s; is the"):
        async with aclosing(source.chunks()) as chunks:
            async for chunk in chunks:
                if chunk.entries[-1].seq >= kill_at:
                    monkeypatch.setattr("unicrond.replay.reading.nats_source.STALL_S", 0.5)
                    await nats_server.kill()
    assert not readers()


@pytest.mark.parametrize("apart_from", [HERE, APART], ids=["here", "apart"])
async def test_missing_entries_give_same_damage_error(nats_server: EmbeddedServer, apart_from: int) -> None:
    connection = await connect(nats_server.url, name="test", timeout_s=10)
    try:
        await api(connection, f"STREAM.CREATE.{EVENT_STREAM}", {**event_stream_config(), "deny_delete": False})
        session = await connection.session()
        for envelope in facts(1, 100):
            await session.request(subject(envelope), encode(envelope))
        for seq in (60, 61):
            await api(connection, f"STREAM.MSG.DELETE.{EVENT_STREAM}", {"seq": seq})
        seen: list[int] = []
        with pytest.raises(LogDamaged, match=f"^stream {EVENT_STREAM}: entries 60 to 61 are missing$"):
            async with aclosing(NatsSource(connection, 100, 0, apart_from=apart_from).chunks()) as chunks:
                async for chunk in chunks:
                    seen += [entry.seq for entry in chunk.entries]
        assert seen == list(range(1, 60))
    finally:
        await connection.close()


async def test_reading_process_receives_login_privately(tmp_path: Path, started: list[Started]) -> None:
    login = Login(user="unicron", password='se"cret')
    server = EmbeddedServer(tmp_path / "nats", login=login)
    await server.start()
    try:
        connection = await connect(server.url, name="test", login=login, timeout_s=10)
        await create_streams(connection)
        await NatsEventLog(connection).append(facts(1, 100))
        await connection.close()
        async with open_nats([server.url], login, apart_from=APART) as source, aclosing(source.chunks()) as chunks:
            seqs = [entry.seq for entry in (await anext(chunks)).entries]
            (reader,) = started
            assert "se" + '"cret' not in f"{reader.words} {reader.environment}"
            async for chunk in chunks:
                seqs += [entry.seq for entry in chunk.entries]
        assert seqs == list(range(1, 101))
    finally:
        await server.kill()


async def test_reading_process_uses_tls_and_key(tmp_path: Path) -> None:
    async with nats_cluster(tmp_path / "cluster") as cluster:
        connection = await connect(cluster.urls, name="test", login=cluster.login, timeout_s=60)
        await create_streams(connection, replicas=3)
        await NatsEventLog(connection).append(facts(1, 100))
        await connection.close()
        async with open_nats(cluster.urls, cluster.login, apart_from=APART) as source:
            assert [entry.seq for entry in await entries_of(source)] == list(range(1, 101))


# --- an asker that goes --------------------------------------------------------------------------

ASKER = """
import asyncio, signal, sys
from contextlib import aclosing
import psutil
from unicrond.events.nats.connection import connect
from unicrond.replay.reading.nats_source import NatsSource

async def main():
    connection = await connect(sys.argv[1], name="asker")
    async with aclosing(NatsSource(connection, int(sys.argv[2]), 0, apart_from=1).chunks()) as chunks:
        async for chunk in chunks:
            if chunk.entries[-1].seq >= int(sys.argv[3]):
                print(*(child.pid for child in psutil.Process().children()), flush=True)
                await asyncio.Event().wait()

signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background it is ignored,
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and this one under nohup
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("last", "until"), [(BIG, BIG // 2), (BIG + 10, BIG)], ids=["held back", "waiting for the server"]
)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
async def test_reading_process_ends_with_its_parent(
    nats_server: EmbeddedServer, nats_connection: Connection, how: signal.Signals, last: int, until: int
) -> None:
    await write_big(nats_connection)
    asker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ASKER, nats_server.url, str(last), str(until)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    assert asker.stdout is not None
    pid = int(await asker.stdout.readline())
    reader_fd = os.pidfd_open(pid)
    try:
        assert os.getpgid(pid) != asker.pid, "a terminal would tell it as well, and it would say so"
        os.killpg(asker.pid, how)  # as a terminal does
        told, errors = await asker.communicate()
        ended, _, _ = select.select([reader_fd], [], [], 60)
        assert ended, "the reading process is still there"
        assert not errors
        assert told == (b"interrupted\n" if how == signal.SIGINT else b"")
    finally:
        os.close(reader_fd)
        if asker.returncode is None:
            asker.kill()
            await asker.communicate()


# --- back-pressure -------------------------------------------------------------------------------


class Narrow:
    """A way to the asker with room for one frame; the asker makes room when it is asked to."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.taken = 0
        self.is_flushed = False

    def write(self, frame: bytes) -> None:
        assert self.taken == len(self.frames), "written before there was room"
        self.frames.append(frame)

    async def drain(self) -> None:
        await asyncio.sleep(0)
        self.taken = len(self.frames)

    def close(self) -> None:
        pass

    async def wait_closed(self) -> None:
        self.is_flushed = True


async def test_slow_parent_applies_backpressure(nats_server: EmbeddedServer, nats_connection: Connection) -> None:
    await write_big(nats_connection)
    asker, way = asyncio.StreamReader(), Narrow()
    job = reading_process.ReadRequest([nats_server.url], Login(), 0, BIG)
    asker.feed_data(reading_process.frame(job))
    await reading_process.serve(asker, way)  # type: ignore[arg-type]
    assert len(way.frames) > 3 and way.is_flushed
