"""Accumulates gradients over micro-batches in flat memory, from which they are reduced bucket by bucket.

Rules
-----
* A hook adds each finished gradient to its parameter's place in the present *store* (what Megatron's
  DistributedDataParallel does, without its collectives, its scaling and its groups): all parameters one after the
  other, in fp32, cut into buckets.
* Where the sum is fixed (`lanes.py`) there is a store for each running sum and each block of lanes that this replica
  has: as a rule one. Before another lane begins, blocks are added up, so of n lanes in a row there are at most
  log2(n) + 4 stores. Otherwise there is one, which takes everything in the order in which it is computed.
* Reduction never writes here. A collective that dies half-way leaves partial sums elsewhere; the accumulation stays
  until the iteration is agreed.
* `settle` makes sum / tokens the gradients: from then on every parameter's `main_grad` (and `grad`, for plain torch
  optimizers) is the mean gradient of the whole global batch, in fp32, until `clear`.
* What may be reduced during a backward is counted: `expect` says how many gradients each parameter will still get,
  and learns of each bucket whose parameters have had theirs. A gradient beyond that is a `surplus`.
* Where torch's own optimizers step (`torch_grads`), each parameter's `grad` is in the parameter's own dtype, as these
  want it: the mean, cast once. (Sums in 16 bits would lose what the next micro-batch adds.) And it is None where no
  micro-batch of the iteration, on any replica, gave the parameter a gradient: optimizers leave out such parameters. One
  element for each parameter, beside the gradients, says so; they are summed with them, and never divided. So are the
  buffers that change (`carried_buffers.py`).
* A parameter that gets several gradients in one micro-batch, as in a loop over its samples, has them added one after
  the other. Computed ahead of the lane's running sum they would be added up first, and have other bits: `has_several`
  says that a micro-batch has done so, and none is computed ahead from then on.
* Where a framework adds gradients to buffers of its own, the stores are laid out as these (`StoreLayout`), and it adds
  to whichever is the present one (`megatron/buffers.py`).
* Of parameters that `fully_shard` has spread over the replica's workers, a store has the shards of this worker: torch
  calls the hook with those of a gradient that it has summed over the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from unicrond.agents.trainer.gradients.carried_buffers import CarriedBuffers
from unicrond.agents.trainer.lifecycle.lanes import Lanes, Sums
from unicrond.agents.trainer.process.shards import shard_of, spread_as

BUCKET_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The layout of a store, in elements. `starts`: of each parameter; `spans`: of each bucket, [start, stop), in the
    order opposite to that in which a backward finishes them; `bucket_of`: the bucket of each parameter; `numel`: of a
    store."""

    starts: Sequence[int]
    spans: Sequence[tuple[int, int]]
    bucket_of: Sequence[int]
    numel: int


def consecutive_layout(parameters: Sequence[torch.Tensor], bucket_bytes: int) -> StoreLayout:
    """Return a layout of all parameters in their order, without gaps; at most `bucket_bytes` of gradients in a bucket
    (a larger parameter has one of its own)."""
    starts: list[int] = []
    spans: list[tuple[int, int]] = []
    bucket_of: list[int] = []
    end = 0
    for group in _groups(parameters, bucket_bytes // 4):
        bucket_of += [len(spans)] * len(group)
        spans.append((end, end + sum(map(torch.numel, group))))
        for parameter in group:
            starts.append(end)
            end += parameter.numel()
    return StoreLayout(starts, spans, bucket_of, end)


def with_elements_beside(layout: StoreLayout, count: int) -> StoreLayout:
    """Return the layout with so many elements behind the gradients, in a bucket of their own: the first, which is
    reduced last."""
    spans = [(layout.numel, layout.numel + count), *layout.spans]
    return StoreLayout(layout.starts, spans, [1 + bucket for bucket in layout.bucket_of], layout.numel + count)


class GradientStore:
    """Memory for one gradient of each parameter: `flat`, and a view of it for each parameter. `marks`: parameters that
    are known to have a gradient in it."""

    def __init__(self, parameters: Sequence[torch.Tensor], plan: StoreLayout) -> None:
        device = parameters[0].device if parameters else None
        self.marks: set[int] = set()
        self.flat = torch.zeros(plan.numel, dtype=torch.float32, device=device)
        self.places = [
            self.flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(plan.starts, parameters, strict=True)
        ]

    def clear(self) -> None:
        """Have zeros in it."""
        self.marks.clear()
        self.flat.zero_()


class Accumulation:
    """The accumulated gradients of the parameters that need any. `lanes`: of a fixed sum. `bucket_bytes`: of gradients
    in one bucket, at most (a larger parameter has a bucket of its own). `plan`: the layout of the stores, if not one
    after the other. `torch_grads`: give gradients to torch's own optimizers, in each parameter's dtype. `buffers`:
    those that travel with the sums."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lanes: Lanes | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        plan: StoreLayout | None = None,
        torch_grads: bool = False,
        buffers: CarriedBuffers | None = None,
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        #: What a store has a place for, by parameter.
        self._shards = [shard_of(parameter) for parameter in self._parameters]
        self._lanes = lanes
        plan = plan or consecutive_layout(self._shards, bucket_bytes)
        #: Elements of gradients in a store. Behind them: a mark for each parameter, and the buffers.
        self.gradients = plan.numel
        self._torch_grads, self._extra_buffers = torch_grads, buffers
        marks = len(self._parameters) if torch_grads else 0
        self._room = slice(plan.numel + marks, None)
        beside = marks + (buffers.size if buffers is not None else 0)
        self._plan = plan = with_elements_beside(plan, beside) if beside else plan
        self._bucket_of = list(plan.bucket_of)
        #: Of each bucket, [start, stop) in a store.
        self.spans = list(plan.spans)
        self._members = [self._bucket_of.count(bucket) for bucket in range(len(self.spans))]
        self._first = self._new_store()
        self._present = self._first
        self._free: list[GradientStore] = []
        self._ahead: list[GradientStore] = []
        self._stores_max = 1
        self._has_had_room = False
        #: Whether a micro-batch has given a parameter more than one gradient, in this process. By parameter: the place
        #: of the last micro-batch that gave it any, counted from 1.
        self.has_several = False
        self._micro_batch = 0
        self._last_micro_batch = [0] * len(self._parameters)
        self.sums: Sums[GradientStore] = Sums(self._add_up)
        self._expected_counts: list[int] | None = None
        self._unready: list[int] = []
        self._ready: Callable[[int], None] | None = None
        #: Called with each finished gradient: this is a backward.
        self.on_gradient: Callable[[], None] = _do_nothing
        #: Whether a parameter got more gradients than were expected.
        self.surplus = False
        self._install_hooks()
        self.clear()

    def _new_store(self) -> GradientStore:
        return GradientStore(self._shards, self._plan)

    def _install_hooks(self) -> None:
        """Have gradients added here from now on."""
        for index, parameter in enumerate(self._parameters):
            parameter.main_grad = self._first.places[index]
            parameter.register_post_accumulate_grad_hook(partial(self._accumulate, index))

    def _enter(self, store: GradientStore) -> None:
        """Have gradients added to this store."""
        self._present = store

    def __len__(self) -> int:
        """Return the number of buckets, which are in the parameters' order."""
        return len(self.spans)

    def allocate(self, numel: int) -> torch.Tensor:
        """Return an uninitialized flat tensor on the gradients' device."""
        return torch.empty(numel, dtype=torch.float32, device=self._first.flat.device)

    def copy(self, bucket: int) -> torch.Tensor:
        """Return a copy of what the only store has accumulated in the bucket, to be reduced."""
        return self._first.flat[slice(*self.spans[bucket])].clone()

    def expect(self, gradients: int, ready: Callable[[int], None] | None) -> None:
        """Expect so many gradients more for each parameter, and call `ready` with each bucket that has them all. None:
        expect nothing."""
        self._ready = ready
        self._expected_counts = None if ready is None else [gradients] * len(self._parameters)
        self._unready = list(self._members)

    def settle(self, sums: Iterable[tuple[int, torch.Tensor]], tokens: float) -> None:
        """Make `sums` / `tokens` the gradients; each sum with the place where it starts."""
        flat = self._first.flat
        for start, total in sums:
            place = flat[start : start + total.numel()]
            if start >= self.gradients:
                place.copy_(total)
            else:
                torch.div(total, tokens, out=place)
        if self._extra_buffers is not None and self._extra_buffers.size:
            self._extra_buffers.adopt(flat[self._room])
        if self._torch_grads:
            marks = flat[self.gradients : self.gradients + len(self._parameters)].tolist()
            for parameter, mark in zip(self._parameters, marks, strict=True):
                mean = parameter.main_grad.to(parameter.dtype) if mark else None
                parameter.grad = None if mean is None else spread_as(parameter, mean)
            return
        for parameter in self._parameters:
            if parameter.dtype == torch.float32:
                parameter.grad = parameter.main_grad

    def begin_micro_batches(self) -> None:
        """Note that the program computes micro-batches now: their gradients and buffers are to be told apart from those
        before."""
        self._micro_batch += 1
        if self._extra_buffers is not None:
            self._extra_buffers.begin()

    def end_micro_batches(self, micro_batches: Sequence[int]) -> None:
        """Note that the program has computed these. Raises BufferMoved."""
        if self._extra_buffers is not None:
            self._extra_buffers.end(micro_batches, self._present.flat[self._room])

    def clear(self) -> None:
        """Begin an iteration: nothing accumulated or expected, no `grad` that aliases a store. Stores beyond what the
        last one has needed at a time are given back."""
        self.expect(0, None)
        self.surplus = False
        self._release_ahead()
        spares = [store for store in (*self.sums.all_sums(), *self._free) if store is not self._first]
        self._free = [self._first, *spares[: self._stores_max - 1]]
        for store in self._free:
            store.clear()
        self._stores_max = 1
        self.sums = Sums(self._add_up)
        self._enter(self._first)
        self._drop_grads()

    def _drop_grads(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    # --- lanes -----------------------------------------------------------------------------------

    def select_lane(self, lane: int) -> None:
        """Have gradients added to this lane's running sum from now on."""
        if self._lanes is not None:
            if lane not in self.sums.running:
                self.sums.merge(self._lanes.root)
                self.sums.running[lane] = self.take_store()
            self._enter(self.sums.running[lane])
            self._stores_max = max(self._stores_max, len(self.sums.all_sums()))

    @property
    def store_bytes(self) -> int:
        """Return the size of each store."""
        return int(self._first.flat.nbytes)

    @property
    def has_room(self) -> bool:
        """Return whether the gradients' GPU, if they are on one, has memory for some more stores, freed memory
        included."""
        flat = self._first.flat
        if not flat.is_cuda:
            return True
        kept_bytes = torch.cuda.memory_reserved(flat.device) - torch.cuda.memory_allocated(flat.device)
        return bool(torch.cuda.mem_get_info(flat.device)[0] + kept_bytes > 4 * flat.nbytes)

    def has_had_room(self) -> bool:
        """Return whether there has been room at some iteration's end: an uneven deal takes more stores, and keeps
        them."""
        self._has_had_room = self._has_had_room or self.has_room
        return self._has_had_room

    def go_ahead(self) -> None:
        """Keep gradients apart from now on: they are of a micro-batch whose lane's running sum is not here yet."""
        store = self.take_store(spare=True)
        self._ahead.append(store)
        self._enter(store)

    def resume_lane(self, lane: int, store: GradientStore) -> None:
        """Use `store` as the lane's running sum, and add to it what was computed ahead, in its order."""
        for ahead in self._ahead:
            store.flat.add_(ahead.flat)
        self._release_ahead()
        self.sums.running[lane] = store

    def drop_ahead(self) -> None:
        """Drop the micro-batch that was computed ahead last."""
        self._release(self._ahead.pop())

    def _release_ahead(self) -> None:
        for store in self._ahead:
            self._release(store)
        self._ahead = []

    def take_store(self, *, spare: bool = False) -> GradientStore:
        """Return a store of zeros. `spare`: not the first, in which the means will stand."""
        places = [place for place, store in enumerate(self._free) if not spare or store is not self._first]
        return self._free.pop(places[0]) if places else self._new_store()

    @contextmanager
    def scratch_store(self) -> Iterator[torch.Tensor]:
        """Keep gradients apart meanwhile, and then drop them; yield their sum, which begins at zero."""
        previous, store = self._present, self.take_store(spare=True)
        self._enter(store)
        yield store.flat
        self._enter(previous)
        self._release(store)

    def keep(self, valid: Collection[int]) -> None:
        """Drop the sums that are not made of these micro-batches."""
        if self._lanes is not None:
            self._release_ahead()
            for store in self.sums.keep(valid, self._lanes):
                self._release(store)

    def _add_up(self, target: GradientStore, addend: GradientStore) -> GradientStore:
        target.flat.add_(addend.flat)
        self._release(addend)
        return target

    def _release(self, store: GradientStore) -> None:
        store.clear()
        self._free.append(store)

    def _accumulate(self, index: int, parameter: torch.nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        store = self._present
        store.places[index].add_(shard_of(gradient))
        if self._torch_grads and index not in store.marks:
            store.marks.add(index)
            store.flat[self.gradients + index] = 1.0
        self._note_gradient(index)

    def _note_gradient(self, index: int, *_: object) -> None:
        """Note that a gradient is finished and added, in the middle of a backward."""
        self.on_gradient()
        self.has_several |= self._last_micro_batch[index] == self._micro_batch
        self._last_micro_batch[index] = self._micro_batch
        if self._expected_counts is None or self._ready is None:
            return
        self._expected_counts[index] -= 1
        self.surplus |= self._expected_counts[index] < 0
        if self._expected_counts[index] == 0:
            bucket = self._bucket_of[index]
            self._unready[bucket] -= 1
            if self._unready[bucket] == 0:
                self._ready(bucket)


def _do_nothing() -> None:
    pass


def _groups(parameters: Sequence[torch.Tensor], numel_max: int) -> list[list[torch.Tensor]]:
    """Return consecutive parameters in groups of at most `numel_max` elements (a larger one stands alone)."""
    groups: list[list[torch.Tensor]] = []
    count = 0
    for parameter in parameters:
        if not groups or count + parameter.numel() > numel_max:
            groups.append([])
            count = 0
        groups[-1].append(parameter)
        count += parameter.numel()
    return groups
