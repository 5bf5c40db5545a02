"""Keeps the agent connected to the event log: the connection to NATS, the log's guard, commands, observations and
heartbeats.

Rules
-----
* Workers need nothing of this: they start, train and are adopted while NATS is away.
* The schema of the coordinator is asked for before the first word, and again where another log stands in its place.
* The node follows its tasks' entries before it joins: one that cannot be commanded must not be planned for.
* Commands are taken and observations appended only while the log is the known one (event_log_guard.py); when another
  takes its place, both end together, and begin anew there.
* An agent whose own key is refused for good ends once no worker needs it (duplicate_agent.py).
* Beats begin with the inventory, before the node joins: an older agent of the name is to hear them.

How observations are repeated: outbox.py. Two agents of one name: duplicate_agent.py. What a command does: the core.
Requests that are no commands: node_queries.py. The machine's Node object: kubernetes/.
"""

from __future__ import annotations

import asyncio
import logging
import time

from unicrond.agents.core.known_event_log import difference
from unicrond.agents.core.state import LogSeen, MachineSaw, Unreadable
from unicrond.agents.host import host_resources as host
from unicrond.agents.kubernetes.node_object import NodeObject
from unicrond.agents.shell.departure import Departure
from unicrond.agents.shell.duplicate_agent import LOOK_AT_REFUSALS_S, DuplicateAgents, DuplicateWatch, is_shut_out
from unicrond.agents.shell.event_log_guard import LogGuard
from unicrond.agents.shell.memberships import KnownAuthorities
from unicrond.agents.shell.node_queries import NodeQueries
from unicrond.agents.shell.options import Options
from unicrond.agents.shell.run_dir import RunDir
from unicrond.agents.shell.shell import Shell
from unicrond.events.nats.commands import NatsCommandFeed, UnreadCommand
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.terms import Terms
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.schemas import SCHEMA, spoken_schema

logger = logging.getLogger("unicrond.agents")


class EventLogKeeper:
    """Keeps one agent connected to the event log. Call `run` once."""

    def __init__(
        self, shell: Shell, options: Options, run_dir: RunDir, departure: Departure, queries: NodeQueries
    ) -> None:
        """Connect to nothing yet. `departure` hears of other agents of the name."""
        self._shell = shell
        self._options = options
        self._departure = departure
        self._queries = queries
        boot = shell.state.config.agent_boot
        self._duplicates = DuplicateAgents(boot, run_dir.previous_boot, options.heartbeat_s)
        self._look_for_duplicates = asyncio.Event()
        self._authorities = KnownAuthorities(options.login)
        self._connection: Connection | None = None
        self._guard: LogGuard | None = None

    @property
    def trouble(self) -> str:
        """Return why NATS or the log cannot be used, in one line; "" where they can, or the log is still to be
        asked."""
        if self._connection is None:
            return "waits for NATS"
        if self._connection.trouble:
            return self._connection.trouble
        return f"waits for a person: {self._guard.trouble}" if self._guard is not None and self._guard.trouble else ""

    @property
    def is_sure(self) -> bool:
        """Return whether the log has proved to be the known one on the present connection."""
        return self._guard is not None and self._guard.is_sure

    def look_for_agent(self, boot: int) -> None:
        """Look whether an agent of this later boot, for which there is a command, is at work."""
        logger.warning("a command is for a later agent of this name (boot %d): it is left to that one", boot)
        self._duplicates.note_logged(boot, time.monotonic())
        self._look_for_duplicates.set()

    async def run(self) -> None:
        """Connect to NATS, and run everything that needs it, without end."""
        shell, options = self._shell, self._options
        connection = self._connection = Connection(options.nats, name=f"agent {options.node}", login=options.login)
        await connection.start(None)
        try:
            terms = Terms(connection, self._coordinator_started, lambda: guard.look())
            guard = self._guard = LogGuard(
                connection, terms, lambda: shell.state.memory, lambda: shell.read_seq, self._may_take_any_log
            )
            shell.outbox.on_backward = guard.look
            await terms.ask()  # before the first word: the coordinator must be able to read it
            watch = DuplicateWatch(
                connection,
                options.node,
                self._duplicates,
                self._look_for_duplicates,
                self._departure.supersede,
                self._departure.outrun,
                shell.heard_own_beat,
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(watch.run())
                group.create_task(self._send_beats(connection))
                group.create_task(terms.follow())
                group.create_task(self._queries.serve(connection))
                group.create_task(self._end_when_shut_out(connection))
                if options.kubernetes is not None:
                    group.create_task(self._keep_node_object(connection, options.kubernetes))
                await watch.alone(shell.has_inventory)
                while True:
                    log_seen = await guard.wait_for_log()
                    if difference(shell.state.memory, log_seen, shell.read_seq):
                        terms.forget()
                        await terms.ask()
                    await self._use_log(connection, guard, log_seen)
        finally:
            await connection.close()

    async def _use_log(self, connection: Connection, guard: LogGuard, log_seen: LogSeen) -> None:
        """Act by this log and append to it, until another stands in its place. `log_seen`: its state by the last
        answer."""
        joins = asyncio.Event()

        async def work() -> None:
            # With a key it has no right to make the consumer: the coordinator makes and fits it.
            feed = NatsCommandFeed(
                connection,
                self._options.node,
                on_unread=self._cannot_read,
                makes_consumer=self._options.login.key is None,
                on_interrupted=guard.look,
                after_seq=self._shell.begin_reading(log_seen),
            )
            # Before the node joins: one that cannot be commanded must not be planned for.
            await feed.follow(self._shell.tasks_here(log_seen))
            joins.set()
            self._shell.feed(log_seen)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._shell.outbox.run(NatsEventLog(connection, session_gate=guard.trusts)))
                group.create_task(self._take_commands(feed))

        async with asyncio.TaskGroup() as group:
            working = group.create_task(work())
            await guard.wait_until_replaced(lambda now: self._shell.feed(now) if joins.is_set() else None)
            working.cancel()

    async def _keep_node_object(self, connection: Connection, node_object: NodeObject) -> None:
        from unicrond.agents.kubernetes.api import NodeApi
        from unicrond.agents.kubernetes.keeper import KubernetesNode

        api = NodeApi(node_object.url, node_object.name, node_object.account)
        keeper = KubernetesNode(
            api,
            self._options.node,
            node_object.cordon_means,
            lambda place: self._shell.feed(MachineSaw(hold=place.hold, reason=place.reason)),
        )
        await keeper.run(connection)

    async def _end_when_shut_out(self, connection: Connection) -> None:
        if self._options.login.key is None:  # a shared login: its new password comes by itself
            return
        denied_s: float | None = None
        while not is_shut_out(denied_s, self._options.lease_s, len(self._shell.state.memory.workers)):
            await asyncio.sleep(LOOK_AT_REFUSALS_S)
            since_s = connection.denied_since_s
            denied_s = None if since_s is None else time.monotonic() - since_s
        self._departure.shut_out(connection.trouble)

    def _may_take_any_log(self) -> bool:
        """Return whether this agent has just begun, and nothing of another log is left here, or a person allows it."""
        if self._shell.has_joined.is_set() or not self._shell.has_inventory.is_set():
            return False
        memory = self._shell.state.memory
        return self._options.new_log or not (memory.workers or memory.waiting_starts or self._shell.state.holds)

    def _coordinator_started(self, event: CoordinatorStarted) -> None:
        schema = min(SCHEMA, spoken_schema(event.version))
        if schema != self._shell.outbox.schema:
            logger.info("the coordinator of term %d reads schema %d", event.term, schema)
            self._shell.outbox.schema = schema

    async def _send_beats(self, connection: Connection) -> None:
        beats = NatsBeatLog(connection)
        await self._shell.has_inventory.wait()  # before that the node can do nothing
        loop = asyncio.get_running_loop()
        due_s, session = loop.time(), connection.live_session
        while True:
            if session is None or connection.live_session is not session:
                session = connection.live_session
                self._shell.hears_anew()
            outbox_backlog, outbox_backlog_us = self._shell.outbox.backlog(time.monotonic())
            envelope = self._shell.beat(
                load_milli=host.load_milli(),
                memory_free_bytes=host.memory_free_bytes(),
                outbox_backlog=outbox_backlog,
                outbox_backlog_us=outbox_backlog_us,
                authorities=self._authorities(),
            )
            await beats.publish(envelope)
            due_s = max(due_s + self._options.heartbeat_s, loop.time())
            await asyncio.sleep(due_s - loop.time())

    async def _take_commands(self, feed: NatsCommandFeed) -> None:
        await self._shell.has_joined.wait()
        await self._shell.take_entries(feed)

    def _cannot_read(self, order: UnreadCommand) -> None:
        self._shell.feed(Unreadable(command_id=order.command_id, cause=order.event_id, reason=order.reason))
