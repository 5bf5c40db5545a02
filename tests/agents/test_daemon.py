"""The agent as a process, with a real log on a real server, real forks and real signals.

Its workers are light (entries.py: `talk`); those with Megatron in them have their own tests.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.agents.node import decision, part
from tests.agents.processes import LIGHT, TIMEOUT_S, children, command_of, environment, has_ended, kill
from tests.other_users import USER, needs_root, opened
from unicrond.agents.protocol.marks import Marker
from unicrond.events.cli.exit_codes import FORGOTTEN
from unicrond.events.log.subjects import EVENT_STREAM, agent_consumer
from unicrond.events.nats.commands import ensure_command_consumer
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, create_streams, event_stream_config
from unicrond.events.queries import node_checks
from unicrond.events.queries.node_checks import FactsCheck, LinksCheck, LinksReport, NodeFacts, Peer, decode_report
from unicrond.events.queries.worker_queries import LogsReply, LogsRequest, decode_reply, encode, logs_subject
from unicrond.events.vocabulary import (
    Command,
    CommandApplied,
    CommandFailed,
    CoordinatorStarted,
    Decision,
    ErrorReported,
    HangSuspected,
    Heartbeat,
    LeaveCluster,
    Member,
    MembershipDecided,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    Observation,
    StartWorker,
    StepCommitted,
    StopWorker,
    StoreAddress,
    TaskSpec,
    WorkerExited,
    WorkerJoinedGroup,
    WorkerReady,
    WorkerStarted,
)
from unicrond.events.vocabulary.placements import runs_of
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.events.wire.schemas import SCHEMA, told_version

E = TypeVar("E", bound=Observation)
STORE = StoreAddress(host="127.0.0.1", port=1)


class AgentProcess:
    """`unicron-agent`, started and started again."""

    def __init__(self, url: str, run_dir: Path, *more: str) -> None:
        self.url = url
        self.run_dir = run_dir
        #: Before the command, and further flags.
        self.prefix: tuple[str, ...] = ()
        self.more: tuple[str, ...] = more or ("--hand-over",)
        self.process = self.start()

    @property
    def output(self) -> Path:
        return self.run_dir / "agent.log"

    def start(self) -> subprocess.Popen[bytes]:
        flags = ["--nats", self.url, "--node", "n1", "--slots", "2", "--run-dir", str(self.run_dir)]
        flags += ["--heartbeat-s", "0.1", "--lease-s", "20", "--accelerators", "fake"]
        flags += [*(f"--fork-server={flag}" for flag in LIGHT)]
        with self.output.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "unicrond.agents.shell.cli", *flags, *self.more],
                stdout=log,
                stderr=log,
                env=environment(),
            )
        return self.process

    def end(self) -> None:
        """Kill it and its fork server; nothing of theirs may be left."""
        kill(self.process.pid)
        self.process.wait()
        try:
            fork_server = self.fork_server()
        except OSError:
            return
        theirs = children(fork_server)
        kill(fork_server)
        assert all(has_ended(pid) for pid in (fork_server, *theirs))

    def log(self) -> str:
        return self.output.read_text()

    def fork_server(self) -> int:
        """The pid of whoever serves fork.sock."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.run_dir / "fork.sock"))
            return int.from_bytes(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


class Coordinator:
    """What the tests need of one: commands under term 1, and the log read in order."""

    def __init__(self, connection: Connection) -> None:
        self.log = NatsEventLog(connection)
        self.number = 0
        self.entries = self.log.read(0)
        self.seen: list[RecordedEvent] = []
        self.has_node = False

    async def command(self, make: Callable[[str], Command]) -> str:
        """Order something once the node has joined: what stands before that is for others."""
        if not self.has_node:
            await self.until(NodeJoined)
        command = make(f"1.1.n1.{self.number + 1}")
        await self.say(command)
        return command.command_id

    async def say(self, event: Command | Decision) -> None:
        self.number += 1
        envelope = Envelope(
            producer="coordinator",
            boot=1,
            number=self.number,
            term=1,
            observed_at_us=time.time_ns() // 1000,
            event=event,  # type: ignore[arg-type]
        )
        await self.log.append([envelope])

    async def take_over(self) -> None:
        """From now on the agent knows that all it says is read."""
        self.number += 1
        event = CoordinatorStarted(term=1, version=told_version("test", SCHEMA))
        await self.log.claim_term(
            Envelope(producer="coordinator", boot=1, number=self.number, term=1, observed_at_us=1, event=event)
        )

    async def start(self, worker: str, entry: str = "talk", *args: str) -> str:
        task = worker.rpartition(".")[0]
        spec = TaskSpec(name=task, entry=entry, args=args)
        return await self.command(
            lambda id: StartWorker(
                command_id=id, node="n1", epoch=1, spec=spec, worker=worker, replica=0, shard=0, store=STORE
            )
        )

    async def stop(self, worker: str) -> str:
        task = worker.rpartition(".")[0]
        return await self.command(
            lambda id: StopWorker(command_id=id, node="n1", epoch=1, task=task, worker=worker, reason="test")
        )

    async def membership(self, generation: int, *workers: str) -> None:
        members = [Member(worker=w, node="n1", replica=i, shard=0) for i, w in enumerate(workers)]
        await self.say(
            MembershipDecided(
                task=workers[0].rpartition(".")[0],
                generation=generation,
                size=1,
                seats=runs_of(members, (), 1),
                urgent=False,
                store=STORE,
                incident="",
                reason="test",
            )
        )

    async def until(self, kind: type[E], within_s: float = TIMEOUT_S, **fields: Any) -> E:
        """The next event of a kind (with these fields) that was not read before."""
        async with asyncio.timeout(within_s):
            async for entry in self.entries:
                assert isinstance(entry, RecordedEvent), entry
                self.seen.append(entry)
                event = entry.envelope.event
                self.has_node |= isinstance(event, NodeJoined)
                if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
                    return event
        raise AssertionError("the log never ends")

    async def trained(self, worker: str, generation: int = 1) -> None:
        """`worker` runs, is a member, and has committed."""
        await self.start(worker)
        await self.until(WorkerReady, worker=worker)
        await self.membership(generation, worker)
        await self.until(WorkerJoinedGroup, worker=worker)
        await self.until(StepCommitted, worker=worker)


@pytest.fixture
def agent(nats_server: EmbeddedServer, nats_connection: Connection, run_dir: Path) -> Iterator[AgentProcess]:
    """An agent; afterwards it and its fork server are killed, and then nothing of theirs may be left."""
    agent = AgentProcess(nats_server.url, run_dir)
    yield agent
    agent.end()


@pytest.fixture
async def coordinator(nats_connection: Connection) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(nats_connection)
    async with aclosing(coordinator.entries):
        yield coordinator


async def test_daemon_runs_life_of_worker(
    agent: AgentProcess, coordinator: Coordinator, nats_connection: Connection
) -> None:
    joined = await coordinator.until(NodeJoined)
    assert (joined.slots, joined.workers) == (2, ())
    socket.create_connection((joined.store.host, joined.store.port), timeout=30).close()
    order = await coordinator.start("a.1")
    pid = (await coordinator.until(WorkerStarted)).pid
    await coordinator.until(CommandApplied, command_id=order)
    await coordinator.until(WorkerReady)
    await coordinator.membership(1, "a.1")
    await coordinator.until(WorkerJoinedGroup)
    first = await coordinator.until(StepCommitted)
    second = await coordinator.until(StepCommitted)
    assert (first.first, first.last, second.first) == (1, 1, 2)
    assert second.last > second.first + 3, "a second of steps of 10 ms is one event"

    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    exited = await coordinator.until(WorkerExited)
    print(f"SIGKILL to the coordinator's reading of the exit: {(time.monotonic() - begun) * 1e3:.1f} ms")
    assert (exited.signal, exited.is_expected) == (signal.SIGKILL, False)
    kinds = [type(entry.envelope.event) for entry in coordinator.seen[-3:]]
    assert kinds == [StepCommitted, ErrorReported, WorkerExited]

    order = await coordinator.start("b.1", "print", "50")
    exited = await coordinator.until(WorkerExited, worker="b.1")
    assert exited.exit_code == 1 and exited.log_tail.endswith("RuntimeError: and then it broke\n")
    request = encode(LogsRequest(task="b", tail_bytes=32))
    reply = decode_reply((await nats_connection.request(logs_subject("n1"), request)).data)
    assert (reply.worker, reply.data) == ("b.1", b"RuntimeError: and then it broke\n")

    await coordinator.trained("c.1")
    order = await coordinator.stop("c.1")
    assert (await coordinator.until(WorkerExited, worker="c.1")).is_expected
    await coordinator.until(CommandApplied, command_id=order)


async def test_daemon_answers_log_and_stack_requests(
    agent: AgentProcess, coordinator: Coordinator, nats_connection: Connection
) -> None:
    joined = await coordinator.until(NodeJoined)

    async def ask(body: bytes) -> LogsReply:
        return decode_reply((await nats_connection.request(logs_subject("n1"), body, timeout_s=TIMEOUT_S)).data)

    facts = decode_report((await ask(node_checks.encode(FactsCheck()))).data, NodeFacts)
    assert facts.findings == () and facts.torch, "all on one machine: it is meant so"
    there = {"store": (joined.store.host, joined.store.port), "nothing": ("127.0.0.1", 9)}
    peers = (Peer(node="n2", ports=there),)
    links = LinksCheck(token="0" * 16, peers=peers, pairs=(), library="gloo", limit_s=10.0)
    (lost,) = decode_report((await ask(node_checks.encode(links))).data, LinksReport).unreachable_ports
    assert (lost.peer, lost.service, lost.reason) == ("n2", "nothing", "connection refused")

    await coordinator.start("a.1")
    await coordinator.until(WorkerReady)
    flight = LogsRequest(task="a", worker="a.1", flight=True)
    assert (await ask(encode(flight))).error == "node n1: a light worker has none"
    other = LogsRequest(task="a", worker="a.2", flight=True)
    assert "does not run here" in (await ask(encode(other))).error


async def test_daemon_passes_secrets_to_worker(agent: AgentProcess, coordinator: Coordinator) -> None:
    """Through everything that leaves out what an older reader would not know."""
    await coordinator.until(NodeJoined)
    (agent.run_dir / "secret").write_text("s3cret\n")
    spec = TaskSpec(name="a", entry="describe", secrets={"COLOUR": f"file:{agent.run_dir / 'secret'}"})
    await coordinator.command(
        lambda id: StartWorker(
            command_id=id, node="n1", epoch=1, spec=spec, worker="a.1", replica=0, shard=0, store=STORE
        )
    )
    exited = await coordinator.until(WorkerExited, worker="a.1")
    assert '"COLOUR": "(hidden)"' in exited.log_tail, "what the worker has is the secret, so its log hides it"


@needs_root
async def test_agent_with_users_refuses_log_without_logins(
    agent: AgentProcess, nats_connection: Connection, coordinator: Coordinator
) -> None:
    """Whoever reaches such a log could run code as these users."""
    await coordinator.until(NodeJoined)
    agent.process.terminate()
    agent.process.wait()
    agent.prefix, agent.more = opened(), ("--hand-over", "--run-as", USER)
    before = await NatsEventLog(nats_connection).last_seq()
    agent.start()
    async with asyncio.timeout(30):
        while "NATS asks for no login there" not in agent.log():  # noqa: ASYNC110  (another process)
            await asyncio.sleep(0.05)
    assert "unicrond enroll), or start without --run-as" in agent.log()
    assert await NatsEventLog(nats_connection).last_seq() == before


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[tuple[EmbeddedServer, Coordinator]]:
    """A server that asks for a login, with its password in `<tmp_path>/password`, and a coordinator there."""
    (tmp_path / "password").write_text("secret\n")
    login = Login(user="unicron", password="secret")
    server = EmbeddedServer(tmp_path / "locked", login=login)
    await server.start()
    try:
        connection = await connect(server.url, name="test", login=login, timeout_s=10)
        await create_streams(connection)
        coordinator = Coordinator(connection)
        async with aclosing(coordinator.entries):
            yield server, coordinator
        await connection.close()
    finally:
        await server.kill()


@needs_root
async def test_user_separation_starts_after_old_workers_exit(
    locked: tuple[EmbeddedServer, Coordinator], run_dir: Path, tmp_path: Path
) -> None:
    """The fork server of the agent before cannot change users: no worker starts until its last one has ended."""
    server, coordinator = locked
    login = ("--user", "unicron", "--password-file", str(tmp_path / "password"))
    agent = AgentProcess(server.url, run_dir, "--hand-over", *login)
    try:
        await coordinator.until(NodeJoined)
        assert "not separated: tasks run as this agent's user (root)" in agent.log()
        await coordinator.trained("a.1")
        before = agent.fork_server()
        agent.process.terminate()
        agent.process.wait()
        agent.prefix, agent.more = opened(), ("--hand-over", "--run-as", USER, *login)
        agent.start()
        await coordinator.until(NodeJoined)
        order = await coordinator.start("b.1", "describe")
        failed = await coordinator.until(CommandFailed, command_id=order)
        assert "the fork server is of an agent without --run-as, and its workers live" in failed.reason
        await coordinator.stop("a.1")
        await coordinator.until(WorkerExited, worker="a.1")
        await coordinator.until(NodeJoined)
        assert agent.fork_server() != before
        await coordinator.start("c.1", "describe")
        exited = await coordinator.until(WorkerExited, worker="c.1")
        assert f'"uid": {pwd.getpwnam(USER).pw_uid}' in exited.log_tail
    finally:
        agent.end()


async def test_daemon_follows_memberships_of_own_tasks_only(
    agent: AgentProcess, coordinator: Coordinator, nats_connection: Connection
) -> None:
    """Of a task that has workers here, by one agent after the other, in parts too; of another task nothing."""

    async def follows() -> set[str]:
        info = await api(nats_connection, f"CONSUMER.INFO.{EVENT_STREAM}.agent-n1", {})
        subjects = info["config"].get("filter_subjects") or [info["config"]["filter_subject"]]
        return {subject.split(".")[3] for subject in subjects if ".decision." in subject}

    await coordinator.until(NodeJoined)
    assert await follows() == set(), "the consumer is there once the node has joined"
    await coordinator.start("a.1")
    await coordinator.until(WorkerReady, worker="a.1")
    assert await follows() == {"a"}
    await coordinator.say(decision("b", 9, ["b.1"]))
    await coordinator.say(decision("a", 1, ["a.1"]))
    await coordinator.until(WorkerJoinedGroup, worker="a.1", generation=1)
    await coordinator.until(StepCommitted, generation=1)

    agent.process.terminate()
    assert agent.process.wait(60) == 143
    await coordinator.say(part("a", 2, 1, ["a.1"]))  # while no agent listens
    agent.start()
    await coordinator.until(NodeJoined)
    await coordinator.say(decision("a", 2, [], parts=1))
    await coordinator.until(WorkerJoinedGroup, worker="a.1", generation=2)

    await coordinator.stop("a.1")
    await coordinator.until(WorkerExited, worker="a.1")
    assert await follows() == {"a"}
    await coordinator.start("b.2", "sleep")
    await coordinator.until(WorkerStarted, worker="b.2")
    assert await follows() == {"b"}, "what has no worker here any more is given up with the next entry"
    assert not [entry for entry in coordinator.seen if isinstance(entry.envelope.event, CommandFailed)]


async def test_successor_adopts_workers_of_killed_agent(agent: AgentProcess, coordinator: Coordinator) -> None:
    first = await coordinator.until(NodeJoined)
    await coordinator.trained("a.1", generation=3)
    await coordinator.start("b.1", "sleep")
    await coordinator.until(WorkerStarted, worker="b.1")
    kill(agent.process.pid)
    agent.process.wait()
    Marker(agent.run_dir / "marks" / "b.1").begin_iteration(7, 100_000)
    (fork_server,) = {agent.fork_server()}
    begun = time.monotonic()
    agent.start()
    second = await coordinator.until(NodeJoined)
    print(f"adopted {time.monotonic() - begun:.2f} s after the new agent's start (b.1 never says Hello: 2 s)")
    assert second.agent_boot > first.agent_boot
    assert second.store == first.store
    assert [(w.worker, w.generation) for w in second.workers] == [("a.1", 3), ("b.1", 0)]
    assert agent.fork_server() == fork_server
    before = max(e.envelope.event.last for e in coordinator.seen if isinstance(e.envelope.event, StepCommitted))
    after = await coordinator.until(StepCommitted)
    assert after.first > before, "no iteration stands in the log twice"
    assert not [e for e in coordinator.seen if isinstance(e.envelope.event, WorkerExited)]
    told = [e.envelope.event for e in coordinator.seen if isinstance(e.envelope.event, HangSuspected)]
    late = told[0] if told else await coordinator.until(HangSuspected)
    assert (late.worker, late.iteration) == ("b.1", 7), "who stands still says no hello, and is watched all the same"


async def test_successor_reports_exits_during_absence(agent: AgentProcess, coordinator: Coordinator) -> None:
    await coordinator.trained("a.1")
    agent.process.terminate()
    assert agent.process.wait(60) == 143
    pid = next(e.envelope.event.pid for e in coordinator.seen if isinstance(e.envelope.event, WorkerStarted))
    kill(pid)
    assert has_ended(pid)
    agent.start()
    exited = await coordinator.until(WorkerExited)
    assert (exited.worker, exited.signal, exited.is_expected) == ("a.1", signal.SIGKILL, False)
    assert (await coordinator.until(NodeJoined)).workers == ()


async def test_killed_node_returns_empty(agent: AgentProcess, coordinator: Coordinator) -> None:
    await coordinator.trained("a.1")
    fork_server = agent.fork_server()
    theirs = children(fork_server)
    for pid in (agent.process.pid, fork_server):
        kill(pid)
    agent.process.wait()
    assert all(has_ended(pid) for pid in theirs)
    agent.start()
    assert (await coordinator.until(WorkerExited)).worker == "a.1"
    assert (await coordinator.until(NodeJoined)).workers == ()
    await coordinator.trained("a.2", generation=2)


async def test_killed_fork_server_is_reported_and_replaced(agent: AgentProcess, coordinator: Coordinator) -> None:
    first = await coordinator.until(NodeJoined)
    await coordinator.trained("a.1")
    kill(agent.fork_server())
    exited = await coordinator.until(WorkerExited)
    assert (exited.signal, exited.is_expected) == (signal.SIGKILL, False)
    second = await coordinator.until(NodeJoined)
    assert second.agent_boot == first.agent_boot
    told, replaced = agent.log().index("ended by signal 9"), agent.log().rindex("started a fork server")
    assert told < replaced, "what died is told before the next fork server has loaded what it needs"
    await coordinator.trained("a.2", generation=2)


async def test_node_without_command_consumer_never_joins(
    nats_server: EmbeddedServer, nats_connection: Connection, run_dir: Path
) -> None:
    """The stream takes no more consumers: the agent says so and is not planned for, until there is room."""
    full = {**event_stream_config(), "max_consumers": 1}
    await api(nats_connection, f"STREAM.UPDATE.{EVENT_STREAM}", full)
    await ensure_command_consumer(nats_connection, "n9", ())
    agent = AgentProcess(nats_server.url, run_dir)
    try:
        log = NatsEventLog(nats_connection)
        async with asyncio.timeout(TIMEOUT_S):
            while agent.log().count("NODE n1 CANNOT BE COMMANDED") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert "maximum consumers limit reached" in agent.log()
            assert await log.last_seq() == 0
            await api(nats_connection, f"STREAM.UPDATE.{EVENT_STREAM}", event_stream_config())
            while not await log.last_seq():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        got = await api(nats_connection, f"STREAM.MSG.GET.{EVENT_STREAM}", {"seq": 1})
        assert got["message"]["subject"] == "unicron.v1.obs.n1.NodeJoined"
        made = await api(nats_connection, f"CONSUMER.INFO.{EVENT_STREAM}.{agent_consumer('n1')}", {})
        assert made["created"] < got["message"]["time"]
    finally:
        agent.end()


async def test_killed_server_loses_no_observation(
    agent: AgentProcess, coordinator: Coordinator, nats_server: EmbeddedServer
) -> None:
    await coordinator.trained("a.1")
    started = next(e.envelope.event for e in coordinator.seen if isinstance(e.envelope.event, WorkerStarted))
    await nats_server.kill()
    kill(started.pid)
    assert has_ended(started.pid)
    await nats_server.restart()
    await coordinator.until(WorkerExited)
    steps = [e.envelope.event for e in coordinator.seen if isinstance(e.envelope.event, StepCommitted)]
    assert [s.first for s in steps] == [1, *(s.last + 1 for s in steps[:-1])], "the steps have no gap"
    await coordinator.trained("a.2", generation=2)


async def test_heartbeats_are_sequential_and_complete(
    agent: AgentProcess, coordinator: Coordinator, nats_connection: Connection
) -> None:
    joined = await coordinator.until(NodeJoined)
    await coordinator.take_over()
    order = await coordinator.start("a.1", "sleep")
    await coordinator.until(CommandApplied, command_id=order)
    read_seq = next(e.seq for e in coordinator.seen if isinstance(e.envelope.event, StartWorker))
    beats: list[Heartbeat] = []
    async with asyncio.timeout(TIMEOUT_S), aclosing(NatsBeatLog(nats_connection).subscribe()) as entries:
        async for entry in entries:
            assert isinstance(entry, RecordedEvent) and isinstance(entry.envelope.event, Heartbeat)
            beats.append(entry.envelope.event)
            if len(beats) >= 5 and beats[-1].read_seq == read_seq:
                break
    assert [b.beat for b in beats] == list(range(beats[0].beat, beats[0].beat + len(beats)))
    assert {b.agent_boot for b in beats} == {joined.agent_boot}
    assert all(b.memory_free_bytes > 0 for b in beats)


async def test_sigint_stops_workers_and_node_leaves(agent: AgentProcess, coordinator: Coordinator) -> None:
    await coordinator.trained("a.1")
    await coordinator.start("b.1", "sleep")
    await coordinator.until(WorkerStarted, worker="b.1")
    fork_server = agent.fork_server()
    theirs = children(fork_server)
    agent.process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(agent.process.wait, 60) == 130, agent.log()
    assert all(has_ended(pid) for pid in (fork_server, *theirs))
    await coordinator.until(NodeLeft)
    exits = [e.envelope.event for e in coordinator.seen if isinstance(e.envelope.event, WorkerExited)]
    assert [(e.worker, e.is_expected) for e in exits] == [("a.1", True), ("b.1", True)]


async def test_supervisor_restarts_agent_that_adopts(
    nats_server: EmbeddedServer, coordinator: Coordinator, run_dir: Path
) -> None:
    """And SIGTERM reaches it: the node leaves."""
    agent = AgentProcess(nats_server.url, run_dir, "--supervise", "--grace-s", "8")
    try:
        await coordinator.until(NodeJoined)
        await coordinator.trained("a.1")
        (child,) = [pid for pid in children(agent.process.pid) if pid != agent.fork_server()]
        assert command_of(child) == command_of(agent.process.pid), "no fork: it imports all anew"
        begun = time.monotonic()
        kill(child)
        joined = await coordinator.until(NodeJoined)
        print(f"adopted {time.monotonic() - begun:.2f} s after the agent's SIGKILL")
        assert [w.worker for w in joined.workers] == ["a.1"]
        agent.process.terminate()
        exited = await coordinator.until(WorkerExited)
        assert exited.is_expected
        await coordinator.until(NodeLeft)
        assert await asyncio.to_thread(agent.process.wait, 60) == 143, agent.log()
    finally:
        agent.end()


@pytest.mark.parametrize("for_good", [True, False])
async def test_agent_leaves_on_command(agent: AgentProcess, coordinator: Coordinator, *, for_good: bool) -> None:
    """For good: drained, and it ends with 0. Forgotten while it was away: its worker ends, and the exit code says that
    the next agent is wanted."""
    joined = await coordinator.until(NodeJoined)
    await coordinator.take_over()
    await coordinator.start("a.1", "sleep")
    pid = (await coordinator.until(WorkerStarted)).pid
    stale = await coordinator.command(
        lambda id: LeaveCluster(
            command_id=id, node="n1", epoch=1, agent_boot=1, for_good=True, limit_us=600_000_000, reason="test"
        )
    )
    await coordinator.until(CommandFailed, command_id=stale)
    await coordinator.command(
        lambda id: LeaveCluster(
            command_id=id,
            node="n1",
            epoch=1,
            agent_boot=joined.agent_boot,
            for_good=for_good,
            limit_us=600_000_000,
            reason="test",
        )
    )
    await coordinator.until(CommandApplied)
    if for_good:
        await coordinator.until(NodeLeaving)
        assert not has_ended(pid, 0), "the coordinator moves it away"
        await coordinator.stop("a.1")
    await coordinator.until(NodeLeft)
    assert await asyncio.to_thread(agent.process.wait, 60) == (0 if for_good else FORGOTTEN), agent.log()
    assert has_ended(pid)


def test_agent_starts_on_full_volume(run_dir: Path, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    output = tmp_path / "agent.log"
    program = [sys.executable, "-m", "tests.agents.full_run_dir", str(run_dir), str(output)]
    ran = subprocess.run(["unshare", "-rm", *program], capture_output=True, text=True, timeout=90, check=False)
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}{output.read_text()}"


async def test_second_agent_in_directory_is_refused(agent: AgentProcess, coordinator: Coordinator) -> None:
    await coordinator.until(NodeJoined)
    first = agent.process
    second = agent.start()
    assert second.wait(60) == 2
    assert "another agent works in" in agent.log()
    agent.process = first
    assert first.poll() is None
