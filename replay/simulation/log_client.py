"""The log's clients on one machine: event log, heartbeats, commands. They ask again until they are answered.

An `Endpoint` is one process's connection. Its owner may be made to crash at the boundaries of its next append:
"before" it is sent, "sent" (it is under way), "acknowledged" (the log holds it, nothing was done about that yet);
"part": of the next one with a part of a membership, once the log holds that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Any, Literal

from events.codec import COORDINATOR, encode
from events.envelope import Entry, Envelope, Recorded
from events.log import Fence, Fenced, claimed_term, encode_batch
from events.skips import skips_in
from events.vocabulary import Heartbeat, MembershipPart
from replay.simulation.log_server import FencedReply, LogServer, Reply
from replay.simulation.network import Link

#: A real client asks again after so long without an answer.
ANSWER_S = 0.5
Boundary = Literal["", "before", "sent", "acknowledged", "part"]
#: Told of every append that was acknowledged.
Witness = Callable[[Sequence[Envelope], Sequence[int]], None]


class Endpoint:
    """An EventLog. `crash`: ends its owner; set by the owner."""

    def __init__(self, server: LogServer, link: Link, witness: Witness) -> None:
        self._server = server
        self.link = link
        self._witness = witness
        self.crash: Callable[[], None] = lambda: None
        self.crash_at: Boundary = ""

    async def append(self, envelopes: Sequence[Envelope], *, fence: Fence | None = None) -> list[int]:
        """See EventLog. The owner may crash before the request, after it is sent, or after its answer."""
        bodies = encode_batch(envelopes)
        await self._boundary("before")
        if self.crash_at == "sent":
            self.link.send(lambda: self._server.append(envelopes, bodies, fence, lambda _: None))
            await self._boundary("sent")
        seqs: list[int] = await self._ask(lambda reply: self._server.append(envelopes, bodies, fence, reply))
        self._witness(envelopes, seqs)
        await self._boundary("acknowledged")
        if any(isinstance(envelope.event, MembershipPart) for envelope in envelopes):
            await self._boundary("part")
        return seqs

    async def claim_term(self, envelope: Envelope) -> Fence:
        """See EventLog."""
        claimed_term(envelope)
        encode(envelope)
        fence: Fence = await self._ask(lambda reply: self._server.claim(envelope, reply))
        self._witness([envelope], [fence.seq])
        return fence

    async def skips(self) -> dict[int, str]:
        """See EventLog. Takes no time."""
        return skips_in(self._server.entries)

    async def last_seq(self) -> int:
        """See EventLog."""
        return int(await self._ask(self._server.last_seq))

    async def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
        """See EventLog. Entries travel over the link; a cut link delays them."""
        seq, server = after_seq, self._server
        while until_seq is None or seq < until_seq:
            grown = server.grown
            if self._reaches() and seq < len(server.entries):
                await asyncio.sleep(self.link.travel_s())
                if not self._reaches():
                    continue
                there = len(server.entries) if until_seq is None else min(until_seq, len(server.entries))
                for entry in server.entries[seq:there]:
                    seq += 1
                    yield entry
            elif self.link.cut:
                await asyncio.sleep(0.1)  # a cut link does not announce its end
            else:
                await grown.wait()

    async def close(self) -> None:
        """Nothing to release."""

    def _reaches(self) -> bool:
        return self._server.up and not self.link.cut

    async def _ask(self, request: Callable[[Reply], None]) -> Any:
        loop = asyncio.get_running_loop()
        while True:
            answered: asyncio.Future[object] = loop.create_future()

            def take(answer: object, into: asyncio.Future[object] = answered) -> None:
                if not into.done():
                    into.set_result(answer)

            def reply(answer: object, take: Callable[[object], None] = take) -> None:
                self.link.send(lambda: take(answer))

            self.link.send(lambda reply=reply: request(reply))  # type: ignore[misc]
            done, _ = await asyncio.wait([answered], timeout=ANSWER_S)
            if done:
                answer = answered.result()
                if isinstance(answer, FencedReply):
                    raise Fenced(answer.why)
                return answer

    async def _boundary(self, here: Boundary) -> None:
        if self.crash_at == here:
            self.crash_at = ""
            self.crash()
            await asyncio.get_running_loop().create_future()  # nothing more of the owner happens


class Beats:
    """The heartbeat stream, and the BeatLog of each holder of one of its `ends`."""

    def __init__(self, server: LogServer, wall_us: Callable[[], int]) -> None:
        self.server = server
        self.wall_us = wall_us
        self.seq = 0
        self.listeners: dict[int, tuple[Link, Callable[[Recorded], None]]] = {}
        self._next = 0
        #: Per node, the boot of its last beat; and agents that listen for others of their name.
        self.last_boot: dict[str, int] = {}
        self._namesakes: dict[str, dict[int, tuple[Link, Callable[[int], object]]]] = {}

    def take(self, envelope: Envelope) -> None:
        """A beat has reached the server."""
        if self.server.up:
            self.seq += 1
            beat = Recorded(self.seq, self.wall_us(), envelope)
            for link, tell in list(self.listeners.values()):
                link.send(lambda tell=tell: tell(beat))  # type: ignore[misc]
            event = envelope.event
            if isinstance(event, Heartbeat):
                self.last_boot[event.node] = event.agent_boot
                others = self._namesakes.get(event.node, {})
                # To hear itself changes nothing: one agent of a name costs no message.
                is_heard = len(others) > 1 or event.node == COORDINATOR
                for other, tell_boot in list(others.values()) if is_heard else ():
                    other.send(lambda tell_boot=tell_boot, boot=event.agent_boot: tell_boot(boot))  # type: ignore[misc]

    def listen(self, link: Link, tell: Callable[[Recorded], None]) -> int:
        """Hear beats from now on; a number to stop by."""
        self._next += 1
        self.listeners[self._next] = (link, tell)
        return self._next

    def listen_to(self, node: str, link: Link, tell: Callable[[int], object]) -> Callable[[], object]:
        """Hear the boots in the beats of one name; what ends it."""
        self._next += 1
        number = self._next
        self._namesakes.setdefault(node, {})[number] = (link, tell)
        return lambda: self._namesakes[node].pop(number, None)


class BeatEnd:
    """A BeatLog over one link."""

    def __init__(self, beats: Beats, link: Link) -> None:
        self._beats = beats
        self._link = link

    async def publish(self, envelope: Envelope) -> None:
        """See BeatLog. A cut link loses the beat. Raises TypeError on anything but a Heartbeat."""
        if not isinstance(envelope.event, Heartbeat):
            raise TypeError(f"envelope.event: expected a Heartbeat, got {type(envelope.event).__name__}")
        self._link.send(lambda: self._beats.take(envelope))

    async def subscribe(self) -> AsyncGenerator[Entry, None]:
        """See BeatLog."""
        queue: asyncio.Queue[Recorded] = asyncio.Queue()
        number = self._beats.listen(self._link, queue.put_nowait)
        try:
            while True:
                yield await queue.get()
        finally:
            del self._beats.listeners[number]


class CommandEnd:
    """A CommandFeed over one link: one entry is under way at a time."""

    def __init__(self, server: LogServer, link: Link, node: str) -> None:
        self._server = server
        self._link = link
        self._node = node
        self._tasks: frozenset[str] = frozenset()
        self._handled_seq = 0

    async def follow(self, tasks: Collection[str]) -> None:
        """See CommandFeed."""
        self._tasks = followed = frozenset(tasks)
        number = next(self._server.requests)
        await self._until_known(lambda: self._server.follow(self._node, followed, number, self._handled_seq))

    async def read(self) -> AsyncGenerator[Recorded, None]:
        """See CommandFeed."""
        server, link = self._server, self._link
        while True:
            grown = server.grown
            if not self._reaches():
                await asyncio.sleep(0.1)
            elif (entry := server.next_for(self._node, self._tasks, self._handled_seq)) is None:
                await grown.wait()
            else:
                await asyncio.sleep(link.travel_s())
                if not self._reaches():
                    continue
                if entry.seq > self._handled_seq:
                    yield entry
                    self._handled_seq = entry.seq
                seq = entry.seq
                await self._until_known(lambda seq=seq: server.acknowledge(self._node, seq))  # type: ignore[misc]

    def _reaches(self) -> bool:
        return self._server.up and not self._link.cut

    async def _until_known(self, request: Callable[[], None]) -> None:
        """Until the server knows; it may hear it late, or only after the entry has been delivered again."""
        done = asyncio.Event()

        def arrive() -> None:
            if self._server.up:
                request()
                done.set()

        while not done.is_set():
            self._link.send(arrive)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await done.wait()
            except TimeoutError:
                continue
