"""An agent whose log is another one than before: it stops, its workers train on, and a person has the last word."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests import nats_snapshots
from tests.agents.node import Node, committed
from tests.agents.processes import TIMEOUT_S, has_ended
from tests.agents.test_core import member
from tests.agents.test_daemon import AgentProcess, Coordinator, agent, coordinator
from unicrond.agents.core.known_event_log import difference, is_taken
from unicrond.agents.core.state import LogSeen, Remembered
from unicrond.agents.host.paths import PROBE_SOCKET
from unicrond.agents.shell.event_log_guard import LogGuard
from unicrond.agents.shell.probe import Condition, ask
from unicrond.events.log.log_identity import LogMark
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, create_streams, event_stream_config
from unicrond.events.nats.terms import Terms
from unicrond.events.vocabulary import CoordinatorStarted, NodeJoined, StepCommitted, WorkerExited, WorkerStarted
from unicrond.events.wire.envelope import Envelope
from unicrond.events.wire.schemas import SCHEMA, told_version

__all__ = ["agent", "coordinator"]  # fixtures

CLAIM = LogMark(30, 3_000, "coordinator-3-1")
MARKS = (LogMark(1, 1_000, ""), CLAIM)
KNOWN = Remembered(log="first", log_seq=40, log_marks=MARKS, log_adopted_us=7, fence=(3, 1))


@pytest.mark.parametrize(
    ("seen", "read_seq", "words"),
    [
        (LogSeen(created="first", last_seq=40, term=3), 40, ""),
        (LogSeen(created="first", last_seq=90, term=9), 40, ""),
        (LogSeen(created="first", last_seq=90), 40, ""),
        (LogSeen(created=""), 40, ""),
        (LogSeen(created="second", last_seq=40, term=3, marks=MARKS), 40, ""),
        (
            LogSeen(created="second", last_seq=90, term=4, marks=(MARKS[0], LogMark(80, 8_000, "coordinator-4-1"))),
            40,
            "",
        ),
        (LogSeen(created="second", last_seq=90, term=3, marks=(LogMark(20, 2_000, ""), CLAIM)), 40, ""),
        (LogSeen(created="first", last_seq=90, term=3, marks=(LogMark(1, 1_001, ""), CLAIM)), 40, "entry 1 of the"),
        (
            LogSeen(created="second", last_seq=90, term=3, marks=(LogMark(30, 3_001, "coordinator-3-1"),)),
            40,
            "entry 30 of the event log is another than the one that this agent knows",
        ),
        (LogSeen(created="second", last_seq=90, term=9, marks=MARKS, adopted_us=8), 40, "and a person has taken it"),
        (LogSeen(created="second", last_seq=90, term=9), 40, "was made at second, and holds none of the entries"),
        (LogSeen(created="first", last_seq=39, term=3), 0, "ends at entry 39, and this agent knows entry 40"),
        (LogSeen(created="first", last_seq=40, term=3), 41, "ends at entry 40, and this agent knows entry 41"),
        (LogSeen(created="first", last_seq=90, term=2), 40, "newest term is 2, and this agent has obeyed term 3"),
        (None, 40, "the event log is gone: NATS has none, and this agent knows the one made at first"),
    ],
)
def test_log_difference_names_cause(seen: LogSeen | None, read_seq: int, words: str) -> None:
    found = difference(KNOWN, seen, read_seq)
    assert words in found and bool(words) == bool(found)
    assert not difference(Remembered(), seen, read_seq), "who knows of none takes what there is"


def test_adoption_order_must_be_newer() -> None:
    assert not is_taken(KNOWN, LogSeen(created="second", adopted_us=7)), "one that was obeyed already"
    assert is_taken(KNOWN, LogSeen(created="second", adopted_us=8))


def test_memory_of_older_agent_knows_stream_alone() -> None:
    older = Remembered(log="first", log_seq=40)
    assert not difference(older, LogSeen(created="first", last_seq=40, marks=MARKS))
    assert "was made at second" in difference(older, LogSeen(created="second", last_seq=40, marks=MARKS))


def test_restored_log_changes_nothing_but_stream() -> None:
    """A complete restore: no worker ends, nothing is said anew."""
    node = Node()
    node.boot()
    node.feed(LogSeen(created="first", last_seq=10, marks=MARKS[:1]))
    member(node, "a.1", 1, generation=9)
    node.feed(LogSeen(created="first", last_seq=40, marks=MARKS))
    node.appended.clear()
    node.feed(LogSeen(created="restored", last_seq=40, marks=MARKS))
    assert not node.processes["a.1"].quit and node.appended == []
    memory = node.state.memory
    assert (memory.log, memory.log_seq, memory.log_marks) == ("restored", 40, MARKS)
    node.say("a.1", committed(9, 4))
    assert node.of(StepCommitted)


@pytest.mark.parametrize("seen", [LogSeen(created="second", adopted_us=5), LogSeen(created="first", adopted_us=5)])
def test_node_rejoins_adopted_log(seen: LogSeen) -> None:
    node = Node()
    node.boot()
    node.feed(LogSeen(created="first", last_seq=10))
    member(node, "a.1", 1, generation=9)
    node.appended.clear()
    node.feed(seen)
    assert node.processes["a.1"].quit
    assert node.of(NodeJoined)[0].workers == ()
    node.say("a.1", committed(9, 4))
    assert node.of(StepCommitted) == []
    memory = node.state.memory
    assert (memory.log, memory.log_seq, memory.log_adopted_us, memory.fence) == (seen.created, 0, 5, (0, 0))
    node.appended.clear()
    node.feed(seen)
    assert node.appended == []


async def _claim(log: NatsEventLog, term: int, adopted_us: int) -> None:
    event = CoordinatorStarted(term=term, version=told_version("test", SCHEMA), adopted_us=adopted_us)
    await log.claim_term(
        Envelope(producer="coordinator", boot=term, number=1, term=term, observed_at_us=1, event=event)
    )


async def test_claim_says_when_trimmed_log_began(nats_server: EmbeddedServer) -> None:
    """A restore may keep fewer entries in NATS than there were, and the next head claims before an agent looks."""
    connection = await connect(nats_server.url, name="n1", timeout_s=10)
    try:
        await api(connection, f"STREAM.CREATE.{EVENT_STREAM}", event_stream_config() | {"first_seq": 41})
        guard = LogGuard(connection, Terms(connection, lambda _: None), lambda: KNOWN, lambda: 40, lambda: False)
        for term, began_us in ((4, 1_001), (5, 1_000)):
            event = CoordinatorStarted(term=term, version=told_version("test", SCHEMA), log_began_us=began_us)
            await NatsEventLog(connection).claim_term(
                Envelope(producer="coordinator", boot=term, number=1, term=term, observed_at_us=1, event=event)
            )
            if term == 4:
                waiting = asyncio.create_task(guard.wait_for_log())
                async with asyncio.timeout(TIMEOUT_S):
                    while "entry 1 of the event log is another" not in guard.trouble:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
        seen = await asyncio.wait_for(waiting, TIMEOUT_S)
        assert [(mark.seq, mark.event_id) for mark in seen.marks] == [(1, ""), (41, ""), (42, "coordinator-5-1")]
    finally:
        await connection.close()


async def _says(agent: AgentProcess, words: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while words not in agent.log():  # noqa: ASYNC110  # another process writes it
            await asyncio.sleep(0.05)


async def _answers_probes(agent: AgentProcess, words: str, *, is_ready: bool) -> None:
    """Whoever asks while an agent begins or ends finds nobody there."""
    found: Condition | OSError | None = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    found = await asyncio.to_thread(ask, agent.run_dir / PROBE_SOCKET)
                    if words in found.status and found.is_ready == is_ready:
                        return
                except (OSError, ValueError) as error:
                    found = error
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not {words!r}, but {found}") from None


async def test_agent_waits_for_adoption_while_workers_train(
    agent: AgentProcess, coordinator: Coordinator, nats_connection: Connection
) -> None:
    await coordinator.take_over()
    await coordinator.trained("a.1")
    pid = next(e.envelope.event.pid for e in coordinator.seen if isinstance(e.envelope.event, WorkerStarted))
    await coordinator.entries.aclose()
    await api(nats_connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
    await create_streams(nats_connection)  # as somebody's script might
    await _says(agent, "this agent takes nothing from it and writes nothing to it; its workers train on")
    log = NatsEventLog(nats_connection)
    before = await log.last_seq()
    await _claim(log, 1, 0)  # a coordinator, and no person
    await asyncio.sleep(1.5)
    assert await log.last_seq() == before + 1
    kill_and_start(agent)  # the next agent knows what this one did
    await _says(agent, "this agent takes nothing from it and writes nothing to it; its workers train on")
    await asyncio.sleep(1.5)
    assert await log.last_seq() == before + 1
    assert not has_ended(pid, 0)

    await _claim(log, 2, time.time_ns() // 1000)
    anew = Coordinator(nats_connection)
    joined = await anew.until(NodeJoined)
    assert joined.workers == ()
    assert has_ended(pid)
    assert "a person has taken it, and this agent begins anew there" in agent.log()
    assert not any(isinstance(e.envelope.event, StepCommitted) for e in anew.seen[before:])
    await anew.entries.aclose()


def kill_and_start(agent: AgentProcess) -> None:
    """Its log begins anew too."""
    agent.process.kill()
    agent.process.wait()
    agent.output.write_text("")
    agent.start()


async def test_agent_waits_out_shorter_log_and_resumes(
    agent: AgentProcess,
    coordinator: Coordinator,
    nats_server: EmbeddedServer,
    nats_connection: Connection,
    tmp_path: Path,
) -> None:
    """A store that was rolled back, and then put right: nothing is lost, and nothing was written in between."""
    await coordinator.take_over()
    await coordinator.until(NodeJoined)
    log = NatsEventLog(nats_connection)
    older_seq = await log.last_seq()
    store, older, newer = nats_server.directory / "store", tmp_path / "older", tmp_path / "newer"
    await nats_server.kill()
    shutil.copytree(store, older)
    await nats_server.restart()
    await coordinator.trained("a.1")
    pid = next(e.envelope.event.pid for e in coordinator.seen if isinstance(e.envelope.event, WorkerStarted))
    await nats_server.kill()
    shutil.copytree(store, newer)
    await coordinator.entries.aclose()
    shutil.rmtree(store)
    shutil.copytree(older, store)
    await asyncio.sleep(1.5)  # the agent has something to say as soon as there is a server
    await nats_server.restart()
    await _says(agent, "and this agent knows entry")
    await asyncio.sleep(1.5)
    assert await log.last_seq() == older_seq, "not one word, not even before it was sure"
    await nats_server.kill()
    shutil.rmtree(store)
    shutil.copytree(newer, store)
    await nats_server.restart()
    await _says(agent, "the event log is the known one again: this agent goes on")
    anew = Coordinator(nats_connection)
    steps = [await anew.until(StepCommitted) for _ in range(3)]
    assert [step.first for step in steps[1:]] == [step.last + 1 for step in steps[:-1]], "the steps have no gap"
    assert not has_ended(pid, 0) and not any(isinstance(e.envelope.event, WorkerExited) for e in anew.seen)
    await anew.entries.aclose()


async def test_agent_goes_on_in_restored_log(
    agent: AgentProcess, coordinator: Coordinator, nats_connection: Connection
) -> None:
    """A complete restore into another stream: no worker ends, nobody joins anew, and the steps have no gap."""
    await coordinator.take_over()
    await coordinator.trained("a.1")
    pid = next(e.envelope.event.pid for e in coordinator.seen if isinstance(e.envelope.event, WorkerStarted))
    await coordinator.entries.aclose()
    agent.process.send_signal(signal.SIGSTOP)  # a backup holds all that was ever acknowledged
    saved = await nats_snapshots.backup(nats_connection, EVENT_STREAM)
    await api(nats_connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
    agent.process.send_signal(signal.SIGCONT)
    await asyncio.sleep(2)  # the agent has something to say meanwhile, and nowhere to
    await nats_snapshots.restore(nats_connection, saved)
    anew = Coordinator(nats_connection)
    steps = [await anew.until(StepCommitted) for _ in range(3)]
    while anew.seen[-1].seq <= saved.state["last_seq"]:
        steps.append(await anew.until(StepCommitted))
    assert [step.first for step in steps[1:]] == [step.last + 1 for step in steps[:-1]], "the steps have no gap"
    joins = [e for e in anew.seen if isinstance(e.envelope.event, NodeJoined)]
    assert len(joins) == 1 and not has_ended(pid, 0)
    assert not any(isinstance(e.envelope.event, WorkerExited) for e in anew.seen)
    assert "begins anew" not in agent.log()
    await anew.entries.aclose()


async def _swapped(server: EmbeddedServer, away: Path, here: Path | None = None) -> None:
    """The server's store goes `away`, and the one that lies `here` takes its place; None: an empty one."""
    await server.kill()
    store = server.directory / "store"
    store.rename(away)
    if here is not None:
        here.rename(store)  # noqa: ASYNC240  (nothing else runs meanwhile)
    await server.restart()


async def test_agent_waits_out_missing_log(
    agent: AgentProcess,
    coordinator: Coordinator,
    nats_server: EmbeddedServer,
    nats_connection: Connection,
    tmp_path: Path,
) -> None:
    """A server that comes back with an empty store: no agent makes anything in it, not even the next one."""
    await coordinator.take_over()
    await coordinator.trained("a.1")
    pid = next(e.envelope.event.pid for e in coordinator.seen if isinstance(e.envelope.event, WorkerStarted))
    await _answers_probes(agent, "joined", is_ready=True)
    await coordinator.entries.aclose()
    gone = "waits for a person: the event log is gone: NATS has none"
    await _swapped(nats_server, tmp_path / "kept")
    await _answers_probes(agent, gone, is_ready=False)
    assert "this agent makes no other, and its workers train on. Restore the log" in agent.log()
    assert (await api(nats_connection, "STREAM.NAMES", {})).get("streams") is None

    await _swapped(nats_server, tmp_path / "empty", tmp_path / "kept")
    await _says(agent, "the event log is the known one again: this agent goes on")
    await _answers_probes(agent, "joined", is_ready=True)
    anew = Coordinator(nats_connection)
    steps = [await anew.until(StepCommitted) for _ in range(3)]
    assert [step.first for step in steps[1:]] == [step.last + 1 for step in steps[:-1]], "the steps have no gap"
    await anew.entries.aclose()

    await _swapped(nats_server, tmp_path / "kept")
    kill_and_start(agent)  # what the one before has not told is lost with it
    await _answers_probes(agent, gone, is_ready=False)
    assert (await api(nats_connection, "STREAM.NAMES", {})).get("streams") is None
    await _swapped(nats_server, tmp_path / "empty again", tmp_path / "kept")
    await _answers_probes(agent, "joined", is_ready=True)
    anew = Coordinator(nats_connection)
    while (await anew.until(StepCommitted)).first <= steps[-1].last:
        pass
    assert not has_ended(pid, 0) and not any(isinstance(e.envelope.event, WorkerExited) for e in anew.seen)
    await anew.entries.aclose()
