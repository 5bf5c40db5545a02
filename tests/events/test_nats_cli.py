"""NATS's own client: what it needs, the calls that it makes, and what people do with it (docs/operate/nats.md).

The client itself is on no package registry: where `nats` is on the PATH the documents' commands are run with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import stat
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.unicrond.serving import healed_cluster
from unicrond.core.replayer import replay
from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import digest
from unicrond.ctl.main import main
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM
from unicrond.events.nats import cli_context as nats_cli
from unicrond.events.nats.commands import ensure_command_consumer
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.reader import READS, read_stream
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, consumers_of, create_streams, event_stream_config, forget_restored_readers
from unicrond.events.trust.keys import load_or_create_key

ROOT = Path(__file__).parents[2]
LOGINS = ("operator", "coordinator", "agent-n1")


class Head(NamedTuple):
    """A server with keys, the operator's connection, and a cluster's log on it."""

    server: EmbeddedServer
    key: Path
    operator: Connection
    state: ClusterState


async def told(connection: Connection, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
    return await asyncio.wait_for(api(connection, subject, request or {}), 20)


async def written(agent: Connection, operator: Connection) -> ClusterState:
    """A short log of n1's observations, and the state after it: its agent may not read, nor write decisions."""
    log = NatsEventLog(operator)
    envelopes = [entry.envelope for entry in healed_cluster().log if entry.envelope.producer == "n1"][:12]
    for envelope in envelopes:
        await NatsEventLog(agent).append([envelope])
    async with aclosing(log.read(0, until_seq=len(envelopes))) as entries:
        return replay([entry async for entry in entries])


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[Head]:
    users = [load_or_create_key(tmp_path / "keys", login).user for login in LOGINS]
    server = EmbeddedServer(tmp_path / "nats", users=users)
    await server.start()
    key = tmp_path / "keys" / "operator.key"
    operator = await connect(server.url, name="operator", login=Login(key=key), timeout_s=20)
    try:
        await create_streams(operator)
        await ensure_command_consumer(operator, "n1", ())
        agent = await connect(server.url, name="agent n1", login=Login(key=key.with_name("agent-n1.key")), timeout_s=20)
        state = await written(agent, operator)
        await agent.close()
        yield Head(server, key, operator, state)
    finally:
        await operator.close()
        await server.kill()


# --- what it needs -------------------------------------------------------------------------------


def test_nats_command_and_context_agree() -> None:
    login = Login(key=Path("/k/operator.key"), tls_ca=Path("/k/ca.pem"), tls_cert=Path("/k/own.pem"))
    assert nats_cli.command("tls://h:4222", login) == (
        "nats -s tls://h:4222 --nkey=/k/operator.key --tlsca=/k/ca.pem --tlscert=/k/own.pem --tlskey=/k/own.pem"
    )
    assert nats_cli.context("tls://h:4222", login) == {
        "description": "unicrond's event log", "url": "tls://h:4222", "nkey": "/k/operator.key",
        "ca": "/k/ca.pem", "cert": "/k/own.pem", "key": "/k/own.pem",
    }  # fmt: skip
    secret = Login(user="unicron", password="s3cret")
    assert "s3cret" not in nats_cli.command("nats://h", secret)
    assert nats_cli.context("nats://h", secret)["password"] == "s3cret"
    assert "--creds=/k/op.creds" in nats_cli.command("nats://h", Login(key=Path("/k/op.creds")))


def test_nats_context_is_written_to_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["nats-context", "--nats", "nats://h:4222", "--write", "--context", "prod"]) == 0
    path = tmp_path / "nats" / "context" / "prod.json"
    assert json.loads(path.read_text())["url"] == "nats://h:4222" and "nats --context prod" in capsys.readouterr().out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(["nats-context", "--state-dir", str(tmp_path)]) == 2
    assert "no nats-server runs in" in capsys.readouterr().err


async def test_nats_context_of_running_head_uses_operator_key(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["nats-context", "--state-dir", str(head.key.parents[1])]) == 0
    assert capsys.readouterr().out == f"nats -s {head.server.url} --nkey={head.key}\n"


# --- the calls that it makes ---------------------------------------------------------------------


async def test_streams_and_consumers_have_descriptions(head: Head) -> None:
    for stream in (EVENT_STREAM, BEAT_STREAM):
        assert "unicrond: " in (await told(head.operator, f"STREAM.INFO.{stream}"))["config"]["description"]
    assert sorted((await told(head.operator, "STREAM.NAMES"))["streams"]) == [BEAT_STREAM, EVENT_STREAM]
    async with aclosing(read_stream(head.operator, EVENT_STREAM, start={"deliver_policy": "all"})) as messages:
        await anext(messages)
        named = {each["name"]: each["config"] for each in await consumers_of(head.operator, EVENT_STREAM)}
    assert "n1: its commands" in named.pop("agent-n1")["description"]
    [(name, config)] = named.items()
    assert name.startswith(READS) and config["description"].startswith("operator reads here")
    for _ in range(1_000):  # the reader has gone, and its consumer goes with it
        if [each["name"] for each in await consumers_of(head.operator, EVENT_STREAM)] == ["agent-n1"]:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("the reader's consumer is left behind")


async def test_older_stream_gets_description(nats_server: EmbeddedServer) -> None:
    connection = await connect(nats_server.url, name="test", timeout_s=20)
    older = {name: value for name, value in event_stream_config().items() if name != "description"}
    await told(connection, f"STREAM.CREATE.{EVENT_STREAM}", older)
    await create_streams(connection)
    assert (await told(connection, f"STREAM.INFO.{EVENT_STREAM}"))["config"]["description"]
    await connection.close()


async def test_operator_reads_stream_info_and_messages(head: Head) -> None:
    last = head.state.seq
    info = await told(head.operator, f"STREAM.INFO.{EVENT_STREAM}", {"subjects_filter": ">"})
    subjects = info["state"]["subjects"]
    assert sum(subjects.values()) == last and subjects["unicron.v1.obs.n1.NodeJoined"] == 1
    first = await told(head.operator, f"STREAM.MSG.GET.{EVENT_STREAM}", {"seq": 1})
    assert first["message"]["subject"] == "unicron.v1.obs.n1.NodeJoined"
    newest = await told(head.operator, f"STREAM.MSG.GET.{EVENT_STREAM}", {"last_by_subj": "unicron.v1.obs.n1.*"})
    assert newest["message"]["seq"] == last
    since = (datetime.now(UTC) - timedelta(minutes=10)).isoformat()
    start = {"deliver_policy": "by_start_time", "opt_start_time": since}
    async with asyncio.timeout(20), aclosing(read_stream(head.operator, EVENT_STREAM, start=start)) as messages:
        assert [(await anext(messages)).seq for _ in range(last)] == list(range(1, last + 1))
    report = {each["name"]: each for each in await consumers_of(head.operator, EVENT_STREAM)}
    assert report["agent-n1"]["num_pending"] == 0 and report["agent-n1"]["num_redelivered"] == 0


async def backed_up(connection: Connection, stream: str) -> tuple[dict[str, Any], list[bytes]]:
    """As `nats stream backup`: the stream's configuration and its store in pieces, each acknowledged."""
    session = await connection.session()
    inbox, pieces, over = session.client.new_inbox(), list[bytes](), asyncio.Event()

    async def take(message: Any) -> None:
        if not message.data:
            over.set()
            return
        pieces.append(message.data)
        if message.reply:
            await session.publish(message.reply, b"")

    await session.client.subscribe(inbox, cb=take)
    about = await told(connection, f"STREAM.SNAPSHOT.{stream}", {"deliver_subject": inbox, "no_consumers": False})
    await asyncio.wait_for(over.wait(), 20)
    return {"config": about["config"], "state": about["state"]}, pieces


async def restored(connection: Connection, stream: str, about: dict[str, Any], pieces: list[bytes]) -> None:
    """As `nats stream restore`."""
    began = await told(connection, f"STREAM.RESTORE.{stream}", about)
    session = await connection.session()
    for piece in [*pieces, b""]:
        answer = await asyncio.wait_for(session.request(began["deliver_subject"], piece), 20)
    assert "error" not in json.loads(answer.data or b"{}")


async def test_backup_restores_to_same_digest(head: Head, tmp_path: Path) -> None:
    reading = read_stream(head.operator, EVENT_STREAM, start={"deliver_policy": "all"})
    await anext(reading)
    about, pieces = await backed_up(head.operator, EVENT_STREAM)
    await reading.aclose()
    server = EmbeddedServer(tmp_path / "other")
    await server.start()
    other = await connect(server.url, name="other", timeout_s=20)
    try:
        await restored(other, EVENT_STREAM, about, pieces)
        await create_streams(other)
        assert any(each["name"].startswith(READS) for each in await consumers_of(other, EVENT_STREAM)), "it came along"
        await forget_restored_readers(other)
        kept = [each["name"] for each in await consumers_of(other, EVENT_STREAM)]
        assert not [name for name in kept if name.startswith(READS)]
        async with aclosing(NatsEventLog(other).read(0, until_seq=head.state.seq)) as entries:
            state = replay([entry async for entry in entries])
        assert digest(state) == digest(head.state)
    finally:
        await other.close()
        await server.kill()


# --- the client itself ---------------------------------------------------------------------------

BLOCKS = [
    line.removeprefix("$ ").strip()
    for name in ("docs/operate/nats.md", "docs/operate/install.md")
    for line in (ROOT / name).read_text().splitlines()
    if line.startswith("$ nats ")
]


@pytest.mark.skipif(shutil.which("nats") is None, reason="NATS's own client, nats, is not on the PATH")
async def test_documented_nats_commands_work(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that end by themselves and change nothing."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert (
        await asyncio.to_thread(main, ["nats-context", "--nats", head.server.url, "--key", str(head.key), "--write"])
        == 0
    )
    looking = [line for line in BLOCKS if shlex.split(line)[1:3] in (["stream", "ls"], ["stream", "info"],
               ["stream", "subjects"], ["consumer", "report"], ["stream", "get"])]  # fmt: skip
    assert looking
    for line in looking:
        process = await asyncio.create_subprocess_exec(
            "nats", "--context", nats_cli.NAME, *shlex.split(line.partition(" | ")[0])[1:],
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=os.environ,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0, (line, out)
