"""Probes of the links between nodes: a few kilobytes to a peer's agent and back, within a second.

Rules
-----
* A probe is a few rounds, one after the other. Each tries two connections at once, from the node's address in the
  training network. If one has sent and got all its bytes, the link is not silent. If both have within SLOW_S, the round
  was quick.
* `good`: QUICK_MIN rounds were quick; on a good link the first two. `slow`: no longer so many of ROUNDS can be. One
  round says little: where 5 % of all packets are lost, 2 of 5 rounds are not quick; where a quarter is lost, 49 of 50.
  Of either link up to six rounds say the same, probe after probe.
* `silent`: no connection returned all bytes within LIMIT_S, or the network reports no route. A peer that refuses
  a connection is reachable: `unknown`, since its agent may be starting.
* `unknown` also where this process got no CPU time meanwhile: a busy machine says nothing about the link.
* Of a silent link each end also says whether it hears the other's datagrams (datagrams.py): that names the way that is
  cut.
* The server echoes what a client sends, BYTES at most, for AT_ONCE clients at a time: it reveals nothing.
* A peer that is not good is probed again every EVERY_S, until it has been good for the patience that the order names,
  and at least twice; that is reported, and the watch is over. A newer order for the peer replaces it.

What does not live here: when links are probed, and what follows (unicrond/core/faults/links.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from unicrond.agents.health.datagrams import Datagrams
from unicrond.events.vocabulary import LinkCondition, LinkProbe, LinksProbed, ProbedPeer, ProbeLinks

logger = logging.getLogger("unicrond.agents")

LIMIT_S, SLOW_S, EVERY_S = 1.0, 0.15, 1.5
BYTES = 32 * 1024
AT_ONCE = 256
#: Rounds of a probe, connections of a round, and how many quick rounds make a link good.
ROUNDS, QUICK_MIN = 6, 2
_TRIES = 2
#: This process looks at the clock so often while it probes, and was too busy if it came so late.
_TICK_S, _BUSY_S = 0.05, 0.3


class LinkProber:
    """Answers the probes of other agents, and probes their links for the node. `report` takes what was found."""

    def __init__(self, node: str, address: str, report: Callable[[LinksProbed], None]) -> None:
        self._node = node
        self._address = address
        self._report = report
        self._server: asyncio.Server | None = None
        self._datagrams = Datagrams(node)
        self._answering = 0
        self._running: set[asyncio.Task[None]] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def serve(self) -> int:
        """Answer probes from now on; return the port. 0: nothing can be served here."""
        try:
            self._server = await asyncio.start_server(self._answer, self._address, 0)
        except OSError as error:
            logger.error("cannot answer probes of links at %s (%s): bad links are found later", self._address, error)
            return 0
        port: int = self._server.sockets[0].getsockname()[1]
        await self._datagrams.serve(self._address, port)
        return port

    def probe(self, order: ProbeLinks) -> None:
        """Begin to probe. Needs a running loop."""
        self._keep(asyncio.create_task(self._probe_all(order), name="probes of links"))

    async def close(self) -> None:
        """Probe and answer no more."""
        tasks = [*self._running, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._datagrams.close()
        if self._server is not None:
            self._server.close()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answering += 1
        try:
            if self._answering <= AT_ONCE:
                async with asyncio.timeout(2 * LIMIT_S):
                    writer.write(await reader.readexactly(BYTES))
                    await writer.drain()
                    await reader.read(1)  # it hangs up when it has all
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # a probe that did not come to its end is the other side's to report
        finally:
            self._answering -= 1
            writer.close()

    async def _probe_all(self, order: ProbeLinks) -> None:
        began_s, sending = time.monotonic(), asyncio.create_task(self._datagrams.send(order.peers))
        try:
            probes = await asyncio.gather(*(probe_peer(peer, self._address) for peer in order.peers))
        finally:
            sending.cancel()
        # The other end may have begun, and ended, a little earlier.
        probes = [self._with_way(probe, began_s - LIMIT_S) for probe in probes]
        if order.task:
            self._report(LinksProbed(node=self._node, command_id=order.command_id, probes=tuple(probes)))
        for peer, outcome in zip(order.peers, probes, strict=True):
            if outcome.condition in ("silent", "slow") or not order.task:
                if (before := self._watches.get(peer.node)) is not None:
                    before.cancel()
                watch = asyncio.create_task(self._watch(order, peer), name=f"watch of the link to {peer.node}")
                self._watches[peer.node] = watch

    def _with_way(self, probe: LinkProbe, since_s: float) -> LinkProbe:
        """Return a silent probe with whether the peer is heard."""
        if probe.condition != "silent":
            return probe
        return replace(probe, hears_peer=self._datagrams.has_heard(probe.peer, since_s))

    async def _watch(self, order: ProbeLinks, peer: ProbedPeer) -> None:
        """Probe the peer until it has been good for long enough, and report that."""
        good_since_s = 0.0
        while True:
            await asyncio.sleep(EVERY_S)
            outcome, now_s = await probe_peer(peer, self._address), time.monotonic()
            if outcome.condition != "good":
                good_since_s = 0.0 if outcome.condition != "unknown" else good_since_s
            elif not good_since_s:
                good_since_s = now_s
            elif now_s - good_since_s >= order.patience_us / 1e6:
                break
        self._watches.pop(peer.node, None)
        self._report(LinksProbed(node=self._node, command_id=order.command_id, probes=(outcome,)))


async def probe_peer(peer: ProbedPeer, address: str, limit_s: float = LIMIT_S) -> LinkProbe:
    """Return what one probe of the way to the peer and back finds, and what its first round took."""
    began_s, busy_s = time.monotonic(), asyncio.create_task(_longest_pause(limit_s))
    tries: list[asyncio.Task[LinkCondition]] = []
    ends_s: list[float] = []
    is_quick = await _try_rounds(peer, address, tries, ends_s)
    while not is_quick and "good" not in _answers(tries) and (waiting := [task for task in tries if not task.done()]):
        rest_s = began_s + limit_s - time.monotonic()
        if not (await asyncio.wait(waiting, timeout=max(0.0, rest_s), return_when=asyncio.FIRST_COMPLETED))[0]:
            break
    took_s, answers = time.monotonic() - began_s, _answers(tries)
    round_s = max(ends_s) - began_s if len(ends_s) == _TRIES else took_s
    busy_s.cancel()
    for task in tries:
        task.cancel()
    await asyncio.gather(*tries, return_exceptions=True)
    pause_s = (await asyncio.gather(busy_s, return_exceptions=True))[0]
    condition: LinkCondition = "good" if is_quick else "slow" if "good" in answers else "silent"
    is_busy = took_s > limit_s + _BUSY_S or (isinstance(pause_s, float) and pause_s > _BUSY_S)
    if condition != "good" and (is_busy or "unknown" in answers):
        condition = "unknown"
    return LinkProbe(peer=peer.node, condition=condition, took_us=int(round_s * 1e6))


async def _try_rounds(
    peer: ProbedPeer, address: str, tries: list[asyncio.Task[LinkCondition]], ends_s: list[float]
) -> bool:
    """Return whether enough rounds were quick. Adds the exchanges to `tries`, and to `ends_s` when those of the first
    round ended."""
    quick: list[bool] = []
    while (is_quick := verdict(quick)) is None:
        pair = [asyncio.create_task(_exchange(peer.host, peer.port, address)) for _ in range(_TRIES)]
        tries += pair
        if not quick:
            for task in pair:
                task.add_done_callback(lambda _: ends_s.append(time.monotonic()))
        late = (await asyncio.wait(pair, timeout=SLOW_S))[1]
        if quick:  # the first round alone shows what comes within the limit: more would fill the link
            for task in late:
                task.cancel()
        quick.append(not late and all(task.result() == "good" for task in pair))
        if not late and all(task.result() != "good" for task in pair):
            return False  # refused, or no route: another round finds the same
    return is_quick


def verdict(quick: Sequence[bool]) -> bool | None:
    """Return whether the rounds so far show a good link; None: another round is to tell."""
    if sum(quick) >= QUICK_MIN:
        return True
    return False if sum(quick) + ROUNDS - len(quick) < QUICK_MIN else None


def _answers(tries: Sequence[asyncio.Task[LinkCondition]]) -> list[LinkCondition]:
    return [task.result() for task in tries if task.done() and not task.cancelled()]


async def _exchange(host: str, port: int, address: str) -> LinkCondition:
    """Send the bytes and get them back."""
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, port, local_addr=(address, 0))
        writer.write(bytes(BYTES))
        await writer.drain()
        await reader.readexactly(BYTES)
        return "good"
    except (ConnectionRefusedError, ConnectionResetError, asyncio.IncompleteReadError):
        return "unknown"
    except OSError:
        return "silent"
    finally:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.transport.abort()


async def _longest_pause(limit_s: float) -> float:
    """Return how late this process came at worst when it wanted to look at the clock."""
    longest_s, end_s = 0.0, time.monotonic() + limit_s
    try:
        while (now_s := time.monotonic()) < end_s:
            await asyncio.sleep(_TICK_S)
            longest_s = max(longest_s, time.monotonic() - now_s - _TICK_S)
    except asyncio.CancelledError:
        pass  # what it has seen is the answer
    return longest_s
