"""Has the agents look at their nodes, links and storage, for `unicronctl doctor` (events/queries/node_checks.py).

Rules
-----
* Only nodes that are up are asked, so many at most; each within its time. Nothing of this is appended to the log.
* Connections are tried between all nodes of a small cluster. In a larger one each node tries those that are 1, 2, 4, 8,
  ... places away in the order of names, so that a node takes part in few, and one that is cut off is found.
* Sums are made around a ring of the nodes: each takes part in two.
* The storage of each active task: one node writes a mark, the others look for it, and it is removed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from unicrond.core.state.state import ClusterState, Node, NodeStatus, TaskStatus
from unicrond.events.queries.node_checks import (
    AnyCheck,
    FactsCheck,
    Library,
    LinksCheck,
    LinksReport,
    NodeFacts,
    Pair,
    Peer,
    Seconds,
    StorageCheck,
    StorageReport,
    decode_report,
    encode,
)
from unicrond.events.queries.worker_queries import BadLogsMessage, LogsReply
from unicrond.events.vocabulary.tasks import is_url
from unicrond.service.api.worker_output import LogReader, LogsUnavailable

NODES_MAX = 512
#: Up to so many nodes try connections with all others.
ALL_PAIRS_MAX = 24
FACTS_S = 10.0
#: The default limit: a node imports torch first, and may be busy.
LINKS_S = 60.0
STORAGE_S = 10.0
TASKS_MAX = 64
K = TypeVar("K", NodeFacts, LinksReport, StorageReport)


class ChecksBusy(RuntimeError):
    """The agents are already looking for somebody else."""


class ChecksRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request of `doctor`. `library`: for the sums between nodes; `limit_s`: the time for these."""

    library: Library = "gloo"
    limit_s: Seconds = LINKS_S


class Facts(NodeFacts, frozen=True, kw_only=True):
    """A node's facts. `ahead_s`: how far its clock is ahead of ours, as exactly as the `took_s` of the question
    tell."""

    ahead_s: float
    took_s: float


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """What nodes see of a task's `directory`. `writer`: the node that wrote; "": none could. `reports`: of the writer
    and the others."""

    task: str
    directory: str
    writer: str
    reports: dict[str, StorageReport] = msgspec.field(name="seen")


class ChecksResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the agents of `nodes` have seen. `silent`: what a node did not answer, and why: {node: reason}. `links`: the
    connections to `targets`; `pairs`: the nodes that summed."""

    nodes: tuple[str, ...]
    facts: dict[str, Facts]
    links: dict[str, LinksReport]
    targets: dict[str, tuple[str, ...]] = msgspec.field(name="tried")
    pairs: tuple[tuple[str, str], ...]
    storage: tuple[Storage, ...]
    silent: dict[str, str]


class NodeChecks:
    """Checks nodes by requests of a LogReader."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._turn = asyncio.Lock()

    async def look(self, state: ClusterState, request: ChecksRequest) -> ChecksResult:
        """Have the agents look, and return what they have seen. Raises ChecksBusy."""
        if self._turn.locked():
            raise ChecksBusy("doctor: another check is running already; try again in a minute")
        async with self._turn:
            nodes = {name: node for name, node in sorted(state.nodes.items()) if node.status is NodeStatus.UP}
            nodes = dict(list(nodes.items())[:NODES_MAX])
            silent: dict[str, str] = {}
            facts = await self._facts(nodes, silent)
            answering = {name: node for name, node in nodes.items() if name in facts}
            links, storage = await asyncio.gather(
                self._links(answering, request, silent), self._storage(state, answering)
            )
            return ChecksResult(
                nodes=tuple(nodes),
                facts=facts,
                links=links,
                targets={name: tuple(peers) for name, peers in to_try(list(answering)).items()},
                pairs=tuple(ring(list(answering))),
                storage=storage,
                silent=silent,
            )

    async def _facts(self, nodes: Iterable[str], silent: dict[str, str]) -> dict[str, Facts]:
        async def of(node: str) -> Facts:
            """Return one node's facts and the lead of its clock."""
            began_us, began_s = time.time_ns() // 1000, time.monotonic()
            reply = await self._ask(node, FactsCheck(), NodeFacts, FACTS_S)
            took_s = time.monotonic() - began_s
            ahead_s = (reply.now_us - began_us) / 1e6 - took_s / 2
            return Facts(**msgspec.structs.asdict(reply), ahead_s=ahead_s, took_s=took_s)

        return await _all_of({node: of(node) for node in nodes}, silent)

    async def _links(
        self, nodes: Mapping[str, Node], request: ChecksRequest, silent: dict[str, str]
    ) -> dict[str, LinksReport]:
        token, names = secrets.token_hex(8), list(nodes)
        if len(names) < 2:
            return {}
        pairs, targets = ring(names), to_try(names)

        async def of(name: str) -> LinksReport:
            """Return one node's report on its links."""
            ring_pairs = [
                Pair(peer=pair[1 - rank], rank=rank, store=nodes[pair[0]].store, turn=_turn(at, len(pairs)))
                for at, pair in enumerate(pairs)
                for rank in (0, 1)
                if pair[rank] == name
            ]
            check = LinksCheck(
                token=token,
                peers=tuple(_peer(nodes[peer]) for peer in targets[name]),
                pairs=tuple(ring_pairs),
                library=request.library,
                limit_s=request.limit_s,
            )
            return await self._ask(name, check, LinksReport, request.limit_s + 15.0)

        return await _all_of({name: of(name) for name in names}, silent)

    async def _storage(self, state: ClusterState, nodes: Mapping[str, Node]) -> tuple[Storage, ...]:
        tasks = [
            task
            for task in state.tasks.values()
            if task.status is TaskStatus.ACTIVE and task.spec.checkpoint.dir and not is_url(task.spec.checkpoint.dir)
        ]
        if len(nodes) < 2:
            return ()
        return tuple(
            [await self._of_task(task.name, task.spec.checkpoint.dir, list(nodes)) for task in tasks[:TASKS_MAX]]
        )

    async def _of_task(self, task: str, directory: str, nodes: Sequence[str]) -> Storage:
        token, reports, writer = secrets.token_hex(8), dict[str, StorageReport](), ""

        async def of(node: str, part: Any) -> StorageReport:
            """Return one node's report on its part of the storage check."""
            check = StorageCheck(directory=directory, token=token, part=part)
            return await self._ask(node, check, StorageReport, STORAGE_S)

        for node in nodes:
            reports |= await _all_of({node: of(node, "write")}, {})
            if node in reports and reports[node].result == "seen":
                writer = node
                break
        if writer:
            readers = [node for node in nodes if node not in reports]
            reports |= await _all_of({node: of(node, "look") for node in readers}, {})
            await _all_of({writer: of(writer, "remove")}, {})
        return Storage(task=task, directory=directory, writer=writer, reports=reports)

    async def _ask(self, node: str, check: AnyCheck, kind: type[K], timeout_s: float) -> K:
        """Return the node's answer to one check. Raises LogsUnavailable."""
        reply: LogsReply = await self._reader.ask(node, encode(check), timeout_s)
        if "bad request" in reply.error:
            raise LogsUnavailable("runs an agent that is too old for this; upgrade it")
        if reply.error:
            raise LogsUnavailable(reply.error)
        try:
            return decode_report(reply.data, kind)
        except BadLogsMessage as error:
            raise LogsUnavailable(f"gives an answer that cannot be read: {error}") from None


async def _all_of(requests: Mapping[str, Any], silent: dict[str, str]) -> dict[str, Any]:
    """Await the requests and return the answers; the reason for a missing one goes into `silent`."""
    answers = await asyncio.gather(*requests.values(), return_exceptions=True)
    replies = {}
    for node, answer in zip(requests, answers, strict=True):
        if isinstance(answer, LogsUnavailable):
            silent[node] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            replies[node] = answer
    return replies


def _peer(node: Node) -> Peer:
    ports = {"store": (node.store.host, node.store.port)}
    if node.memory is not None:
        ports["states in memory"] = (node.memory.host, node.memory.port)
    return Peer(node=node.name, ports=ports)


def ring(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of each node with the next; two nodes are one pair."""
    if len(names) < 3:
        return [(names[0], names[1])] if len(names) == 2 else []
    return [(name, names[(at + 1) % len(names)]) for at, name in enumerate(names)]


def _turn(at: int, count: int) -> int:
    """Return the turn of a pair: no node has two pairs in one turn."""
    return 2 if count % 2 and at == count - 1 else at % 2


def to_try(names: Sequence[str]) -> dict[str, list[str]]:
    """Map each name to those that it connects to. Every link is tried from both ends."""
    count = len(names)
    if count <= ALL_PAIRS_MAX:
        return {name: [peer for peer in names if peer != name] for name in names}
    steps = [1 << bit for bit in range((count - 1).bit_length())]
    away = [step for distance in steps for step in (distance, -distance)]
    return {name: list(dict.fromkeys(names[(at + step) % count] for step in away)) for at, name in enumerate(names)}
