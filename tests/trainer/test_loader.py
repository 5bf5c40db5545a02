"""The loader gives each micro-batch the same samples and random numbers, whoever loads it and whatever was foreseen."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from tests.seeds import at_most
from unicrond import Hook, Local
from unicrond.agents.protocol.sampling import Sampling
from unicrond.agents.trainer.loop.loader import BadLoader, Loader, sampling_over
from unicrond.agents.trainer.loop.stream import StreamLoader


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    """The processes of a loader that nobody has any more end with it; what started them may be what holds it."""
    before = set(multiprocessing.active_children())
    yield
    gc.collect()  # torch's traceback of a failed sample holds the frames that it passes through
    assert set(multiprocessing.active_children()) <= before


SAMPLING = Sampling(7, 8, 2, 23)
ITERATIONS = 6


class Noisy:
    """23 samples with noise from every generator; the fifth can be broken."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 23

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        if sample == self.broken:
            raise OSError(f"sample {sample} cannot be read")
        return torch.tensor([sample, random.random(), numpy.random.rand(), torch.rand(()).item()]).double(), os.getpid()


class Scripted:
    """A step of one replica: these micro-batches, and where a peer dies these others."""

    def __init__(self, iteration: int, micro_batches: list[int], extra: list[int]) -> None:
        self.iteration = iteration
        self.left = list(micro_batches)
        self.extra = list(extra)
        self.seeds: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self.left or self.extra:
            if not self.left:
                self.left, self.extra = self.extra, []
            yield self.left[0]
            self.left.pop(0)

    def upcoming(self, count: int) -> list[int]:
        return self.left[count:]

    def loading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def seed(self, micro_batch: int) -> None:
        self.seeds.append(micro_batch)


def make(num_workers: int = 0, dataset: Any = None, **options: Any) -> Loader:
    return Loader(dataset or Noisy(), SAMPLING, lambda: ITERATIONS, num_workers=num_workers, **options)


def expected(iteration: int, micro_batch: int) -> torch.Tensor:
    return make()._load_here((iteration, micro_batch))[0]


WANTED = {(i, m): expected(i, m) for i in range(1, ITERATIONS + 1) for m in range(4)}


class InOrder:
    """In the place of torch's processes: the batches in the order in which the forecast names them, two ahead."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.orders = loader, iter(loader._forecast)
        self.ahead = [order for _ in range(2) if (order := next(self.orders, None))]
        self.handed = [order[0] for order in self.ahead]

    def __iter__(self) -> InOrder:
        return self

    def __next__(self) -> Any:
        order = self.ahead.pop(0)
        if (following := next(self.orders, None)) is not None:
            self.ahead.append(following)
            self.handed.append(following[0])
        return self.loader._collate(self.loader._dataset.__getitems__(order))


courses = st.lists(st.integers(0, 3), unique=True, max_size=4)


@settings(max_examples=at_most(200))
@given(st.lists(st.tuples(courses, courses), min_size=1, max_size=ITERATIONS), st.integers(0, 2))
def test_batches_are_the_same_whatever_was_foreseen(course: list[tuple[list[int], list[int]]], again: int) -> None:
    """Members come and go within an iteration and between two, and an iteration is computed again."""
    loader = make(1)
    processes: list[InOrder] = []
    loader._processes = lambda: processes.append(InOrder(loader)) or processes[-1]  # type: ignore
    for iteration, (micro_batches, extra) in enumerate(course, 1):
        step = Scripted(max(1, iteration - again), micro_batches, [m for m in extra if m not in micro_batches])
        wanted = [*step.left, *step.extra]
        batches = list(loader(step))
        assert step.seeds == wanted
        for micro_batch, (batch, _) in zip(wanted, batches, strict=True):
            assert torch.equal(batch, WANTED[step.iteration, micro_batch])
        if wanted:
            assert all(early.iteration >= step.iteration for early in loader._early), "the others are dropped"
    assert all(len(run.handed) == len(set(run.handed)) for run in processes), "nothing is loaded twice"


def test_processes_load_what_was_foreseen_and_the_loop_the_rest() -> None:
    loader = make(1)
    course = [([0, 1], []), ([0, 1], [3]), ([0, 1, 2], []), ([2, 3, 0], [])]
    for iteration, (micro_batches, extra) in enumerate(course, 1):
        step = Scripted(iteration, micro_batches, extra)
        for micro_batch, (batch, pids) in zip([*micro_batches, *extra], loader(step), strict=True):
            assert torch.equal(batch, WANTED[iteration, micro_batch])
            is_here = set(pids.tolist()) == {os.getpid()}
            assert is_here == (iteration == 2 and micro_batch == 3), (iteration, micro_batch)


def test_loader_ends_and_goes_on_where_the_task_gets_longer() -> None:
    length, processes = 2, set()
    loader = Loader(Noisy(), SAMPLING, lambda: length, num_workers=1)
    for iteration in range(1, 5):
        for micro_batch, (batch, pids) in zip([0, 1], loader(Scripted(iteration, [0, 1], [])), strict=True):
            assert torch.equal(batch, WANTED[iteration, micro_batch])
            processes.update(pids.tolist())
        length = 4
    living = {process.pid for process in multiprocessing.active_children()}
    assert processes and os.getpid() not in processes and not processes & living, "nothing is left to load"


def test_sample_that_cannot_be_read_fails_its_own_micro_batch_alone() -> None:
    broken = SAMPLING.samples(2, 1)[0]
    places = [(i, m) for i in (1, 2, 3) for m in (0, 1) if broken in SAMPLING.samples(i, m)]
    for num_workers in (0, 1):
        loader, failures = make(num_workers, Noisy(broken)), []
        for iteration in (1, 2, 3):
            batches = loader(Scripted(iteration, [0, 1], []))
            try:
                assert len(list(batches)) == 2
            except OSError as error:
                failures.append(iteration)
                assert f"sample {broken} cannot be read" in str(error)
        assert failures == sorted({iteration for iteration, _ in places})


def test_what_nobody_asks_for_may_be_broken() -> None:
    loader = make(1, Noisy(SAMPLING.samples(2, 1)[0]))
    for iteration, course in ((1, [0, 1]), (2, [0]), (3, [0])):
        for micro_batch, (batch, _) in zip(course, loader(Scripted(iteration, course, [])), strict=True):
            assert torch.equal(batch, WANTED[iteration, micro_batch])


@pytest.mark.parametrize(
    ("dataset", "options", "problem"),
    [
        (iter([1]), {}, "a stream has no size; leave dataset_size out"),
        (object(), {}, "give a map-style dataset"),
        ([], {}, "it is empty"),
        ([1] * 5, {}, "it has 5 samples, and dataset_size is 23"),
        (Noisy(), {"num_workers": -1}, "give 0 to 1024 processes"),
        (Noisy(), {"prefetch": 0}, "at least one micro-batch ahead"),
        (Noisy(), {"pin_memory": True}, r"hook.loader\(pin_memory=...\): without num_workers the training process"),
        (Noisy(), {"batch_size": 4}, r"hook.loader\(batch_size=...\): the task says what a batch is"),
        (Noisy(), {"shuffle": True}, "the task says what a batch is"),
    ],
)
def test_loader_that_cannot_be_made_says_what_to_change(dataset: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadLoader, match=problem):
        Loader(dataset, sampling_over(dataset, SAMPLING, has_begun=False), lambda: 1, **options)


class Numbers(IterableDataset[torch.Tensor]):
    """Counts to seven, and says how often it began."""

    def __init__(self, size: int = 7) -> None:
        self.size, self.begins = size, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begins += 1
        yield from (torch.tensor([number, random.random()]) for number in range(self.size))


class ShuffledNumbers(Numbers):
    """The same in an order that is drawn where it begins, through a buffer."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = random.sample(range(self.size), self.size)
        buffer = order[:3]
        for number in (*order[3:], -1, -1, -1):
            place = random.randrange(len(buffer))
            yield torch.tensor([buffer.pop(place), random.random()])
            buffer += [number] * (number >= 0)


class PlacedNumbers(Numbers):
    """The same with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begins += 1
        self.next %= self.size
        while self.next < self.size:
            self.next += 1
            yield torch.tensor([self.next - 1, random.random()])


STREAM = Sampling(5, 4, 2, None)
FIRST = [[0, 1, 2, 3], [4, 5, 6, 0], [1, 2, 3, 4], [5, 6, 0, 1]]


def read(loader: StreamLoader, iteration: int, micro_batches: list[int]) -> list[torch.Tensor]:
    return list(loader(Scripted(iteration, micro_batches, [])))


@pytest.mark.parametrize("kind", [Numbers, ShuffledNumbers, PlacedNumbers])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_stream_gives_each_micro_batch_its_samples_whoever_reads_it(kind: type[Numbers], num_workers: int) -> None:
    """Beginning anew in mid-iteration; and a newcomer reads on where another stands, in an iteration or after it."""
    loader, alone = StreamLoader(kind(), STREAM, num_workers=num_workers), StreamLoader(kind(), STREAM)
    expected = {iteration: read(alone, iteration, [0, 1]) for iteration in range(1, len(FIRST) + 1)}
    whole: dict[int, list[torch.Tensor]] = {}
    for iteration, numbers in enumerate(FIRST, 1):
        whole[iteration] = read(loader, iteration, [0, 1])
        if kind is not ShuffledNumbers:
            assert torch.cat(whole[iteration])[:, 0].tolist() == numbers
        for later in (iteration, iteration + 1):
            dataset = kind()
            newcomer = StreamLoader(dataset, STREAM)
            newcomer.load_state_dict(loader.state_dict())
            for known in range(later, len(FIRST) + 1):
                batches = read(newcomer, known, [1, 0])
                assert torch.equal(torch.stack(batches), torch.stack(expected[known][::-1])), "random numbers too"
            assert newcomer.state_dict()["places"][0][0] <= len(FIRST)


def test_replica_without_a_micro_batch_knows_where_the_stream_stands() -> None:
    busy, idle = StreamLoader(PlacedNumbers(), STREAM), StreamLoader(PlacedNumbers(), STREAM)
    read(busy, 1, [0, 1])
    assert not read(idle, 1, [])
    assert idle.state_dict() == busy.state_dict()


def test_stream_that_ends_or_is_read_by_two_processes_is_refused() -> None:
    with pytest.raises(BadLoader, match="a stream is read in order, by one process"):
        StreamLoader(Numbers(), STREAM, num_workers=2)
    with pytest.raises(BadLoader, match="has nothing in epoch 0"):
        read(StreamLoader(Numbers(0), STREAM), 1, [0])
    with pytest.raises(BadLoader, match="has nothing in epoch 1"):
        read(StreamLoader(iter([1.0] * 3), STREAM), 1, [0])


def test_loader_is_made_before_the_first_step() -> None:
    with pytest.raises(BadLoader, match="before the first step"):
        sampling_over(Noisy(), SAMPLING, has_begun=True)


def test_refused_loader_changes_no_sampling() -> None:
    model = torch.nn.Linear(1, 1)
    hook = Hook.attach_or_local(Local(1, 2, 1), model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(BadLoader):
        hook.loader(Noisy(), shuffle=True)
    hook.loader([torch.ones(1)] * 7)  # would be of another size than the one before


def test_micro_batch_without_tokens_counts_none() -> None:
    """Every token of it is masked: it is no micro-batch of as many tokens as it has samples."""
    model = torch.nn.Linear(1, 1)
    hook = Hook.attach_or_local(Local(1, 4, 2), model, torch.optim.SGD(model.parameters(), 0.1))
    for step in hook.steps():
        for micro_batch in step:
            step.backward(model(torch.ones(1)).sum(), tokens=0 if micro_batch else 3, mean=False)
        assert step.loss == pytest.approx(2 * model(torch.ones(1)).sum().item() / 3)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_mean_loss_over_a_loader_trains_as_the_plain_loop(num_workers: int) -> None:
    """The plain loop: a mean over the batch, one backward."""
    data = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    samples = [(row, row.sum()) for row in data]
    plain, ours = (torch.nn.Linear(3, 1) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    plain_sgd, sgd = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ours))
    hook = Hook.attach_or_local(Local(iterations=4, global_batch=6, micro_batch=6), ours, sgd)
    assert (hook.iterations, hook.global_batch, hook.micro_batch) == (4, 6, 6)
    loader = hook.loader(samples, num_workers=num_workers)
    for step in hook.steps():
        batch = [samples[sample] for sample in step.samples(0)]
        plain_sgd.zero_grad()
        rows, sums = (torch.stack(part) for part in zip(*batch, strict=True))
        loss = torch.nn.functional.mse_loss(plain(rows)[:, 0], sums)
        loss.backward()
        plain_sgd.step()
        for rows, sums in loader(step):
            step.backward(torch.nn.functional.mse_loss(ours(rows)[:, 0], sums))
        sgd.step()
        assert step.loss == pytest.approx(loss.item(), abs=1e-6)
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one, other)


# --- a DataLoader of the program's own ----------------------------------------------------------------

ROWS = torch.arange(11.0).reshape(11, 1)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, sample: int) -> torch.Tensor:
        return ROWS[sample]


def epochs_of(data: DataLoader[torch.Tensor], iterations: int) -> list[list[list[float]]]:
    """What a loop of the hook gets, as batches of each iteration; 4 samples in each, 2 in a micro-batch."""
    model = torch.nn.Linear(1, 1)
    hook = Hook.attach_or_local(Local(iterations, 4, 2), model, torch.optim.SGD(model.parameters(), 0.1))
    loader, found = hook.loader(data), []
    assert len(loader) == 3
    for step in hook.steps():
        found.append([])
        for rows in loader(step):
            found[-1].append(rows.flatten().tolist())
            step.backward(model(rows).mean())
    return found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_loader_is_read_in_its_own_order(num_workers: int) -> None:
    """As alone, epoch by epoch: a short batch, and a last iteration of one batch fewer."""
    found = epochs_of(DataLoader(Rows(), 2, shuffle=False, num_workers=num_workers), 4)
    assert found == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10]], [[0, 1], [2, 3]]]
    sampler = DistributedSampler(Rows(), 1, 0, seed=3)
    alone = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        alone += [rows.flatten().tolist() for rows in DataLoader(Rows(), 2, sampler=sampler)]
    found = epochs_of(DataLoader(Rows(), 2, sampler=sampler, num_workers=num_workers), 6)
    assert [rows for iteration in found for rows in iteration] == alone


def test_shuffled_data_loader_has_one_order_in_each_epoch() -> None:
    own = torch.Generator()
    before = own.get_state()
    orders = [epochs_of(DataLoader(Rows(), 2, shuffle=True, generator=g), 6) for g in (None, None, own, own)]
    assert torch.equal(own.get_state(), before), "the program may draw from it as well"
    assert orders[0] == orders[1] and orders[2] == orders[3] and orders[0][:3] != orders[0][3:]
    for order in orders:
        samples = [sample for iteration in order[:3] for rows in iteration for sample in rows]
        assert sorted(samples) == ROWS.flatten().tolist()


def test_short_batch_of_data_loader_weighs_as_its_samples() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    hook = Hook.attach_or_local(Local(1, 12, 3), model, torch.optim.SGD(model.parameters(), 0.1))
    loader = hook.loader(DataLoader(Rows(), 3))
    for step in hook.steps():
        for rows in loader(step):
            step.backward(model(rows).mean())
    assert model.weight.grad is not None and model.weight.grad.item() == pytest.approx(ROWS.mean().item())


class Restless(Sampler[int]):
    """Goes on where it has ended."""

    begin = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        self.begin += 4
        return iter([(self.begin + place) % 11 for place in range(4)])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (DataLoader(Rows(), 4), "its batch_size is 4 and the task's micro_batch 2"),
        (DataLoader(Rows(), None), "it makes no batches"),
        (DataLoader(Rows(), 2, sampler=DistributedSampler(Rows(), 3, 0)), "one of 3 ranks"),
        (DataLoader(Rows(), 2, sampler=Restless()), "another order of the first epoch when asked again"),
        (DataLoader(Rows(), 2, sampler=[]), "no batches"),
        (DataLoader(type("Stream", (IterableDataset,), {"__iter__": iter})(), 2), "its dataset is a stream"),
    ],
)
def test_data_loader_that_is_not_taken_is_refused(data: DataLoader[torch.Tensor], sentence: str) -> None:
    with pytest.raises(BadLoader, match=re.escape(sentence)):
        epochs_of(data, 1)
