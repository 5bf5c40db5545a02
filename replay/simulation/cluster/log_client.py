"""The log's clients on one machine: event log, heartbeats, commands. They repeat a request until it is answered.

An `Endpoint` is one process's connection. Its owner may crash at the boundaries of its next append: "before" it is
sent, "sent" (the request is in flight), "acknowledged" (the log holds it, nothing follows from that yet); "part": of
the next one with a part of a membership, once the log holds that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unicrond.events.log.event_log import Fence, Fenced, claimed_term, encode_batch
from unicrond.events.log.skips import skips_in
from unicrond.events.vocabulary import Heartbeat, MembershipPart
from unicrond.events.wire.codec import COORDINATOR, encode
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.replay.simulation.checks.checker import InvariantChecker
from unicrond.replay.simulation.cluster.log_server import FencedReply, LogServer, Reply
from unicrond.replay.simulation.models.network import Link

#: A real client asks again after so long without an answer.
ANSWER_S = 0.5
Boundary = Literal["", "before", "sent", "acknowledged", "part"]
#: Called after every append that was acknowledged.
AcknowledgementCallback = Callable[[Sequence[Envelope], Sequence[int]], None]


@dataclass(frozen=True)
class ClusterParts:
    """What all machines of one simulated cluster share: the event loop, the log and the heartbeats, the checker of all
    that becomes durable; and the times that their agents are configured with.

    `lease_s`: how long workers and fork servers go on without an agent. `start_max_age_s`: of an order to start a
    worker that an agent still obeys."""

    loop: asyncio.AbstractEventLoop
    server: LogServer
    beats: Beats
    checker: InvariantChecker
    heartbeat_s: float
    lease_s: float
    start_max_age_s: float


class Endpoint:
    """One process's connection to the log: an EventLog over one link. `crash`: ends that process, which sets it."""

    def __init__(self, server: LogServer, link: Link, on_acknowledged: AcknowledgementCallback) -> None:
        self._server = server
        self.link = link
        self._on_acknowledged = on_acknowledged
        self.crash: Callable[[], None] = lambda: None
        self.crash_at: Boundary = ""

    async def append(self, envelopes: Sequence[Envelope], *, fence: Fence | None = None) -> list[int]:
        """Append, or crash before the request, after it is sent, or after its answer; see EventLog."""
        bodies = encode_batch(envelopes)
        await self._boundary("before")
        if self.crash_at == "sent":
            self.link.send(lambda: self._server.append(envelopes, bodies, fence, lambda _: None))
            await self._boundary("sent")
        seqs: list[int] = await self._ask(lambda reply: self._server.append(envelopes, bodies, fence, reply))
        self._on_acknowledged(envelopes, seqs)
        await self._boundary("acknowledged")
        if any(isinstance(envelope.event, MembershipPart) for envelope in envelopes):
            await self._boundary("part")
        return seqs

    async def claim_term(self, envelope: Envelope) -> Fence:
        """Claim a term; see EventLog."""
        claimed_term(envelope)
        encode(envelope)
        fence: Fence = await self._ask(lambda reply: self._server.claim(envelope, reply))
        self._on_acknowledged([envelope], [fence.seq])
        return fence

    async def skips(self) -> dict[int, str]:
        """Return the skipped entries, in no time; see EventLog."""
        return skips_in(self._server.entries)

    async def last_seq(self) -> int:
        """Return the newest entry's number; see EventLog."""
        return int(await self._ask(self._server.last_seq))

    async def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
        """Yield entries, which travel over the link; a cut link delays them. See EventLog."""
        seq, server = after_seq, self._server
        while until_seq is None or seq < until_seq:
            growth = server.growth
            if self._reaches() and seq < len(server.entries):
                await asyncio.sleep(self.link.travel_s())
                if not self._reaches():
                    continue
                end_seq = len(server.entries) if until_seq is None else min(until_seq, len(server.entries))
                for entry in server.entries[seq:end_seq]:
                    seq += 1
                    yield entry
            elif not self.link.carries(back=True):
                await asyncio.sleep(0.1)  # a cut link does not announce its end
            else:
                await growth.wait()

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _reaches(self) -> bool:
        return self._server.up and self.link.carries(back=True)

    async def _ask(self, request: Callable[[Reply], None]) -> Any:
        loop = asyncio.get_running_loop()
        while True:
            future: asyncio.Future[object] = loop.create_future()

            def take(answer: object, into: asyncio.Future[object] = future) -> None:
                """Set the answer, unless one came before."""
                if not into.done():
                    into.set_result(answer)

            def reply(answer: object, take: Callable[[object], None] = take) -> None:
                """Send the answer back over the link."""
                self.link.send(lambda: take(answer), back=True)

            self.link.send(lambda reply=reply: request(reply))  # type: ignore[misc]
            ready, _ = await asyncio.wait([future], timeout=ANSWER_S)
            if ready:
                answer = future.result()
                if isinstance(answer, FencedReply):
                    raise Fenced(answer.reason)
                return answer

    async def _boundary(self, boundary: Boundary) -> None:
        if self.crash_at == boundary:
            self.crash_at = ""
            self.crash()
            await asyncio.get_running_loop().create_future()  # nothing more of the owner happens


class Beats:
    """The heartbeat stream, for all `BeatEnd`s."""

    def __init__(self, server: LogServer, wall_us: Callable[[], int]) -> None:
        self.server = server
        self.wall_us = wall_us
        self.seq = 0
        self.listeners: dict[int, tuple[Link, Callable[[RecordedEvent], None]]] = {}
        self._next = 0
        #: Per node, the boot of its last beat; and agents that listen for duplicates of their name.
        self.last_boot: dict[str, int] = {}
        self._boot_listeners: dict[str, dict[int, tuple[Link, Callable[[int], object]]]] = {}

    def take(self, envelope: Envelope) -> None:
        """Distribute a beat that has reached the server."""
        if self.server.up:
            self.seq += 1
            beat = RecordedEvent(self.seq, self.wall_us(), envelope)
            for link, callback in list(self.listeners.values()):
                link.send(lambda callback=callback: callback(beat), back=True)  # type: ignore[misc]
            event = envelope.event
            if isinstance(event, Heartbeat):
                self.last_boot[event.node] = event.agent_boot
                listeners = self._boot_listeners.get(event.node, {})
                # An agent's own beats change nothing for it: one agent of a name costs no message.
                is_heard = len(listeners) > 1 or event.node == COORDINATOR
                for listener_link, on_boot in list(listeners.values()) if is_heard else ():
                    boot = event.agent_boot
                    listener_link.send(lambda on_boot=on_boot, boot=boot: on_boot(boot), back=True)  # type: ignore[misc]

    def listen(self, link: Link, callback: Callable[[RecordedEvent], None]) -> int:
        """Call back on beats from now on; return a number by which to stop."""
        self._next += 1
        self.listeners[self._next] = (link, callback)
        return self._next

    def listen_to(self, node: str, link: Link, callback: Callable[[int], object]) -> Callable[[], object]:
        """Call back with the boots in the beats of one name; return the function that stops it."""
        self._next += 1
        number = self._next
        self._boot_listeners.setdefault(node, {})[number] = (link, callback)
        return lambda: self._boot_listeners[node].pop(number, None)


class BeatEnd:
    """A BeatLog over one link. `on_echo`: called with the number of each beat that comes back."""

    def __init__(self, beats: Beats, link: Link, on_echo: Callable[[int], object] = lambda _: None) -> None:
        self._beats = beats
        self._link = link
        self._on_echo = on_echo

    async def publish(self, envelope: Envelope) -> None:
        """Send a beat, which a cut link loses; see BeatLog. Raises TypeError on anything but a Heartbeat."""
        if not isinstance(envelope.event, Heartbeat):
            raise TypeError(f"envelope.event: expected a Heartbeat, got {type(envelope.event).__name__}")
        self._link.send(lambda: self._beats.take(envelope))
        if self._link.hears:  # a connection repeats what it loses: where it carries back, each beat comes back at last
            self._on_echo(envelope.number)

    async def subscribe(self) -> AsyncGenerator[Entry, None]:
        """Yield the beats from now on; see BeatLog."""
        queue: asyncio.Queue[RecordedEvent] = asyncio.Queue()
        number = self._beats.listen(self._link, queue.put_nowait)
        try:
            while True:
                yield await queue.get()
        finally:
            del self._beats.listeners[number]


class CommandEnd:
    """A CommandFeed over one link: one entry is in flight at a time."""

    def __init__(self, server: LogServer, link: Link, node: str) -> None:
        self._server = server
        self._link = link
        self._node = node
        self._tasks: frozenset[str] = frozenset()
        self._handled_seq = 0

    async def follow(self, tasks: Collection[str]) -> None:
        """Follow the tasks' memberships; see CommandFeed."""
        self._tasks = task_names = frozenset(tasks)
        number = next(self._server.requests)
        await self._send_until_received(lambda: self._server.follow(self._node, task_names, number, self._handled_seq))

    async def read(self) -> AsyncGenerator[RecordedEvent, None]:
        """Yield the entries for the node; see CommandFeed."""
        server, link = self._server, self._link
        while True:
            growth = server.growth
            if not self._reaches():
                await asyncio.sleep(0.1)
            elif (entry := server.next_for(self._node, self._tasks, self._handled_seq)) is None:
                await growth.wait()
            else:
                await asyncio.sleep(link.travel_s())
                if not self._reaches():
                    continue
                if entry.seq > self._handled_seq:
                    yield entry
                    self._handled_seq = entry.seq
                seq = entry.seq
                await self._send_until_received(lambda seq=seq: server.acknowledge(self._node, seq))  # type: ignore[misc]

    def _reaches(self) -> bool:
        return self._server.up and self._link.carries(back=True)

    async def _send_until_received(self, request: Callable[[], None]) -> None:
        """Repeat the request until the server has received it; that may be late, or only after the entry has been
        delivered again."""
        arrived = asyncio.Event()

        def arrive() -> None:
            """Execute the request, if the server is up."""
            if self._server.up:
                request()
                arrived.set()

        while not arrived.is_set():
            self._link.send(arrive)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await arrived.wait()
            except TimeoutError:
                continue
