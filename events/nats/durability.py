"""Checks NATS servers that are not ours against the log's guarantees: each weakness is reported in one line.

Rules
-----
* The guarantees: acknowledged means on the disks of most servers; the loss of one server loses nothing and stops
  nothing; no login can do more than its role needs.
* Only the servers' own account (`$SYS`) reports whether they sync each write to disk. With its key (`system.key` beside
  the coordinator's, as `unicrond nats-config` makes it) all of them are asked; without it, one line reports that it is
  unknown.
* A question without an answer becomes a line, never an error: nothing is decided from any of this.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from unicrond.events.log.event_log import LogError
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM
from unicrond.events.nats.connection import Connection, Login, NoReply, connect
from unicrond.events.nats.lease import STREAM as HEADS_STREAM
from unicrond.events.nats.streams import JetStreamError, api_once
from unicrond.events.trust.keys import BadKey
from unicrond.events.trust.logins import USER_INFO, Role, rights

STREAMS = (EVENT_STREAM, BEAT_STREAM, HEADS_STREAM)
#: How long servers may take to answer.
ANSWERS_S = 1.0
_SERVERS = "$SYS.REQ.SERVER.PING.JSZ"


async def find_weaknesses(connection: Connection, role: Role | None, system: Login | None, replicas: int) -> list[str]:
    """Return one line for each guarantee that is weaker here than promised.

    `role`: of the connection's login; None: it is shared by all. `system`: a login of the servers' own account; None:
    there is none. `replicas`: as configured.
    """
    streams = await asyncio.gather(*(_check_stream(connection, stream, replicas) for stream in STREAMS))
    servers = await _servers(connection, system)
    return [
        *(line for lines in streams for line in lines),
        *server_weaknesses(servers),
        *await _check_rights(connection, role),
    ]


async def _check_stream(connection: Connection, stream: str, replicas: int) -> list[str]:
    try:
        return stream_weaknesses(stream, await api_once(connection, f"STREAM.INFO.{stream}", {}), replicas)
    except (JetStreamError, NoReply) as error:
        return [f"NATS does not tell how stream {stream} is kept: {error}"]


def stream_weaknesses(stream: str, info: Mapping[str, Any], replicas: int) -> list[str]:
    """Return the weaknesses of a stream. `info`: the answer to STREAM.INFO; `replicas`: as configured."""
    count = int(info["config"]["num_replicas"])
    edit = f"nats stream edit {stream} --replicas {max(replicas, 3)}"
    lines = []
    if count < 3:
        loses = "loses it" if count == 1 else "stops it"
        lines.append(f"stream {stream} has {count} replica{'s' * (count > 1)}: the loss of one server {loses}; {edit}")
    elif count < replicas:
        lines.append(f"stream {stream} has {count} replicas, not {replicas} as nats.replicas says; {edit}")
    peers = (info.get("cluster") or {}).get("replicas") or []
    offline = [str(peer.get("name")) for peer in peers if peer.get("offline")]
    return [*lines, *(f"stream {stream}: its replica on server {name} is offline" for name in offline)]


async def _servers(connection: Connection, system: Login | None) -> dict[str, bool | None] | None:
    """Ask each server whether it syncs each write; None for one that does not say. None as a whole: no server can be
    asked."""
    if system is None:
        return None
    try:
        system_connection = await connect(
            connection.servers, name="unicrond-check", login=system, timeout_s=5 * ANSWERS_S
        )
    except (LogError, BadKey):
        return None
    try:
        session = await system_connection.session()
        answers: list[Msg] = []

        async def answered(message: Msg) -> None:
            """Collect an answer."""
            answers.append(message)

        inbox = session.client.new_inbox()
        await session.client.subscribe(inbox, cb=answered)
        await session.publish(_SERVERS, json.dumps({"config": True}).encode(), reply=inbox)
        await asyncio.sleep(ANSWERS_S)
        return dict(syncs(answer.data) for answer in answers)
    except (nats.errors.Error, LogError, OSError):
        return None
    finally:
        await system_connection.close()


def syncs(body: bytes) -> tuple[str, bool | None]:
    """Return the name of the server in an answer to JSZ, and whether it syncs each write to disk."""
    try:
        answer = json.loads(body)
        config = (answer.get("data") or {}).get("config") or {}
        return str(answer["server"]["name"]), config.get("sync_always", False) if config else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return "?", None


def server_weaknesses(servers: Mapping[str, bool | None] | None) -> list[str]:
    """Return the weaknesses of the servers. `servers`: their answers; None: they cannot be asked."""
    if not servers:
        return [
            "whether the NATS servers sync each write to disk is not known: put system.key into nats.keys "
            "(`unicrond nats-config` makes it), and see that jetstream.sync_interval is `always`"
        ]
    unsynced = sorted(name for name, is_synced in servers.items() if not is_synced)
    if not unsynced:
        return []
    return [
        f"server {', '.join(unsynced)} does not sync each write to disk: a power failure may take acknowledged events "
        "back; set `sync_interval: always` in its jetstream section"
    ]


async def _check_rights(connection: Connection, role: Role | None) -> list[str]:
    try:
        answer = json.loads((await connection.request(USER_INFO, b"", timeout_s=ANSWERS_S)).data)
    except (NoReply, ValueError) as error:
        return [f"NATS does not tell which rights the login has ({error}); allow it {USER_INFO}"]
    return rights_weaknesses(answer.get("data") or {}, role)


def rights_weaknesses(login_info: Mapping[str, Any], role: Role | None) -> list[str]:
    """Return the weaknesses of a login's rights. `login_info`: the server's description of the login."""
    permissions = login_info.get("permissions")
    if not permissions:
        holder = f"the login {role}" if role else "the login, which all agents may share,"
        return [f"{holder} may do everything in its NATS account: set nats.auth to keys (docs/operate/logins.md)"]
    if role is None:
        return []
    needed = rights(role)
    lines = []
    for verb, subjects in (("publish", needed.publish), ("subscribe", needed.subscribe)):
        allowed = set(_allowed(permissions.get(verb)))
        missing, extra = [subject for subject in subjects if subject not in allowed], sorted(allowed - set(subjects))
        if missing and not allowed & {">"}:
            lines.append(f"the login {role} may not {verb} {_few(missing)}; use what `unicrond nats-config` prints")
        if extra:
            lines.append(f"the login {role} may {verb} {_few(extra)}, which it does not need")
    return lines


def _allowed(permission: Any) -> Iterable[str]:
    allowed = (permission or {}).get("allow") if isinstance(permission, dict) else permission
    return [allowed] if isinstance(allowed, str) else allowed or []


def _few(subjects: list[str]) -> str:
    return ", ".join([*subjects[:3], *(["..."] if len(subjects) > 3 else [])])
