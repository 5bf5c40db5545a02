"""Loads a dataset's micro-batches ahead of the loop, in processes of torch's DataLoader.

    loader = hook.loader(dataset, collate_fn=collate, num_workers=4)
    for step in hook.steps():
        for batch in loader(step):                  # this replica's micro-batches, more of them after a peer's death
            step.backward(model(batch))
        optimizer.step()

Rules
-----
* What a micro-batch holds is a function of the task's seed, the iteration and its number alone: the samples are those
  of `step.samples`, and every random number that the dataset draws is seeded for it, in whichever process it is loaded.
  So there is no state to save, and whoever has to load a micro-batch again gets the same.
* Which micro-batches come next is a forecast: what is left of this iteration, then the same ones in each that follows,
  as they are while nobody dies or joins. A micro-batch outside the forecast is loaded in the training process; one that
  nobody asks for is dropped, with whatever its loading raised.
* Reading counts as reading: an exception or a hang there is reported as one of the data.
* Of a DataLoader of the program's own, dataset, collate_fn, processes and the order of samples are taken. Where its
  last batches make no whole iteration, the micro-batches beyond them are empty, and nobody computes them.

What does not live here: streams, which can only be read in order (`stream.py`); who computes which micro-batch
(lifecycle/micro_batch_assignment.py), which samples it has (protocol/sampling.py).
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from unicrond.agents.protocol.sampling import Sampling, work_seed
from unicrond.agents.trainer.process import randomness

MAX_WORKERS = 1024
#: Arguments of torch's DataLoader that `hook.loader` passes on.
PASSED_ON = ("pin_memory", "worker_init_fn", "multiprocessing_context", "timeout")
#: Orders of so many epochs are kept: processes read ahead over the end of one.
_EPOCHS_MAX = 2


class BadLoader(ValueError):
    """The loader cannot be made: one line with the argument and the fix."""


class LoaderStep(Protocol):
    """A step, as far as the loader needs it: `hook.Step`, `local.LocalStep`."""

    iteration: int
    #: Samples of the micro-batch that was handed out last, if a loader did.
    batch_size: int | None

    def __iter__(self) -> Iterator[int]: ...

    def upcoming(self, count: int) -> list[int]:
        """Return the micro-batches that this replica computes after the next `count`."""

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Mark what reads data."""

    def seed(self, micro_batch: int) -> None:
        """Seed every random number drawn for the micro-batch."""


class _WorkPlace(NamedTuple):
    """A micro-batch of an iteration."""

    iteration: int
    micro_batch: int


class _Order(NamedTuple):
    """An order to a process: load these samples, with random numbers from this seed."""

    seed: int
    samples: tuple[int, ...]


class _SeededDataset:
    """The program's dataset, which torch's fetcher asks for whole micro-batches (`__getitems__`)."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, orders: Sequence[_Order]) -> list[Any]:
        (order,) = orders
        seed_dataset(order.seed)
        if fetch := getattr(self.dataset, "__getitems__", None):
            return list(fetch(list(order.samples)))
        return [self.dataset[sample] for sample in order.samples]


def seed_dataset(seed: int) -> None:
    """Seed every random number that a dataset may draw."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class DataLoaderOrder:
    """The order of samples of a program's own DataLoader: each micro-batch is one of its batches, as many follow each
    other in an iteration as the task has micro-batches, and each epoch begins with an iteration.

    The order of an epoch is a function of the task's seed and the epoch: the sampler gets `set_epoch` where it has it,
    and every random number that it draws is seeded."""

    def __init__(self, loader: DataLoader[Any], sampling: Sampling) -> None:
        self.seed = sampling.seed
        self._loader, self._ranks = loader, sampling.ranks
        self._micro_batches = sampling.global_batch // sampling.micro_batch
        self._epochs: dict[int, list[tuple[int, ...]]] = {}
        first = self._batches(0)
        #: Iterations of an epoch.
        self.iterations = -(-len(first) // self._micro_batches)
        if first:
            self._batches(1)
            self._epochs.clear()
        if not first or self._batches(0) != first:
            raise BadLoader(
                "hook.loader(data_loader): its sampler gives "
                + ("another order of the first epoch when asked again" if first else "no batches")
                + "; give one whose order follows from set_epoch and torch's random numbers, as DistributedSampler's"
            )

    def samples(self, iteration: int, micro_batch: int) -> tuple[int, ...]:
        """Return the sample indices of one micro-batch, in order; none behind the last batch of an epoch."""
        epoch, number = divmod(iteration - 1, self.iterations)
        batches, place = self._batches(epoch), number * self._micro_batches + micro_batch
        return batches[place] if place < len(batches) else ()

    def _batches(self, epoch: int) -> list[tuple[int, ...]]:
        if epoch not in self._epochs:
            batch_sampler: Any = self._loader.batch_sampler
            sampler = getattr(batch_sampler, "sampler", None)
            previous, seed = randomness.snapshot(), work_seed(self.seed, epoch, 0, purpose="order")
            parts = (self._loader, batch_sampler, sampler)
            generators = [generator for part in parts if (generator := getattr(part, "generator", None)) is not None]
            states = [generator.get_state() for generator in generators]  # the program may draw from them elsewhere
            randomness.seed_all(seed)
            for generator in generators:
                generator.manual_seed(seed)
            for part in parts:
                if set_epoch := getattr(part, "set_epoch", None):
                    set_epoch(epoch)
            batches = [tuple(map(int, batch)) for batch in batch_sampler]
            randomness.resume(previous)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            if len(batches) % self._ranks:
                raise BadLoader(
                    f"hook.loader(data_loader): the {len(batches)} batches of an epoch do not divide among the"
                    f" {self._ranks} workers of a replica, which compute together; set drop_last or another size"
                )
            self._epochs = dict([*self._epochs.items(), (epoch, batches)][-_EPOCHS_MAX:])
        return self._epochs[epoch]


def _order(sampling: Sampling | DataLoaderOrder, place: _WorkPlace) -> _Order:
    return _Order(work_seed(sampling.seed, *place, purpose="data"), sampling.samples(*place))


class _Forecast:
    """The micro-batches that this replica is going to compute, in their order; iterable once by torch's DataLoader.
    `course`: those of one iteration; `under_way`: those that it has taken and whose batches have not come back."""

    def __init__(self, sampling: Sampling | DataLoaderOrder, iterations: Callable[[], int]) -> None:
        self.under_way: deque[_WorkPlace] = deque()
        self.has_ended = False
        self.course: list[int] = []
        self._sampling = sampling
        self._iterations = iterations
        self._iteration = 0
        self._places: deque[_WorkPlace] = deque()
        self._used_places: set[_WorkPlace] = set()

    def begin(self, iteration: int, course: list[int]) -> None:
        """Begin with these micro-batches of an iteration, but those that were taken before."""
        self.course, self._iteration = course, iteration
        self._used_places = {place for place in self._used_places if place.iteration >= iteration}
        self._places = deque(self._places_of(iteration))

    def holds(self, place: _WorkPlace) -> bool:
        """Return whether the place is still to come."""
        return place in self.under_way or (place in self._places and not self.has_ended)

    def _places_of(self, iteration: int) -> list[_WorkPlace]:
        places = [_WorkPlace(iteration, micro_batch) for micro_batch in self.course]
        return [place for place in places if place not in self._used_places and self._sampling.samples(*place)]

    def __iter__(self) -> Iterator[list[_Order]]:
        while True:
            while not self._places:
                if self._iteration >= self._iterations() or not self.course:
                    self.has_ended = True
                    return
                self._iteration += 1
                self._places.extend(self._places_of(self._iteration))
            place = self._places.popleft()
            self.under_way.append(place)
            self._used_places.add(place)
            yield [_order(self._sampling, place)]


def check_options(num_workers: int, prefetch: int, options: Mapping[str, Any]) -> None:
    """Require options that a loader takes. Raises BadLoader."""
    if not 0 <= num_workers <= MAX_WORKERS or prefetch < 1:
        raise BadLoader(
            f"hook.loader(num_workers={num_workers}, prefetch={prefetch}): give 0 to {MAX_WORKERS} processes, and "
            "at least one micro-batch ahead for each"
        )
    if name := next((name for name in options if name not in PASSED_ON), None):
        raise BadLoader(
            f"hook.loader({name}=...): the task says what a batch is (global_batch, micro_batch, seed); of torch's "
            f"DataLoader it takes {', '.join(PASSED_ON)}"
        )
    if options and not num_workers:
        raise BadLoader(
            f"hook.loader({next(iter(options))}=...): without num_workers the training process loads, and torch's "
            "DataLoader does not run; give num_workers, or leave it out"
        )


class Loader:
    """The micro-batches of one dataset. `iterations`: returns how many the task has."""

    def __init__(
        self,
        dataset: Any,
        sampling: Sampling | DataLoaderOrder,
        iterations: Callable[[], int],
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        **options: Any,
    ) -> None:
        check_options(num_workers, prefetch, options)
        self._dataset = _SeededDataset(dataset)
        self._sampling = sampling
        self._iterations = iterations
        self._collate = collate_fn or default_collate
        self._num_workers = num_workers
        self._options = {"prefetch_factor": prefetch, **options}
        self._forecast = _Forecast(sampling, iterations)
        self._batches: Iterator[Any] | None = None
        #: Batches that came before their time.
        self._early: dict[_WorkPlace, Any] = {}
        self._iteration = 0

    def __call__(self, step: LoaderStep) -> Iterator[Any]:
        """Yield the batch of each micro-batch of the step, all random numbers seeded for it."""
        for micro_batch in step:
            step.batch_size = len(self._sampling.samples(step.iteration, micro_batch))
            if not step.batch_size:
                continue
            with step.loading():
                batch = self._batch(_WorkPlace(step.iteration, micro_batch), [micro_batch, *step.upcoming(1)])
            step.seed(micro_batch)
            yield batch

    def __bool__(self) -> bool:
        """Return True, also where there is no length."""
        return True

    def __len__(self) -> int:
        """Return the iterations of an epoch of a program's own DataLoader. Raises TypeError for a dataset."""
        if not isinstance(self._sampling, DataLoaderOrder):
            raise TypeError("len(loader): epochs are a DataLoader's; of a dataset, samples follow each other")
        return self._sampling.iterations

    def _batch(self, place: _WorkPlace, remaining: list[int]) -> Any:
        """Return one batch. `remaining`: what this replica computes in this iteration, from this micro-batch on."""
        if not self._num_workers:
            return self._load_here(place)
        if place.iteration != self._iteration:
            self._begin_iteration(place, remaining)
        if place in self._early:
            return self._early.pop(place)
        while self._batches is not None and self._forecast.holds(place):
            arrival = self._forecast.under_way[0]
            try:
                batch = next(self._batches)
            except Exception:
                if arrival == place:
                    raise
            else:
                if arrival == place:
                    return batch
                if arrival.iteration >= place.iteration:
                    self._early[arrival] = batch
            finally:
                self._forecast.under_way.popleft()
                if self._forecast.has_ended and not self._forecast.under_way:
                    self._batches = None  # nothing is left to load: the processes end
        return self._load_here(place)

    def _begin_iteration(self, place: _WorkPlace, remaining: list[int]) -> None:
        """Drop what is past, and begin a new forecast where another membership gives this replica other work."""
        self._iteration = place.iteration
        self._early = {early: batch for early, batch in self._early.items() if early.iteration >= place.iteration}
        forecast = self._forecast
        if self._batches is None:
            self._forecast = _Forecast(self._sampling, self._iterations)
            self._forecast.begin(place.iteration, remaining)
            self._batches = iter(self._processes())
        elif forecast.course != remaining or not (place in self._early or forecast.holds(place)):
            forecast.begin(place.iteration, remaining)

    def _processes(self) -> DataLoader[Any]:
        return DataLoader(
            self._dataset,
            batch_sampler=self._forecast,
            collate_fn=self._collate,
            num_workers=self._num_workers,
            generator=torch.Generator(),  # or it draws from the program's random numbers
            **self._options,
        )

    def _load_here(self, place: _WorkPlace) -> Any:
        return self._collate(self._dataset.__getitems__([_order(self._sampling, place)]))


def loader_of(
    data: DataLoader[Any], sampling: Sampling, iterations: Callable[[], int], options: Mapping[str, Any]
) -> Loader:
    """Return the loader of a program's own DataLoader. Raises BadLoader."""
    if options:
        raise BadLoader(f"hook.loader(data_loader, {next(iter(options))}=...): say it in the DataLoader itself")
    return Loader(
        data.dataset,
        DataLoaderOrder(data, sampling),
        iterations,
        data.collate_fn,
        data.num_workers,
        data.prefetch_factor or 2,
        **{name: getattr(data, name) for name in PASSED_ON if data.num_workers},
    )


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be read in order."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def _require_fitting(data: DataLoader[Any], sampling: Sampling) -> None:
    """Raises BadLoader where the DataLoader is not one of all samples, in the task's micro-batches."""
    if sampling.dataset_size is not None:
        raise BadLoader(
            "hook.loader(data_loader): the order is the DataLoader's; leave dataset_size out of Hook.attach"
        )
    if is_stream(data.dataset):
        raise BadLoader("hook.loader(data_loader): its dataset is a stream; give hook.loader the dataset itself")
    if data.batch_sampler is None:
        raise BadLoader("hook.loader(data_loader): it makes no batches; give it a batch_size")
    batch_size = getattr(data.batch_sampler, "batch_size", None)
    if batch_size not in (None, sampling.micro_batch):
        raise BadLoader(
            f"hook.loader(data_loader): its batch_size is {batch_size} and the task's micro_batch"
            f" {sampling.micro_batch}; make them the same (global_batch: batch_size x the ranks of torchrun)"
        )
    replicas = getattr(getattr(data.batch_sampler, "sampler", None), "num_replicas", 1)
    if replicas != 1:
        raise BadLoader(
            f"hook.loader(data_loader): its sampler has only the samples of one of {replicas} ranks, and unicrond deals"
            " out all of them; leave num_replicas and rank out of DistributedSampler"
        )


def sampling_over(dataset: Any, sampling: Sampling, *, has_begun: bool) -> Sampling:
    """Return the task's sampling over this dataset. Raises BadLoader."""
    if has_begun:
        raise BadLoader("hook.loader(...): make it before the first step")
    if isinstance(dataset, DataLoader):
        _require_fitting(dataset, sampling)
        return sampling
    if is_stream(dataset):
        if sampling.dataset_size is not None:
            raise BadLoader("hook.loader(dataset): a stream has no size; leave dataset_size out of Hook.attach")
        return sampling
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise BadLoader(
            "hook.loader(dataset): give a map-style dataset (`__getitem__`, `__len__`), or a stream (`__iter__`)"
        )
    if len(dataset) < 1:
        raise BadLoader("hook.loader(dataset): it is empty")
    if sampling.dataset_size not in (None, len(dataset)):
        raise BadLoader(
            f"hook.loader(dataset): it has {len(dataset)} samples, and dataset_size is {sampling.dataset_size}: leave "
            "dataset_size out of Hook.attach; of several datasets each needs as many"
        )
    return replace(sampling, dataset_size=len(dataset))
