"""The coordinator prepares what each node reads: one consumer for each agent, with the tasks that it follows.

Rules
-----
* An agent with a key may neither make its consumer nor change it (events/trust/logins.py). It waits until the consumer
  is there before it joins, and until a task is in its filter before it acknowledges the command that starts the task's
  first worker on its node. So a node is never planned for that cannot be commanded, and misses nothing.
* A task comes into a node's filter before the command that brings it there is appended (`before`). What is written
  behind the command is then matched, however soon it comes; what came before it concerns no worker of the node.
* A task leaves a filter when it has ended, and not when its workers left the node: to hear of a task too long costs a
  few messages, too short a worker.
* The server forgets consumers (all, where it was restarted; one, by a `nats consumer rm`) and others change them (an
  older agent, with the shared login). So all are compared at the start of a term, when a node is enrolled, when the
  connection was lost, and every LOOK_EVERY_S. One that is made again begins behind what its agent's last beat says that
  it has read: earlier costs deliveries, later could cost a command. A node that has joined before, and whose agent has
  not said yet what it has read, waits for that up to BEAT_WAIT_S, unless it is to start a worker: its past is long.
* A node that is not enrolled has an agent with the shared login, which makes and fits its own; both at once would undo
  each other's work.
* A consumer that NATS refuses does not stop decisions: the refusal is logged, and tried again; its agent waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.events.log.event_log import LogError
from unicrond.events.log.subjects import EVENT_STREAM, agent_consumer, feed_subjects
from unicrond.events.nats.commands import command_consumer_config, filters, with_filter
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.streams import api, consumers_of
from unicrond.events.vocabulary import AnyEvent, StartWorker, StartWorkers

log = logging.getLogger("unicrond")

LOOK_EVERY_S = 5.0
#: A large cluster's consumers are compared less often: each takes some of the server's time and ours.
LOOK_PER_NODE_S = 0.01
#: How long a consumer that is gone may wait for its agent's beat.
BEAT_WAIT_S = 5.0
#: Requests under way at a time.
_AT_ONCE = 32


class Consumers:
    """Prepares the agents' consumers. `state`: the coordinator's, as folded. `read_seq`: the last entry that a node's
    agent has read. `leads`: whether the coordinator decides; a standby leaves consumers alone. `before` and `look` may
    run side by side."""

    def __init__(
        self,
        connection: Connection,
        state: Callable[[], ClusterState],
        read_seq: Callable[[str], int],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._connection = connection
        self._state = state
        self._read_seq = read_seq
        self._leads = leads
        self._follows: dict[str, frozenset[str]] = {}
        #: The configurations that the server last gave or took, by node.
        self._configs: dict[str, dict[str, Any]] = {}
        self._busy = asyncio.Lock()
        self._refused: set[str] = set()
        self._has_looked = False
        #: Nodes whose consumer waits for a beat, with the time until which it does; 0: that is over.
        self._waiting: dict[str, float] = {}

    def forget(self) -> None:
        """Forget what is known of the consumers: a term begins, and another head may have changed them."""
        self._follows.clear()
        self._has_looked = False

    async def before(self, events: Iterable[AnyEvent]) -> None:
        """Prepare the consumers for these events, or log why that failed. Waits through outages."""
        try:
            if not self._has_looked:
                await self.look()
            await self._prepare(events)
        except LogError as error:
            log.error("cannot prepare the agents' consumers: %s", error)

    async def _prepare(self, events: Iterable[AnyEvent]) -> None:
        new: dict[str, set[str]] = {}
        for event in events:
            if isinstance(event, StartWorker | StartWorkers):
                task = event.spec.name
                if event.node in self._state().logins and task not in self._follows.get(event.node, frozenset()):
                    new.setdefault(event.node, set()).add(task)
        if new:
            async with self._busy:
                await self._fit({node: self._active_tasks(node) | tasks for node, tasks in new.items()})

    async def look(self) -> None:
        """Compare all consumers with the state, and fit those that lack something."""
        async with self._busy:
            self._configs = await self._fetch_configs()
            waiting, self._waiting = self._waiting, {}
            targets = following(self._state())
            lacking = {}
            for node, tasks in targets.items():
                follows = self._active_tasks(node) | tasks
                if set(feed_subjects(node, follows)) <= set(filters(self._configs.get(node, {}))):
                    self._follows[node] = follows
                elif self._waits_for_beat(node, waiting.get(node)):
                    self._follows.pop(node, None)
                else:
                    lacking[node] = follows
            await self._fit(lacking)
            self._has_looked = True

    async def run(self) -> None:
        """Compare the consumers now and then, and whenever a node is enrolled; until cancelled."""
        while True:
            enrolled, session = self._state().logins, await self._connection.session()
            try:
                if self._leads():
                    await self.look()
            except LogError as error:
                log.error("cannot compare the agents' consumers: %s", error)
            for _ in range(int(max(LOOK_EVERY_S, LOOK_PER_NODE_S * len(enrolled)) / 0.25)):
                await asyncio.sleep(0.25)
                is_due = self._leads() and (session.disconnected.is_set() or not self._has_looked or self._has_waited())
                if self._state().logins is not enrolled or is_due:
                    break

    def _waits_for_beat(self, node: str, until_s: float | None) -> bool:
        """Return whether the node's consumer, which is gone, is made later: its agent is to say first what it has
        read. `until_s`: until when it waits already."""
        if node in self._configs or node not in self._state().nodes or self._read_seq(node):
            return False
        now_s = time.monotonic()
        until_s = now_s + BEAT_WAIT_S if until_s is None else until_s
        self._waiting[node] = until_s if now_s < until_s else 0.0
        return now_s < until_s

    def _has_waited(self) -> bool:
        now_s = time.monotonic()
        waiting = {node: until_s for node, until_s in self._waiting.items() if until_s}
        return any(self._read_seq(node) or now_s >= until_s for node, until_s in waiting.items())

    def _begin_seq(self, node: str) -> int:
        """Return the entry behind which a new consumer of the node begins. What an agent has read beyond the log's end
        stood in another log, of which this one is a shorter restore: orders come under its numbers again."""
        return min(self._read_seq(node), self._state().seq)

    def _active_tasks(self, node: str) -> frozenset[str]:
        """Return those of the tasks that the node follows that go on."""
        tasks = self._state().tasks
        follows = self._follows.get(node, frozenset())
        return frozenset(name for name in follows if name not in tasks or tasks[name].status is TaskStatus.ACTIVE)

    async def _fetch_configs(self) -> dict[str, dict[str, Any]]:
        """Return the configurations of all agents' consumers, by node."""
        prefix = agent_consumer("")
        consumers = await consumers_of(self._connection, EVENT_STREAM)
        return {
            consumer["name"].removeprefix(prefix): consumer["config"]
            for consumer in consumers
            if consumer["name"].startswith(prefix)
        }

    async def _fit(self, targets: Mapping[str, frozenset[str]]) -> None:
        room = asyncio.Semaphore(_AT_ONCE)

        async def fit(node: str, tasks: frozenset[str]) -> None:
            """Create or change the consumer of one node, or log that NATS refuses it."""
            current = self._configs.get(node)
            config = (
                with_filter(current, node, tasks)
                if current
                else command_consumer_config(node, tasks, self._begin_seq(node))
            )
            request = {"stream_name": EVENT_STREAM, "config": config}
            async with room:
                try:
                    await api(self._connection, f"CONSUMER.CREATE.{EVENT_STREAM}.{agent_consumer(node)}", request)
                except LogError as error:
                    if node not in self._refused:
                        self._refused.add(node)
                        log.error("NODE %s CANNOT BE COMMANDED: NATS refuses its consumer (%s)", node, error)
                    return
            self._refused.discard(node)
            self._configs[node] = config
            self._follows[node] = tasks

        await asyncio.gather(*(fit(node, tasks) for node, tasks in targets.items()))


def following(state: ClusterState) -> dict[str, frozenset[str]]:
    """Return each node that is enrolled with its tasks: those that have workers there and go on."""
    follows: dict[str, set[str]] = {node: set() for node in state.logins}
    for task in state.active:
        for worker in task.workers.values():
            if worker.node in follows:
                follows[worker.node].add(task.name)
    return {node: frozenset(tasks) for node, tasks in follows.items()}
