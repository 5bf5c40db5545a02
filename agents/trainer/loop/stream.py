"""Loads a stream's micro-batches: a dataset that can only be read in order (torch's IterableDataset, Hugging Face's).

    loader = hook.loader(stream, collate_fn=collate, num_workers=1)    # as for a map-style dataset (`loader.py`)

Rules
-----
* Each replica reads the whole stream, and keeps the samples of the present iteration until the next begins: what a dead
  peer was to compute is here. Only its own micro-batches are collated: dear work belongs into `collate_fn`.
* Sample number n of an iteration belongs to micro-batch n // micro_batch, whoever computes it, and all random numbers
  that the stream draws for it are seeded for it.
* The place of an iteration's first sample travels with the training state, for the present iteration and the one after
  it, and with it what `state_dict()` of the stream says there, if it has one. A newcomer goes on from there; a stream
  without states is read again up to there.
* A stream that ends begins again (`set_epoch`, if it has it), in the middle of an iteration too.

What does not live here: datasets whose samples have numbers (`loader.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch.utils.data import DataLoader, IterableDataset, default_collate

from unicrond.agents.protocol.sampling import Sampling, work_seed
from unicrond.agents.trainer.loop.loader import (
    BadLoader,
    Loader,
    LoaderStep,
    check_options,
    is_stream,
    loader_of,
    seed_dataset,
)


class StreamPlace(NamedTuple):
    """A place in a stream: so many samples of an epoch have been read. `state`: the stream's own, None: it has none."""

    epoch: int = 0
    samples: int = 0
    state: dict[str, Any] | None = None


class _Iterations(IterableDataset):  # type: ignore[misc]
    """The samples of one iteration after the other, from `place` on, and the place behind them."""

    def __init__(self, dataset: Any, sampling: Sampling, iteration: int, place: StreamPlace) -> None:
        self._dataset, self._sampling, self._first, self._place = dataset, sampling, iteration, place

    def __iter__(self) -> Iterator[tuple[list[Any], StreamPlace]]:
        epoch, count, state = self._place
        batch = self._sampling.global_batch
        number = (self._first - 1) * batch
        stream = self._begin(epoch, number, count, state)
        while True:
            samples: list[Any] = []
            while len(samples) < batch:
                self._seed(number)
                try:
                    samples.append(next(stream))
                except StopIteration:
                    if not count:
                        raise BadLoader(
                            f"hook.loader(dataset): the stream has nothing in epoch {epoch}; give one whose iter()"
                            " begins anew each time"
                        ) from None
                    epoch, count = epoch + 1, 0
                    stream = self._begin(epoch, number, 0, None)
                else:
                    count, number = count + 1, number + 1
            yield samples, StreamPlace(epoch, count, state_of(self._dataset))

    def _begin(self, epoch: int, number: int, count: int, state: dict[str, Any] | None) -> Iterator[Any]:
        """Return the samples from the task's `number`-th on; `count` of the epoch's come before it. Where the stream
        has no state these are read again and dropped, each under its own seed: what they draw may be the order of those
        that follow."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        first = number if state is not None else number - count
        self._seed(first)
        if state is not None:
            self._dataset.load_state_dict(state)
        stream: Iterator[Any] = iter(self._dataset)
        for dropped in range(first, number):
            self._seed(dropped)
            next(stream)
        return stream

    def _seed(self, number: int) -> None:
        """Seed what the stream draws for the task's `number`-th sample, from 0."""
        iteration, place = divmod(number, self._sampling.global_batch)
        seed_dataset(work_seed(self._sampling.seed, iteration + 1, place, purpose="data"))


class StreamLoader:
    """The micro-batches of a stream; a `Stateful`, which `hook.loader` registers."""

    def __init__(
        self,
        dataset: Any,
        sampling: Sampling,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        **options: Any,
    ) -> None:
        """Take the options of `loader.Loader`; at most one process reads ahead, `prefetch` iterations. Raises
        BadLoader."""
        check_options(num_workers, prefetch, options)
        if num_workers > 1:
            raise BadLoader(
                f"hook.loader(dataset, num_workers={num_workers}): a stream is read in order, by one process; give 0 or"
                " 1, and do what takes long in collate_fn"
            )
        self._dataset, self._sampling = dataset, sampling
        self._collate = collate_fn or default_collate
        self._options = {
            "num_workers": num_workers,
            **({"prefetch_factor": prefetch, **options} if num_workers else {}),
        }
        #: Before which iteration the stream stood where.
        self._places = {1: StreamPlace(state=state_of(dataset))}
        self._iteration = 0
        self._samples: list[Any] = []
        self._chunks: Iterator[tuple[list[Any], StreamPlace]] | None = None

    def __call__(self, step: LoaderStep) -> Iterator[Any]:
        """Yield the batch of each micro-batch of the step, all random numbers seeded for it."""
        size = self._sampling.micro_batch
        for micro_batch in step:
            with step.loading():
                self._read(step.iteration)
                batch = self._collate(self._samples[micro_batch * size : (micro_batch + 1) * size])
            step.seed(micro_batch)
            yield batch
        with step.loading():
            self._read(step.iteration)  # though nothing of it was this replica's: its state is the others'

    def _read(self, iteration: int) -> None:
        """Have the samples of the iteration here."""
        if iteration == self._iteration:
            return
        if self._chunks is None or iteration < self._iteration:
            self._iteration = max(first for first in self._places if first <= iteration) - 1
            self._chunks = self._open(self._iteration + 1)
        while self._iteration < iteration:
            self._samples, place = next(self._chunks)
            self._iteration += 1
            before = self._places[self._iteration]
            self._places = {self._iteration: before, self._iteration + 1: place}

    def _open(self, iteration: int) -> Iterator[tuple[list[Any], StreamPlace]]:
        chunks = _Iterations(self._dataset, self._sampling, iteration, self._places[iteration])
        if not self._options["num_workers"]:
            return iter(chunks)
        return iter(DataLoader(chunks, batch_size=None, collate_fn=_unchanged, **self._options))

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stood before the present iteration and the next one."""
        return {"places": [[iteration, *place] for iteration, place in self._places.items()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        places = {iteration: StreamPlace(*place) for iteration, *place in state_dict["places"]}
        if places.keys() != self._places.keys():
            self._places, self._chunks = places, None


DatasetLoader: TypeAlias = Loader | StreamLoader


class LoadingHook(Protocol):
    """A hook, as far as a loader needs it: `hook.Hook`, `local.LocalHook`."""

    @property
    def iterations(self) -> int:
        """Return after which iteration training ends."""

    def register(self, name: str, stateful: Any) -> None:
        """Have the loader's state travel with the training state."""


def make_loader(
    hook: LoadingHook, registered: Mapping[str, Any], dataset: Any, sampling: Sampling, options: Mapping[str, Any]
) -> DatasetLoader:
    """Return the loader of a dataset, or of a DataLoader; that of a stream is registered. Raises BadLoader."""
    if isinstance(dataset, DataLoader):
        return loader_of(dataset, sampling, lambda: hook.iterations, options)
    if not is_stream(dataset):
        return Loader(dataset, sampling, lambda: hook.iterations, **options)
    loader = StreamLoader(dataset, sampling, **options)
    streams = sum(isinstance(stateful, StreamLoader) for stateful in registered.values())
    hook.register(f"stream {streams + 1}", loader)
    return loader


def _unchanged(item: Any) -> Any:
    return item


def state_of(dataset: Any) -> dict[str, Any] | None:
    """Return the state of a stream; None where it has none."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return None
    state: dict[str, Any] = copy.deepcopy(dataset.state_dict())  # it may be what the dataset goes on with
    return state
