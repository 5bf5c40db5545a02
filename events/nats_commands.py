"""One node's commands from NATS: a durable pull consumer, so the server remembers what was acknowledged.

Rules
-----
* The server remembers it in memory: on disk each command would cost it two more fsyncs, and a membership that a hundred
  nodes read two hundred, before the last of them has it (`docs/results/scale.md`). A server that is started anew has
  forgotten all consumers; each is made again behind what its agent has handled (`Heartbeat.read_seq`), or where that is
  not known, for all that the log holds: handlers know what they have done.
* One command at a time (`max_ack_pending` 1): order holds even when one is delivered again.
* What is told once of the tasks that the node follows comes by the same consumer: `follow` changes its filter. While an
  entry is not acknowledged the server looks at nothing behind it, so what matches the new filter there still comes. An
  idle consumer has passed over what did not match; that is never asked for again.
* The filter is the server's: it outlives the agent. With each connection it is compared with what is followed.
* Where an agent has a key, it may neither make its consumer nor change it: a consumer can read everything. The
  coordinator does both, before the node needs it (`unicrond/service/consumers.py`); the agent compares, and waits.
* A command is acknowledged after its handler is done with it. If the agent is killed in between, its
  successor gets the command after at most ACK_WAIT_S; handlers act once per command id, so that a second
  delivery does no harm.
* Delivered MAX_DELIVER times and never acknowledged, a command is left behind: it would otherwise kill
  every agent that comes. The coordinator's deadline for it decides what then.
* Silence of the server means: ask again, on the session of the moment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
import nats.errors
from msgspec.structs import replace
from nats.aio.msg import Msg

from events.envelope import Quarantined, Recorded
from events.log import LogError
from events.nats_connection import Connection, Denied, Patience, Session, Unanswered
from events.nats_inquiry import listened
from events.nats_reader import SILENCE_S, stored_message
from events.nats_streams import NANOS, ApiError, api
from events.subjects import EVENT_STREAM, WARRANT_HEADER, agent_consumer, entry, told_subjects

logger = logging.getLogger(__name__)

ACK_WAIT_S = 2
MAX_DELIVER = 20
PULL_BATCH = 100
PULL_EXPIRES_S = 30
CONSUMER_NOT_FOUND = 10014


def command_consumer_config(node: str, tasks: Collection[str] = (), after_seq: int = 0) -> dict[str, Any]:
    """The durable consumer of one agent that follows `tasks`, for what stands behind `after_seq`."""
    start = {"deliver_policy": "by_start_sequence", "opt_start_seq": after_seq + 1}
    return {
        "durable_name": agent_consumer(node),
        "description": f"the agent of {node}: its commands, and what is told once of the tasks there",
        "filter_subjects": told_subjects(node, tasks),
        **(start if after_seq else {"deliver_policy": "all"}),
        "ack_policy": "explicit",
        "ack_wait": ACK_WAIT_S * NANOS,
        "max_deliver": MAX_DELIVER,
        "max_ack_pending": 1,
        "mem_storage": True,
    }


def fitted(config: dict[str, Any], node: str, tasks: Collection[str]) -> dict[str, Any]:
    """A consumer's configuration, as the server tells it, with the filter for `tasks`. Where it begins cannot be
    changed."""
    ours = {name: value for name, value in config.items() if name != "filter_subject"}
    return ours | {"filter_subjects": told_subjects(node, tasks)}


class UnreadOrder(NamedTuple):
    """A command that this version cannot read, as far as it can be identified. `reason`: why it cannot."""

    command_id: str
    event_id: str
    reason: str


def unread_order(body: bytes, node: str, reason: str) -> UnreadOrder | None:
    """What there is to answer of a command to `node` that cannot be read; None where that cannot be told."""
    try:
        found = _named.decode(body)
    except msgspec.MsgspecError:
        return None
    start = f"{found.term}.{found.event.epoch}.{node}."
    if not re.fullmatch(re.escape(start) + "[0-9]{1,19}", found.event.command_id):
        return None
    return UnreadOrder(found.event.command_id, f"{found.producer}-{found.boot}-{found.number}", reason)


class _Order(msgspec.Struct):
    command_id: str
    epoch: int


class _Named(msgspec.Struct):
    """Of any command, of whatever schema, what names it."""

    producer: str
    boot: int
    number: int
    term: int
    event: _Order


_named = msgspec.msgpack.Decoder(_Named)


async def fit_command_consumer(
    connection: Connection, node: str, tasks: Collection[str] | None, after_seq: int = 0
) -> None:
    """Make sure that the node's consumer exists and has the filter for `tasks`; None: leave the one that it has. Asks
    before it writes: an agent may have no right to. `after_seq`: where one begins that is not there."""
    name = agent_consumer(node)
    try:
        info = await api(connection, f"CONSUMER.INFO.{EVENT_STREAM}.{name}", {})
    except ApiError as error:
        if error.code != CONSUMER_NOT_FOUND:
            raise
        config = command_consumer_config(node, tasks or (), after_seq)
    else:
        found = info["config"]
        if not found.get("mem_storage"):  # an older version made it; where it is kept cannot be changed
            await api(connection, f"CONSUMER.DELETE.{EVENT_STREAM}.{name}", {})
            config = command_consumer_config(node, tasks or (), max(after_seq, int(info["ack_floor"]["stream_seq"])))
        elif tasks is None or sorted(filters(found)) == sorted(told_subjects(node, tasks)):
            return
        else:
            config = fitted(found, node, tasks)
    await api(connection, f"CONSUMER.CREATE.{EVENT_STREAM}.{name}", {"stream_name": EVENT_STREAM, "config": config})


async def is_fitted(connection: Connection, node: str, tasks: Collection[str]) -> bool:
    """Whether the node's consumer is there and gives at least what is told of `tasks`. ApiError, Denied."""
    try:
        info = await api(connection, f"CONSUMER.INFO.{EVENT_STREAM}.{agent_consumer(node)}", {})
    except ApiError as error:
        if error.code != CONSUMER_NOT_FOUND:
            raise
        return False
    return set(told_subjects(node, tasks)) <= set(filters(info["config"]))


def filters(config: dict[str, Any]) -> list[str]:
    """The subjects that a consumer gives."""
    return list(config.get("filter_subjects") or [config.get("filter_subject", "")])


class NatsCommandFeed:
    """A CommandFeed: the commands to `node`, over every outage."""

    def __init__(
        self,
        connection: Connection,
        node: str,
        on_unread: Callable[[UnreadOrder], None] | None = None,
        *,
        makes_consumer: bool = True,
        on_interrupted: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_unread`: told of each command that this version cannot read, before it is acknowledged.
        `makes_consumer`: this login may, and does; else the coordinator. `on_interrupted`: called when the consumer is
        gone or does not answer."""
        self._on_interrupted = on_interrupted
        self._makes_consumer = makes_consumer
        self._connection = connection
        self._node = node
        self._on_unread = on_unread
        #: The last entry that was handled.
        self.handled_seq = 0
        self._tasks: frozenset[str] | None = None

    async def follow(self, tasks: Collection[str]) -> None:
        """See CommandFeed. Makes the consumer where there is none yet, or waits until the coordinator has; waits
        through outages.

        Logs an error each time that NATS refuses the consumer.
        """
        self._tasks = frozenset(tasks)
        if not self._makes_consumer:
            return await self._until_fitted()
        patience = Patience(f"what {self._node} follows")
        while True:
            try:
                return await fit_command_consumer(self._connection, self._node, self._tasks, self.handled_seq)
            except ApiError as error:
                logger.error(
                    "NODE %s CANNOT BE COMMANDED: NATS refuses its consumer (%s); trying again. "
                    "If a limit of consumers is reached, raise max_consumers of the stream and of the account",
                    self._node,
                    error,
                )
                await patience.lose(error)

    async def read(self) -> AsyncGenerator[Recorded, None]:
        """See CommandFeed. Waits through outages."""
        patience = Patience(f"commands for {self._node}")
        while True:
            try:
                if self._makes_consumer:
                    await fit_command_consumer(self._connection, self._node, self._tasks, self.handled_seq)
                else:
                    await self._until_fitted()
                session = await self._connection.session()
                async with aclosing(_pull(session, agent_consumer(self._node), patience.succeed)) as messages:
                    async for message in messages:
                        patience.succeed()
                        stored = stored_message(message)
                        found = entry(stored.seq, stored.recorded_at_us, stored.subject, stored.body)
                        if isinstance(found, Quarantined):
                            self._say_unread(found, stored.body)
                        elif found.seq > self.handled_seq:  # else its acknowledgement was lost
                            warrant = (message.headers or {}).get(WARRANT_HEADER, "")
                            try:
                                yield replace(found, warrant=warrant) if warrant else found
                            except BaseException:
                                await session.publish(message.reply, b"-NAK")  # again at once, not after ACK_WAIT_S
                                raise
                        self.handled_seq = max(self.handled_seq, found.seq)
                        await session.publish(message.reply, b"+ACK")
            except (_Silent, Unanswered, ApiError, nats.errors.Error) as error:
                logger.info("reading commands for %s was interrupted (%s); continuing", self._node, error)
                self._on_interrupted()
                await patience.lose(error)

    async def _until_fitted(self) -> None:
        patience = Patience(f"what {self._node} follows")
        told = False
        while True:
            why: Exception
            try:
                if await is_fitted(self._connection, self._node, self._tasks or ()):
                    return
                why = LogError(f"consumer {agent_consumer(self._node)} is not there, or lacks a task")
            except (ApiError, Denied) as error:
                why = error
            if not told:
                told = True
                logger.warning(
                    "waiting for the coordinator to prepare the commands of %s (%s); is it running, and is the node "
                    "enrolled?",
                    self._node,
                    why,
                )
            await patience.lose(why)

    def _say_unread(self, found: Quarantined, body: bytes) -> None:
        order = unread_order(body, self._node, found.reason)
        logger.error("command %d cannot be read%s: %s", found.seq, "" if order else " nor answered", found.reason)
        if order is not None and self._on_unread is not None and found.seq > self.handled_seq:
            self._on_unread(order)


class _Silent(Exception):
    """The consumer or its server is gone; why."""


class _Arrivals:
    """Messages in the order in which they came; None: the connection is lost."""

    def __init__(self) -> None:
        self._messages: deque[Msg | None] = deque()
        self._arrived = asyncio.Event()

    def put(self, message: Msg | None) -> None:
        self._messages.append(message)
        self._arrived.set()

    async def next(self) -> Msg:
        """The oldest one; _Silent where none comes."""
        if not await listened(self._arrived, SILENCE_S):
            raise _Silent(f"no heartbeat for {SILENCE_S:g} s")
        message = self._messages.popleft()
        if not self._messages:
            self._arrived.clear()
        if message is None:
            raise _Silent("connection lost")
        return message


async def _pull(session: Session, consumer: str, is_alive: Callable[[], None]) -> AsyncGenerator[Msg, None]:
    """Messages of a pull consumer until the session or the consumer is gone (_Silent). `is_alive`: called where the
    server says that there is nothing new."""
    inbox = session.client.new_inbox()
    arrivals = _Arrivals()

    async def on_message(message: Msg) -> None:
        arrivals.put(message)

    subscription = await session.client.subscribe(inbox, cb=on_message)
    lost = asyncio.create_task(session.lost.wait())
    lost.add_done_callback(lambda _: arrivals.put(None))
    ask = {"batch": PULL_BATCH, "expires": PULL_EXPIRES_S * NANOS, "idle_heartbeat": NANOS}
    try:
        while True:
            await session.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{EVENT_STREAM}.{consumer}", json.dumps(ask).encode(), reply=inbox
            )
            left = PULL_BATCH
            while left:
                message = await arrivals.next()
                if message.reply.startswith("$JS.ACK."):
                    left -= 1
                    yield message
                    continue
                headers = message.headers or {}
                status = headers.get("Status")
                if status == "408":  # this request has expired
                    break
                if status != "100":  # not a heartbeat
                    raise _Silent(f"the server says {status} {headers.get('Description', '')}")
                is_alive()
    finally:
        lost.cancel()
        if not session.lost.is_set():
            try:
                await subscription.unsubscribe()
            except nats.errors.Error:
                logger.debug("inbox %s ends with its session", inbox)
