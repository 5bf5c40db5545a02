"""What NATS servers keep of the log's promises, as they tell it, and asked of a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unicrond.events.nats.connection import Login, connect
from unicrond.events.nats.durability import (
    find_weaknesses,
    rights_weaknesses,
    server_weaknesses,
    stream_weaknesses,
    syncs,
)
from unicrond.events.nats.lease import NatsLease
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.events.trust.keys import load_or_create_key
from unicrond.events.trust.logins import Role, rights


def info(count: int, **cluster: Any) -> dict[str, Any]:
    return {"config": {"num_replicas": count}, "cluster": cluster}


def test_stream_check_finds_too_few_or_offline_replicas() -> None:
    assert stream_weaknesses("S", info(3), 3) == []
    (line,) = stream_weaknesses("S", info(1), 1)
    assert line == "stream S has 1 replica: the loss of one server loses it; nats stream edit S --replicas 3"
    (line,) = stream_weaknesses("S", info(2), 1)
    assert "2 replicas: the loss of one server stops it" in line
    (line,) = stream_weaknesses("S", info(3), 5)
    assert "has 3 replicas, not 5" in line
    peers = [{"name": "b", "offline": True}, {"name": "c", "current": True}]
    assert stream_weaknesses("S", info(3, replicas=peers), 3) == ["stream S: its replica on server b is offline"]


def test_server_check_finds_missing_sync() -> None:
    said = {"server": {"name": "a"}, "data": {"config": {"sync_interval": 120_000_000_000, "sync_always": True}}}
    assert syncs(json.dumps(said).encode()) == ("a", True)
    del said["data"]["config"]["sync_always"]
    assert syncs(json.dumps(said).encode()) == ("a", False)
    assert syncs(b'{"server": {"name": "a"}, "data": {}}') == ("a", None)
    assert [syncs(odd) for odd in (b"", b"[]", b'{"server": 1}', b"{}")] == [("?", None)] * 4
    assert server_weaknesses({"a": True, "b": True}) == []
    (line,) = server_weaknesses({"a": True, "c": None, "b": False})
    assert line.startswith("server b, c does not sync each write to disk")
    for unknown in (None, {}):
        (line,) = server_weaknesses(unknown)
        assert "to disk is not known" in line


def test_rights_check_finds_missing_and_excess_rights() -> None:
    needed = rights(Role.COORDINATOR)
    told = {"publish": {"allow": list(needed.publish)}, "subscribe": {"allow": list(needed.subscribe)}}
    assert rights_weaknesses({"permissions": told}, Role.COORDINATOR) == []
    (line,) = rights_weaknesses({}, Role.COORDINATOR)
    assert "the login coordinator may do everything" in line
    (line,) = rights_weaknesses({}, None)
    assert "which all agents may share" in line
    assert rights_weaknesses({"permissions": told}, None) == []
    (line,) = rights_weaknesses(
        {"permissions": {**told, "publish": {"allow": list(needed.publish[1:])}}}, Role.COORDINATOR
    )
    assert f"may not publish {needed.publish[0]}" in line
    wide = {**told, "subscribe": {"allow": ">"}}
    (line,) = rights_weaknesses({"permissions": wide}, Role.COORDINATOR)
    assert "may subscribe >, which it does not need" in line


async def test_real_server_reports_all_weaknesses(tmp_path: Path) -> None:
    users = [load_or_create_key(tmp_path, login).user for login in (Role.COORDINATOR, Role.OPERATOR)]
    server = EmbeddedServer(tmp_path / "nats", users=users)
    await server.start()
    connection = await connect(server.url, name="t", login=Login(key=tmp_path / "coordinator.key"), timeout_s=10)
    try:
        await create_streams(connection)
        await NatsLease(connection).make()
        lines = await find_weaknesses(connection, Role.COORDINATOR, None, 1)
        assert [line.split(":")[0] for line in lines[:3]] == [
            "stream UNICRON_EVENTS has 1 replica",
            "stream UNICRON_BEATS has 1 replica",
            "stream KV_UNICRON_HEADS has 1 replica",
        ]
        assert len(lines) == 4 and "to disk is not known" in lines[3]
        operator = await connect(server.url, name="t", login=Login(key=tmp_path / "operator.key"), timeout_s=10)
        assert any("NATS does not tell which rights" in line for line in await find_weaknesses(operator, None, None, 1))
        await operator.close()
    finally:
        await connection.close()
        await server.kill()
