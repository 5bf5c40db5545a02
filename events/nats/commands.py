"""One node's commands from NATS: a durable pull consumer, so the server remembers what was acknowledged.

Rules
-----
* The server remembers it in memory: on disk each command would cost it two more fsyncs, and a membership that a hundred
  nodes read two hundred, before the last of them has it (`docs/results/scale.md`). A server that is started anew has
  forgotten all consumers; each is made again behind what its agent has handled (`Heartbeat.read_seq`), or where that is
  not known, for all that the log holds: handlers know what they have done. An agent without memory has handled what
  stands before its NodeJoined.
* One command at a time (`max_ack_pending` 1): order holds even when one is delivered again.
* Broadcast decisions of the tasks that the node follows come by the same consumer: `follow` changes its filter. While
  an entry is not acknowledged the server looks at nothing behind it, so what matches the new filter there still comes.
  An idle consumer has passed over what did not match; that is never requested again.
* The filter is the server's: it outlives the agent. With each connection it is compared with what is followed.
* Where an agent has a key, it may neither make its consumer nor change it: a consumer can read everything. The
  coordinator does both, before the node needs it (`unicrond/service/event_log/consumers.py`); the agent compares, and
  waits.
* A command is acknowledged after its handler is done with it. If the agent is killed in between, its
  successor gets the command after at most ACK_WAIT_S; handlers act once per command id, so that a second
  delivery does no harm.
* Delivered MAX_DELIVER times and never acknowledged, a command is left behind: it would otherwise kill
  every agent that comes. The coordinator's deadline for it decides what then.
* Commands are asked for at a pace (READS): a backlog is no flood to the head, which counts what an agent asks.
* Silence of the server means: ask again, on the session of the moment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
import nats.errors
from msgspec.structs import replace
from nats.aio.msg import Msg

from unicrond.events.log.entrance import READS
from unicrond.events.log.event_log import LogError
from unicrond.events.log.subjects import EVENT_STREAM, WARRANT_HEADER, agent_consumer, entry, feed_subjects
from unicrond.events.nats.connection import Backoff, Connection, NoReply, PublishDenied, Session
from unicrond.events.nats.reader import SILENCE_S
from unicrond.events.nats.request_reply import wait_for_event
from unicrond.events.nats.stored_message import stored_message
from unicrond.events.nats.streams import NANOS, JetStreamError, api
from unicrond.events.wire.envelope import QuarantinedMessage, RecordedEvent

logger = logging.getLogger(__name__)

ACK_WAIT_S = 2
MAX_DELIVER = 20
#: A request is for one command, and not for long. Replicated servers do not see of a request from another account that
#: the agent which sent it is gone: it takes the next command, and nobody hears that before ACK_WAIT_S is over.
PULL_EXPIRES_S = 5
CONSUMER_NOT_FOUND = 10014


def command_consumer_config(node: str, tasks: Collection[str] = (), after_seq: int = 0) -> dict[str, Any]:
    """Return the configuration of the durable consumer of an agent that follows `tasks`, for entries after
    `after_seq`."""
    start = {"deliver_policy": "by_start_sequence", "opt_start_seq": after_seq + 1}
    return {
        "durable_name": agent_consumer(node),
        "description": f"the agent of {node}: its commands, and what is told once of the tasks there",
        "filter_subjects": feed_subjects(node, tasks),
        **(start if after_seq else {"deliver_policy": "all"}),
        "ack_policy": "explicit",
        "ack_wait": ACK_WAIT_S * NANOS,
        "max_deliver": MAX_DELIVER,
        "max_ack_pending": 1,
        "mem_storage": True,
    }


def with_filter(config: dict[str, Any], node: str, tasks: Collection[str]) -> dict[str, Any]:
    """Return a consumer's configuration, as the server reports it, with the filter for `tasks`.

    Where a consumer begins cannot be changed.
    """
    unfiltered = {name: value for name, value in config.items() if name != "filter_subject"}
    return unfiltered | {"filter_subjects": feed_subjects(node, tasks)}


class UnreadCommand(NamedTuple):
    """A command that this version cannot read, as far as it can be identified. `reason`: why it cannot be read."""

    command_id: str
    event_id: str
    reason: str


def unread_command(body: bytes, node: str, reason: str) -> UnreadCommand | None:
    """Identify a command to `node` that cannot be read, so that it can be answered; None where that is impossible."""
    try:
        identity = _identity_decoder.decode(body)
    except msgspec.MsgspecError:
        return None
    prefix = f"{identity.term}.{identity.event.epoch}.{node}."
    if not re.fullmatch(re.escape(prefix) + "[0-9]{1,19}", identity.event.command_id):
        return None
    return UnreadCommand(identity.event.command_id, f"{identity.producer}-{identity.boot}-{identity.number}", reason)


class _CommandFields(msgspec.Struct):
    command_id: str
    epoch: int


class _CommandIdentity(msgspec.Struct):
    """The fields that identify any command, of whatever schema."""

    producer: str
    boot: int
    number: int
    term: int
    event: _CommandFields


_identity_decoder = msgspec.msgpack.Decoder(_CommandIdentity)


async def ensure_command_consumer(
    connection: Connection, node: str, tasks: Collection[str] | None, after_seq: int = 0
) -> None:
    """Make sure that the node's consumer exists and has the filter for `tasks`; None: keep the filter that it has.

    Reads before it writes: an agent may not be allowed to write. `after_seq`: where a new consumer begins.
    """
    name = agent_consumer(node)
    try:
        info = await api(connection, f"CONSUMER.INFO.{EVENT_STREAM}.{name}", {})
    except JetStreamError as error:
        if error.code != CONSUMER_NOT_FOUND:
            raise
        config = command_consumer_config(node, tasks or (), after_seq)
    else:
        existing = info["config"]
        if not existing.get("mem_storage"):  # an older version made it; where it is kept cannot be changed
            await api(connection, f"CONSUMER.DELETE.{EVENT_STREAM}.{name}", {})
            config = command_consumer_config(node, tasks or (), max(after_seq, int(info["ack_floor"]["stream_seq"])))
        elif tasks is None or sorted(filters(existing)) == sorted(feed_subjects(node, tasks)):
            return
        else:
            config = with_filter(existing, node, tasks)
    await api(connection, f"CONSUMER.CREATE.{EVENT_STREAM}.{name}", {"stream_name": EVENT_STREAM, "config": config})


async def has_filter(connection: Connection, node: str, tasks: Collection[str]) -> bool:
    """Say whether the node's consumer exists and delivers at least the broadcasts of `tasks`. Raises JetStreamError,
    PublishDenied."""
    try:
        info = await api(connection, f"CONSUMER.INFO.{EVENT_STREAM}.{agent_consumer(node)}", {})
    except JetStreamError as error:
        if error.code != CONSUMER_NOT_FOUND:
            raise
        return False
    return set(feed_subjects(node, tasks)) <= set(filters(info["config"]))


def filters(config: dict[str, Any]) -> list[str]:
    """Return the subjects that a consumer delivers."""
    return list(config.get("filter_subjects") or [config.get("filter_subject", "")])


class NatsCommandFeed:
    """A CommandFeed: the commands to `node`, across every outage."""

    def __init__(
        self,
        connection: Connection,
        node: str,
        on_unread: Callable[[UnreadCommand], None] | None = None,
        *,
        makes_consumer: bool = True,
        on_interrupted: Callable[[], object] = lambda: None,
        after_seq: int = 0,
    ) -> None:
        """Create a feed.

        `on_unread`: called with each command that this version cannot read, before it is acknowledged.
        `makes_consumer`: this login may make the consumer, and does; else the coordinator makes it. `on_interrupted`:
        called when the consumer is gone or does not answer. `after_seq`: the last entry that was handled before.
        """
        self._on_interrupted = on_interrupted
        self._makes_consumer = makes_consumer
        self._connection = connection
        self._node = node
        self._on_unread = on_unread
        #: The last entry that was handled.
        self.handled_seq = after_seq
        self._tasks: frozenset[str] | None = None
        #: Until when the commands that were asked for are paid for (Bucket).
        self._paid_us = 0

    async def follow(self, tasks: Collection[str]) -> None:
        """Set the tasks to follow (CommandFeed.follow).

        Makes the consumer where there is none yet, or waits until the coordinator has made it; waits through outages.
        Logs an error each time that NATS refuses the consumer.
        """
        self._tasks = frozenset(tasks)
        if not self._makes_consumer:
            return await self._wait_for_consumer()
        backoff = Backoff(f"what {self._node} follows")
        while True:
            try:
                return await ensure_command_consumer(self._connection, self._node, self._tasks, self.handled_seq)
            except JetStreamError as error:
                logger.error(
                    "NODE %s CANNOT BE COMMANDED: NATS refuses its consumer (%s); trying again. "
                    "If a limit of consumers is reached, raise max_consumers of the stream and of the account",
                    self._node,
                    error,
                )
                await backoff.wait_after(error)

    async def read(self) -> AsyncGenerator[RecordedEvent, None]:
        """Yield commands and broadcasts (CommandFeed.read). Waits through outages."""
        backoff = Backoff(f"commands for {self._node}")
        while True:
            try:
                if self._makes_consumer:
                    await ensure_command_consumer(self._connection, self._node, self._tasks, self.handled_seq)
                else:
                    await self._wait_for_consumer()
                session = await self._connection.session()
                pulled = _pull(session, agent_consumer(self._node), backoff.reset, self._keep_pace)
                async with aclosing(pulled) as messages:
                    async for message in messages:
                        backoff.reset()
                        stored = stored_message(message)
                        delivery = entry(stored.seq, stored.recorded_at_us, stored.subject, stored.body)
                        if isinstance(delivery, QuarantinedMessage):
                            self._say_unread(delivery, stored.body)
                        elif delivery.seq > self.handled_seq:  # else its acknowledgement was lost
                            warrant = (message.headers or {}).get(WARRANT_HEADER, "")
                            try:
                                yield replace(delivery, warrant=warrant) if warrant else delivery
                            except BaseException:
                                await session.publish(message.reply, b"-NAK")  # again at once, not after ACK_WAIT_S
                                raise
                        self.handled_seq = max(self.handled_seq, delivery.seq)
                        await session.publish(message.reply, b"+ACK")
            except (_ConsumerSilent, NoReply, JetStreamError, nats.errors.Error) as error:
                logger.info("reading commands for %s was interrupted (%s); continuing", self._node, error)
                self._on_interrupted()
                await backoff.wait_after(error)

    async def _keep_pace(self) -> None:
        """Wait until the next command may be asked for."""
        loop = asyncio.get_running_loop()
        if pause_us := READS.pause_us(self._paid_us, int(loop.time() * 1e6)):
            await asyncio.sleep(pause_us / 1e6)
        self._paid_us = READS.paid_us(self._paid_us, int(loop.time() * 1e6))

    async def _wait_for_consumer(self) -> None:
        """Wait until the coordinator has made the consumer with the filter that this node needs."""
        backoff = Backoff(f"what {self._node} follows")
        has_warned = False
        while True:
            problem: Exception
            try:
                if await has_filter(self._connection, self._node, self._tasks or ()):
                    return
                problem = LogError(f"consumer {agent_consumer(self._node)} is not there, or lacks a task")
            except (JetStreamError, PublishDenied) as error:
                problem = error
            if not has_warned:
                has_warned = True
                logger.warning(
                    "waiting for the coordinator to prepare the commands of %s (%s); is it running, and is the node "
                    "enrolled?",
                    self._node,
                    problem,
                )
            await backoff.wait_after(problem)

    def _say_unread(self, message: QuarantinedMessage, body: bytes) -> None:
        """Log a command that cannot be read, and report it to `on_unread` where it can be identified."""
        order = unread_command(body, self._node, message.reason)
        logger.error("command %d cannot be read%s: %s", message.seq, "" if order else " nor answered", message.reason)
        if order is not None and self._on_unread is not None and message.seq > self.handled_seq:
            self._on_unread(order)


class _ConsumerSilent(Exception):
    """The consumer or its server is gone; the text says why."""


class _Arrivals:
    """A queue of messages in the order in which they came; None: the connection is lost."""

    def __init__(self) -> None:
        self._messages: deque[Msg | None] = deque()
        self._arrived = asyncio.Event()

    def add(self, message: Msg | None) -> None:
        """Add a message, and wake the reader."""
        self._messages.append(message)
        self._arrived.set()

    async def next(self) -> Msg:
        """Return the oldest message. Raises _ConsumerSilent where none comes."""
        if not await wait_for_event(self._arrived, SILENCE_S):
            raise _ConsumerSilent(f"no heartbeat for {SILENCE_S:g} s")
        message = self._messages.popleft()
        if not self._messages:
            self._arrived.clear()
        if message is None:
            raise _ConsumerSilent("connection lost")
        return message


async def _pull(
    session: Session, consumer: str, is_alive: Callable[[], None], keep_pace: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Msg, None]:
    """Yield messages of a pull consumer until the session or the consumer is gone (_ConsumerSilent).

    `is_alive`: called where the server reports that there is nothing new. `keep_pace`: waits before each request.
    """
    inbox = session.client.new_inbox()
    arrivals = _Arrivals()

    async def on_message(message: Msg) -> None:
        """Queue a message."""
        arrivals.add(message)

    subscription = await session.client.subscribe(inbox, cb=on_message)
    loss_watch = asyncio.create_task(session.disconnected.wait())
    loss_watch.add_done_callback(lambda _: arrivals.add(None))
    pull_request = {"batch": 1, "expires": PULL_EXPIRES_S * NANOS, "idle_heartbeat": NANOS}
    try:
        while True:
            await keep_pace()
            await session.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{EVENT_STREAM}.{consumer}", json.dumps(pull_request).encode(), reply=inbox
            )
            while True:
                message = await arrivals.next()
                if message.reply.startswith("$JS.ACK."):
                    yield message
                    break
                headers = message.headers or {}
                status = headers.get("Status")
                if status == "408":  # this request has expired
                    break
                if status != "100":  # not a heartbeat
                    raise _ConsumerSilent(f"the server says {status} {headers.get('Description', '')}")
                is_alive()
    finally:
        loss_watch.cancel()
        if not session.disconnected.is_set():
            try:
                await subscription.unsubscribe()
            except nats.errors.Error:
                logger.debug("inbox %s ends with its session", inbox)
