"""Where the state comes from when no member has any: memory of a member's node, memory of another node, storage.

Rules
-----
* Every replica says which iterations all its shards find in their nodes' memory; member 0's replica also asks the
  other nodes, and looks at storage. All this is gathered, so every member knows all candidates and their order.
* The newest iteration first: nothing is trained again that anybody still has. Of the same iteration the nearest:
  memory here, memory of another node, storage. (What is nearer is saved to more often, so it is newer as well,
  unless it was left behind by a task that has moved away since.)
* A state is believed when its digest is right, its names, shapes and dtypes fit, and every number is finite, for all
  shards. If not, the next candidate is tried. With none left, training begins from the seed.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from agents.trainer import checkpoint, memory_exchange
from agents.trainer.context import Context
from agents.trainer.memory import Head, Memory, digest_of
from agents.trainer.memory_exchange import Fetching, NoAnswer
from agents.trainer.state import BadState
from agents.trainer.state_bytes import read
from events.vocabulary import MemoryService

Kind: TypeAlias = Literal["memory", "peer", "checkpoint"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: How many iterations of each kind are told; a slot more of storage than is usually kept.
TOLD: dict[Kind, int] = {"memory": 2, "peer": 4, "checkpoint": 4}
ROW_WORDS = sum(TOLD.values())


@dataclass(frozen=True, slots=True)
class Candidate:
    """The state after `iteration`, which the replica of member `rank` can take from `kind`."""

    iteration: int
    kind: Kind
    rank: int

    def __str__(self) -> str:
        return f"{self.kind} of iteration {self.iteration}"


def ordered(rows: Sequence[Sequence[int]]) -> list[Candidate]:
    """All that the gathered rows name, best first. `rows[m]`: member m's iterations by kind, 0 for none."""
    found = [
        Candidate(iteration, kind, rank)
        for rank, row in enumerate(rows)
        for kind, iterations in split(row).items()
        for iteration in iterations
    ]
    return sorted(dict.fromkeys(found), key=lambda one: (-one.iteration, KINDS.index(one.kind), one.rank))


def newest(rows: Sequence[Sequence[int]], kind: Kind) -> int:
    """The newest iteration of the kind that anybody named; 0 for none."""
    return max((iteration for row in rows for iteration in split(row)[kind]), default=0)


def row_of(told: dict[Kind, list[int]]) -> list[int]:
    """The row that a member gathers."""
    row: list[int] = []
    for kind in KINDS:
        iterations = sorted(told.get(kind, []), reverse=True)[: TOLD[kind]]
        row += iterations + [0] * (TOLD[kind] - len(iterations))
    return row


def split(row: Sequence[int]) -> dict[Kind, list[int]]:
    """The inverse of `row_of`."""
    told: dict[Kind, list[int]] = {}
    start = 0
    for kind in KINDS:
        told[kind] = [iteration for iteration in row[start : start + TOLD[kind]] if iteration > 0]
        start += TOLD[kind]
    return told


class Sources:
    """One shard's way to the state. `memory`: its node's."""

    def __init__(self, context: Context, memory: Memory | None, peers: tuple[MemoryService, ...]) -> None:
        self._context = context
        self._memory = memory
        self._peers = [peer for peer in peers if peer.node != context.launch.node]
        self._held: dict[int, MemoryService] = {}

    def row(self, *, is_first: bool) -> list[int]:
        """What this replica has to offer. All its shards call this. `is_first`: it is member 0's."""
        told: dict[Kind, list[int]] = {"memory": [] if self._memory is None else _iterations(self._memory.heads())}
        if is_first:
            told["peer"] = self._ask_peers()
            told["checkpoint"] = self._look_at_storage()
        return row_of(self._common(told))

    def load(self, candidate: Candidate) -> tuple[dict[str, Any], int]:
        """This shard's tree, a copy of its own, and its size in bytes. Raises BadState with the reason."""
        take: dict[Kind, Callable[[int], tuple[dict[str, Any], int]]] = {
            "memory": self._from_memory,
            "peer": self._from_peer,
            "checkpoint": self._from_storage,
        }
        try:
            tree, size_bytes = take[candidate.kind](candidate.iteration)
        except (OSError, NoAnswer, msgspec.MsgspecError) as error:
            raise BadState(str(error)) from None
        if tree["iteration"] != candidate.iteration:
            raise BadState(f"it is the state after iteration {tree['iteration']}")
        return tree, size_bytes

    # --- looking ---------------------------------------------------------------------------------

    def _common(self, told: dict[Kind, list[int]]) -> dict[Kind, list[int]]:
        """What all shards of the replica have."""
        code = struct.Struct(f"<{ROW_WORDS}q")
        rows = [split(code.unpack(row)) for row in self._context.replica.gather(code.pack(*row_of(told)))]
        return {kind: [one for one in rows[0][kind] if all(one in row[kind] for row in rows)] for kind in KINDS}

    def _ask_peers(self) -> list[int]:
        launch = self._context.launch
        for peer in self._peers:
            try:
                heads = memory_exchange.ask(peer, launch.task, launch.shard)
            except NoAnswer as error:
                print(f"{launch.worker}: no state from the memory of {peer.node}: {error}", file=sys.stderr, flush=True)
                continue
            for iteration in _iterations(heads):
                self._held.setdefault(iteration, peer)
        return list(self._held)

    def _look_at_storage(self) -> list[int]:
        launch, replica = self._context.launch, self._context.replica
        if not launch.spec.checkpoint.dir:
            return []
        return checkpoint.newest_iterations(Path(launch.spec.checkpoint.dir), launch.spec.name, replica.size)

    # --- taking ----------------------------------------------------------------------------------

    def _from_memory(self, iteration: int) -> tuple[dict[str, Any], int]:
        if self._memory is None:
            raise BadState("this node keeps no memory")
        with self._memory.reading(iteration) as found:
            if found is None:
                raise BadState("it has been overwritten, or is being")
            return _checked(*found)

    def _from_peer(self, iteration: int) -> tuple[dict[str, Any], int]:
        launch = self._context.launch
        if iteration not in self._held:
            raise BadState("no node keeps it")
        fetching = Fetching(self._held[iteration], launch.task, launch.shard, iteration)
        if fetching.head.size_bytes > _size_limit():
            raise BadState(f"it is said to be {fetching.head.size_bytes} bytes long")
        view = memoryview(bytearray(fetching.head.size_bytes))
        fetching.receive(view)
        return _checked(fetching.head, view)

    def _from_storage(self, iteration: int) -> tuple[dict[str, Any], int]:
        spec, replica = self._context.launch.spec, self._context.replica
        return checkpoint.load(Path(spec.checkpoint.dir), spec.name, iteration, replica.shard, replica.size)


def _checked(head: Head, view: memoryview) -> tuple[dict[str, Any], int]:
    if digest_of(view) != head.digest:
        raise BadState("its bytes do not have the digest that was taken of them")
    return read(view, copy=True), head.size_bytes


def _iterations(heads: Sequence[Head]) -> list[int]:
    return list(dict.fromkeys(head.iteration for head in heads))


def _size_limit() -> int:
    """No state is larger than this machine's memory."""
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 1 << 40
