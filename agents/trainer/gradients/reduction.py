"""Sums one iteration's gradients over all replicas, bucket by bucket.

Rules
-----
* A bucket is *started* when this replica's share is on its way through the group, *complete* here when the sum has
  arrived, and *final* when it is complete on every member that is left (`verdict.py`): then it is not reduced again,
  whichever member is lost.
* Buckets are started from the last to the first, the order in which a backward finishes them, and never otherwise: a
  collective must be every member's n-th. One that is ready before its turn waits for it.
* `overlap` starts buckets inside the backward of the last micro-batches, each as soon as its gradients are there;
  `start` starts the others. Neither ever raises: a broken group shows where it is waited for (`ShardGroup.finish`).
* `keep` throws away everything but the final sums. What is still in flight then writes where no reader is.

Where the sum follows the assignment, a bucket's share is copied and reduced by the library.

Where it is fixed (`lanes.py`) a bucket is reduced strip by strip, and each strip in chunks, one for each member, its
*owner*: all members give each owner its chunk of their blocks' sums; it adds them in the tree's order; and all gather
the chunks. The bytes that travel are those of an all-reduce, where each member has one block. The exchange of one strip
begins when that of the strip before has come; so its chunks are gathered meanwhile, and the order of collectives is
that of the strips on every member: exchange, gather, exchange, gather. With gloo its threads go from one to the next,
with NCCL a stream does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from unicrond.agents.trainer.gradients.accumulation import Accumulation, GradientStore
from unicrond.agents.trainer.groups.group import Operation, ShardGroup
from unicrond.agents.trainer.lifecycle.lanes import Block, Lanes, halves, tree

#: Elements of gradients in one exchange (4 MiB), and at least in one chunk of it (64 KiB): of many members' smaller
#: ones the messages would cost more than what is in them.
STRIP, CHUNK = 1024 * 1024, 16 * 1024


@dataclass(frozen=True, slots=True)
class _Strip:
    """Elements [start, stop) of the gradients, in one bucket. `sums`: by block, those that this replica has."""

    bucket: int
    start: int
    stop: int
    sums: Mapping[Block, GradientStore]


@dataclass
class _Round:
    """One attempt, in one group. `arriving`: of each bucket that is started, its stretches: where each begins, what it
    is when its operation is done, None as long as that has not begun. `strips`: to be exchanged next, with what this
    replica has for them; `ends`: the blocks that each member has, in rank order; `is_busy`: one is on its way;
    `is_beginning`: about to be. `on_done`: to be called when none is left."""

    group: ShardGroup | None = None
    arriving: dict[int, dict[int, tuple[torch.Tensor, Operation] | None]] = field(default_factory=dict)
    strips: list[_Strip] = field(default_factory=list)
    ends: Sequence[Sequence[Block]] = ()
    is_busy: bool = False
    is_beginning: bool = False
    on_done: Callable[[], None] | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)


class Reduction:
    """The sums of an iteration's gradients over all replicas. `lanes`: None where the sum follows the assignment."""

    def __init__(self, accumulation: Accumulation, lanes: Lanes | None = None) -> None:
        self._accumulation = accumulation
        self._lanes = lanes
        #: Called after each start, inside a backward or not (for ordered faults).
        self.on_start: Callable[[], None] = _do_nothing
        #: The blocks that each member has, in rank order; `ending`: lanes that end with the present backward.
        self.ends: Sequence[Sequence[Block]] = ()
        self.ending: Collection[int] = ()
        self._final: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._turns: list[int] = []
        self._waiting: set[int] = set()
        self._round = _Round()
        self._receive_buffer: torch.Tensor | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a new iteration."""
        self._final = {}
        self._norms = {}
        self._reset()

    def overlap(self, group: ShardGroup, gradients: int) -> None:
        """Prepare for the last of this replica's micro-batches, `gradients` for each parameter: reduce inside their
        backward."""
        self._round.group = group
        self._accumulation.expect(gradients, self._ready)

    def start(self, group: ShardGroup, on_done: Callable[[], None]) -> None:
        """Start every bucket that is not final and not started, and then call `on_done`, which starts another
        collective: from this thread, or from one of the group's."""
        self._round.group = group
        self._accumulation.expect(0, None)
        for bucket in list(self._turns):
            self._ready(bucket)
        with self._round.lock:
            self._round.on_done = on_done
            self._exchange(self._round)

    @property
    def started(self) -> int:
        """Return how many buckets are on their way, or have come, in the present group."""
        return len(self._round.arriving)

    def complete(self) -> dict[int, list[tuple[int, torch.Tensor]]]:
        """Return the sums that are complete here, final ones among them: of each bucket the stretches, with their
        places."""
        sums = dict(self._final)
        for bucket, stretches in self._round.arriving.items():
            arrived = [
                (start, stretch[0])
                for start, stretch in stretches.items()
                if stretch is not None and stretch[1].succeeded
            ]
            if len(arrived) == len(stretches):
                sums[bucket] = arrived
        return sums

    def sums(self) -> list[tuple[int, torch.Tensor]]:
        """Return all sums, with their places. Raises KeyError unless all are complete."""
        complete = self.complete()
        return [stretch for bucket in range(len(self._accumulation)) for stretch in complete[bucket]]

    def norm(self) -> float:
        """Return the norm of what this replica has contributed, as it was when each bucket was started first."""
        return float(torch.linalg.vector_norm(torch.stack([*self._norms.values()]))) if self._norms else 0.0

    def keep(self, final: Collection[int]) -> None:
        """Keep these buckets as final, and have all others reduced again."""
        complete = self.complete()
        self._final = {bucket: complete[bucket] for bucket in final}
        self._receive_buffer = None
        self._reset()

    def _reset(self) -> None:
        with self._round.lock:
            self._round.strips, self._round.on_done = [], None
            if self._round.is_busy:  # what was on its way may still arrive
                self._receive_buffer = None
        self._round = _Round()
        self._turns = [bucket for bucket in reversed(range(len(self._accumulation))) if bucket not in self._final]
        self._waiting = set()
        self.ending = ()
        self._accumulation.expect(0, None)

    def _ready(self, bucket: int) -> None:
        self._waiting.add(bucket)
        while self._turns and self._turns[0] in self._waiting:
            begin = self._all_reduce if self._lanes is None else self._ordered
            begin(self._turns.pop(0))
            self.on_start()

    def _all_reduce(self, bucket: int) -> None:
        group = self._round.group
        assert group is not None
        copy = self._accumulation.copy(bucket)
        start = self._accumulation.spans[bucket][0]
        self._note_norm(start, copy)
        self._round.arriving[bucket] = {start: (copy, group.all_reduce(copy))}

    def _note_norm(self, place: int, *shares: torch.Tensor) -> None:
        """Note the norm of what stands at the element `place` and behind it, where that is gradients."""
        if place >= self._accumulation.gradients:
            return
        if place not in self._norms and shares:
            self._norms[place] = torch.linalg.vector_norm(
                torch.stack([torch.linalg.vector_norm(share) for share in shares])
            )

    # --- a fixed sum -----------------------------------------------------------------------------

    def _ordered(self, bucket: int) -> None:
        first, last = self._accumulation.spans[bucket]
        sums = self._accumulation.sums.by_block(self.ending)
        current = self._round
        assert current.group is not None
        length = max(STRIP, CHUNK * current.group.size)
        strips = [_Strip(bucket, start, min(start + length, last), sums) for start in range(first, last, length)]
        with current.lock:
            current.ends = self.ends
            current.arriving[bucket] = dict.fromkeys(strip.start for strip in strips)
            current.strips += strips
            self._exchange(current)

    def _exchange(self, current: _Round) -> None:
        """Begin the next strip's exchange, unless one is on its way; after the last, call what waits for that."""
        if current.is_beginning:
            return
        current.is_beginning = True
        while current.strips and not current.is_busy:
            self._begin(current, current.strips.pop(0))
        current.is_beginning = False
        if not current.is_busy and current.on_done is not None:
            on_done, current.on_done = current.on_done, None
            on_done()

    def _begin(self, current: _Round, strip: _Strip) -> None:
        current.is_busy = True
        group, size = current.group, strip.stop - strip.start
        assert group is not None
        have = {block: store.flat[strip.start : strip.stop] for block, store in strip.sums.items()}
        block_sums = [tree(block, have, torch.add) for block in current.ends[group.rank]]
        self._note_norm(strip.start, *block_sums)
        if group.size == 1:
            current.arriving[strip.bucket][strip.start] = block_sums[0].clone(), Operation(is_done=True)
            current.is_busy = False
            return
        chunk = -(-size // group.size)
        lengths = [max(0, min(chunk, size - member * chunk)) for member in range(group.size)]
        own_length = lengths[group.rank]
        outgoing = block_sums[0] if len(block_sums) == 1 else self._by_owner(block_sums, lengths)
        incoming = self._room(sum(map(len, current.ends)) * own_length)
        group.all_to_all(
            incoming,
            outgoing,
            [len(blocks) * own_length for blocks in current.ends],
            [len(block_sums) * length for length in lengths],
            callback=partial(self._gather, current, strip, incoming, chunk, own_length),
        )

    def _gather(self, current: _Round, strip: _Strip, incoming: torch.Tensor, chunk: int, own_length: int) -> None:
        """Add up this member's chunk, which all have sent, and have all gather it."""
        group = current.group
        assert group is not None and self._lanes is not None
        all_blocks = [block for blocks in current.ends for block in blocks]
        pieces = dict(
            zip(all_blocks, incoming.split(own_length) if own_length else [incoming] * len(all_blocks), strict=True)
        )
        whole = self._accumulation.allocate(chunk * group.size)
        part = whole[group.rank * chunk : (group.rank + 1) * chunk]
        _sum_into(part[:own_length], self._lanes.root, pieces)
        with current.lock:
            current.arriving[strip.bucket][strip.start] = whole[: strip.stop - strip.start], group.gather(whole, part)
            current.is_busy = False
            self._exchange(current)

    def _room(self, numel: int) -> torch.Tensor:
        """Return the buffer in which the chunks of one strip arrive: the same for all, as long as no group breaks."""
        if self._receive_buffer is None or self._receive_buffer.numel() < numel:
            self._receive_buffer = self._accumulation.allocate(numel)
        return self._receive_buffer[:numel]

    def _by_owner(self, pieces: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
        """Return what each owner gets of all pieces, one owner after the other."""
        pieces_by_owner = [piece.split(list(lengths)) for piece in pieces]
        return torch.cat(
            [self._accumulation.allocate(0), *(part for owner in zip(*pieces_by_owner, strict=True) for part in owner)]
        )


def _sum_into(part: torch.Tensor, block: Block, pieces: Mapping[Block, torch.Tensor]) -> None:
    """Write the sum of the pieces into `part`; the pieces are overwritten."""
    if block in pieces:
        part.copy_(pieces[block])
    else:
        low, high = (tree(half, pieces, torch.Tensor.add_) for half in halves(block))
        torch.add(low, high, out=part)


def _do_nothing() -> None:
    pass
