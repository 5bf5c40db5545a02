"""Finds and loads a state when no member has any: from memory of its node, memory of another node, storage.

Rules
-----
* Every replica says which iterations all its shards find in their nodes' memory; member 0's replica also asks the
  other nodes, and looks at storage. All this is gathered; the order in which they are tried: `candidates.py`.
* Storage that refuses, or hangs for longer than `UNICRON_SAVE_WAIT_S`, keeps nobody from a state in memory that is as
  new as the newest checkpoint that is known (`candidates.py`). Where there is none, or none is sound, it is waited for,
  and what it raises is raised: nobody begins from an older state or from the seed unseen.
* A state of another layout than the task has now is as good as one of its own: it is there where all shards of
  that layout are found, on whatever nodes, this one among them; each new shard puts its own together (`resharding.py`).
* A state is believed when its digest is right, its names, shapes and dtypes fit, and every number is finite, for all
  shards. If not, the next candidate is tried. With none left, training begins from the seed.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch

from unicrond.agents.protocol import memory_exchange
from unicrond.agents.protocol.memory import Memory, StateHead, digest_of
from unicrond.agents.protocol.memory_exchange import ExchangeFailed, Fetching
from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.trainer.lifecycle import candidates
from unicrond.agents.trainer.lifecycle.candidates import KINDS, ROW_WORDS, Candidate, Kind, row_of, split
from unicrond.agents.trainer.process.context import Context
from unicrond.agents.trainer.states import checkpoint, origins
from unicrond.agents.trainer.states.origins import RunOrigin
from unicrond.agents.trainer.states.places import place_of
from unicrond.agents.trainer.states.resharding import WHOLE, NoLayout
from unicrond.agents.trainer.states.state import BadState
from unicrond.agents.trainer.states.state_bytes import read
from unicrond.events.vocabulary import MemoryService
from unicrond.events.vocabulary.shape import Shape

Tree: TypeAlias = dict[str, Any]
T = TypeVar("T")


class Sources:
    """Finds and loads one shard's states. `memory`: its node's. `membership`: names the peers. `reshard`: makes this
    shard's state from all shards of another layout. `origin`: of the states of this run."""

    def __init__(
        self,
        context: Context,
        memory: Memory | None,
        membership: GroupMembership,
        reshard: Callable[[Iterable[Tree]], Tree],
        origin: RunOrigin,
    ) -> None:
        self._context = context
        self._memory = memory
        self._peers = membership.peers
        self._passes = membership.passes
        self._storage_iteration = membership.storage_iteration
        self._reshard = reshard
        self._origin = origin
        self._layout = context.launch.spec.cut
        #: By iteration, which node has which shard, and in which layout: of this one where there is a choice.
        self._peer_shards: dict[int, tuple[Shape, dict[int, MemoryService]]] = {}
        self._stored: dict[int, Shape] = {}
        #: Of what was loaded last: its layout where that is another than the task's, else "".
        self.resharded_from = ""

    def row(self, *, is_first: bool, must_see_storage: bool = False, last_write: int = 0) -> list[int]:
        """Return what this replica has to offer. All its shards call this. `is_first`: it is member 0's; `last_write`:
        the newest checkpoint that this process has written. Raises OSError of storage, where it has nothing else or
        must see that."""
        heads = [] if self._memory is None else self._memory.heads()
        offers: dict[Kind, list[int]] = {"memory": [head.iteration for head in heads if head.layout == self._layout]}
        is_seen = True
        if is_first:
            offers["peer"] = self._ask_peers()
            must_see_storage |= not any(self._common(offers).values())
            is_seen = self._context.replica.all_true(self._look_at_storage(must=must_see_storage))
            offers["checkpoint"] = list(self._stored) if is_seen else []
        row = row_of(self._common(offers))
        if is_seen:
            return row
        return candidates.without_storage(row, *self._context.replica.highest(self._newest_checkpoint(last_write)))

    def load(self, candidate: Candidate) -> tuple[Tree, int]:
        """Load this shard's tree; return a copy of its own, and the bytes that were read for it. Raises BadState,
        StateRefused where the task must end."""
        take: dict[Kind, Callable[[int], tuple[Tree, int]]] = {
            "memory": self._from_memory,
            "peer": self._from_peer,
            "checkpoint": self._from_storage,
        }
        try:
            self.resharded_from = ""
            tree, size_bytes = take[candidate.kind](candidate.iteration)
        except (OSError, ExchangeFailed, msgspec.MsgspecError) as error:
            raise BadState(str(error)) from None
        if tree["iteration"] != candidate.iteration:
            raise BadState(f"it is the state after iteration {tree['iteration']}")
        if candidate.kind != "checkpoint":
            self._origin.require(origins.origin_in(tree))
        return tree, size_bytes

    # --- looking ---------------------------------------------------------------------------------

    def _common(self, offers: dict[Kind, list[int]]) -> dict[Kind, list[int]]:
        """Return what all shards of the replica have."""
        code = struct.Struct(f"<{ROW_WORDS}q")
        rows = [split(code.unpack(row)) for row in self._context.replica.gather(code.pack(*row_of(offers)))]
        return {
            kind: [iteration for iteration in rows[0][kind] if all(iteration in row[kind] for row in rows)]
            for kind in KINDS
        }

    def _newest_checkpoint(self, last_write: int) -> int:
        """Return the newest checkpoint that the head or this process knows of."""
        return candidates.UNKNOWN if self._storage_iteration is None else max(self._storage_iteration, last_write)

    def _ask_peers(self) -> list[int]:
        launch = self._context.launch
        other_layouts: dict[tuple[int, Shape], dict[int, MemoryService]] = {}
        for peer in self._peers:
            try:
                heads_by_shard = memory_exchange.ask(peer, launch.task, self._passes)
            except ExchangeFailed as error:
                self._print(f"no state from the memory of {peer.node}: {error}")
                continue
            for shard, heads in heads_by_shard.items():
                for head in heads:
                    if head.layout != self._layout:
                        other_layouts.setdefault((head.iteration, head.layout), {}).setdefault(shard, peer)
                    elif shard == launch.shard and peer.node != launch.node:
                        self._peer_shards.setdefault(head.iteration, (head.layout, {shard: peer}))
        for (iteration, layout), shards in sorted(other_layouts.items()):
            if shards.keys() == set(range(layout.workers)):
                self._peer_shards.setdefault(iteration, (layout, shards))
        return list(self._peer_shards)

    def _look_at_storage(self, *, must: bool) -> bool:
        """Note what storage has; return False where it does not say, though it need not (`must`)."""
        spec, start = self._context.launch.spec, self._origin.start
        directory = spec.checkpoint.dir
        if not directory:
            return True
        if start.mode == "fork":
            fork = partial(checkpoint.fork, start.source_dir, start.source, directory, spec.name, self._origin)
            is_done = self._context.replica.shard != 0 or self._ask_storage(fork, must=must) is not None
            if not self._context.replica.all_true(is_done):
                return False
        look = partial(checkpoint.newest_iterations, directory, spec.name, self._origin)
        answer = self._ask_storage(look, must=must)
        if answer is None:
            return False
        self._stored = answer.result()
        return True

    def _ask_storage(self, question: Callable[[], T], *, must: bool) -> Future[T] | None:
        """Ask storage, in a thread; return its answer, None where it gives none in time and need not (`must`)."""
        launch, limit_s = self._context.launch, self._context.settings.save_wait_s
        pool = ThreadPoolExecutor(1, "look")
        answer = pool.submit(question)
        pool.shutdown(wait=False)
        wait([answer], limit_s)
        problem = "" if answer.done() else f"no answer for {limit_s:.0f} s"
        try:
            if must and problem:
                self._print(f"waiting for {launch.spec.checkpoint.dir}: {problem}")
            if must or not problem:
                answer.result()
                return answer
        except OSError as error:
            if must:
                raise
            problem = f"{type(error).__name__}: {error}"
        self._print(f"no state from {launch.spec.checkpoint.dir}: {problem}")
        return None

    def _print(self, line: str) -> None:
        print(f"{self._context.launch.worker}: {line}", file=sys.stderr, flush=True)

    # --- taking ----------------------------------------------------------------------------------

    def _from_memory(self, iteration: int) -> tuple[Tree, int]:
        if self._memory is None:
            raise BadState("this node keeps no states in memory")
        with self._memory.reading(iteration, self._layout) as slot:
            if slot is None:
                raise BadState("it was overwritten, or is being overwritten")
            return _checked(*slot, digest_of(slot[1]))

    def _from_peer(self, iteration: int) -> tuple[Tree, int]:
        if iteration not in self._peer_shards:
            raise BadState("no node has it in memory")
        layout, shards = self._peer_shards[iteration]
        return self._put_together(layout, lambda shard: self._fetched(shards[shard], shard, iteration, layout))

    def _fetched(self, service: MemoryService, shard: int, iteration: int, layout: Shape) -> tuple[Tree, int]:
        fetching = Fetching(service, self._context.launch.task, shard, iteration, layout, self._passes)
        if fetching.head.size_bytes > _size_limit():
            raise BadState(f"its announced size is {fetching.head.size_bytes} bytes")
        view = torch.empty(fetching.head.size_bytes, dtype=torch.uint8).numpy().data
        return _checked(fetching.head, view, fetching.receive(view))

    def _from_storage(self, iteration: int) -> tuple[Tree, int]:
        if iteration not in self._stored:
            raise BadState("it is not on storage")
        spec = self._context.launch.spec
        self._origin.require(origins.origin_of(place_of(spec.checkpoint.dir), iteration))
        load = partial(checkpoint.load, spec.checkpoint.dir, spec.name, iteration)
        return self._put_together(self._stored[iteration], load)

    def _put_together(self, layout: Shape, shard_of: Callable[[int], tuple[Tree, int]]) -> tuple[Tree, int]:
        """Return this shard as it was kept; or, in another layout, make it from all shards of that, one after the
        other."""
        if layout == self._layout:
            state = shard_of(self._context.launch.shard)
            if WHOLE not in state[0]:
                return state
        self.resharded_from = str(layout)
        sizes_bytes: list[int] = []

        def shards() -> Iterator[Tree]:
            """Yield the trees of the other layout's shards."""
            for shard in range(layout.workers):
                tree, size_bytes = shard_of(shard)
                sizes_bytes.append(size_bytes)
                yield tree

        try:
            return self._reshard(shards()), sum(sizes_bytes)
        except NoLayout as error:
            hint = f"submit the task with {layout}, or under another name"
            raise NoLayout(f"it was kept with {layout}, and {error}; {hint}") from None


def _checked(head: StateHead, view: memoryview, digest: bytes) -> tuple[Tree, int]:
    if digest != head.digest:
        raise BadState("the digest of its bytes is wrong")
    return read(view, copy=True), head.size_bytes


def _size_limit() -> int:
    """Return this machine's memory in bytes: no state is larger."""
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 1 << 40
