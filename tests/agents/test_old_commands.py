"""An agent without memory and the commands of its node's past: they come to no agent, and are not answered again."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

from msgspec.structs import replace

from tests.agents.node import Node, start
from tests.agents.test_daemon import AgentProcess, Coordinator
from unicrond.agents.core.known_event_log import entries_behind
from unicrond.agents.core.state import LogSeen, Remembered, WorkerRecord
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.vocabulary import CommandApplied, CommandFailed, NodeJoined, StopWorker
from unicrond.events.wire.envelope import Envelope

OLD_COMMANDS = 10_000
_BATCH = 500


def _old_command(number: int) -> Envelope:
    """A command to an agent that has ended long ago."""
    command = StopWorker(
        command_id=f"1.1.n1.{number}", node="n1", epoch=1, agent_boot=7, task="a", worker="a.1", reason="test"
    )
    return Envelope(producer="coordinator", boot=1, number=number, term=1, observed_at_us=1, event=command)


async def test_agent_without_memory_answers_nothing_of_past(
    nats_server: EmbeddedServer, nats_connection: Connection, run_dir: Path
) -> None:
    """The server was restarted, and has forgotten the node's consumer."""
    log = NatsEventLog(nats_connection)
    for first in range(1, OLD_COMMANDS + 1, _BATCH):
        await log.append([_old_command(number) for number in range(first, first + _BATCH)])
    await nats_server.restart()
    coordinator = Coordinator(nats_connection)
    coordinator.number = OLD_COMMANDS
    coordinator.entries = coordinator.log.read(OLD_COMMANDS)
    agent = AgentProcess(nats_server.url, run_dir)
    try:
        async with aclosing(coordinator.entries):
            joined = await coordinator.until(NodeJoined)
            start_s = time.monotonic()
            order = await coordinator.start("a.1", "sleep")
            await coordinator.until(CommandApplied, command_id=order)
            print(f"{OLD_COMMANDS} old commands; the first of its own applied {time.monotonic() - start_s:.2f} s later")
            assert not [e for e in coordinator.seen if isinstance(e.envelope.event, CommandFailed)]
            # The next agent of the run directory goes on there, after another restart of the server.
            agent.process.terminate()
            await asyncio.to_thread(agent.process.wait, 20)
            await nats_server.restart()
            agent.start()
            again = await coordinator.until(NodeJoined)
            assert [w.worker for w in again.workers] == ["a.1"] and again.agent_boot > joined.agent_boot
            order = await coordinator.stop("a.1")
            await coordinator.until(CommandApplied, command_id=order)
            assert not [e for e in coordinator.seen if isinstance(e.envelope.event, CommandFailed)]
    finally:
        agent.end()


LOG = LogSeen(created="first", last_seq=40)


def test_feed_begins_where_agent_has_read() -> None:
    assert entries_behind(Remembered(since_boot=2), LOG) == 40, "all of it was for others"
    assert entries_behind(Remembered(log="first", log_seq=30), LOG) == 0, "an older version wrote down no place"
    assert entries_behind(Remembered(log="first", log_seq=30, read_seq=25), LOG) == 25
    assert entries_behind(Remembered(log="other", log_seq=30, read_seq=25), LOG) == 0, "it joins another log anew"
    living = {"a.1": WorkerRecord(worker="a.1", task="a", slot=0, pid=5)}
    assert entries_behind(Remembered(since_boot=2, workers=living), LOG) == 0, "its membership stands there"


def test_another_log_has_no_read_entry() -> None:
    node = Node()
    node.boot()
    node.command(start("a.1", 1))
    node.state = replace(node.state, memory=replace(node.state.memory, log="first", log_seq=30, read_seq=25))
    node.feed(LogSeen(created="second", last_seq=50))
    assert node.state.memory.log == "second" and not node.state.memory.read_seq
