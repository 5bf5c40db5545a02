"""Accounts: each login asks for every answer that a server gives, to be sent to every subject that means something.

The requests are generated from what servers answer, the subjects from what the log is made of. Nothing may move.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nats.aio.client import Client

from tests.contracts.logs import beat, command, decision, fact, started
from tests.integration.nats_cluster import nats_cluster
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM, agent_consumer
from unicrond.events.nats.commands import ACK_WAIT_S, NatsCommandFeed, ensure_command_consumer
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.lease import LEADER, NatsLease
from unicrond.events.nats.lease import STREAM as HEADS_STREAM
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import NO_STREAM, JetStreamError, api, consumers_of, create_streams
from unicrond.events.trust.accounts import (
    ACCOUNT_OF,
    LOANS,
    LOCAL_API,
    NatsAccount,
    exports,
    imports,
    includes,
    server_accounts,
)
from unicrond.events.trust.keys import load_or_create_key
from unicrond.events.trust.logins import CACHE_BUCKET, CACHE_STREAM, BadLogin, Role, User, rights, role_of
from unicrond.events.vocabulary import NodeIsolated
from unicrond.service.coordinator.nats_snapshots import NatsSnapshotStore

ATTACKERS = ("agent-n1", Role.READER, Role.API, Role.OPERATOR)
LOGINS = (*ATTACKERS, Role.COORDINATOR, "agent-n2")
STREAMS = (EVENT_STREAM, BEAT_STREAM, HEADS_STREAM, CACHE_STREAM)
NODES = ("n1", "n2")


# --- the data ------------------------------------------------------------------------------------


def test_subject_pattern_includes_narrower_ones() -> None:
    for subject in ("a.b", "a.*", "a.b.c", "a.>"):
        assert includes("a.>", subject) and includes(">", subject)
    assert includes("a.*", "a.b") and includes("a.*", "a.*") and includes("a.b", "a.b")
    others = (("a.*", "a.>"), ("a.*", "a.b.c"), ("a.>", "a"), ("a.b", "a.*"), ("a.b", "a"), ("b.>", "a.b"))
    for pattern, subject in others:
        assert not includes(pattern, subject), (pattern, subject)


def inner(login: str, subject: str) -> bool:
    """Whether the subject stays within the login's account: its inbox, and what agents hear of each other."""
    own = tuple(f"unicron.v1.{kind}." for kind in ("logs", "logged", "beat", "obs"))
    return subject.startswith((f"_INBOX_{login}.", *own))


@pytest.mark.parametrize("login", ATTACKERS)
def test_account_borrows_exactly_what_its_logins_need(login: str) -> None:
    account = ACCOUNT_OF[role_of(login)[0]]
    needed, loans = rights(login), list(imports(account))
    services = [loan.subject for loan in loans if loan.is_service]
    heard = [loan.subject for loan in loans if not loan.is_service]
    for subject in needed.publish:
        assert any(includes(service, subject) for service in services) or inner(login, subject), subject
    for subject in needed.subscribe:
        assert any(includes(stream, subject) for stream in heard) or inner(login, subject), subject
    for service in services:
        assert any(includes(service, subject) for subject in needed.publish), f"nobody in {account} asks {service}"
    for stream in heard:
        assert any(includes(stream, subject) for subject in needed.subscribe), f"nobody in {account} hears {stream}"


def test_only_operators_borrow_a_call_that_changes_a_stream() -> None:
    verbs = ("CREATE", "UPDATE", "DELETE", "PURGE", "RESTORE", "SNAPSHOT", "STEPDOWN", "REMOVE", "PAUSE")
    for loan in LOANS:
        if loan.borrowers != (NatsAccount.OPERATORS,) and loan.lender is NatsAccount.LOG:
            assert not any(f".{verb}" in loan.subject for verb in verbs), loan
            assert not loan.subject.startswith(("$JS.API.>", "$KV", "$O", ">"))
    assert not list(exports(NatsAccount.OPERATORS)) and not list(exports(NatsAccount.READERS))
    assert [loan.subject for loan in imports(NatsAccount.LOG)] == ["unicron.v1.logs.*"]


def test_accounts_refuse_empty_list() -> None:
    for users in ([], [User(Role.SYSTEM, "U" + "A" * 55)]):
        with pytest.raises(BadLogin, match="would let everybody in"):
            server_accounts(users)


def test_accounts_need_unique_keys() -> None:
    user = User("agent-n1", "U" + "A" * 55)
    with pytest.raises(BadLogin, match="occurs twice"):
        server_accounts([user, User("agent-n2", user.key)])
    with pytest.raises(BadLogin, match="not the public nkey"):
        server_accounts([User("agent-n1", 'U"}')])


# --- what makes a server answer, and what means something ------------------------------------------


def requests(login: str) -> Iterator[tuple[str, bytes]]:
    """What makes a server answer: what this login may ask, and what it may not."""
    role, node = role_of(login)
    if role is Role.OPERATOR:  # what else it asks, it may: it changes streams
        yield "$JS.API.INFO", b""
        yield "$JS.API.STREAM.NAMES", b""
    else:
        yield "unicron.v1.obs.api.X" if role is Role.API else f"unicron.v1.obs.{node or 'n1'}.X", b"x"
        yield f"unicron.v1.beat.{node or 'n1'}", b"x"
        yield f"unicron.v1.logged.{node or 'n1'}.t", b"x"
        yield "unicron.v1.logs.n1", b"x"
        yield LEADER, b"{}"
        yield f"$O.{CACHE_BUCKET}.M.x", b"x"
    yield "$SYS.REQ.USER.INFO", b""
    yield "$SYS.REQ.ACCOUNT.PING.CONNZ", b""
    yield "$SYS.REQ.SERVER.PING", b""
    for stream in STREAMS:
        yield f"$JS.API.STREAM.INFO.{stream}", b""
        yield f"$JS.API.CONSUMER.NAMES.{stream}", b""
        yield f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq": 999999}'
        yield f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq": 1}'
        yield f"$JS.API.DIRECT.GET.{stream}", b'{"seq": 999999}'
        yield f"$JS.API.DIRECT.GET.{stream}", b'{"seq": 1, "batch": 3}'
        yield f"$JS.API.DIRECT.GET.{stream}", b'{"no": "sense"}'
        yield f"$JS.API.DIRECT.GET.{stream}.nothing", b""
    for name in (agent_consumer(node) for node in NODES):
        yield f"$JS.API.CONSUMER.INFO.{EVENT_STREAM}.{name}", b""
        if role is not Role.OPERATOR:
            yield f"$JS.API.CONSUMER.MSG.NEXT.{EVENT_STREAM}.{name}", b'{"batch": 1, "no_wait": true}'
            yield f"$JS.API.CONSUMER.MSG.NEXT.{EVENT_STREAM}.{name}", b'{"batch": 1, "expires": 1000000}'
            yield f"$JS.API.CONSUMER.MSG.NEXT.{EVENT_STREAM}.{name}", b'{"no": '
            yield f"$JS.ACK.{EVENT_STREAM}.{name}.1.999.1.1.0", b"+ACK"
            yield f"$JS.ACK.{EVENT_STREAM}.{name}.1.999.1.1.0", b"+NXT 1"
    for subject in rights(login).publish:
        if ".DIRECT.GET." in subject:
            yield subject, b""


def victims(acks: list[str]) -> Iterator[str]:
    """What means something to somebody. `acks`: where deliveries that wait are acknowledged."""
    for stream in STREAMS:
        for verb in ("DELETE", "PURGE", "LEADER.STEPDOWN", "PEER.REMOVE", "UPDATE", "CREATE", "MSG.DELETE", "SNAPSHOT"):
            yield f"$JS.API.STREAM.{verb}.{stream}"
    for name in (agent_consumer(node) for node in NODES):
        for verb in ("DELETE", "PAUSE", "LEADER.STEPDOWN", "MSG.NEXT", "UNPIN", "RESET"):
            yield f"$JS.API.CONSUMER.{verb}.{EVENT_STREAM}.{name}"
        yield f"$JS.API.CONSUMER.CREATE.{EVENT_STREAM}.{name}"
        yield f"$JS.FC.{EVENT_STREAM}.{name}.x"
    yield from ("$JS.API.META.LEADER.STEPDOWN", "$JS.API.SERVER.REMOVE", "$JS.API.ACCOUNT.PURGE.LOG")
    yield from (LEADER, f"$KV.{HEADS_STREAM[3:]}.head.x", f"$O.{CACHE_BUCKET}.M.x", f"$O.{CACHE_BUCKET}.C.x")
    yield from ("unicron.v1.obs.n2.NodeLeft", "unicron.v1.obs.api.NodeCordoned", "unicron.v1.decision.n2.NodeIsolated")
    yield from ("unicron.v1.command.n2.StopWorker", "unicron.v1.command.n1.StopWorker", "unicron.v1.term")
    yield from ("unicron.v1.beat.n2", "unicron.v1.beat.coordinator", "unicron.v1.decision.n1.NodeReadmitted")
    yield from ("$SYS.REQ.SERVER.PING", "$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.SERVER.PING.KICK", "$SYS.REQ.USER.INFO")
    yield from ("_INBOX_coordinator.x.1", "$JS.SNAPSHOT.ACK.x", f"{LOCAL_API}.STREAM.DELETE.{EVENT_STREAM}")
    yield from acks


# --- a log, and what stands there ------------------------------------------------------------------


class Site(NamedTuple):
    """Servers with a log. `urls`: of each server; `link(login)`: a connection; `admin`: the operator's."""

    urls: list[str]
    keys: Path
    ca: Path | None
    admin: Connection
    acks: list[str]

    def login(self, name: str) -> Login:
        return Login(key=self.keys / f"{name}.key", tls_ca=self.ca)


def own_subjects(login: str) -> tuple[str, ...]:
    """What the login may write by itself."""
    role, node = role_of(login)
    own = {Role.AGENT: (f"unicron.v1.obs.{node}.", f"unicron.v1.beat.{node}"), Role.API: ("unicron.v1.obs.api.",)}
    return own.get(role, ())


async def standing(site: Site, login: str) -> dict[str, Any]:
    """All that stands on the servers, without what this login may write and take by itself."""
    own, facts = own_subjects(login), dict[str, Any]()
    for stream in STREAMS:
        info = await api(site.admin, f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
        subjects = info["state"].get("subjects") or {}
        mine = sum(number for subject, number in subjects.items() if own and subject.startswith(own))
        others = {subject: number for subject, number in subjects.items() if not (own and subject.startswith(own))}
        state = {name: info["state"].get(name) for name in ("first_seq", "num_deleted", "consumer_count")}
        led = (info.get("cluster") or {}).get("leader")
        facts[stream] = (info["config"], info["created"], led, state, others, info["state"]["last_seq"] - mine)
        for consumer in await consumers_of(site.admin, stream):
            moves = {name: consumer[name] for name in ("delivered", "ack_floor", "num_ack_pending")}
            is_own = consumer["name"] == login
            facts[consumer["name"]] = (consumer["config"], consumer["created"], {} if is_own else moves)
    account = await api(site.admin, "INFO", {})
    facts["account"] = (account["streams"], account["consumers"])
    return facts


async def write_log(site: Site, stack: AsyncExitStack, replicas: int) -> None:
    """Streams, the lease, a snapshot, two agents' consumers, of which n2's waits for an acknowledgement."""

    async def link(name: str) -> Connection:
        connection = await connect(site.urls, name=name, login=site.login(name), timeout_s=20)
        stack.push_async_callback(connection.close)
        return connection

    head, agent = await link(Role.COORDINATOR), await link("agent-n2")
    await create_streams(site.admin, replicas=replicas)
    lease = NatsLease(head, replicas=replicas)
    await lease.make()
    log = NatsEventLog(head)
    fence = await log.claim_term(started(1))
    await NatsSnapshotStore(head, replicas=replicas).save(b"state" * 1000)
    for node in NODES:
        await ensure_command_consumer(head, node, ())
    isolation = NodeIsolated(node="n1", until_us=None, reason="test")
    await log.append([decision(1, isolation)], fence=fence)
    await NatsEventLog(agent).append([fact(1, "n2")])
    await NatsBeatLog(agent).publish(beat(1, "n2"))
    await log.append([command(2, "n2")], fence=fence)
    session = await agent.session()
    inbox = session.client.new_inbox()
    delivery: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def take(message: Any) -> None:
        if message.reply and not delivery.done():
            delivery.set_result(message.reply)

    await session.client.subscribe(inbox, cb=take)
    ask = json.dumps({"batch": 1, "expires": 5_000_000_000}).encode()
    await session.publish(f"$JS.API.CONSUMER.MSG.NEXT.{EVENT_STREAM}.{agent_consumer('n2')}", ask, reply=inbox)
    site.acks.append(await asyncio.wait_for(delivery, 10))


def allowed(login: str) -> dict[str, Any]:
    return {verb: {"allow": subjects} for verb, subjects in rights(login)._asdict().items()}


class OneAccount(EmbeddedServer):
    """The same logins with the same rights, all in one account."""

    def _config(self) -> str:
        before, _, _ = super()._config().partition("accounts {")
        assert self._users is not None
        users = [{"nkey": user.key, "permissions": allowed(user.login)} for user in self._users]
        return f"{before}authorization {{ users: {json.dumps(users)} }}\n"


@asynccontextmanager
async def one_server(directory: Path, kind: Callable[..., EmbeddedServer] = EmbeddedServer) -> AsyncIterator[Site]:
    users = [load_or_create_key(directory / "keys", login).user for login in LOGINS]
    server = kind(directory / "nats", users=users, dies_with_us=True)
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.kill)
        yield await site_of(stack, [server.url], directory / "keys", None, 1)


async def site_of(stack: AsyncExitStack, urls: list[str], keys: Path, ca: Path | None, replicas: int) -> Site:
    key = Login(key=keys / f"{Role.OPERATOR}.key", tls_ca=ca)
    admin = await connect(urls, name="admin", login=key, timeout_s=60)
    stack.push_async_callback(admin.close)
    site = Site(urls, keys, ca, admin, [])
    await write_log(site, stack, replicas)
    return site


@asynccontextmanager
async def three_servers(directory: Path) -> AsyncIterator[Site]:
    users = [load_or_create_key(directory / "keys", login).user for login in LOGINS]
    async with (
        nats_cluster(directory / "nats", logins="\n".join(server_accounts(users))) as cluster,
        AsyncExitStack() as stack,
    ):
        yield await site_of(stack, cluster.urls, directory / "keys", cluster.ca, 3)


async def attack(site: Site, login: str) -> int:
    """Ask every server for every answer, to be sent to every victim; return how many requests were sent."""
    sent = 0
    for url in site.urls:
        client = Client()

        async def on_error(_: Exception) -> None:
            """What is refused is not what this is about."""

        await client.connect(url, error_cb=on_error, allow_reconnect=False, **site.login(login).options())
        try:
            for subject, body in requests(login):
                for victim in victims(site.acks):
                    if login == Role.OPERATOR and victim.startswith("$JS.API."):
                        continue  # its right
                    await client.publish(subject, body, reply=victim)
                    sent += 1
                await client.flush(timeout=20)
            await client.flush(timeout=20)
        finally:
            await client.close()
    return sent


async def moved(site: Site, login: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Attack; return the number of requests, and what stood there before and after."""
    before = await standing(site, login)
    sent = await attack(site, login)
    await asyncio.sleep(0.2)  # answers that have no listener announce nothing
    return sent, before, await standing(site, login)


async def work(site: Site) -> None:
    """What each login is for, by each server: the walls keep nobody from it."""
    for number, url in enumerate(site.urls, start=1):
        async with AsyncExitStack() as stack, asyncio.timeout(60):
            links = {}
            for login in ("agent-n2", Role.READER, Role.API, Role.COORDINATOR):
                links[login] = await connect([url], name=login, login=site.login(login), timeout_s=20)
                stack.push_async_callback(links[login].close)
            log = NatsEventLog(links[Role.COORDINATOR])
            fence = await log.claim_term(started(10 + number))
            feed = NatsCommandFeed(links["agent-n2"], "n2", makes_consumer=False)
            await feed.follow(())
            commands = [command(10 * number + step, "n2", term=10 + number) for step in (0, 1)]
            seq = (await log.append(commands, fence=fence))[-1]
            # The request of the agent before, which is gone, takes one command at most (see PULL_EXPIRES_S).
            async with aclosing(feed.read()) as deliveries, asyncio.timeout(1.8 * ACK_WAIT_S):
                while (await anext(deliveries)).seq < seq:
                    pass
            (seq,) = await NatsEventLog(links["agent-n2"]).append([fact(10 * number, "n2")])
            assert await NatsEventLog(links[Role.READER]).last_seq() >= seq
            async with aclosing(NatsEventLog(links[Role.READER]).read(0, until_seq=seq)) as entries:
                assert len([entry async for entry in entries]) == seq
            assert await NatsSnapshotStore(links[Role.READER]).load() == b"state" * 1000
            asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

            async def take_question(message: Any, asked: asyncio.Future[str] = asked) -> None:
                asked.set_result(message.reply)

            async def take_answer(message: Any, answered: asyncio.Future[bytes] = answered) -> None:
                answered.set_result(message.data)

            await links["agent-n2"].subscribe("unicron.v1.logs.n2", take_question)
            await links[Role.API].subscribe("unicron.v1.logged.*.*", take_answer)
            for link in links.values():
                await (await link.session()).client.flush()
            session = await links[Role.API].session()
            await session.publish("unicron.v1.logs.n2", b"?", reply="unicron.v1.logged.n2.token")
            await (await links["agent-n2"].session()).publish(await asked, b"!")
            assert await answered == b"!"


async def test_no_answer_moves_anything_on_one_server(tmp_path: Path) -> None:
    async with one_server(tmp_path) as site:
        for login in ATTACKERS:
            sent, before, after = await moved(site, login)
            assert sent > 500
            assert after == before, f"{login} has moved something"
        await work(site)


async def test_open_server_takes_keys_and_keeps_its_log(tmp_path: Path) -> None:
    users = [load_or_create_key(tmp_path, login).user for login in (Role.READER, "agent-n1")]
    server = EmbeddedServer(tmp_path / "nats", dies_with_us=True)
    async with AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.kill)

        async def link(login: Login) -> Connection:
            connection = await connect(server.url, name="test", login=login, timeout_s=10)
            stack.push_async_callback(connection.close)
            return connection

        stranger = await link(Login())
        await create_streams(stranger)
        assert await NatsEventLog(stranger).append([fact(1)]) == [1]
        assert await EmbeddedServer(server.directory, users=users).start(), "adopted"
        agent, reader = [await link(Login(key=tmp_path / f"{login}.key")) for login in ("agent-n1", Role.READER)]
        assert await NatsEventLog(agent).append([fact(2)]) == [2]
        assert [entry.seq async for entry in NatsEventLog(reader).read(0, until_seq=2)] == [1, 2]
        assert not stranger.is_up


@pytest.mark.parametrize("login", ["agent-n1", Role.READER])
async def test_answers_move_the_log_where_all_share_an_account(tmp_path: Path, login: str) -> None:
    """The attack is one: with the same rights in one account it deletes the log."""
    async with one_server(tmp_path, OneAccount) as site:
        before = await standing(site, login)
        await attack(site, login)
        assert EVENT_STREAM in before
        with pytest.raises(JetStreamError) as refusal:
            async with asyncio.timeout(30):
                while True:  # an answer that deletes announces nothing, and may come after the attacker has left
                    await api(site.admin, f"STREAM.INFO.{EVENT_STREAM}", {})
        assert refusal.value.code == NO_STREAM


@pytest.mark.timeout(300)
async def test_no_answer_moves_anything_on_three_servers(tmp_path: Path) -> None:
    async with three_servers(tmp_path) as site:
        for login in ATTACKERS:
            sent, before, after = await moved(site, login)
            assert sent > 1500
            assert after == before, f"{login} has moved something"
        await work(site)
