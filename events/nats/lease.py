"""The heads' lease as a key of a NATS bucket (`nats kv get UNICRON_HEADS leader`). Rules: lease.py.

Rules
-----
* Each key has a time to live of its own (`Nats-TTL`, of one message), so that the lease and the heads' announcements
  end at different times. Measured on nats-server 2.15: it ends 2.00 to 2.02 s after the last renewal at 2 s; a bucket
  with one age for all (`max_age`) takes up to 0.34 s longer on disk. Delete markers are left out: a reader without a
  consumer hears of none, and they would stand in the place of the key.
* In the server's memory: renewals cost no fsync, and wait for no slow disk. One server alone also forgets the bucket
  when it restarts; it is made anew then.
* Answers come from the stream's leader (no direct get): a replica may lag behind.
* Servers check no reply subject. Where all logins share an account, a node can have JSON of theirs stored in the place
  of the lease (docs/operate/logins.md). It is no Holder, and does not count.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec
from nats.aio.msg import Msg

from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.log.lease import ANNOUNCED_S, DEAF_BEATS, LEASE_S, Holder, LeaseEntry, LeaseView
from unicrond.events.log.subjects import OWN_BEATS_SUBJECT
from unicrond.events.nats.connection import Connection, NoReply, PublishDenied, Session
from unicrond.events.nats.event_log import LAST_SEQUENCE_UNDECIDED, WRONG_LAST_SEQUENCE
from unicrond.events.nats.streams import NANOS, NO_MESSAGE_FOUND, NO_STREAM, JetStreamError, answer, api, api_once
from unicrond.events.trust.logins import HEADS_BUCKET
from unicrond.events.vocabulary import Heartbeat
from unicrond.events.wire.codec import COORDINATOR, BadEvent, decode

STREAM = f"KV_{HEADS_BUCKET}"
LEADER = f"$KV.{HEADS_BUCKET}.leader"
_HEADS = f"$KV.{HEADS_BUCKET}.head"
TIMEOUT_S = 0.5
#: So many announcements are read.
HEADS_MAX = 16


def bucket_config(replicas: int = 1) -> dict[str, Any]:
    """Return the bucket's configuration, as NATS's own clients would make it."""
    return {
        "name": STREAM,
        "description": "which unicrond leads, and which stand by (docs/operate/heads.md)",
        "subjects": [f"$KV.{HEADS_BUCKET}.>"],
        "storage": "memory",
        "retention": "limits",
        # What others get stored here goes before the lease, which is always young.
        "discard": "old",
        "max_msgs": 1000,
        "max_msgs_per_subject": 1,
        "max_msg_size": 8192,
        "num_replicas": replicas,
        "duplicate_window": NANOS,
        "allow_rollup_hdrs": True,
        "allow_direct": True,
        "allow_msg_ttl": True,
        "deny_delete": True,
    }


class NatsLease:
    """A Lease in a NATS bucket. `replicas`: the bucket's, where it is made here."""

    def __init__(self, connection: Connection, *, replicas: int = 1) -> None:
        self._connection = connection
        self._replicas = replicas
        self._session: Session | None = None

    async def make(self) -> None:
        """Make the bucket where there is none. Waits for the server. Raises JetStreamError, PublishDenied."""
        try:
            await api(self._connection, f"STREAM.INFO.{STREAM}", {})
        except JetStreamError as error:
            if error.code != NO_STREAM:
                raise
            await api(self._connection, f"STREAM.CREATE.{STREAM}", bucket_config(self._replicas))

    async def look(self) -> LeaseView:
        """Return the present holder (Lease.look)."""
        session, before = await self._live(), self._session
        self._session = session
        return LeaseView(await self._newest(LEADER), before is not None and session is not before)

    async def acquire_or_renew(self, holder: Holder, after: int) -> LeaseEntry | None:
        """Acquire or renew the lease (Lease.acquire_or_renew)."""
        session = await self._live()
        headers = {"Nats-Expected-Last-Subject-Sequence": str(after), "Nats-TTL": f"{LEASE_S}s"}
        try:
            reply = await session.request(LEADER, msgspec.json.encode(holder), headers, TIMEOUT_S)
            return LeaseEntry(int(answer(LEADER, reply.data)["seq"]), holder)
        except JetStreamError as error:
            if error.code == WRONG_LAST_SEQUENCE:
                return None
            undecided = " (of several replicas)" if error.code == LAST_SEQUENCE_UNDECIDED else ""
            raise LogUnavailable(f"the heads' lease: {error}{undecided}") from None
        except PublishDenied as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None
        except NoReply as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None

    async def announce(self, holder: Holder) -> None:
        """Announce a head (Lease.announce)."""
        body, headers = msgspec.json.encode(holder), {"Nats-TTL": f"{ANNOUNCED_S}s"}
        await self._ask(f"{_HEADS}.{holder.head}", body, headers)

    async def heads(self) -> list[Holder]:
        """Return the announced heads, at most HEADS_MAX (Lease.heads)."""
        info = await self._call(f"STREAM.INFO.{STREAM}", {"subjects_filter": f"{_HEADS}.*"})
        subjects = (info or {"state": {}})["state"].get("subjects") or {}
        entries = [await self._newest(subject) for subject in sorted(subjects)[:HEADS_MAX]]
        return [entry.holder for entry in entries if entry is not None and entry.holder is not None]

    async def listen(self, on_news: Callable[[], object], on_beat: Callable[[int], object]) -> None:
        """Subscribe to the lease and to the coordinators' beats (Lease.listen)."""

        async def news(_: Msg) -> None:
            """Forward a write of the lease."""
            on_news()

        async def beat(message: Msg) -> None:
            """Forward a coordinator's beat."""
            try:
                event = decode(message.data).event
            except BadEvent:
                return  # whoever reads the stream tells of it
            if isinstance(event, Heartbeat) and event.node == COORDINATOR and event.echo_lag < DEAF_BEATS:
                on_beat(event.agent_boot)

        await self._connection.subscribe(LEADER, news)
        await self._connection.subscribe(OWN_BEATS_SUBJECT, beat)

    async def _newest(self, subject: str) -> LeaseEntry | None:
        """Read the newest entry of a key; None where there is none."""
        reply = await self._call(f"STREAM.MSG.GET.{STREAM}", {"last_by_subj": subject})
        if reply is None:
            return None
        body = base64.b64decode(reply["message"].get("data", ""))
        try:
            holder = msgspec.json.decode(body, type=Holder)
        except msgspec.MsgspecError:  # a deletion by `nats kv del`, or what no head wrote
            holder = None
        return LeaseEntry(int(reply["message"]["seq"]), holder)

    async def _call(self, subject: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """Call JetStream's API once; return None where the requested message does not exist."""
        try:
            return await api_once(self._connection, subject, request, TIMEOUT_S)
        except JetStreamError as error:
            if error.code == NO_MESSAGE_FOUND:
                return None
            if error.code == NO_STREAM:
                await self._make_once()
            raise LogUnavailable(f"the heads' lease: {error}") from None
        except NoReply as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None

    async def _make_once(self) -> None:
        """Make the bucket that a restarted server has forgotten."""
        try:
            await api_once(self._connection, f"STREAM.CREATE.{STREAM}", bucket_config(self._replicas), TIMEOUT_S)
        except (JetStreamError, NoReply) as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None

    async def _ask(self, subject: str, body: bytes, headers: dict[str, str]) -> None:
        try:
            reply = await self._connection.request(subject, body, headers, TIMEOUT_S)
            answer(subject, reply.data)
        except (JetStreamError, NoReply) as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None

    async def _live(self) -> Session:
        """Return the current session."""
        try:
            return await self._connection.session_within(TIMEOUT_S)
        except NoReply as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None
