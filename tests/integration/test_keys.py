"""Logins with keys on a running head: nodes come and go, others are kept out, and a cluster moves to keys."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import subprocess
import sys
import urllib.error
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from nats.aio.client import Client

from tests.integration.head import UNICROND, config, ctl, daemon, get
from tests.other_users import ROOT, USER, needs_root, opened
from tests.token_reviews import POD_TOKEN, TokenReviews, account_of_head
from unicrond.agents.shell.cli import main as agent_main
from unicrond.core.state.state import NodeStatus, TaskStatus
from unicrond.ctl.client import Client as ApiClient
from unicrond.events.cli.exit_codes import SHUT_OUT
from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.commands import NatsCommandFeed
from unicrond.events.nats.connection import Connection, Login, LoginRefused, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.trust.keys import read_key
from unicrond.events.vocabulary import NodeJoined, StoreAddress
from unicrond.events.wire.envelope import Envelope, QuarantinedMessage
from unicrond.intake.config import load
from unicrond.local.dev import DevCluster
from unicrond.replay.reading.nats_source import embedded_login

JOB = {
    "name": "a",
    "max_workers": 1,
    "model": {"layers": 1, "hidden": 32, "heads": 2, "seq": 32, "vocab": 256},
    "global_batch": 4,
    "iterations": 5,
    "checkpoint": {"interval": 0},
}


JOINED = Envelope(
    producer="n1",
    boot=1,
    number=1,
    observed_at_us=1,
    event=NodeJoined(
        node="n1",
        address="127.0.0.1",
        slots=1,
        store=StoreAddress(host="127.0.0.1", port=1),
        workers=(),
        version="1",
        agent_boot=1,
    ),
)


def with_nats(path: Path, more: str) -> Path:
    """The configuration with more fields of `nats`."""
    path.write_text(path.read_text().replace("nats: {", f"nats: {{{more}, "))
    return path


async def unicrond(path: Path, *words: str) -> None:
    process = await asyncio.create_subprocess_exec(UNICROND, *words, "--config", str(path))
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def logged_in(path: Path, login: Login, within_s: float = 30.0) -> Connection:
    return await connect(f"nats://127.0.0.1:{load(path).nats.port}", name="test", login=login, timeout_s=within_s)


async def alarm(url: str, text: str) -> str:
    """The first alarm with this text."""
    async with asyncio.timeout(60):
        while True:
            health = await asyncio.to_thread(get, f"{url}/healthz")
            for line in (row["text"] for row in health["alarms"]):  # type: ignore[attr-defined]
                if text in line:
                    return str(line)
            await asyncio.sleep(0.05)


async def end_of(connection: Connection) -> None:
    async with asyncio.timeout(60):
        while connection.is_up:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def refused(path: Path, login: Login) -> str:
    """How NATS refuses it, at once or soon."""
    async with asyncio.timeout(60):
        while True:
            try:
                connection = await logged_in(path, login, 3.0)
            except LoginRefused as error:
                return str(error)
            except LogUnavailable:
                continue  # a busy machine has not answered yet
            await end_of(connection)
            await connection.close()


async def test_node_with_key_enrolls_and_is_revoked(tmp_path: Path) -> None:
    """Enrolled: its login works, and its consumer is there. Revoked: its connection ends. The next daemon knows it."""
    path, key = with_nats(config(tmp_path, auth="on"), "auth: keys"), tmp_path / "n1.key"
    async with daemon(path) as (process, _):
        await unicrond(path, "enroll", "n1", "--out", str(key))
        connection = await logged_in(path, Login(key=key))
        async with asyncio.timeout(60):
            await NatsCommandFeed(connection, "n1", makes_consumer=False).follow(())
        sly = Client()
        await sly.connect(f"nats://127.0.0.1:{load(path).nats.port}", **Login(key=key).options())
        standing = f"$JS.API.DIRECT.GET.{EVENT_STREAM}.unicron.v1.decision.n1.NodeIsolated"
        for reply in ("unicron.v1.command.n2.StopWorker", f"$JS.API.STREAM.DELETE.{EVENT_STREAM}"):
            for subject in (standing, f"$JS.API.STREAM.INFO.{EVENT_STREAM}"):
                await sly.publish(subject, b"", reply=reply)
        own = "unicron.v1.obs.n1.StopWorker"
        seq = int(json.loads((await sly.request(own, b"{}", timeout=10)).data)["seq"])
        reader = await logged_in(path, embedded_login(tmp_path / "state", Login()))
        async with asyncio.timeout(60):
            entries = [entry async for entry in NatsEventLog(reader).read(0, until_seq=seq)]
        assert [entry.subject for entry in entries if isinstance(entry, QuarantinedMessage)] == [own]
        await reader.close()
        await sly.close()
        unused = tmp_path / "n2.key"
        await unicrond(path, "enroll", "n2", "--out", str(unused), "--unused-h", "0.0001")
        assert "not used in time" in await refused(path, Login(key=unused))
        process.send_signal(signal.SIGTERM)
        await process.wait()
    async with daemon(path):
        async with asyncio.timeout(60):
            await connection.session()
        await unicrond(path, "revoke", "n1")
        await end_of(connection)
        await connection.close()
        assert "unicrond enroll n1" in await refused(path, Login(key=key))


async def test_keys_change_under_sessions(tmp_path: Path) -> None:
    """A node's, by a second enrolment: the first key holds until its file is replaced, and after. The head's own, by
    renew-key: it goes on under the new one. None of them is refused meanwhile."""
    path, key, new = with_nats(config(tmp_path, auth="on"), "auth: keys"), tmp_path / "n1.key", tmp_path / "new.key"
    keys = tmp_path / "state" / "keys"
    async with daemon(path) as (process, _):
        await unicrond(path, "enroll", "n1", "--out", str(key))
        connection = await logged_in(path, Login(key=key))
        reader = await logged_in(path, Login(key=keys / "reader.key"))
        session, reading = await connection.session(), await reader.session()
        await unicrond(path, "enroll", "n1", "--out", str(new))
        await (await logged_in(path, Login(key=new))).close()
        assert not session.disconnected.is_set() and connection.is_up
        new.replace(key)
        async with asyncio.timeout(60):
            await session.disconnected.wait()
            await connection.session()
        for role in ("coordinator", "api", "reader", "operator"):
            await unicrond(path, "renew-key", role)
        async with asyncio.timeout(60):
            await reading.disconnected.wait()
            await reader.session()
        await unicrond(path, "enroll", "n2", "--out", str(new))
        await (await logged_in(path, Login(key=new))).close()
        assert process.returncode is None
        await reader.close()
        await connection.close()


async def test_public_head_requires_tls_and_keys(tmp_path: Path) -> None:
    """NATS and the API; with a node that is enrolled, and a certificate that is renewed while they run."""
    path, key, token = with_nats(config(tmp_path, auth="on"), "host: 0.0.0.0"), tmp_path / "n1.key", tmp_path / "token"
    token.write_text("secret\n")
    path.write_text(path.read_text().replace("api: {", f"api: {{host: 0.0.0.0, token_file: {token}, "))
    await unicrond(path, "tls-init")
    ca = tmp_path / "state" / "tls" / "ca.pem"
    async with daemon(path) as (_, url):
        assert "not of a CA that this machine knows; give --tls-ca" in await refused(path, Login())
        assert "NATS wants a login and got none" in await refused(path, Login(tls_ca=ca))
        assert "NATS refuses user unicron" in await refused(path, Login(user="unicron", password="guess", tls_ca=ca))
        reader = embedded_login(tmp_path / "state", Login())
        assert reader.tls_ca == ca
        connection = await logged_in(path, reader)
        assert await NatsEventLog(connection).last_seq() > 0
        await unicrond(path, "enroll", "n1", "--out", str(key))
        node = await logged_in(path, Login(key=key))
        client = ApiClient(url.replace("0.0.0.0", "127.0.0.1"), "secret", ca=ca)
        health = await asyncio.to_thread(client.health)
        assert (health["status"], health["alarms"]) == ("live", [])
        shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", load(path).api.port))
        await unicrond(path, "tls-init", "--renew", "--days", "20")
        async with asyncio.timeout(60):
            api = ("127.0.0.1", load(path).api.port)
            while shown == await asyncio.to_thread(ssl.get_server_certificate, api):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert node.is_up and connection.is_up
        await (await logged_in(path, Login(key=key))).close()
        for one in (node, connection):
            await one.close()


async def test_pod_exchanges_its_token_for_a_key_over_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its agent logs in with that, and has a certificate of its own for states; to another node it is of no use."""
    path, key, token = with_nats(config(tmp_path, auth="on"), "host: 0.0.0.0"), tmp_path / "n1.key", tmp_path / "token"
    token.write_text(f"{POD_TOKEN}\n")
    account = account_of_head(tmp_path / "account")
    async with TokenReviews().serve() as reviews:
        logins = f"pod_logins: {{service_account: unicron-agent, url: '{reviews.url}', account_dir: {account}}}"
        path.write_text(path.read_text().replace("api: {", f"{logins}\napi: {{host: 0.0.0.0, "))
        await unicrond(path, "tls-init")
        ca = tmp_path / "state" / "tls" / "ca.pem"
        async with daemon(path) as (_, url):
            words = ["--pod-login", url.replace("0.0.0.0", "127.0.0.1"), "--pod-token", str(token), "--key", str(key)]
            assert await asyncio.to_thread(agent_main, words) == 1
            assert "not of a CA that this machine knows; give the head's CA as --tls-ca" in capsys.readouterr().err
            assert await asyncio.to_thread(agent_main, [*words, "--tls-ca", str(ca)]) == 0
            assert read_key(key).login == "agent-gpu1-example" and read_key(key).has_certificate
            await (await logged_in(path, Login(key=key))).close()
            nats = f"nats://127.0.0.1:{load(path).nats.port}"
            agent = ["--nats", nats, "--key", str(key), "--slots", "1", "--run-dir", str(tmp_path / "run"), "--check"]
            assert await asyncio.to_thread(agent_main, [*agent, "--node", "gpu1.example"]) in (0, 1)
            assert "may not" not in capsys.readouterr().out
            assert agent_main([*agent, "--node", "gpu2.example"]) == 2
            assert "is the key of agent-gpu1-example, not of node gpu2-example" in capsys.readouterr().err


async def test_cluster_moves_from_password_to_keys(tmp_path: Path) -> None:
    """Old agents work on, an alarm says which nodes have no key, and then the password counts no more."""
    password, key = tmp_path / "password", tmp_path / "n1.key"
    password.write_text("secret\n")
    path = with_nats(config(tmp_path, "heartbeat_s: 4\n"), f"user: unicron, password_file: {password}")
    shared = Login(user="unicron", password="secret")
    async with daemon(path) as (process, _):  # without keys, as it may be on loopback
        old = await logged_in(path, shared)
        process.send_signal(signal.SIGTERM)
        await process.wait()
    path.write_text(path.read_text().replace("auth: off", "auth: on"))
    with_nats(path, "auth: migrate")
    async with daemon(path) as (process, url):
        async with asyncio.timeout(60):
            await NatsEventLog(old).append([JOINED])
            await NatsCommandFeed(old, "n1").follow(["a"])
        assert "the 1 node without a key (n1)" in await alarm(url, "NATS accepts the shared login")
        await unicrond(path, "enroll", "n1", "--out", str(key))
        assert "set nats.auth to keys" in await alarm(url, "every node has a key")
        new = await logged_in(path, Login(key=key))
        process.send_signal(signal.SIGTERM)
        await process.wait()
    path.write_text(path.read_text().replace(f"user: unicron, password_file: {password}, ", ""))
    path.write_text(path.read_text().replace("auth: migrate", "auth: keys"))
    async with daemon(path) as (_, url):
        await end_of(old)
        assert new.is_up, "its login is the same"
        assert "ALARM" not in await asyncio.to_thread(ctl, url, "status")
        assert "NATS refuses user unicron" in await refused(path, shared)
    await old.close()
    await new.close()


async def test_password_rolls_under_a_running_head(tmp_path: Path) -> None:
    """First every client has both; then the head's file has the new one first; a session moves by itself."""
    password, clients = tmp_path / "password", tmp_path / "clients"
    password.write_text("old\n")
    clients.write_text("old\nnew\n")
    path = with_nats(config(tmp_path, auth="on"), f"user: unicron, password_file: {password}, auth: migrate")
    async with daemon(path) as (process, url):
        session = await logged_in(path, Login(user="unicron", password_file=clients))
        password.write_text("new\nold\n")
        assert "NATS refuses user unicron" in await refused(path, Login(user="unicron", password="old"))
        async with asyncio.timeout(60):
            await NatsEventLog(session).append([JOINED])
        assert process.returncode is None and await asyncio.to_thread(get, f"{url}/healthz")
        await session.close()


async def until_node(dev: DevCluster, status: NodeStatus) -> None:
    async with asyncio.timeout(60):
        while (await dev.state())[0].nodes["node1"].status is not status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.timeout(600)
async def test_agent_with_key_trains_until_revoked(tmp_path: Path) -> None:
    """It ends by itself once it is refused for its lease: somebody else may have its name."""
    async with AsyncExitStack() as stack:
        dev = DevCluster(tmp_path, 1, 1, 0, keys=True)
        stack.push_async_callback(dev.stop)
        agent = dev.agents["node1"]
        agent.env |= {"UNICRON_AGENT_LEASE_S": "3"}
        await dev.start()
        (tmp_path / "secret").write_text("s3cret\n")
        secrets = {"HF_TOKEN": f"file:{tmp_path / 'secret'}"}
        await dev.submit({**JOB, "env": {"XDG_CACHE_HOME": str(tmp_path / "cache")}, "secrets": secrets})
        async with asyncio.timeout(90):
            while (await dev.state())[0].tasks["a"].status is not TaskStatus.COMPLETED:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        printed = await asyncio.to_thread(ctl, dev.url, "logs", "a")
        assert "megatron" in printed and "iteration 1: loss " in printed
        command = [str(Path(sys.executable).with_name("unicron-replay")), "verify", "--state-dir", str(dev.state_dir)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        await agent.rest()
        assert agent.process is not None
        await unicrond(dev.config_path, "revoke", "node1")
        await until_node(dev, NodeStatus.LOST)
        assert await agent.process.wait() == SHUT_OUT
        said = agent.output.read_text().splitlines()
        assert [line for line in said if "CRITICAL" in line and "the node's key is another one's now" in line], said
        assert len([line for line in said if "WARNING node1 NATS refuses the key of node node1" in line]) == 1, said


async def test_head_is_locked_by_default(tmp_path: Path) -> None:
    """On loopback too: no login, no log; no token, no answer. unicronctl of the head's user finds the token."""
    path = config(tmp_path, auth="on")
    async with daemon(path) as (_, url):
        assert "NATS wants a login and got none" in await refused(path, Login())
        for route in ("/v1/state", "/v1/events", "/metrics"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                await asyncio.to_thread(get, url + route)
        health = await asyncio.to_thread(get, f"{url}/healthz")
        assert health["status"] == "live" and not health["alarms"]
        assert "sequence" in await asyncio.to_thread(ctl, url, "status")
        await unicrond(path, "enroll", "n1", "--out", str(tmp_path / "n1.key"))
        connection = await logged_in(path, Login(key=tmp_path / "n1.key"))
        await connection.close()


@needs_root
async def test_another_user_of_the_machine_gets_nothing(tmp_path: Path) -> None:
    async with daemon(config(tmp_path, auth="on")) as (_, url):
        words = [*opened(), "setpriv", f"--reuid={USER}", "--clear-groups", sys.executable, "-m", "unicrond.ctl.main"]
        done = await asyncio.to_thread(
            subprocess.run, [*words, "--url", url, "status"], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
    assert done.returncode == 1 and "operator.token: Permission denied; give --token-file" in done.stderr, done.stderr


async def test_unlocked_head_says_so(tmp_path: Path) -> None:
    async with daemon(config(tmp_path, auth="off")) as (_, url):
        assert "every process of this machine" in await alarm(url, "auth: off")
        assert "auth: off: every process" in await asyncio.to_thread(ctl, url, "status")
