"""The log on a real nats-server that is killed, restarted, misused and written to by strangers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
import trustme
from msgspec.structs import replace
from nats.aio.msg import Msg

from tests.contracts.logs import beat, command, envelope_of, fact, facts, history, started
from unicrond.events.log.event_log import Fence, Fenced, LogError, LogUnavailable
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM, agent_consumer
from unicrond.events.nats import event_log as nats_log
from unicrond.events.nats.commands import NatsCommandFeed, command_consumer_config, ensure_command_consumer
from unicrond.events.nats.connection import Backoff, Connection, Login, LoginRefused, connect
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.reader import SILENCE_S
from unicrond.events.nats.request_reply import wait_for_answer, wait_for_event
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import JetStreamError, api, beat_stream_config, create_streams, event_stream_config
from unicrond.events.wire.envelope import Entry, QuarantinedMessage


async def test_appends_and_reads_survive_sigkills(nats_server: EmbeddedServer, nats_connection: Connection) -> None:
    """Three SIGKILLs in the middle of singles, batches and two readers: nothing lost, doubled or out of order."""
    log = NatsEventLog(nats_connection)
    fence = await log.claim_term(started(1))
    acked: dict[int, str] = {}
    done = asyncio.Event()
    progress = asyncio.Condition()

    async def write(node: str, batch: int) -> None:
        number = 1
        while not done.is_set():
            envelopes = facts(number, number + batch - 1, node)
            seqs = await log.append(envelopes)
            acked.update(zip(seqs, (envelope.event_id for envelope in envelopes), strict=True))
            number += batch
            async with progress:
                progress.notify_all()

    async def decide() -> None:
        number = 1
        while not done.is_set():
            batch = [command(number), command(number + 1, "n2")]
            seqs = await log.append(batch, fence=fence)
            acked.update(zip(seqs, (envelope.event_id for envelope in batch), strict=True))
            number += 2

    seen: list[list[Entry]] = [[], []]
    last = fact(1, "end").event_id

    async def follow(into: list[Entry]) -> None:
        async with aclosing(log.read()) as entries:
            async for entry in entries:
                into.append(entry)
                async with progress:
                    progress.notify_all()
                # Not by its number: a reader may have the entry before the writer has its acknowledgement.
                if envelope_of(entry).event_id == last:
                    return

    async with asyncio.timeout(60):
        writers = [asyncio.create_task(task) for task in (write("n1", 1), write("n2", 7), decide())]
        readers = [asyncio.create_task(follow(into)) for into in seen]
        for _ in range(3):
            target = len(acked) + 300
            async with progress:
                await progress.wait_for(lambda target=target: len(acked) >= target)  # type: ignore[misc]
            await nats_server.kill()
            await nats_server.start()
        target = len(acked) + 300
        async with progress:
            await progress.wait_for(lambda: len(acked) >= target)
        done.set()
        await asyncio.gather(*writers)
        end = await log.append([fact(1, "end")])
        acked[end[0]] = last
        await asyncio.gather(*readers)

    stored = {entry.seq: envelope_of(entry).event_id for entry in await history(log)}
    del stored[fence.seq]
    assert stored == acked, "all that was acknowledged, each once, under its number, and nothing else"
    for entries in seen:
        assert [entry.seq for entry in entries] == list(range(1, end[0] + 1))


async def test_commands_and_beats_survive_sigkill(nats_server: EmbeddedServer, nats_connection: Connection) -> None:
    log, beats = NatsEventLog(nats_connection), NatsBeatLog(nats_connection)
    taken: asyncio.Queue[int] = asyncio.Queue()
    heard: asyncio.Queue[Entry] = asyncio.Queue()

    async def take() -> None:
        async for recorded in NatsCommandFeed(nats_connection, "n1").read():
            taken.put_nowait(recorded.envelope.number)

    async def watch() -> None:
        async for entry in beats.subscribe():
            heard.put_nowait(entry)

    async def pulse() -> None:
        for number in range(1, 10_000):  # also into the void: nobody waits, nobody fails
            await beats.publish(beat(number))
            await asyncio.sleep(0.005)

    tasks = [asyncio.create_task(task) for task in (take(), watch(), pulse())]
    async with asyncio.timeout(30):
        await log.append([command(1), command(2)])
        assert [await taken.get(), await taken.get()] == [1, 2]
        before = await heard.get()
        session = await nats_connection.session()
        await nats_server.kill()
        await session.disconnected.wait()
        while not heard.empty():
            before = heard.get_nowait()
        await nats_server.start()
        await log.append([command(3)])
        assert await taken.get() == 3
        after = await heard.get()
        # The newest numbers may have been taken back; the time tells which beat is meant.
        assert after.recorded_at_us > before.recorded_at_us
        assert envelope_of(after).number > envelope_of(before).number
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_lost_acknowledgement_repeats_no_command(
    nats_server: EmbeddedServer, nats_connection: Connection
) -> None:
    await NatsEventLog(nats_connection).append([command(1), command(2)])
    taken = []
    async with asyncio.timeout(30), aclosing(NatsCommandFeed(nats_connection, "n1").read()) as commands:
        async for recorded in commands:
            taken.append(recorded.seq)
            if len(taken) == 2:
                break
            session = await nats_connection.session()
            await nats_server.restart()
            await session.disconnected.wait()
    assert taken == [1, 2]


async def test_abandoned_append_can_be_repeated(nats_server: EmbeddedServer, nats_connection: Connection) -> None:
    log = NatsEventLog(nats_connection, give_up_s=0.3)
    assert await log.append([fact(1)]) == [1]
    await nats_server.kill()
    with pytest.raises(LogUnavailable, match=r"no answer from NATS at .* for 0\.3 s"):
        await log.append(facts(2, 3))
    await nats_server.start()
    assert await NatsEventLog(nats_connection).append(facts(1, 4)) == [1, 2, 3, 4]


async def test_cancelled_append_can_be_repeated(nats_connection: Connection) -> None:
    """Cancelled at any moment, it was written or not; repeated with more behind it, everything stands once."""
    log = NatsEventLog(nats_connection)
    for round_number in range(20):
        first = round_number * 10 + 1
        attempt = asyncio.create_task(log.append(facts(first, first + 4)))
        for _ in range(round_number):
            await asyncio.sleep(0)
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)
        seqs = await log.append(facts(first, first + 6))
        assert len(set(seqs)) == 7
    entries = await history(log)
    assert len({envelope_of(entry).event_id for entry in entries}) == len(entries) == 140


async def test_fenced_retry_finds_written_batch(nats_connection: Connection) -> None:
    """The acknowledgement was lost, then a new term came: the server says no, but the batch stands."""
    log = NatsEventLog(nats_connection)
    first = await log.claim_term(started(1))
    seqs = await log.append([command(1), command(2)], fence=first)
    await log.claim_term(started(2))
    assert await log.append([command(1), command(2)], fence=first) == seqs
    with pytest.raises(Fenced):
        await log.append([command(2), command(3)], fence=Fence(1, first.seq))


async def test_fenced_retry_searches_only_from_its_base(
    nats_connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = NatsEventLog(nats_connection)
    await log.append(facts(1, 50))
    fence = await log.claim_term(started(1))
    decided = [replace(command(number), based_on=fence.seq) for number in (1, 2)]
    seqs = await log.append(decided, fence=fence)
    starts: list[dict[str, object]] = []
    real = nats_log.read_stream

    def read_stream(*arguments: Any, start: dict[str, Any], **how: Any) -> Any:
        starts.append(start)
        return real(*arguments, start=start, **how)

    monkeypatch.setattr(nats_log, "read_stream", read_stream)
    assert await log.append(decided, fence=fence) == seqs
    assert starts == [{"deliver_policy": "by_start_sequence", "opt_start_seq": fence.seq + 1}]


async def test_delayed_reader_resumes(nats_connection: Connection, caplog: pytest.LogCaptureFixture) -> None:
    """What came meanwhile is in its socket: the consumer is not thrown away."""
    log = NatsEventLog(nats_connection)
    await log.append([fact(1), command(2)])
    read: asyncio.Queue[int] = asyncio.Queue()
    obeyed: asyncio.Queue[int] = asyncio.Queue()

    async def follow() -> None:
        async for entry in log.read():
            read.put_nowait(entry.seq)

    async def obey() -> None:
        async for recorded in NatsCommandFeed(nats_connection, "n1").read():
            obeyed.put_nowait(recorded.seq)

    tasks = [asyncio.create_task(work) for work in (follow(), obey())]
    with caplog.at_level(logging.INFO):
        async with asyncio.timeout(60):
            assert [await read.get(), await read.get(), await obeyed.get()] == [1, 2, 2]
            await asyncio.sleep(0.2)
            time.sleep(SILENCE_S + 0.7)  # noqa: ASYNC251
            await asyncio.sleep(0.2)
            await log.append([command(3)])
            assert [await read.get(), await obeyed.get()] == [3, 3]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert "interrupted" not in caplog.text


@pytest.mark.parametrize(
    "wait", [lambda: wait_for_answer(asyncio.Future(), 0.02), lambda: wait_for_event(asyncio.Event(), 0.02)]
)
async def test_wait_of_sleeping_process_is_extended_and_ends(
    wait: Callable[[], Awaitable[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unicrond.events.nats.request_reply.ANSWER_PART_S", 0.02)
    monkeypatch.setattr("unicrond.events.nats.request_reply.MESSAGE_PART_S", 0.02)

    async def nap() -> None:
        while True:
            time.sleep(0.05)  # noqa: ASYNC251
            await asyncio.sleep(0)

    napping, begin_s = asyncio.create_task(nap()), time.monotonic()
    assert not await wait()
    napping.cancel()
    assert time.monotonic() - begin_s > 0.3, "a part that was slept through counts for an eighth"


async def test_answer_during_sleep_counts(nats_connection: Connection) -> None:
    """A loop that was busy for longer than the wait finds the answer in its socket."""
    session = await nats_connection.session()
    asyncio.get_running_loop().call_soon(time.sleep, 0.6)
    await session.request(f"$JS.API.STREAM.INFO.{EVENT_STREAM}", b"", timeout_s=0.3)


async def test_late_answer_to_repeated_message_counts(
    nats_connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unicrond.events.nats.event_log.REQUEST_TIMEOUT_S", 0.05)
    session = await nats_connection.session()
    on_answer, held, sent = session._on_answer, [], []
    publish = session.client.publish

    async def hold(message: Msg) -> None:
        held.append(message)

    async def counted(subject: str, *arguments: Any, **how: Any) -> None:
        sent.append(subject)
        await publish(subject, *arguments, **how)

    monkeypatch.setattr(session.client, "publish", counted)
    session.client._subs[1]._cb = hold  # the inbox for answers
    log = NatsEventLog(nats_connection)
    appending = asyncio.create_task(log.append([fact(1)]))
    async with asyncio.timeout(10):
        while len(sent) < 4:  # noqa: ASYNC110 - what is watched offers no event
            await asyncio.sleep(0.01)
        assert "no answer within" in log.trouble
        session.client._subs[1]._cb = on_answer
        await on_answer(held[0])
        assert await appending == [1]
    assert log.trouble == ""
    assert len(await history(log)) == 1


def test_backoff_grows_with_jitter() -> None:
    slept: list[float] = []

    async def lose(drawn: float) -> list[float]:
        backoff = Backoff("a test", lambda: drawn)
        for _ in range(8):
            await backoff.wait_after(LogError("no"))
        return slept

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("unicrond.events.nats.connection.asyncio.sleep", sleep)
        for drawn in (0.0, 0.5):
            with contextlib.suppress(StopIteration):
                lose(drawn).send(None)
    longest = [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]
    assert slept == [*longest, *(delay_s * 0.75 for delay_s in longest)]


def test_quiet_time_is_no_failure(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("unicrond.events.nats.connection.time.monotonic", lambda: now_s)
    backoff = Backoff("commands for n1")
    backoff.reset()
    now_s = 100.0  # nothing to do until here
    backoff.note(LogError("no connection"))
    now_s = 109.0
    backoff.note(LogError("no connection"))
    assert not caplog.records
    now_s = 111.0
    backoff.note(LogError("no connection"))
    assert "commands for n1: no success for 11 s" in caplog.text


async def test_dead_reader_of_session_is_noticed(nats_connection: Connection) -> None:
    """An exception in nats-py's reading loop leaves `is_connected` true; we must not believe it."""
    log = NatsEventLog(nats_connection)
    session = await nats_connection.session()
    assert session.client._reading_task is not None
    session.client._reading_task.cancel()
    assert await asyncio.wait_for(log.append([fact(1)]), 10) == [1]
    assert await nats_connection.session() is not session


async def test_foreign_messages_are_quarantined(nats_connection: Connection) -> None:
    log = NatsEventLog(nats_connection)
    await log.append([fact(1)])
    for subject, body in (
        ("unicron.v1.obs.n2.NodeLeft", b'{"stream":"UNICRON_EVENTS","seq":1}'),
        ("unicron.v1.obs.n2.NodeLeft", b""),
        ("unicron.v1.term", b"\xc1"),
        ("unicron.v1.decision.t.PlanAdopted", b"\x80"),
    ):
        await nats_connection.request(subject, body)
    await log.append([fact(2)])
    entries = await history(log)
    assert [type(entry).__name__ for entry in entries] == ["RecordedEvent"] + ["QuarantinedMessage"] * 4 + [
        "RecordedEvent"
    ]
    assert all(isinstance(entry, QuarantinedMessage) and entry.reason for entry in entries[1:5])
    assert await log.claim_term(started(1)) == Fence(1, 7), "garbage on the term subject stops nobody"


async def test_slow_reader_applies_backpressure(nats_connection: Connection) -> None:
    log = NatsEventLog(nats_connection)
    for first in range(1, 10_001, 1000):
        await log.append(facts(first, first + 999))
    count = 0
    async with aclosing(log.read(until_seq=10_000)) as entries:
        async for entry in entries:
            count += 1
            assert entry.seq == count
            if count in (1, 5000):
                await asyncio.sleep(0.3)
    assert count == 10_000


async def test_stream_denies_deletion(nats_connection: Connection) -> None:
    await NatsEventLog(nats_connection).append([fact(1)])
    for call, request in (("STREAM.PURGE", {}), ("STREAM.MSG.DELETE", {"seq": 1})):
        with pytest.raises(LogError, match="not permitted"):
            await api(nats_connection, f"{call}.{EVENT_STREAM}", request)


async def test_unsafe_stream_settings_are_refused(nats_server: EmbeddedServer) -> None:
    connection = await connect(nats_server.url, name="test", timeout_s=10)
    try:
        lax = {**event_stream_config(), "deny_delete": False, "deny_purge": False}
        await api(connection, f"STREAM.CREATE.{EVENT_STREAM}", lax)
        with pytest.raises(LogError, match=f"stream {EVENT_STREAM}: deny_delete is"):
            await create_streams(connection)
    finally:
        await connection.close()


@pytest.mark.parametrize("before", ["none", "as older versions made it"])
async def test_beat_stream_syncs_no_single_beat(
    nats_server: EmbeddedServer, before: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server stores and delivers by turns: a disk that is behind would make the coordinator deaf."""
    caplog.set_level(logging.INFO)
    connection = await connect(nats_server.url, name="test", timeout_s=10)
    try:
        if before != "none":
            synced = {key: value for key, value in beat_stream_config().items() if key != "persist_mode"}
            await api(connection, f"STREAM.CREATE.{BEAT_STREAM}", synced)
        for _ in range(2):
            await create_streams(connection)
        config = (await api(connection, f"STREAM.INFO.{BEAT_STREAM}", {}))["config"]
        assert config.get("persist_mode") == ("async" if before == "none" else None)
        assert (f"nats stream rm {BEAT_STREAM}" in caplog.text) == (before != "none")
    finally:
        await connection.close()


async def test_restarted_server_resumes_after_handled_command(
    nats_server: EmbeddedServer, nats_connection: Connection
) -> None:
    """It keeps consumers in memory: no fsync for a command that is given and acknowledged."""
    log = NatsEventLog(nats_connection)
    await log.append([command(1), command(2)])
    obeyed: asyncio.Queue[int] = asyncio.Queue()
    feed = NatsCommandFeed(nats_connection, "n1")

    async def obey() -> None:
        async for recorded in feed.read():
            obeyed.put_nowait(recorded.seq)

    obeying = asyncio.create_task(obey())
    async with asyncio.timeout(30):
        assert [await obeyed.get(), await obeyed.get()] == [1, 2]
        await nats_server.restart()
        await log.append([command(3)])
        assert await obeyed.get() == 3
        name = f"CONSUMER.INFO.{EVENT_STREAM}.{agent_consumer('n1')}"
        assert (await api(nats_connection, name, {}))["config"]["opt_start_seq"] in (2, 3)
        obeying.cancel()
        await asyncio.gather(obeying, return_exceptions=True)
        await nats_server.restart()
        async with aclosing(NatsCommandFeed(nats_connection, "n1").read()) as commands:
            assert [(await anext(commands)).seq for _ in range(3)] == [1, 2, 3], "nobody knows: all of them"


async def test_older_consumer_is_recreated_in_memory(nats_connection: Connection) -> None:
    log = NatsEventLog(nats_connection)
    old = command_consumer_config("n1")
    del old["mem_storage"]
    create = f"CONSUMER.CREATE.{EVENT_STREAM}.{agent_consumer('n1')}"
    await api(nats_connection, create, {"stream_name": EVENT_STREAM, "config": old})
    await log.append([command(1), command(2)])
    async with (
        asyncio.timeout(20),
        aclosing(NatsCommandFeed(nats_connection, "n1", makes_consumer=False).read()) as read,
    ):
        assert [(await anext(read)).seq for _ in range(2)] == [1, 2]  # to ask for the second acknowledges the first
    await ensure_command_consumer(nats_connection, "n1", None)
    info = await api(nats_connection, f"CONSUMER.INFO.{EVENT_STREAM}.{agent_consumer('n1')}", {})
    assert info["config"]["mem_storage"] and info["config"]["opt_start_seq"] == 2
    async with asyncio.timeout(10), aclosing(NatsCommandFeed(nats_connection, "n1").read()) as commands:
        assert (await anext(commands)).seq == 2


async def test_stream_creation_is_idempotent(nats_connection: Connection) -> None:
    await create_streams(nats_connection)
    info = await api(nats_connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    assert info["config"]["allow_atomic"] is True
    edited = {**event_stream_config(), "duplicate_window": 60 * 10**9, "description": "an operator was here"}
    await api(nats_connection, f"STREAM.UPDATE.{EVENT_STREAM}", edited)
    await create_streams(nats_connection)


@pytest.mark.parametrize("before", [{}, {"max_consumers": 3}])
async def test_stream_has_room_for_consumers_of_all_nodes(nats_server: EmbeddedServer, before: dict[str, int]) -> None:
    """One that is new, and one that an earlier version made without a number: the server's default is 1,000."""
    connection = await connect(nats_server.url, name="test", timeout_s=10)
    try:
        if before:
            await api(connection, f"STREAM.CREATE.{EVENT_STREAM}", {**event_stream_config(), **before})
            for number in range(3):
                await ensure_command_consumer(connection, f"n{number}", ())
            with pytest.raises(JetStreamError, match="maximum consumers limit reached"):
                await ensure_command_consumer(connection, "n3", ())
        await create_streams(connection)
        info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
        assert info["config"]["max_consumers"] >= 65_536
        for first in range(0, 1100, 100):
            await asyncio.gather(*(ensure_command_consumer(connection, f"n{first + n}", ()) for n in range(100)))
        await create_streams(connection)
        assert (await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["state"]["consumer_count"] == 1100
    finally:
        await connection.close()


async def test_operator_may_allow_more_consumers(nats_connection: Connection) -> None:
    more = {**event_stream_config(), "max_consumers": 200_000}
    await api(nats_connection, f"STREAM.UPDATE.{EVENT_STREAM}", more)
    await create_streams(nats_connection)
    info = await api(nats_connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    assert info["config"]["max_consumers"] == 200_000


async def test_error_names_unreachable_server() -> None:
    with pytest.raises(LogUnavailable, match=r"cannot reach NATS at nats://127\.0\.0\.1:1: .*is the server running"):
        await connect("nats://127.0.0.1:1", name="test", timeout_s=0.3)


async def test_error_names_wrong_password(tmp_path_factory: pytest.TempPathFactory) -> None:
    login = Login(user="unicron", password='se"cret')
    server = EmbeddedServer(tmp_path_factory.mktemp("nats"), login=login)
    await server.start()
    try:
        for given, why in (
            (Login(), "NATS wants a login and got none"),
            (Login(user="unicron", password="other"), "NATS refuses user unicron: the name or the password is wrong"),
        ):
            with pytest.raises(LoginRefused, match=why):
                await connect(server.url, name="test", login=given, timeout_s=3)
        connection = await connect(server.url, name="test", login=login, timeout_s=10)
        await create_streams(connection)
        await connection.close()
    finally:
        await server.kill()


async def test_client_retries_after_failed_tls_handshake(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    attempts: asyncio.Queue[None] = asyncio.Queue()

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):  # though the test has ended meanwhile
            writer.write(b'INFO {"server_id":"s","version":"2.15.1","max_payload":1048576,"tls_required":true}\r\n')
            await reader.read(1)  # its first bytes of TLS
            attempts.put_nowait(None)
            writer.transport.abort()

    server = await asyncio.start_server(die, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    asked = asyncio.create_task(
        connect(f"tls://127.0.0.1:{port}", name="test", login=Login(tls_ca=tmp_path / "ca.pem"), timeout_s=None)
    )
    try:
        async with asyncio.timeout(30):
            for _ in range(4):  # nats-py itself tries twice
                await attempts.get()
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        server.close()
        await server.wait_closed()


async def test_pending_calls_end_on_close(nats_connection: Connection) -> None:
    reading = asyncio.ensure_future(anext(NatsEventLog(nats_connection).read()))
    await NatsEventLog(nats_connection).last_seq()
    await nats_connection.close()
    with pytest.raises(LogUnavailable, match="closed"):
        await asyncio.wait_for(reading, 10)
    with pytest.raises(LogUnavailable, match="closed"):
        await NatsEventLog(nats_connection).append([fact(1)])


async def test_core_subscriptions_follow_to_next_session(
    nats_server: EmbeddedServer, nats_connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(message: object) -> None:
        heard.put_nowait(message.data)  # type: ignore[attr-defined]

    await nats_connection.subscribe("greetings", hear)
    await nats_connection.publish_now("greetings", b"one")
    assert await asyncio.wait_for(heard.get(), 10) == b"one"
    with caplog.at_level(logging.INFO):
        session = await nats_connection.session()
        await nats_server.restart()
        await asyncio.wait_for(session.disconnected.wait(), 10)
        await nats_connection.session()
    assert await nats_connection.publish_now("greetings", b"two")
    assert await asyncio.wait_for(heard.get(), 10) == b"two"
    assert any("lost the connection to NATS" in record.message for record in caplog.records)


async def test_stream_shows_readable_headers(nats_connection: Connection) -> None:
    await NatsEventLog(nats_connection).append([command(1)])
    got = await api(nats_connection, f"STREAM.MSG.GET.{EVENT_STREAM}", {"seq": 1})
    assert got["message"]["subject"] == "unicron.v1.command.n1.StopWorker"
    assert json.dumps(got)  # the body is base64, the rest plain text
