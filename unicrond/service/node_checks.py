"""Has the agents look at their nodes, links and storage, for `unicronctl doctor` (events/node_checks.py).

Rules
-----
* Only nodes that are up are asked, so many at most; each within its time. Nothing of it comes into the log.
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

from events.logs_request import BadLogsMessage, LogsReply
from events.node_checks import (
    AnyCheck,
    FactsCheck,
    LinksCheck,
    LinksSeen,
    NodeFacts,
    Peer,
    StorageCheck,
    StorageSeen,
    decode_seen,
    encode,
)
from events.pairs import Library, Pair, Seconds
from unicrond.core.state import ClusterState, Node, NodeStatus, TaskStatus
from unicrond.service.log_reading import LogReader, LogsUnavailable

NODES_MAX = 512
#: Up to so many nodes try connections with all others.
ALL_PAIRS_MAX = 24
FACTS_S = 10.0
#: A node imports torch first, and may be busy; if nobody gives another limit.
LINKS_S = 60.0
STORAGE_S = 10.0
TASKS_MAX = 64
K = TypeVar("K", NodeFacts, LinksSeen, StorageSeen)


class ChecksRun(RuntimeError):
    """Somebody else has the agents look already."""


class AskedOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `doctor` wants. `library`: of the sums between nodes; `limit_s`: for these."""

    library: Library = "gloo"
    limit_s: Seconds = LINKS_S


class Facts(NodeFacts, frozen=True, kw_only=True):
    """`ahead_s`: its clock before ours, as far as the `took_s` of the question tell."""

    ahead_s: float
    took_s: float


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """Of a task's `directory`: what the writer saw, and the others. `writer` "": no node could write."""

    task: str
    directory: str
    writer: str
    seen: dict[str, StorageSeen]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the agents of `nodes` have seen. `silent`: what did not come of a node, and why: {node: why}. `links`: the
    connections that were tried, `sums`: the pairs that summed."""

    nodes: tuple[str, ...]
    facts: dict[str, Facts]
    links: dict[str, LinksSeen]
    tried: dict[str, tuple[str, ...]]
    pairs: tuple[tuple[str, str], ...]
    storage: tuple[Storage, ...]
    silent: dict[str, str]


class NodeChecks:
    """Over the requests of a LogReader."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._turn = asyncio.Lock()

    async def look(self, state: ClusterState, asked: AskedOf) -> Seen:
        """Raises ChecksRun."""
        if self._turn.locked():
            raise ChecksRun("doctor: another one has the nodes look already; try again in a minute")
        async with self._turn:
            nodes = {name: node for name, node in sorted(state.nodes.items()) if node.status is NodeStatus.UP}
            nodes = dict(list(nodes.items())[:NODES_MAX])
            silent: dict[str, str] = {}
            facts = await self._facts(nodes, silent)
            answering = {name: node for name, node in nodes.items() if name in facts}
            links, storage = await asyncio.gather(
                self._links(answering, asked, silent), self._storage(state, answering)
            )
            return Seen(
                nodes=tuple(nodes),
                facts=facts,
                links=links,
                tried={name: tuple(others) for name, others in to_try(list(answering)).items()},
                pairs=tuple(ring(list(answering))),
                storage=storage,
                silent=silent,
            )

    async def _facts(self, nodes: Iterable[str], silent: dict[str, str]) -> dict[str, Facts]:
        async def of(node: str) -> Facts:
            began_us, began_s = time.time_ns() // 1000, time.monotonic()
            told = await self._ask(node, FactsCheck(), NodeFacts, FACTS_S)
            took_s = time.monotonic() - began_s
            ahead_s = (told.now_us - began_us) / 1e6 - took_s / 2
            return Facts(**msgspec.structs.asdict(told), ahead_s=ahead_s, took_s=took_s)

        return await _all_of({node: of(node) for node in nodes}, silent)

    async def _links(self, nodes: Mapping[str, Node], asked: AskedOf, silent: dict[str, str]) -> dict[str, LinksSeen]:
        token, names = secrets.token_hex(8), list(nodes)
        if len(names) < 2:
            return {}
        pairs, tried = ring(names), to_try(names)

        async def of(name: str) -> LinksSeen:
            own = [
                Pair(peer=pair[1 - rank], rank=rank, store=nodes[pair[0]].store, turn=_turn(at, len(pairs)))
                for at, pair in enumerate(pairs)
                for rank in (0, 1)
                if pair[rank] == name
            ]
            check = LinksCheck(
                token=token,
                peers=tuple(_peer(nodes[other]) for other in tried[name]),
                pairs=tuple(own),
                library=asked.library,
                limit_s=asked.limit_s,
            )
            return await self._ask(name, check, LinksSeen, asked.limit_s + 15.0)

        return await _all_of({name: of(name) for name in names}, silent)

    async def _storage(self, state: ClusterState, nodes: Mapping[str, Node]) -> tuple[Storage, ...]:
        tasks = [task for task in state.tasks.values() if task.status is TaskStatus.ACTIVE and task.spec.checkpoint.dir]
        if len(nodes) < 2:
            return ()
        return tuple(
            [await self._of_task(task.name, task.spec.checkpoint.dir, list(nodes)) for task in tasks[:TASKS_MAX]]
        )

    async def _of_task(self, task: str, directory: str, nodes: Sequence[str]) -> Storage:
        token, seen, writer = secrets.token_hex(8), dict[str, StorageSeen](), ""

        async def of(node: str, part: Any) -> StorageSeen:
            check = StorageCheck(directory=directory, token=token, part=part)
            return await self._ask(node, check, StorageSeen, STORAGE_S)

        for node in nodes:
            seen |= await _all_of({node: of(node, "write")}, {})
            if node in seen and seen[node].result == "seen":
                writer = node
                break
        if writer:
            others = [node for node in nodes if node not in seen]
            seen |= await _all_of({node: of(node, "look") for node in others}, {})
            await _all_of({writer: of(writer, "remove")}, {})
        return Storage(task=task, directory=directory, writer=writer, seen=seen)

    async def _ask(self, node: str, check: AnyCheck, kind: type[K], timeout_s: float) -> K:
        """Raises LogsUnavailable."""
        reply: LogsReply = await self._reader.ask(node, encode(check), timeout_s)
        if "bad request" in reply.error:
            raise LogsUnavailable("runs an agent that is too old for this; upgrade it")
        if reply.error:
            raise LogsUnavailable(reply.error)
        try:
            return decode_seen(reply.data, kind)
        except BadLogsMessage as error:
            raise LogsUnavailable(f"gives an answer that cannot be read: {error}") from None


async def _all_of(asked: Mapping[str, Any], silent: dict[str, str]) -> dict[str, Any]:
    """The answers; why there is none goes to `silent`."""
    answers = await asyncio.gather(*asked.values(), return_exceptions=True)
    found = {}
    for node, answer in zip(asked, answers, strict=True):
        if isinstance(answer, LogsUnavailable):
            silent[node] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found[node] = answer
    return found


def _peer(node: Node) -> Peer:
    ports = {"store": (node.store.host, node.store.port)}
    if node.memory is not None:
        ports["states in memory"] = (node.memory.host, node.memory.port)
    return Peer(node=node.name, ports=ports)


def ring(names: Sequence[str]) -> list[tuple[str, str]]:
    """Each with the next; two nodes are one pair."""
    if len(names) < 3:
        return [(names[0], names[1])] if len(names) == 2 else []
    return [(name, names[(at + 1) % len(names)]) for at, name in enumerate(names)]


def _turn(at: int, count: int) -> int:
    """No node has two pairs of one turn."""
    return 2 if count % 2 and at == count - 1 else at % 2


def to_try(names: Sequence[str]) -> dict[str, list[str]]:
    """Name -> those that it connects to. Every link is tried from both ends."""
    count = len(names)
    if count <= ALL_PAIRS_MAX:
        return {name: [other for other in names if other != name] for name in names}
    steps = [1 << bit for bit in range((count - 1).bit_length())]
    away = [step for one in steps for step in (one, -one)]
    return {name: list(dict.fromkeys(names[(at + step) % count] for step in away)) for at, name in enumerate(names)}
