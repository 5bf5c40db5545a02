"""Checks this node, its links and its tasks' storage for `unicronctl doctor` (events/queries/node_checks.py).

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

from unicrond.agents.fork_server.agent_line import listen_unix
from unicrond.agents.health import preflight
from unicrond.agents.protocol.messages import Sum
from unicrond.events.nats.request_reply import wait_for_answer
from unicrond.events.queries.node_checks import (
    AnyCheck,
    FactsCheck,
    Finding,
    LinksCheck,
    LinksReport,
    NodeFacts,
    PairSum,
    StorageCheck,
    StorageReport,
    UnreachablePort,
    decode_check,
    encode,
)
from unicrond.events.queries.worker_queries import BadLogsMessage, LogsReply
from unicrond.events.queries.worker_queries import encode as encode_reply
from unicrond.events.vocabulary import Name

logger = logging.getLogger("unicrond.agents")

CONNECT_S = 3.0
#: How many connections are tried at once.
_AT_ONCE = 32
#: A file that another node has written may be seen there a little later.
LOOK_S = 5.0
_LOOK_EVERY_S = 0.25
_RECEIVE_BYTES = 65536
_TEXT_CHARS = 400


class Checks:
    """The checks of one node. `findings` returns those of its preflight. `fork` has the fork server fork the summing
    process, and returns why it cannot, or "". `sum_socket`: where that process sends its result. `free_gpus` returns
    the names of the GPUs that no worker has."""

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
        """Begin the check that a request asks for, and answer when it has ended. Return False where it asks for
        none."""
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
        """Cancel the checks that run; they are not answered."""
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
        except Exception as error:  # the requester is no longer there
            logger.info("a check for doctor could not be answered: %s", error)

    async def _reply(self, check: AnyCheck | str) -> LogsReply:
        match check:
            case FactsCheck():
                return self._of(await asyncio.to_thread(facts, self._findings, self._address))
            case StorageCheck():
                storage = await asyncio.to_thread(look_at_storage, check)
                return self._of(msgspec.structs.replace(storage, runs_as_others=self._runs_as_others))
            case LinksCheck():
                if self._links.locked():
                    return LogsReply(node=self._node, error="it checks its links already; try again in a minute")
                async with self._links:
                    return self._of(await self._look_at_links(check))
        return LogsReply(node=self._node, error=f"bad request: {check}"[:_TEXT_CHARS])

    def _of(self, outcome: NodeFacts | LinksReport | StorageReport) -> LogsReply:
        return LogsReply(node=self._node, data=encode(outcome))

    async def _look_at_links(self, check: LinksCheck) -> LinksReport:
        semaphore = asyncio.Semaphore(_AT_ONCE)
        ports = [(peer.node, port_name, *at) for peer in check.peers for port_name, at in peer.ports.items()]
        attempts = [unreached(*port, source=self._address, semaphore=semaphore) for port in ports]
        summing = asyncio.create_task(self._sum(check))
        try:
            failures = [outcome for outcome in await asyncio.gather(*attempts) if outcome is not None]
            sums, no_sums = await summing
        finally:
            summing.cancel()
        return LinksReport(unreachable_ports=tuple(failures), sums=sums, no_sums=no_sums[:_TEXT_CHARS])

    async def _sum(self, check: LinksCheck) -> tuple[tuple[PairSum, ...], str]:
        """Return the sums of the pairs, and why there are none."""
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
            output = await _process_output(order, self._fork)
            reply = msgspec.json.decode(output, type=tuple[PairSum, ...] | str)
            return ((), reply) if isinstance(reply, str) else (reply, "")
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            return (), f"its process gave no result: {error or type(error).__name__}"
        except NotForked as error:
            return (), str(error)


class NotForked(Exception):
    """The fork server could not fork the process that sums; the text says why."""


async def _process_output(order: Sum, fork: Callable[[Sum], str]) -> bytes:
    """Return the output of the summing process, which lives no longer than its connection here.

    Raise NotForked, OSError or TimeoutError.
    """
    loop, output = asyncio.get_running_loop(), bytearray()
    try:
        with listen_unix(Path(order.answer)) as listener:
            if refusal := fork(order):
                raise NotForked(refusal)
            async with asyncio.timeout(order.limit_s + CONNECT_S):
                connection, _ = await loop.sock_accept(listener)
                with connection:
                    while data := await loop.sock_recv(connection, _RECEIVE_BYTES):
                        output += data
    except TimeoutError:
        raise TimeoutError(f"it did not end within {order.limit_s:g} s") from None
    finally:
        _unlink(order.answer)
    return bytes(output)


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)


async def unreached(
    peer: Name, port_name: str, host: str, port: int, *, source: str, semaphore: asyncio.Semaphore
) -> UnreachablePort | None:
    """Return why this node, from its address `source`, cannot connect to the peer's port; None where it can."""
    async with semaphore:
        connecting = asyncio.ensure_future(asyncio.open_connection(host, port, local_addr=(source, 0)))
        connecting.add_done_callback(_hang_up)  # also closes a connection that comes after the wait
        try:
            if await wait_for_answer(connecting, CONNECT_S):
                connecting.result()
                return None
            reason = f"no answer within {CONNECT_S:g} s"
        except OSError as error:
            reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
        finally:
            connecting.cancel()
    url_host = f"[{host}]" if ":" in host else host
    return UnreachablePort(peer=peer, service=port_name, address=f"{url_host}:{port}", reason=reason[:_TEXT_CHARS])


def _hang_up(connecting: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[1].close()


def facts(findings: Callable[[], list[Finding]], address: str) -> NodeFacts:
    """Return the findings of the node's preflight, and what has to be alike on all nodes."""
    return NodeFacts(
        findings=tuple(findings()),
        mtu=0 if preflight.is_loopback(address) else preflight.mtu_of(address) or 0,
        torch=preflight.version_of("torch"),
        driver=preflight.driver_version(),
        now_us=time.time_ns() // 1000,
    )


def look_at_storage(check: StorageCheck) -> StorageReport:
    """Write, look for, or remove the mark, in the nearest directory that exists: none is made."""
    directory = preflight.existing(Path(check.directory))
    mark = directory / f".unicron-doctor-{check.token}"
    directory_text = str(directory)[:_TEXT_CHARS]
    try:
        match check.part:
            case "write":
                mark.write_text("unicronctl doctor looks for this on the other nodes; it may be removed\n")
            case "remove":
                mark.unlink(missing_ok=True)
                return StorageReport(result="missing", directory=directory_text)
            case "look":
                ends_s = time.monotonic() + LOOK_S
                while not mark.exists() and time.monotonic() < ends_s:
                    time.sleep(_LOOK_EVERY_S)
                if not mark.exists():
                    return StorageReport(result="missing", directory=directory_text)
    except PermissionError as error:
        return StorageReport(result="refused", directory=directory_text, reason=(error.strerror or "")[:_TEXT_CHARS])
    except OSError as error:
        return StorageReport(
            result="failed", directory=directory_text, reason=(error.strerror or str(error))[:_TEXT_CHARS]
        )
    return StorageReport(result="seen", directory=directory_text, writable=os.access(directory, os.W_OK | os.X_OK))
