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
* Servers check no reply subject, so a node can have JSON of theirs stored in the place of the lease (docs/operate/
  logins.md). It is no Holder, and does not count.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec
from nats.aio.msg import Msg

from events.codec import COORDINATOR, BadEvent, decode
from events.lease import ANNOUNCED_S, LEASE_S, Held, Holder, Look
from events.log import LogUnavailable
from events.logins import HEADS_BUCKET
from events.nats_connection import Connection, Denied, Session, Unanswered
from events.nats_log import LAST_SEQUENCE_UNDECIDED, WRONG_LAST_SEQUENCE
from events.nats_streams import NANOS, NO_MESSAGE_FOUND, NO_STREAM, ApiError, answer, api, api_once
from events.subjects import OWN_BEATS_SUBJECT
from events.vocabulary import Heartbeat

STREAM = f"KV_{HEADS_BUCKET}"
LEADER = f"$KV.{HEADS_BUCKET}.leader"
_HEADS = f"$KV.{HEADS_BUCKET}.head"
TIMEOUT_S = 0.5
#: So many announcements are read.
HEADS_MAX = 16


def bucket_config(replicas: int = 1) -> dict[str, Any]:
    """The bucket, as NATS's own clients would make it."""
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
    """A Lease. `replicas`: of the bucket, where it is made here."""

    def __init__(self, connection: Connection, *, replicas: int = 1) -> None:
        self._connection = connection
        self._replicas = replicas
        self._session: Session | None = None

    async def make(self) -> None:
        """Make the bucket where there is none. ApiError, Denied; waits for the server."""
        try:
            await api(self._connection, f"STREAM.INFO.{STREAM}", {})
        except ApiError as error:
            if error.code != NO_STREAM:
                raise
            await api(self._connection, f"STREAM.CREATE.{STREAM}", bucket_config(self._replicas))

    async def look(self) -> Look:
        """See Lease."""
        session, before = await self._live(), self._session
        self._session = session
        return Look(await self._newest(LEADER), before is not None and session is not before)

    async def put(self, holder: Holder, after: int) -> Held | None:
        """See Lease."""
        session = await self._live()
        marks = {"Nats-Expected-Last-Subject-Sequence": str(after), "Nats-TTL": f"{LEASE_S}s"}
        try:
            reply = await session.request(LEADER, msgspec.json.encode(holder), marks, TIMEOUT_S)
            return Held(int(answer(LEADER, reply.data)["seq"]), holder)
        except ApiError as error:
            if error.code == WRONG_LAST_SEQUENCE:
                return None
            undecided = " (of several replicas)" if error.code == LAST_SEQUENCE_UNDECIDED else ""
            raise LogUnavailable(f"the heads' lease: {error}{undecided}") from None
        except Denied as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None
        except Unanswered as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None

    async def announce(self, holder: Holder) -> None:
        """See Lease."""
        body, marks = msgspec.json.encode(holder), {"Nats-TTL": f"{ANNOUNCED_S}s"}
        await self._ask(f"{_HEADS}.{holder.head}", body, marks)

    async def heads(self) -> list[Holder]:
        """See Lease."""
        info = await self._call(f"STREAM.INFO.{STREAM}", {"subjects_filter": f"{_HEADS}.*"})
        subjects = (info or {"state": {}})["state"].get("subjects") or {}
        found = [await self._newest(subject) for subject in sorted(subjects)[:HEADS_MAX]]
        return [held.holder for held in found if held is not None and held.holder is not None]

    async def listen(self, on_news: Callable[[], object], on_beat: Callable[[int], object]) -> None:
        """See Lease."""

        async def news(_: Msg) -> None:
            on_news()

        async def beat(message: Msg) -> None:
            try:
                event = decode(message.data).event
            except BadEvent:
                return  # whoever reads the stream tells of it
            if isinstance(event, Heartbeat) and event.node == COORDINATOR:
                on_beat(event.agent_boot)

        await self._connection.subscribe(LEADER, news)
        await self._connection.subscribe(OWN_BEATS_SUBJECT, beat)

    async def _newest(self, subject: str) -> Held | None:
        got = await self._call(f"STREAM.MSG.GET.{STREAM}", {"last_by_subj": subject})
        if got is None:
            return None
        body = base64.b64decode(got["message"].get("data", ""))
        try:
            holder = msgspec.json.decode(body, type=Holder)
        except msgspec.MsgspecError:  # a deletion by `nats kv del`, or what no head wrote
            holder = None
        return Held(int(got["message"]["seq"]), holder)

    async def _call(self, subject: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """An answer of JetStream's API; None where there is nothing of what was asked for."""
        try:
            return await api_once(self._connection, subject, request, TIMEOUT_S)
        except ApiError as error:
            if error.code == NO_MESSAGE_FOUND:
                return None
            if error.code == NO_STREAM:
                await self._make_once()
            raise LogUnavailable(f"the heads' lease: {error}") from None
        except Unanswered as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None

    async def _make_once(self) -> None:
        """A server that has restarted forgot it."""
        try:
            await api_once(self._connection, f"STREAM.CREATE.{STREAM}", bucket_config(self._replicas), TIMEOUT_S)
        except (ApiError, Unanswered) as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None

    async def _ask(self, subject: str, body: bytes, marks: dict[str, str]) -> None:
        try:
            reply = await self._connection.request(subject, body, marks, TIMEOUT_S)
            answer(subject, reply.data)
        except (ApiError, Unanswered) as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None

    async def _live(self) -> Session:
        """The session of the moment."""
        try:
            return await self._connection.session_within(TIMEOUT_S)
        except Unanswered as error:
            raise LogUnavailable(f"the heads' lease: {error}") from None
