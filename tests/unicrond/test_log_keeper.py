"""A full store: said clearly, nothing lost, and over as soon as there is room."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unicrond.test_coordinator import joined, observation
from unicrond.core.nodes.liveness import OutboxBacklog
from unicrond.core.state.policy import Policy
from unicrond.events import vocabulary as v
from unicrond.events.nats.connection import Connection, connect
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.event_log_health import SILENT_BUS, LogKeeper, outbox_backlog_alarms
from unicrond.service.coordinator.surroundings import HeadSettings


class SmallServer(EmbeddedServer):
    """A server whose store holds `limit`."""

    limit = "300KB"

    def _config(self) -> str:
        return super()._config().replace("sync_interval:", f"max_file_store: {self.limit}, sync_interval:")


class Bus:
    bus_works = True
    is_silent = False


async def fill_up(log: NatsEventLog) -> tuple[list[str], asyncio.Task[list[int]], Envelope]:
    """Append until there is no room: the ids that were acknowledged, the append that waits, and what it holds."""
    acknowledged: list[str] = []
    for number in range(1, 2000):
        event = v.CommandFailed(node="n1", command_id="x", reason="r" * 1000)
        envelope = observation(event, number)
        appending = asyncio.create_task(log.append([envelope]))
        while not appending.done() and not log.trouble:
            await asyncio.wait([appending], timeout=0.02)
        if log.trouble:
            return acknowledged, appending, envelope
        acknowledged.append(envelope.event_id)
    raise AssertionError("it never got full")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - what is watched offers no event
            await asyncio.sleep(0.02)


async def stored_ids(log: NatsEventLog) -> list[str]:
    last = await log.last_seq()
    entries = [entry async for entry in log.read(until_seq=last)]
    return [entry.envelope.event_id for entry in entries if isinstance(entry, RecordedEvent)]


async def test_full_store_loses_nothing_and_completes_waiting_append(tmp_path: Path) -> None:
    server = SmallServer(tmp_path / "nats")
    await server.start()
    connection: Connection | None = None
    try:
        connection = await connect(server.url, name="test", timeout_s=10)
        await create_streams(connection)
        log = NatsEventLog(connection)
        acknowledged, waiting, envelope = await fill_up(log)
        assert len(acknowledged) > 50
        assert log.trouble == "NATS has no room for the log: free disk space there, or raise jetstream max_file_store"
        assert await stored_ids(log) == acknowledged, "what was stored can still be read"
        assert not waiting.done()

        server.limit = "10MB"
        keeper = LogKeeper(log, Bus(), server, restart_after_s=0.05, look_every_s=0.02, room_bytes=1)
        watching = asyncio.create_task(keeper.run())
        try:
            await asyncio.wait_for(server.ended(), 10)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await server.start()  # as the daemon does with one that has ended
        await asyncio.wait_for(waiting, 15)
        assert log.trouble == ""
        assert await stored_ids(log) == [*acknowledged, envelope.event_id]
    finally:
        if connection is not None:
            await connection.close()
        await server.kill()


async def test_coordinator_reports_full_store_and_resumes(tmp_path: Path) -> None:
    server = SmallServer(tmp_path / "nats")
    await server.start()
    connection = await connect(server.url, name="test", timeout_s=10)
    running: asyncio.Task[None] | None = None
    try:
        await create_streams(connection)
        log = NatsEventLog(connection)
        coordinator = Coordinator(log, NatsBeatLog(connection), HeadSettings(policy=Policy(), heartbeat_s=0.2))
        running = asyncio.create_task(coordinator.run())
        await asyncio.wait_for(coordinator.live.wait(), 10)
        other = NatsEventLog(connection)
        acknowledged, waiting, _ = await fill_up(other)
        keeper = LogKeeper(log, coordinator.liveness, None)
        await until(lambda: bool(keeper.trouble))
        assert keeper.trouble == SILENT_BUS or "has no room" in keeper.trouble
        assert not running.done(), "a full store stops nobody"
        server.limit = "10MB"
        await server.restart()
        await asyncio.wait_for(waiting, 15)
        await other.append([observation(joined("n2"), 1, "n2")])
        await until(lambda: "n2" in coordinator.state.nodes and not keeper.trouble)
        assert set(acknowledged) <= set(await stored_ids(other))
        assert not running.done()
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await connection.close()
        await server.kill()


class Stuck:
    """A server that runs, and what was done to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stopped = asyncio.Event()

    def is_running(self) -> bool:
        return not self.stopped.is_set()

    async def stop(self) -> None:
        self.stopped.set()


class Log:
    trouble = ""


async def test_keeper_restarts_server_only_if_store_has_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, server = Log(), Stuck(tmp_path)
    for room, ended in ((2**62, False), (1, True)):
        keeper = LogKeeper(log, Bus(), server, restart_after_s=0.02, look_every_s=0.01, room_bytes=room)
        log.trouble = "full"
        with caplog.at_level(logging.WARNING, logger="unicrond"):
            watching = asyncio.create_task(keeper.run())
            try:
                await asyncio.wait_for(server.stopped.wait(), 0.3 if not ended else 30)
            except TimeoutError:
                assert not ended
            finally:
                watching.cancel()
        assert server.stopped.is_set() is ended
    assert caplog.text.count("the coordinator cannot decide: full; appends wait, nothing is lost") == 2


async def test_keeper_says_that_the_volume_of_the_log_cannot_be_read(tmp_path: Path) -> None:
    """It is unmounted, say: nobody knows how much room there is, and the head goes on."""
    directory, log, server = tmp_path / "nats", Log(), Stuck(tmp_path / "nats")
    directory.mkdir()
    keeper = LogKeeper(log, Bus(), server, restart_after_s=0.02, look_every_s=0.01)
    log.trouble = "appends fail"
    assert keeper.trouble == "appends fail"
    directory.rmdir()
    cause = f"the volume of {directory} cannot be read (No such file or directory), mend it: "
    assert keeper.trouble == f"{cause}appends fail"
    running = asyncio.create_task(keeper.run())
    await asyncio.wait([running], timeout=0.3)
    assert not running.done() and not server.stopped.is_set()
    running.cancel()


async def test_keeper_reports_silent_bus(tmp_path: Path) -> None:
    bus, log = Bus(), Log()
    keeper = LogKeeper(log, bus, None)
    assert keeper.trouble == ""
    bus.bus_works = False
    assert keeper.trouble == SILENT_BUS
    log.trouble = "full"
    assert keeper.trouble == "full"


class Nodes:
    """What nodes say: per node entries and the oldest's age in seconds; `quiet_s`: since the log has grown."""

    def __init__(self) -> None:
        self.kept: dict[str, OutboxBacklog] = {}
        self.quiet_s = 0.0

    def outbox_backlog(self) -> dict[str, OutboxBacklog]:
        return self.kept

    def quiet_us(self) -> int:
        return int(self.quiet_s * 1e6)


async def is_ended(keeper: LogKeeper, server: Stuck, within_s: float) -> bool:
    watching = asyncio.create_task(keeper.run())
    try:
        await asyncio.wait_for(server.stopped.wait(), within_s)
    except TimeoutError:
        return False
    finally:
        watching.cancel()
    return True


async def test_keeper_spares_server_that_takes_appends(tmp_path: Path) -> None:
    """Own heartbeats come late because this process is behind; or an append waits while others' go through."""
    bus, log, nodes, server = Bus(), Log(), Nodes(), Stuck(tmp_path)
    keeper = LogKeeper(log, bus, server, restart_after_s=0.1, look_every_s=0.01, room_bytes=1, nodes=nodes)
    bus.bus_works = False
    nodes.quiet_s = 60
    assert not await is_ended(keeper, server, 0.4), "beats of others come"
    bus.is_silent = True
    nodes.quiet_s = 0.05
    assert not await is_ended(keeper, server, 0.4), "the log grows"
    log.trouble = "no answer"
    assert not await is_ended(keeper, server, 0.4), "the log grows, though our append waits"
    nodes.quiet_s = 60
    assert await is_ended(keeper, server, 5)


async def test_keeper_ignores_own_pause(tmp_path: Path) -> None:
    """The loop stood still for longer than a server is given: it is looked at again before it is ended."""
    log, server = Log(), Stuck(tmp_path)
    log.trouble = "no answer"
    keeper = LogKeeper(log, Bus(), server, restart_after_s=0.3, look_every_s=0.05, room_bytes=1)
    watching = asyncio.create_task(keeper.run())
    try:
        await asyncio.sleep(0.12)
        time.sleep(0.6)  # noqa: ASYNC251
        await asyncio.sleep(0.06)
        log.trouble = ""  # the answer was there
        await asyncio.sleep(0.3)
        assert not server.stopped.is_set()
    finally:
        watching.cancel()


class Probe:
    trouble = ""
    is_settled = False

    def __init__(self) -> None:
        self.looks = asyncio.Event()

    async def look(self) -> None:
        self.looks.set()


def test_outbox_backlog_counts_as_trouble_if_log_stalls() -> None:
    nodes = Nodes()
    keeper = LogKeeper(Log(), Bus(), None, nodes=nodes)
    assert keeper.trouble == ""
    nodes.kept = {"n1": OutboxBacklog(1, 2_000_000)}
    nodes.quiet_s = 60
    assert keeper.trouble == "", "it may be under way"
    nodes.kept = {"n1": OutboxBacklog(5, 7_000_000), "n2": OutboxBacklog(2, 4_000_000)}
    nodes.quiet_s = 8
    said = (
        "2 of the nodes (n1, n2) hold back 7 observations, the oldest for 7 s, and the log got no new entry meanwhile"
    )
    assert keeper.trouble == said
    nodes.quiet_s = 0.1
    assert keeper.trouble == "", "others append: it is these nodes' own trouble"
    assert outbox_backlog_alarms(nodes.kept)[0].startswith("node n1 holds back 5 observations, the oldest for 7 s")
    nodes.kept = {}
    assert outbox_backlog_alarms(nodes.kept) == []


async def test_refusing_stream_raises_alarm_without_restart(tmp_path: Path) -> None:
    probe, server = Probe(), Stuck(tmp_path)
    probe.trouble, probe.is_settled = "holds 50 messages", True
    log = Log()
    log.trouble = "NATS did not store the events: maximum messages exceeded"
    keeper = LogKeeper(log, Bus(), server, restart_after_s=0.02, look_every_s=0.01, room_bytes=1, probe=probe)
    watching = asyncio.create_task(keeper.run())
    try:
        await asyncio.wait_for(probe.looks.wait(), 10)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.stopped.wait(), 0.3)
        assert keeper.trouble == "holds 50 messages", "the cause comes before what follows from it"
        log.trouble = ""
        assert keeper.trouble == "holds 50 messages"
        probe.trouble, probe.is_settled = "", False
        assert keeper.trouble == ""
    finally:
        watching.cancel()


def test_store_on_small_volume_recovers(tmp_path: Path) -> None:
    """Forty megabytes: more room than all of it has is never there."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    command = ["unshare", "-rm", sys.executable, "-m", "tests.unicrond.small_volume", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
