"""Looks at this node, its links and its tasks' storage when `unicronctl doctor` asks (events/node_checks.py).

Rules
-----
* It takes no slot: connections that are opened and closed, one niced process of one thread on the CPU, which the fork
  server forks (pair_sum.py), and a file of a few bytes. NCCL only runs on the GPU of a free slot.
* One check of links at a time; each ends within its limit. Nothing of it comes into the event log.
* Connections begin at the node's address in the training network, as those of groups do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from agents import preflight
from agents.fork_server.sockets import listen_unix
from agents.protocol.sum_order import Sum
from events.finding import Finding
from events.logs_request import BadLogsMessage, LogsReply
from events.logs_request import encode as encode_reply
from events.nats_inquiry import came
from events.node_checks import (
    AnyCheck,
    FactsCheck,
    LinksCheck,
    LinksSeen,
    NodeFacts,
    PairSum,
    StorageCheck,
    StorageSeen,
    Unreached,
    decode_check,
    encode,
)
from events.vocabulary import Name

logger = logging.getLogger("agents")

CONNECT_S = 3.0
#: So many connections are tried at once.
_AT_ONCE = 32
#: A file that another node has written may be seen there a little later.
LOOK_S = 5.0
_LOOK_EVERY_S = 0.25
_SAID_BYTES = 65536
_TEXT_CHARS = 400


class Checks:
    """Of one node. `findings`: its preflight's. `fork`: has the fork server fork what sums; why not, or "".
    `sum_socket`: where that tells its result. `free_gpus`: the names of those that no worker has."""

    def __init__(
        self,
        node: Name,
        address: str,
        findings: Callable[[], list[Finding]],
        fork: Callable[[Sum], str],
        sum_socket: Path,
        free_gpus: Callable[[], Sequence[str]] = tuple,
        *,
        runs_as_others: bool = False,
    ) -> None:
        self._node = node
        self._address = address
        self._findings = findings
        self._fork = fork
        self._sum_socket = sum_socket
        self._free_gpus = free_gpus
        self._runs_as_others = runs_as_others
        self._links = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, body: bytes, respond: Callable[[bytes], Awaitable[None]]) -> bool:
        """Begin the check that a request asks for, and answer when it has ended; False where it asks for none."""
        check: AnyCheck | str | None
        try:
            check = decode_check(body)
        except BadLogsMessage as error:
            check = str(error)
        if check is None:
            return False
        task = asyncio.create_task(self._answer(check, respond), name="check for doctor")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return True

    async def close(self) -> None:
        """End what runs; nothing is answered."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _answer(self, check: AnyCheck | str, respond: Callable[[bytes], Awaitable[None]]) -> None:
        try:
            reply = await self._reply(check)
        except Exception as error:
            logger.exception("a check for doctor failed")
            reply = LogsReply(node=self._node, error=f"its check failed: {type(error).__name__}: {error}"[:_TEXT_CHARS])
        try:
            await respond(encode_reply(reply))
        except Exception as error:  # the one that asked has gone
            logger.info("a check for doctor could not be answered: %s", error)

    async def _reply(self, check: AnyCheck | str) -> LogsReply:
        match check:
            case FactsCheck():
                return self._of(await asyncio.to_thread(facts, self._findings, self._address))
            case StorageCheck():
                seen = await asyncio.to_thread(look_at_storage, check)
                return self._of(msgspec.structs.replace(seen, runs_as_others=self._runs_as_others))
            case LinksCheck():
                if self._links.locked():
                    return LogsReply(node=self._node, error="it checks its links already; try again in a minute")
                async with self._links:
                    return self._of(await self._look_at_links(check))
        return LogsReply(node=self._node, error=f"bad request: {check}"[:_TEXT_CHARS])

    def _of(self, seen: NodeFacts | LinksSeen | StorageSeen) -> LogsReply:
        return LogsReply(node=self._node, data=encode(seen))

    async def _look_at_links(self, check: LinksCheck) -> LinksSeen:
        turn = asyncio.Semaphore(_AT_ONCE)
        asked = [(peer.node, what, *at) for peer in check.peers for what, at in peer.ports.items()]
        tried = [unreached(*one, source=self._address, turn=turn) for one in asked]
        summing = asyncio.create_task(self._sum(check))
        try:
            lost = [one for one in await asyncio.gather(*tried) if one is not None]
            sums, no_sums = await summing
        finally:
            summing.cancel()
        return LinksSeen(unreached=tuple(lost), sums=sums, no_sums=no_sums[:_TEXT_CHARS])

    async def _sum(self, check: LinksCheck) -> tuple[tuple[PairSum, ...], str]:
        """What the sums say; why there are none."""
        gpu = ""
        if check.library == "nccl":
            free = self._free_gpus()
            if not free:
                return (), "no slot with a GPU is free"
            gpu = free[0]
        if not check.pairs:
            return (), ""
        order = Sum(address=self._address, token=check.token, pairs=check.pairs, library=check.library,
                    limit_s=check.limit_s, answer=str(self._sum_socket), asked_s=time.monotonic(), gpu=gpu)  # fmt: skip
        try:
            said = await _said_of(order, self._fork)
            told = msgspec.json.decode(said, type=tuple[PairSum, ...] | str)
            return ((), told) if isinstance(told, str) else (told, "")
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            return (), f"its process gave no result: {error or type(error).__name__}"
        except NotForked as error:
            return (), str(error)


class NotForked(Exception):
    """No process was forked that could sum. The text says why."""


async def _said_of(order: Sum, fork: Callable[[Sum], str]) -> bytes:
    """What the process says. Raises NotForked, OSError, TimeoutError. It lives no longer than its connection here."""
    loop, said = asyncio.get_running_loop(), bytearray()
    try:
        with listen_unix(Path(order.answer)) as listener:
            if why := fork(order):
                raise NotForked(why)
            async with asyncio.timeout(order.limit_s + CONNECT_S):
                connection, _ = await loop.sock_accept(listener)
                with connection:
                    while data := await loop.sock_recv(connection, _SAID_BYTES):
                        said += data
    except TimeoutError:
        raise TimeoutError(f"it did not end within {order.limit_s:g} s") from None
    finally:
        _unlink(order.answer)
    return bytes(said)


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)


async def unreached(
    peer: Name, what: str, host: str, port: int, *, source: str, turn: asyncio.Semaphore
) -> Unreached | None:
    """Why this node cannot connect there; None where it can. `source`: its own address."""
    async with turn:
        connecting = asyncio.ensure_future(asyncio.open_connection(host, port, local_addr=(source, 0)))
        connecting.add_done_callback(_hang_up)  # a connection that comes after the wait is closed too
        try:
            if await came(connecting, CONNECT_S):
                connecting.result()
                return None
            why = f"no answer within {CONNECT_S:g} s"
        except OSError as error:
            why = (os.strerror(error.errno) if error.errno else str(error)).lower()
        finally:
            connecting.cancel()
    shown = f"[{host}]" if ":" in host else host
    return Unreached(peer=peer, what=what, at=f"{shown}:{port}", why=why[:_TEXT_CHARS])


def _hang_up(connecting: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[1].close()


def facts(findings: Callable[[], list[Finding]], address: str) -> NodeFacts:
    """What the node's preflight finds, and what has to be alike on all nodes."""
    return NodeFacts(
        findings=tuple(findings()),
        mtu=0 if preflight.is_loopback(address) else preflight.mtu_of(address) or 0,
        torch=preflight.version_of("torch"),
        driver=preflight.driver_version(),
        now_us=time.time_ns() // 1000,
    )


def look_at_storage(check: StorageCheck) -> StorageSeen:
    """Write, look for, or remove the mark. In the nearest directory that exists: none is made."""
    directory = preflight.existing(Path(check.directory))
    mark = directory / f".unicron-doctor-{check.token}"
    told = str(directory)[:_TEXT_CHARS]
    try:
        match check.part:
            case "write":
                mark.write_text("unicronctl doctor looks for this on the other nodes; it may be removed\n")
            case "remove":
                mark.unlink(missing_ok=True)
                return StorageSeen(result="missing", directory=told)
            case "look":
                ends_s = time.monotonic() + LOOK_S
                while not mark.exists() and time.monotonic() < ends_s:
                    time.sleep(_LOOK_EVERY_S)
                if not mark.exists():
                    return StorageSeen(result="missing", directory=told)
    except PermissionError as error:
        return StorageSeen(result="refused", directory=told, why=(error.strerror or "")[:_TEXT_CHARS])
    except OSError as error:
        return StorageSeen(result="failed", directory=told, why=(error.strerror or str(error))[:_TEXT_CHARS])
    return StorageSeen(result="seen", directory=told, writable=os.access(directory, os.W_OK | os.X_OK))
