"""Every login against everything that it must not do, on a real nats-server: refused, or quarantined with an alarm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from msgspec import msgpack
from nats.aio.client import Client

from unicrond.core.replayer import replay
from unicrond.core.state.state import ClusterState
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM, entry, headers, subject
from unicrond.events.nats.commands import ensure_command_consumer, has_filter
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.reader import read_stream
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import JetStreamError, PublishDenied, api, create_streams
from unicrond.events.trust.accounts import client_name
from unicrond.events.trust.keys import load_or_create_key
from unicrond.events.vocabulary import (
    AnyEvent,
    CoordinatorStarted,
    Heartbeat,
    NodeCordoned,
    NodeIsolated,
    NodeJoined,
    NodeLeft,
    StopWorker,
    StoreAddress,
)
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Entry, Envelope, QuarantinedMessage, RecordedEvent
from unicrond.service.coordinator.alarms import Alarms

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENT = Path(__file__).parents[2] / "docs" / "operate" / "logins.md"
LOGINS = ("agent-n1", "agent-n2", "coordinator", "api", "reader", "operator")


class Site(NamedTuple):
    """A running server with a small log, and a client of each login. `refusals`: what the server said to each."""

    server: EmbeddedServer
    keys: dict[str, Path]
    admin: Connection
    clients: dict[str, Client]
    refusals: dict[str, list[str]]

    async def connect(self, login: str) -> Connection:
        return await connect(self.server.url, name=login, login=Login(key=self.keys[login]), timeout_s=20)

    async def last(self, stream: str) -> int:
        return int((await api(self.admin, f"STREAM.INFO.{stream}", {}))["state"]["last_seq"])

    async def since(self, stream: str, seq: int) -> list[Entry]:
        found: list[Entry] = []
        last = await self.last(stream)
        if last > seq:
            start = {"deliver_policy": "by_start_sequence", "opt_start_seq": seq + 1}
            async with asyncio.timeout(20), aclosing(read_stream(self.admin, stream, start=start)) as messages:
                async for each in messages:
                    found.append(entry(each.seq, each.recorded_at_us, each.subject, each.body, each.message_id))
                    if each.seq == last:
                        break
        return found

    async def state(self) -> ClusterState:
        return replay(await self.since(EVENT_STREAM, 0))


def said_by(producer: str, event: AnyEvent, number: int = 1, *, boot: int = 1, term: int = 0) -> Envelope:
    return Envelope(producer=producer, boot=boot, number=number, term=term, observed_at_us=1, event=event)


def joined(node: str) -> Envelope:
    store = StoreAddress(host="127.0.0.1", port=1)
    return said_by(
        node, NodeJoined(node=node, address="127.0.0.1", slots=1, store=store, workers=(), version="1", agent_boot=1)
    )


def command(node: str, number: int = 7) -> Envelope:
    stop = StopWorker(node=node, epoch=1, command_id=f"1.1.{node}.{number}", task="a", worker="a.1", reason="forged")
    return said_by("coordinator", stop, 100 + number, term=1)


CLAIM = said_by("coordinator", CoordinatorStarted(term=2, version="1", policy={}, severity={}), 1, boot=2, term=2)
FIRST_CLAIM = said_by("coordinator", CoordinatorStarted(term=1, version="1", policy={}, severity={}), 1, term=1)
DECISION = said_by("coordinator", NodeIsolated(node="n2", until_us=None, reason="forged"), 50, term=1)
REQUEST = said_by("api", NodeCordoned(node="n2", drain=True, reason="forged"), 5)


def beat(node: str, number: int = 9) -> Envelope:
    event = Heartbeat(node=node, agent_boot=1, beat=number, workers=0, load_milli=0, memory_free_bytes=0)
    return said_by(node, event, number)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    directory = tmp_path_factory.mktemp("keys")
    users = [load_or_create_key(directory / "keys", login).user for login in LOGINS]
    keys = {login: directory / "keys" / f"{login}.key" for login in LOGINS}
    server = EmbeddedServer(directory / "nats", users=users)
    await server.start()
    clients: dict[str, Client] = {}
    refusals: dict[str, list[str]] = {login: [] for login in LOGINS}
    admin = await connect(server.url, name="admin", login=Login(key=keys["operator"]), timeout_s=20)
    made = Site(server, keys, admin, clients, refusals)
    try:
        await create_streams(admin)
        for login in LOGINS:
            clients[login] = client = Client()

            async def on_error(error: Exception, told: list[str] = refusals[login]) -> None:
                told.append(str(error))

            await client.connect(server.url, error_cb=on_error, **Login(key=keys[login]).options())
        for node in ("n1", "n2"):
            await ensure_command_consumer(admin, node, ())
            await _write(made, f"agent-{node}", joined(node))
        head = await made.connect("coordinator")
        fence = await NatsEventLog(head).claim_term(FIRST_CLAIM)
        await NatsEventLog(head).append([command("n1", 1)], fence=fence)
        await head.close()
        yield made
    finally:
        for client in clients.values():
            await client.close()
        await admin.close()
        await server.kill()


async def _write(site: Site, login: str, envelope: Envelope) -> None:
    connection = await site.connect(login)
    await NatsEventLog(connection).append([envelope])
    await connection.close()


# --- what the server refuses ----------------------------------------------------------------------


class Try(NamedTuple):
    """One attempt: to publish (`body`) or to listen (None). `own`: the logins whose right it is."""

    subject: str
    body: bytes | None
    own: tuple[str, ...] = ()
    reply: str = ""


def _forged(envelope: Envelope, *own: str) -> Try:
    return Try(subject(envelope), encode(envelope), own)


def _api(verb: str, *own: str, body: Any = None) -> Try:
    return Try(f"$JS.API.{verb}", json.dumps(body or {}).encode(), ("operator", *own))


_VERBS = ("DELETE", "PURGE", "UPDATE", "MSG.DELETE", "SNAPSHOT", "RESTORE", "LEADER.STEPDOWN", "PEER.REMOVE")
_WIDE = {"stream_name": EVENT_STREAM, "config": {"name": "agent-n2", "filter_subjects": ["unicron.v1.>"]}}
TRIES = {
    "publish an observation of n2": _forged(said_by("n2", NodeLeft(node="n2", reason="forged"), 9), "agent-n2"),
    "publish an observation of n1": _forged(said_by("n1", NodeLeft(node="n1", reason="forged"), 9), "agent-n1"),
    "publish a beat of n2": _forged(beat("n2"), "agent-n2"),
    "publish a beat of the coordinator": _forged(beat("coordinator"), "coordinator"),
    "publish a command": _forged(command("n2"), "coordinator"),
    "publish a decision": _forged(DECISION, "coordinator"),
    "claim a term": _forged(CLAIM, "coordinator"),
    "publish a request (submit, cordon, enroll, ...)": _forged(REQUEST, "api"),
    "answer a request for n2's logs": Try("unicron.v1.logged.n2.token", b"x", ("agent-n2",)),
    "ask n2 for logs": Try("unicron.v1.logs.n2", b"x", ("api",)),
    "publish on other subjects": Try("unicron.v2.obs.n1.NodeLeft", b"x"),
    "publish into the coordinator's inbox": Try("_INBOX_coordinator.x.1", b"x"),
    "overwrite the coordinator's cache": Try("$O.UNICRON_SNAPSHOTS.M.x", b"x", ("coordinator",)),
    "take the heads' lease": Try("$KV.UNICRON_HEADS.leader", b"{}", ("coordinator",)),
    "pass for a head that stands by": Try("$KV.UNICRON_HEADS.head.x", b"{}", ("coordinator",)),
    "acknowledge n2's commands": Try(f"$JS.ACK.{EVENT_STREAM}.agent-n2.1.1.1.1.1", b"+ACK", ("agent-n2", "operator")),
    "ask NATS's system account": Try("$SYS.REQ.SERVER.PING", b""),
    **{
        f"{verb} {stream}": _api(f"STREAM.{verb}.{stream}")
        for verb in _VERBS
        for stream in (EVENT_STREAM, BEAT_STREAM)
        if (verb, stream) != ("RESTORE", EVENT_STREAM)
    },
    "restore the event stream, where there is none": _api(f"STREAM.RESTORE.{EVENT_STREAM}", "coordinator"),
    "create a stream": _api("STREAM.CREATE.OTHER", body={"name": "OTHER", "subjects": ["unicron.v1.logs.*"]}),
    "list streams": _api("STREAM.NAMES", "coordinator"),
    "read any entry": _api(f"STREAM.MSG.GET.{EVENT_STREAM}", "coordinator", "reader", body={"seq": 1}),
    "read any entry by a direct get": _api(f"DIRECT.GET.{EVENT_STREAM}", "reader", body={"seq": 1}),
    "read n1's observations by a direct get": _api(
        f"DIRECT.GET.{EVENT_STREAM}.unicron.v1.obs.n1.NodeJoined", "coordinator"
    ),
    "read n1's beats by a direct get": _api(f"DIRECT.GET.{BEAT_STREAM}.unicron.v1.beat.n1", "coordinator"),
    "make a consumer": _api(f"CONSUMER.CREATE.{EVENT_STREAM}", body={"stream_name": EVENT_STREAM, "config": {}}),
    "change n2's consumer": _api(f"CONSUMER.CREATE.{EVENT_STREAM}.agent-n2", "coordinator", body=_WIDE),
    "change n1's consumer": _api(f"CONSUMER.CREATE.{EVENT_STREAM}.agent-n1", "coordinator", body=_WIDE),
    "change n2's consumer, with the filter in the subject": _api(
        f"CONSUMER.CREATE.{EVENT_STREAM}.agent-n2.unicron.v1.term", "coordinator"
    ),
    "make a durable consumer in the old way": _api(f"CONSUMER.DURABLE.CREATE.{EVENT_STREAM}.agent-n2"),
    "delete n2's consumer": _api(f"CONSUMER.DELETE.{EVENT_STREAM}.agent-n2", "coordinator"),
    "pause n2's consumer": _api(f"CONSUMER.PAUSE.{EVENT_STREAM}.agent-n2"),
    "look at n2's consumer": _api(f"CONSUMER.INFO.{EVENT_STREAM}.agent-n2", "coordinator", "agent-n2"),
    "read the heads' lease": _api(
        "STREAM.MSG.GET.KV_UNICRON_HEADS", "coordinator", body={"last_by_subj": "$KV.UNICRON_HEADS.leader"}
    ),
    "list consumers": _api(f"CONSUMER.NAMES.{EVENT_STREAM}", "coordinator"),
    "take n2's commands": _api(f"CONSUMER.MSG.NEXT.{EVENT_STREAM}.agent-n2", "agent-n2"),
    "take n1's commands": _api(f"CONSUMER.MSG.NEXT.{EVENT_STREAM}.agent-n1", "agent-n1"),
    "hear n2's commands": Try("unicron.v1.command.n2.*", None, ("operator",)),
    "hear decisions": Try("unicron.v1.decision.*.*", None, ("operator",)),
    "hear n2's beats": Try("unicron.v1.beat.n2", None, ("coordinator", "operator", "agent-n2")),
    "hear n2's requests for logs": Try("unicron.v1.logs.n2", None, ("operator", "agent-n2")),
    "hear answers about logs": Try("unicron.v1.logged.*.*", None, ("operator", "api")),
    "hear the coordinator's beats": Try("unicron.v1.beat.coordinator", None, ("operator", "coordinator")),
    "hear who takes the heads' lease": Try("$KV.UNICRON_HEADS.leader", None, ("operator", "coordinator")),
    "hear n2's inbox": Try("_INBOX_agent-n2.>", None, ("operator", "agent-n2")),
    "hear the coordinator's inbox": Try("_INBOX_coordinator.>", None, ("operator", "coordinator")),
    "hear other inboxes": Try("_INBOX.>", None, ("operator",)),
    "hear requests to JetStream": Try("$JS.API.>", None, ("operator",)),
    "hear all": Try(">", None, ("operator",)),
}


_QUARANTINED = "quarantined, with an ALARM"
_OF_STREAMS = "delete, purge, change, copy, restore or move a stream; delete an entry"


async def test_document_lists_each_forgery_attempt() -> None:
    """docs/operate/logins.md: what an agent (of n1) and the other roles may, and what becomes of a node's tricks."""
    expected = []
    for name, tried in TRIES.items():
        cells = ["may" if login in tried.own else "refused" for login in LOGINS if login != "agent-n2"]
        line = f"| {_OF_STREAMS if name.startswith(_VERBS) else name} | {' | '.join(cells)} |"
        if line not in expected:
            expected.append(line)
    for name in SLY:
        row = name.partition(" the subject of ")[0] + " another's subject" if " the subject of " in name else name
        line = f"| {row} | {'not stored' if name in NOT_STORED or name.startswith(_ANSWERS) else _QUARANTINED} |"
        if line not in expected:
            expected.append(line)
    lines = DOCUMENT.read_text().splitlines()
    ends = tuple(f"| {end} |" for end in ("refused", "may", "not stored", _QUARANTINED))
    assert [line for line in lines if line.endswith(ends)] == expected


@pytest.mark.parametrize(
    ("login", "name"), [(login, name) for login in LOGINS for name, tried in TRIES.items() if login not in tried.own]
)
async def test_server_refuses_forbidden_request(site: Site, login: str, name: str) -> None:
    tried = TRIES[name]
    client, refusals = site.clients[login], site.refusals[login]
    refusals.clear()
    heard = None
    if tried.body is None:
        heard = await client.subscribe(tried.subject)
    else:
        await client.publish(tried.subject, tried.body, reply=f"_INBOX_{login}.answer")
    async with asyncio.timeout(20):
        while not any(
            "permissions violation" in said and tried.subject.lower() in client_name(said) for said in refusals
        ):
            await client.flush()  # its ping may overtake what was published just before
    if heard is not None:
        await heard.unsubscribe()


async def test_refused_requests_leave_log_unchanged(site: Site) -> None:
    """After all of the above: the events that the fixture wrote, and two consumers as they were."""
    kinds = [type(each.envelope.event).__name__ for each in await site.since(EVENT_STREAM, 0) if _is_event(each)]
    assert sorted(kinds) == ["CoordinatorStarted", "NodeJoined", "NodeJoined", "StopWorker"]
    for node in ("n1", "n2"):
        assert await has_filter(site.admin, node, ())
    state = await site.state()
    assert (state.term, state.nodes["n2"].isolation.active, state.nodes["n2"].cordon.active) == (1, False, False)


def _is_event(each: Entry) -> bool:
    return isinstance(each, RecordedEvent)


# --- what each may ------------------------------------------------------------------------------


async def test_reader_login_reads_all_and_changes_nothing(site: Site) -> None:
    connection = await site.connect("reader")
    try:
        log = NatsEventLog(connection)
        last = await log.last_seq()
        async with asyncio.timeout(20):
            assert len([each async for each in log.read(until_seq=last)]) == last
            assert await log.skips() == {}
    finally:
        await connection.close()


async def test_coordinator_login_cannot_change_streams(site: Site) -> None:
    connection = await site.connect("coordinator")
    try:
        await create_streams(connection)  # they are there
        with pytest.raises(PublishDenied):
            await api(connection, f"STREAM.UPDATE.{EVENT_STREAM}", {"name": EVENT_STREAM})
        with pytest.raises(JetStreamError):
            await api(connection, f"CONSUMER.INFO.{EVENT_STREAM}.nobody", {})
    finally:
        await connection.close()


async def test_users_change_without_server_restart(tmp_path: Path) -> None:
    users = [load_or_create_key(tmp_path, login).user for login in ("operator", "agent-n1", "agent-n2")]
    server = EmbeddedServer(tmp_path / "nats", users=users[:2])
    await server.start()
    pid = server.pid
    try:
        there = await connect(server.url, name="n1", login=Login(key=tmp_path / "agent-n1.key"), timeout_s=20)
        await server.let_in([users[0], users[2]])
        newcomer = await connect(server.url, name="n2", login=Login(key=tmp_path / "agent-n2.key"), timeout_s=20)
        async with asyncio.timeout(20):
            while there.is_up:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert newcomer.is_up
        assert server.pid == pid
        again = EmbeddedServer(server.directory, users=users)  # the next coordinator adopts it, and tells it its list
        assert await again.start()
        async with asyncio.timeout(20):
            await there.session()
        await there.close()
        await newcomer.close()
    finally:
        await server.kill()


# --- what it cannot refuse: it checks no reply subject, and no body --------------------------------

Tried = Callable[[Site, Client], Awaitable[None]]
VICTIMS = {
    "a command to n2": subject(command("n2")),
    "an observation of n2": "unicron.v1.obs.n2.NodeLeft",
    "a decision": subject(DECISION),
    "a request": subject(REQUEST),
    "the term": subject(CLAIM),
    "a beat of n2": "unicron.v1.beat.n2",
}


def _acknowledged_there(victim: str) -> Tried:
    async def tried(_: Site, client: Client) -> None:
        own = beat("n1", 77) if victim == "unicron.v1.beat.n2" else said_by("n1", NodeLeft(node="n1", reason=""), 77)
        liar = msgpack.encode({"not": "an event"})
        await client.publish(subject(own), liar, reply=victim)

    return tried


def _answered_there(victim: str) -> Tried:
    async def tried(_: Site, client: Client) -> None:
        await client.publish(f"$JS.API.STREAM.INFO.{EVENT_STREAM}", b"", reply=victim)

    return tried


def _commanded_there(victim: str) -> Tried:
    """n1's own commands, delivered on another's subject."""

    async def tried(_: Site, client: Client) -> None:
        ask = json.dumps({"batch": 1, "no_wait": True}).encode()
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{EVENT_STREAM}.agent-n1", ask, reply=victim)

    return tried


def _body(envelope: Envelope, on: str) -> Tried:
    async def tried(_: Site, client: Client) -> None:
        await client.publish(on, encode(envelope), headers=headers(envelope))

    return tried


async def _own_reply(_: Site, client: Client) -> None:
    """To oneself, with the victim's subject as the one to reply to; with allow_responses that would be a right."""
    heard = await client.subscribe("unicron.v1.beat.n1")
    await client.publish("unicron.v1.beat.n1", b"x", reply=VICTIMS["a command to n2"])
    message = await heard.next_msg(timeout=30)
    await client.publish(message.reply, encode(command("n2", 8)))
    await client.flush()
    await heard.unsubscribe()


async def _squat(_: Site, client: Client) -> None:
    """An event of one's own under the id that n2's next one might have."""
    own = said_by("n1", NodeLeft(node="n1", reason="squatted"), 1000)
    await client.publish(subject(own), encode(own), headers={"Nats-Msg-Id": "n2-1-2"})


async def _half_a_batch(_: Site, client: Client) -> None:
    """The first message on an own subject, the second, which commits, on another's."""
    own, marks = said_by("n1", NodeLeft(node="n1", reason="batch"), 1001), {"Nats-Batch-Id": "b1"}
    await client.publish(subject(own), encode(own), headers={**marks, "Nats-Batch-Sequence": "1"})
    last = {**marks, "Nats-Batch-Sequence": "2", "Nats-Batch-Commit": "1"}
    await client.publish(subject(command("n2", 9)), encode(command("n2", 9)), headers=last)


def _with(**marks: str) -> Tried:
    """A body that is n2's on an own subject, with headers that ask more of the server than to store it."""

    async def tried(_: Site, client: Client) -> None:
        asked = {f"Nats-{name.replace('_', '-')}": value for name, value in marks.items()}
        await client.publish("unicron.v1.obs.n1.StopWorker", encode(command("n2", 12)), headers=asked)

    return tried


async def _next_elsewhere(_: Site, client: Client) -> None:
    """An acknowledgement that asks for the next command, to be delivered on another's subject."""
    own = f"$JS.ACK.{EVENT_STREAM}.agent-n1.1.4.1.1.0"
    await client.publish(own, b"+NXT 1", reply=VICTIMS["a command to n2"])


#: Whose answers stay in the agents' account. What an agent of n1 publishes there itself is stored as its own.
_ANSWERS = "have NATS acknowledge"
#: What the server does not store at all.
NOT_STORED = (
    *(f"have NATS answer on the subject of {name}" for name in VICTIMS),
    *(f"have n1's commands delivered on the subject of {name}" for name in VICTIMS),
    "end an atomic batch on another's subject",
    "replace the log by a rollup",
    "publish a message that expires",
    "schedule a message on n2's subject",
    "have a trace sent to n2's subject",
    "acknowledge, and have the next command delivered to n2",
)
SLY: dict[str, Tried] = {
    **{
        f"have NATS acknowledge on the subject of {name}": _acknowledged_there(victim)
        for name, victim in VICTIMS.items()
    },
    **{f"have NATS answer on the subject of {name}": _answered_there(victim) for name, victim in VICTIMS.items()},
    **{
        f"have n1's commands delivered on the subject of {name}": _commanded_there(victim)
        for name, victim in VICTIMS.items()
    },
    "publish n2's words on n1's subject": _body(
        said_by("n2", NodeLeft(node="n2", reason=""), 9), "unicron.v1.obs.n1.NodeLeft"
    ),
    "publish a command on n1's subject": _body(command("n2", 10), "unicron.v1.obs.n1.StopWorker"),
    "publish a request on n1's subject": _body(REQUEST, "unicron.v1.obs.n1.NodeCordoned"),
    "publish another type than the subject says": _body(
        said_by("n1", NodeLeft(node="n1", reason=""), 9), "unicron.v1.obs.n1.X"
    ),
    "publish n2's beat on n1's subject": _body(beat("n2", 5), "unicron.v1.beat.n1"),
    "send itself a message with n2's subject for the reply": _own_reply,
    "publish under the message id of n2's next event": _squat,
    "end an atomic batch on another's subject": _half_a_batch,
    "replace the log by a rollup": _with(Rollup="all"),
    "publish a message that expires": _with(TTL="1s"),
    "schedule a message on n2's subject": _with(Schedule="@every 1s", Schedule_Target=VICTIMS["a command to n2"]),
    "have a trace sent to n2's subject": _with(Trace_Dest=VICTIMS["a command to n2"]),
    "acknowledge, and have the next command delivered to n2": _next_elsewhere,
}


@pytest.mark.parametrize("name", SLY)
async def test_forged_entry_is_quarantined_with_alarm(site: Site, name: str) -> None:
    before = {stream: await site.last(stream) for stream in (EVENT_STREAM, BEAT_STREAM)}
    state = await site.state()
    await SLY[name](site, site.clients["agent-n1"])
    for _ in range(2):
        await site.clients["agent-n1"].flush()  # the first ping may overtake what was published just before
    for stream, seq in before.items():
        for each in await _settled(site, stream, seq):
            assert name not in NOT_STORED
            assert isinstance(each, QuarantinedMessage), f"{each} of {stream} is taken for an event"
            assert not name.startswith(_ANSWERS) or "n1" in each.subject.split("."), "what stands there is its own"
            assert Alarms().quarantined(each, state)
    after = await site.state()
    assert (after.term, after.nodes, after.tasks, after.last_numbers) == (
        state.term,
        state.nodes,
        state.tasks,
        state.last_numbers,
    )


async def _settled(site: Site, stream: str, seq: int) -> list[Entry]:
    """What the server has stored since; it answers another's request behind ours."""
    await asyncio.sleep(0.05)
    return await site.since(stream, seq)


async def test_occupied_message_id_suppresses_no_event(site: Site) -> None:
    await _squat(site, site.clients["agent-n1"])
    connection = await site.connect("agent-n2")
    event = said_by("n2", NodeLeft(node="n2", reason="really"), 2)
    (seq,) = await NatsEventLog(connection).append([event])
    await connection.close()
    (stored,) = [each for each in await site.since(EVENT_STREAM, seq - 1) if each.seq == seq]
    assert isinstance(stored, RecordedEvent)
    assert stored.envelope == event
