"""Fuses: the login of a node that floods the log ends.

Rules
-----
* What each node writes is counted as the server hears it (events/log/entrance.py), beside the log: a server that is
  flooded stores what it has heard half a minute later. So is what it asks of JetStream, in the same buckets: the server
  adds to such a call whose it is, behind all that the caller wrote. It takes out a header of that name that the caller
  has made up only where the caller has ended it; so what stands before the last one, be it in the same line, says
  nothing. Who asks for commands and acknowledges them the subject tells: that is one agent's own.
* Where a node writes too much and this head has the server, its login ends at once: the server drops the connection
  and what is still on the way, and people see NodeRevoked in the log. A person lets the node in again (`unicrond
  enroll`), and the counting begins anew. A pod is no person: while the alarm stands, its token gives it no key.
* One login may end so in any cluster, and of many within an hour the share of the brakes (`policy.isolated_share`);
  none in mode observe. Beyond it, and where the server is not ours or needs no login, the alarm alone tells a person.
  Nodes that are lost or isolated do not count: a flood does not wait until they are back.

Why not a stream at the entrance, from which the head copies into a log that it alone writes: each observation would be
stored twice, 1 ms later (20 ms at the 99th percentile), at every fault; floods are rare, and a fuse costs nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import nats.errors

from unicrond.core.nodes import brakes
from unicrond.core.state.alarms import Alarm
from unicrond.core.state.state import ClusterState
from unicrond.events.log.entrance import Entrance, heard_bytes
from unicrond.events.log.subjects import PREFIX, agent_consumer
from unicrond.events.nats.connection import Connection
from unicrond.events.trust.accounts import NatsAccount
from unicrond.events.trust.logins import AGENT_ACKS, AGENT_CALLS
from unicrond.events.wire.codec import API_PRODUCER, COORDINATOR

_OBSERVATIONS, _BEATS = f"{PREFIX}.obs.", f"{PREFIX}.beat."
_AGENT = agent_consumer("")
_HEAD_PRODUCERS = (API_PRODUCER, COORDINATOR)
_AGAIN_S = 1.0
_LOOK_AGAIN_US = 1_000_000
#: How the server begins what it adds to a call: in what follows, JSON, no client's word can hold this unescaped.
_CALLER_HEADER, _CALLER_BEGIN = b"Nats-Request-Info: ", b'Nats-Request-Info: {"start":"'
_HEADERS_END = b"\r\n\r\n"
#: A revocation that the log still lacks is asked for again after so long.
_ASK_AGAIN_US = 5_000_000
#: A flood that no fuse has ended is told of for so long after its last message.
_STANDS_US = 60_000_000


class _Caller(msgspec.Struct, frozen=True):
    """Hold what the server adds to a call: the caller's account and public key, and the name in its JWT, "" without a
    JWT."""

    acc: str
    user: str
    name_tag: str = ""


_callers = msgspec.json.Decoder(_Caller)


class Fuse(msgspec.Struct, frozen=True):
    """A fuse that has blown. `is_in_log`: the log says that the login has ended; `asked_us`: when that was last asked
    for."""

    text: str
    since_us: int
    asked_us: int
    is_in_log: bool = False


class Fuses:
    """The fuses of one head. `obstacle`: why it cannot end logins, "" where it can. `flooded`: set while a node that
    writes too much is to be looked at."""

    def __init__(self, state: Callable[[], ClusterState], monotonic_us: Callable[[], int], obstacle: str) -> None:
        self.flooded = asyncio.Event()
        self._state = state
        self._monotonic_us = monotonic_us
        self._obstacle = obstacle
        self._entrance = Entrance()
        #: By public key; looked up anew where it does not fit the logins.
        self._nodes: dict[str, str] = {}
        self._looked_us = -_LOOK_AGAIN_US
        self._fuses: dict[str, Fuse] = {}
        #: By node, why its fuse does not blow.
        self._obstacles: dict[str, str] = {}

    async def watch(self, connection: Connection) -> None:
        """Count what nodes write, until cancelled. A flood may end this connection: it is to serve nothing else."""
        while True:
            session = await connection.session()
            try:
                for subjects in (f"{_OBSERVATIONS}*.*", f"{_BEATS}*"):
                    await session.subscribe_raw(subjects, self._take)
                for subjects in AGENT_CALLS:
                    sink = self._take_read if ".MSG.NEXT." in subjects else self._take_call
                    await session.subscribe_raw(subjects, sink)
                await session.subscribe_raw(AGENT_ACKS, self._take_read)
            except (nats.errors.Error, OSError):
                await asyncio.sleep(_AGAIN_S)
                continue
            await session.disconnected.wait()

    def _take(self, subject: bytes, _: bytes, body: bytes, headers: bytes) -> None:
        """Count one message."""
        self._count(producer_of(subject.decode("utf-8", "replace")), heard_bytes(body, headers))

    def _take_read(self, subject: bytes, _: bytes, body: bytes, headers: bytes) -> None:
        """Count a call for the next command, or an acknowledgement."""
        self._count(reader_of(subject.decode("utf-8", "replace")), heard_bytes(body, headers), is_read=True)

    def _take_call(self, _: bytes, __: bytes, body: bytes, headers: bytes) -> None:
        """Count another call of JetStream's API."""
        if caller := caller_of(headers):
            self._count(_node_named(caller) or self._node_with(caller), heard_bytes(body, headers))

    def _node_with(self, key: str) -> str:
        """Return the node that logs in with this public key; "" where none does."""
        logins, now_us = self._state().logins, self._monotonic_us()
        node = self._nodes.get(key, "")
        if (node not in logins or not logins[node].has_key(key)) and now_us >= self._looked_us + _LOOK_AGAIN_US:
            self._looked_us = now_us
            self._nodes = {
                every: name
                for name, login in logins.items()
                for every in (login.key, *(old.key for old in login.previous))
            }
        return self._nodes.get(key, "")

    def _count(self, node: str, size_bytes: int, *, is_read: bool = False) -> None:
        is_excess = node and self._entrance.take(node, size_bytes, self._monotonic_us(), is_read=is_read)
        if is_excess and node not in self._fuses and node not in self._obstacles:
            self.flooded.set()

    def look(self) -> dict[str, str]:
        """Return the nodes whose logins are to end now, with the reason; again after _ASK_AGAIN_US if the log still
        lacks it."""
        state, now_us = self._state(), self._monotonic_us()
        for node, fuse in list(self._fuses.items()):
            if fuse.is_in_log and node in state.logins:
                del self._fuses[node]
                self._entrance.forget(node)
                self._obstacles.pop(node, None)
            elif node not in state.logins:
                self._fuses[node] = msgspec.structs.replace(fuse, is_in_log=True)
        reasons: dict[str, str] = {}
        for node, fuse in self._fuses.items():
            if not fuse.is_in_log and now_us - fuse.asked_us >= _ASK_AGAIN_US:
                reasons[node] = f"it floods the log: {fuse.text}"
                self._fuses[node] = msgspec.structs.replace(fuse, asked_us=now_us)
        for node, excess in list(self._entrance.excesses.items()):
            if node in self._fuses:
                continue
            if now_us - excess.last_us >= _STANDS_US:
                self._entrance.forget(node)
                self._obstacles.pop(node, None)
                continue
            if obstacle := self._obstacle or self._limit(state, node, now_us):
                self._obstacles[node] = obstacle
            else:
                self._obstacles.pop(node, None)
                reasons[node] = f"it floods the log: {excess.sentence()}"
                self._fuses[node] = Fuse(excess.sentence(), now_us, now_us)
        return reasons

    def has_blown(self, node: str) -> bool:
        """Return whether the node is not to be let in, whatever the folded log says."""
        return node in self._fuses

    def alarms(self) -> list[Alarm]:
        """Return an alarm for each node whose fuse has blown, and for each that floods the log unhindered."""
        alarms = [
            Alarm(
                "node-floods",
                f"node {node} flooded the log ({fuse.text}); its login was revoked: find out who has its key, then "
                f"`unicrond enroll {node}`",
                node,
            )
            for node, fuse in self._fuses.items()
        ]
        for node, excess in self._entrance.excesses.items():
            if node not in self._fuses and self._monotonic_us() - excess.last_us < _STANDS_US:
                obstacle = self._obstacles.get(node) or self._obstacle or "this head does not lead"
                text = f"node {node} floods the log ({excess.sentence()}) and its login stands: {obstacle}"
                alarms.append(Alarm("node-floods", text, node))
        return alarms

    def _limit(self, state: ClusterState, node: str, now_us: int) -> str:
        """Return why the brakes keep the login from ending; "" where they do not."""
        if node not in state.logins:
            return "the log has enrolled no key of it"
        if state.mode == "observe":
            return "the cluster is in mode observe"
        recent = sum(now_us - fuse.since_us < brakes.HOUR_US for fuse in self._fuses.values())
        nodes, share = len(state.logins) + recent, state.brakes.isolated_share
        if recent and recent + 1 > share * nodes:
            return f"{recent} of {nodes} logins ended within an hour for floods (policy.isolated_share: {share:g})"
        return ""


def caller_of(headers: bytes) -> str:
    """Return the public key of the agent that makes the call of JetStream's API with these headers, or its login where
    it has a JWT; "" where the server names none. Linear in their length."""
    begin = headers.rfind(_CALLER_BEGIN)
    if begin < 0 or not headers.endswith(_HEADERS_END):
        return ""
    try:
        caller = _callers.decode(headers[begin + len(_CALLER_HEADER) : -len(_HEADERS_END)])
    except (msgspec.MsgspecError, ValueError):
        return ""
    if caller.name_tag:  # beside a JWT a client may claim any key
        return caller.name_tag
    return caller.user if caller.acc == NatsAccount.AGENTS else ""


def reader_of(subject: str) -> str:
    """Return the node that asks for commands, or acknowledges them, on this subject; "" where none does."""
    tokens = subject.split(".")
    return _node_named(tokens[3] if tokens[1] == "ACK" else tokens[-1])


def _node_named(login: str) -> str:
    """Return the node of an agent's login, or consumer; "" of others."""
    return login.removeprefix(_AGENT) if login.startswith(_AGENT) else ""


def producer_of(subject: str) -> str:
    """Return the node that writes on this subject; "" where none does."""
    for prefix in (_OBSERVATIONS, _BEATS):
        if subject.startswith(prefix):
            producer = subject[len(prefix) :].partition(".")[0]
            return "" if producer in _HEAD_PRODUCERS else producer
    return ""
