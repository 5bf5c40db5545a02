"""What the log promises, held against NATS servers that are not ours: what is weaker is said, one line each.

Rules
-----
* Promised is: acknowledged means on the disks of most servers; one server's loss loses nothing and stops nothing; no
  login can do more than its role needs.
* Whether servers sync each write to disk, only their own account tells (`$SYS`): with its key (`system.key` beside the
  coordinator's, as `unicrond nats-config` makes it) all of them are asked; without it, that it is not known is said.
* A question without an answer is a line, never an error: nothing is decided from any of this.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from events.keys import BadKey
from events.log import LogError
from events.logins import USER_INFO, Role, rights
from events.nats_connection import Connection, Login, Unanswered, connect
from events.nats_lease import STREAM as HEADS_STREAM
from events.nats_streams import ApiError, api_once
from events.subjects import BEAT_STREAM, EVENT_STREAM

STREAMS = (EVENT_STREAM, BEAT_STREAM, HEADS_STREAM)
#: How long servers may take to answer.
ANSWERS_S = 1.0
_SERVERS = "$SYS.REQ.SERVER.PING.JSZ"


async def weaker(connection: Connection, role: Role | None, system: Login | None, replicas: int) -> list[str]:
    """What is weaker than promised. `role`: of the connection's login; None: it is shared by all. `system`: a login of
    the servers' own account; None: there is none. `replicas`: as configured."""
    streams = await asyncio.gather(*(_of_stream(connection, stream, replicas) for stream in STREAMS))
    servers = await _servers(connection, system)
    return [*(line for lines in streams for line in lines), *of_servers(servers), *await _of_rights(connection, role)]


async def _of_stream(connection: Connection, stream: str, replicas: int) -> list[str]:
    try:
        return of_stream(stream, await api_once(connection, f"STREAM.INFO.{stream}", {}), replicas)
    except (ApiError, Unanswered) as error:
        return [f"NATS does not tell how stream {stream} is kept: {error}"]


def of_stream(stream: str, info: Mapping[str, Any], wanted: int) -> list[str]:
    """`info`: the answer to STREAM.INFO; `wanted`: replicas as configured."""
    has = int(info["config"]["num_replicas"])
    edit = f"nats stream edit {stream} --replicas {max(wanted, 3)}"
    lines = []
    if has < 3:
        loses = "loses it" if has == 1 else "stops it"
        lines.append(f"stream {stream} has {has} replica{'s' * (has > 1)}: the loss of one server {loses}; {edit}")
    elif has < wanted:
        lines.append(f"stream {stream} has {has} replicas, not {wanted} as nats.replicas says; {edit}")
    peers = (info.get("cluster") or {}).get("replicas") or []
    away = [str(peer.get("name")) for peer in peers if peer.get("offline")]
    return [*lines, *(f"stream {stream}: its replica on server {name} is offline" for name in away)]


async def _servers(connection: Connection, system: Login | None) -> dict[str, bool | None] | None:
    """Server -> whether it syncs each write; None: it does not say. None as a whole: no server can be asked."""
    if system is None:
        return None
    try:
        asking = await connect(connection.servers, name="unicrond-check", login=system, timeout_s=5 * ANSWERS_S)
    except (LogError, BadKey):
        return None
    try:
        session = await asking.session()
        answers: list[Msg] = []

        async def answered(message: Msg) -> None:
            answers.append(message)

        inbox = session.client.new_inbox()
        await session.client.subscribe(inbox, cb=answered)
        await session.publish(_SERVERS, json.dumps({"config": True}).encode(), reply=inbox)
        await asyncio.sleep(ANSWERS_S)
        return dict(syncs(answer.data) for answer in answers)
    except (nats.errors.Error, LogError, OSError):
        return None
    finally:
        await asking.close()


def syncs(body: bytes) -> tuple[str, bool | None]:
    """The name of the server in an answer to JSZ, and whether it syncs each write to disk."""
    try:
        told = json.loads(body)
        config = (told.get("data") or {}).get("config") or {}
        return str(told["server"]["name"]), config.get("sync_always", False) if config else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return "?", None


def of_servers(servers: Mapping[str, bool | None] | None) -> list[str]:
    """`servers`: as they answered; None: they cannot be asked."""
    if not servers:
        return [
            "whether the NATS servers sync each write to disk is not known: put system.key into nats.keys "
            "(`unicrond nats-config` makes it), and see that jetstream.sync_interval is `always`"
        ]
    late = sorted(name for name, synced in servers.items() if not synced)
    if not late:
        return []
    return [
        f"server {', '.join(late)} does not sync each write to disk: a power failure may take acknowledged events "
        "back; set `sync_interval: always` in its jetstream section"
    ]


async def _of_rights(connection: Connection, role: Role | None) -> list[str]:
    try:
        answer = json.loads((await connection.request(USER_INFO, b"", timeout_s=ANSWERS_S)).data)
    except (Unanswered, ValueError) as error:
        return [f"NATS does not tell which rights the login has ({error}); allow it {USER_INFO}"]
    return of_rights(answer.get("data") or {}, role)


def of_rights(told: Mapping[str, Any], role: Role | None) -> list[str]:
    """`told`: what the server says of the login."""
    permissions = told.get("permissions")
    if not permissions:
        who = f"the login {role}" if role else "the login, which all agents may share,"
        return [f"{who} may do everything in its NATS account: set nats.auth to keys (docs/operate/logins.md)"]
    if role is None:
        return []
    needed = rights(role)
    lines = []
    for verb, subjects in (("publish", needed.publish), ("subscribe", needed.subscribe)):
        allowed = set(_allowed(permissions.get(verb)))
        lacks, more = [one for one in subjects if one not in allowed], sorted(allowed - set(subjects))
        if lacks and not allowed & {">"}:
            lines.append(f"the login {role} may not {verb} {_few(lacks)}; use what `unicrond nats-config` prints")
        if more:
            lines.append(f"the login {role} may {verb} {_few(more)}, which it does not need")
    return lines


def _allowed(permission: Any) -> Iterable[str]:
    allowed = (permission or {}).get("allow") if isinstance(permission, dict) else permission
    return [allowed] if isinstance(allowed, str) else allowed or []


def _few(subjects: list[str]) -> str:
    return ", ".join([*subjects[:3], *(["..."] if len(subjects) > 3 else [])])
