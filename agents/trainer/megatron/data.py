"""Reads Megatron's own data by the micro-batches assigned: its data set, sampler and collate, without its loader.

Rules
-----
* Megatron believes in no other replica, so its sampler's next lists of indices are an iteration's micro-batches, in
  order; where a replica has data-parallel ranks, this rank's share of each. Only those that the replica computes are
  read.
* Where a loader stands follows from the iteration alone: it seeks where that is not the next one.
* With `--num-workers` above 0 a thread reads ahead: what is assigned and not asked for yet, and behind an iteration
  what this replica will most likely begin the next one with. What is not asked for then is thrown away.
* Every replica has a rank 0 that builds a data set's index where the cache holds none. The first builds it under a lock
  beside the cache (`index_lock`), the others find it there.
* Validation data stands where an unbroken run would stand, and test data begins at 0, also where a replica reads its
  share of an evaluation only: a call of the schedule then counts as an iteration (`EvaluationLoader`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

Build: TypeAlias = Callable[[Any, int], Any]
Loading: TypeAlias = Callable[[], AbstractContextManager[None]]
#: Of the data sets that seed generators of the whole process: they are read where they are asked for.
_SEEDS_ALL = "RandomSeedDataset"
#: Micro-batches that are read ahead.
_AHEAD = 2


class MicroBatchLoader:
    """Training data, in place of one of Megatron's loaders: `next` returns the micro-batches requested, in that order.
    `build`: Megatron's loader of a data set, from a number of consumed samples on. `offset`: samples that were consumed
    beyond what the iterations behind come to, for those of a checkpoint can have had another global batch.
    `reads_ahead`: in a thread."""

    def __init__(
        self,
        build: Build,
        dataset: Any,
        global_batch: int,
        micro_batch: int,
        *,
        offset: int = 0,
        reads_ahead: bool = False,
    ) -> None:
        self._build = build
        self.offset = offset
        self._dataset = dataset
        self._micro_batch = micro_batch
        self._micro_batches = global_batch // micro_batch
        #: By iteration, each micro-batch's indices: of the present one, and the next.
        self._indices: dict[int, list[Any]] = {}
        #: The sampler's lists, of which the next is that of micro-batch `_next`, counted through training.
        self._lists: Iterator[Any] = iter(())
        self._next = -1
        self._collate: Callable[[list[Any]], Any] = list
        self._iteration = 0
        self._queue: list[int] = []
        self._loading: Loading = nullcontext
        threads = reads_ahead and type(dataset).__name__ != _SEEDS_ALL
        self._reader = ThreadPoolExecutor(1, "data") if threads else None
        self._pending: dict[tuple[int, int], Future[Any]] = {}
        self._first = 0

    def request(
        self, iteration: int, micro_batches: Sequence[int], upcoming: Sequence[int] = (), loading: Loading = nullcontext
    ) -> None:
        """Read these next, inside of `loading`. `upcoming`: this replica computes them after these."""
        if iteration != self._iteration:
            self._iteration, self._first = iteration, micro_batches[0] if micro_batches else 0
            self._indices = {loaded: lists for loaded, lists in self._indices.items() if loaded == iteration}
        self._queue, self._loading = list(micro_batches), loading
        if self._reader is not None:
            places = [(iteration, number) for number in (*micro_batches, *upcoming[:_AHEAD])]
            if not upcoming:
                places.append((iteration + 1, self._first))
            self._read_ahead(self._reader, places)

    def _read_ahead(self, reader: ThreadPoolExecutor, places: Sequence[tuple[int, int]]) -> None:
        for place in self._pending.keys() - set(places):
            self._pending.pop(place).cancel()
        for iteration, micro_batch in places:
            if (iteration, micro_batch) not in self._pending:
                try:
                    indices = self._indices_of(iteration)[micro_batch]
                except (StopIteration, AssertionError):  # behind the last iteration there is no more
                    continue
                self._pending[iteration, micro_batch] = reader.submit(self._read, indices)

    def _indices_of(self, iteration: int) -> list[Any]:
        """Return the indices of the iteration's micro-batches."""
        if iteration not in self._indices:
            first = (iteration - 1) * self._micro_batches
            if self._next != first:
                self._seek(first)
            self._indices[iteration] = [self._next_indices() for _ in range(self._micro_batches)]
        return self._indices[iteration]

    def _seek(self, micro_batch: int) -> None:
        loader = self._loader_from(self.offset + micro_batch * self._micro_batch)
        self._collate, self._lists, self._next = loader.collate_fn, iter(loader.batch_sampler), micro_batch

    def _loader_from(self, consumed: int) -> Any:
        return self._build(self._dataset, consumed)

    def _next_indices(self) -> Any:
        """Return the sampler's next list; a cyclic one begins another epoch."""
        indices = next(self._lists, None)
        if indices is None:
            self._seek(self._next)
            indices = next(self._lists)
        self._next += 1
        return indices

    def _read(self, indices: Sequence[Any]) -> Any:
        return self._collate([self._dataset[index] for index in indices])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._loading():
            micro_batch = self._queue.pop(0)
            future = self._pending.pop((self._iteration, micro_batch), None)
            return self._read(self._indices_of(self._iteration)[micro_batch]) if future is None else future.result()


class EvaluationLoader(MicroBatchLoader):
    """Validation or test data, as training data: an iteration is a call of the schedule. Where nothing is requested it
    goes on by itself, and behind its end it begins anew."""

    #: What is requested as soon as somebody reads here: a call, and its micro-batches.
    _wish: tuple[int, Sequence[int]] | None = None

    def request_if_read(self, call: int, micro_batches: Sequence[int]) -> None:
        """Have the next reader get these. Nobody may read here: it is not known which split is evaluated on."""
        self._wish = call, micro_batches

    def __next__(self) -> Any:
        wish, self._wish = self._wish, None
        if wish is not None:
            self.request(*wish)
        elif not self._queue:
            self.request(self._iteration + 1, range(self._micro_batches))
        return super().__next__()

    def _loader_from(self, consumed: int) -> Any:
        """Go on behind the end as who has read up to it does, wherever this process begins."""
        whole = len(self._dataset) // self._micro_batch * self._micro_batch
        return self._build(self._dataset, consumed % whole if whole else 0)


class ValidationLoader:
    """Validation data, in place of one of Megatron's loaders: it is built where it is first read, and begins where an
    unbroken run would stand then. `consumed`: samples, as known then."""

    def __init__(self, build: Build, dataset: Any, consumed: Callable[[], int]) -> None:
        self._build = build
        self._dataset = dataset
        self._consumed = consumed
        self._loader: Any = None

    def _real_loader(self) -> Any:
        if self._loader is None:
            self._loader = self._build(self._dataset, self._consumed())
        return self._loader

    def __len__(self) -> int:
        return len(self._real_loader())

    def __iter__(self) -> Iterator[Any]:
        yield from self._real_loader()


@contextlib.contextmanager
def index_lock(args: Any, builds: bool) -> Iterator[None]:
    """Hold the lock. `builds`: this process is the one of its replica that builds; others wait for it in Megatron."""
    directory = _cache_directory(args)
    if not builds or directory is None:
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory / ".unicron-index.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # read only: the index must be there already
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _cache_directory(args: Any) -> Path | None:
    """Return the directory of the cache: Megatron's default is beside the first data set. None: mock data has no
    index."""
    if getattr(args, "mock_data", False):
        return None
    if getattr(args, "data_cache_path", None):
        return Path(args.data_cache_path)
    for words in (getattr(args, "data_path", None), getattr(args, "train_data_path", None)):
        for word in words or ():
            if not _is_number(word):
                return Path(word).parent
    return None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
