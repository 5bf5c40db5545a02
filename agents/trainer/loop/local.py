"""The hook's loop without unicrond: one process, one replica, no recovery. For trying a program, and for its tests.

    hook = Hook.attach_or_local(Local(iterations=100, global_batch=8), model, optimizer, scheduler)

What a program sees of it is what `hook.py` gives in a task: the same micro-batches, samples and seeds, the same mean
gradients as a task with one lane (`UNICRON_LANES: "1"`). Nothing is saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unicrond.agents.protocol.sampling import Sampling, work_seed
from unicrond.agents.trainer.detection.sections import check_name
from unicrond.agents.trainer.gradients.accumulation import Accumulation
from unicrond.agents.trainer.lifecycle.ledger import to_fixed_point
from unicrond.agents.trainer.loop.examination import Examination
from unicrond.agents.trainer.loop.loader import sampling_over
from unicrond.agents.trainer.loop.stream import DatasetLoader, make_loader


@dataclass(frozen=True, slots=True)
class Local:
    """The numbers that a task file would give. `global_batch`, `micro_batch`: in samples."""

    iterations: int
    global_batch: int = 8
    micro_batch: int = 1
    seed: int = 1234


def backward(loss: torch.Tensor, tokens: int | None, samples: int, *, is_mean: bool) -> tuple[torch.Tensor, int]:
    """Compute the gradients of a micro-batch's sum of losses; return that sum and `tokens` (None: as many as
    `samples`). `is_mean`: the loss is the mean over the tokens."""
    count = samples if tokens is None else tokens
    loss_sum = loss * count if is_mean else loss
    loss_sum.backward()
    return loss_sum.detach(), count


class LocalStep:
    """One iteration, with the interface of `hook.Step`."""

    def __init__(self, hook: LocalHook, iteration: int) -> None:
        self._hook = hook
        self.iteration = iteration
        self.agreed = False
        self.loss = float("nan")
        self.batch_size: int | None = None

    @property
    def is_last(self) -> bool:
        """Return whether training ends after this iteration; known once its micro-batches are computed."""
        return self.agreed and (bool(self._hook.stop_reason) or self.iteration >= self._hook.task.iterations)

    def __iter__(self) -> Iterator[int]:
        """Yield the micro-batches one at a time."""
        for (micro_batch,) in self.lists(1):
            yield micro_batch

    def lists(self, at_most: int | None = None) -> Iterator[list[int]]:
        """Yield all micro-batches, in order, in lists of `at_most`."""
        yield from self._hook._lists(self, at_most)

    def upcoming(self, count: int) -> list[int]:
        """Return the micro-batches after the next `count`, the present one among them."""
        return list(range(self._hook._first + count, self._hook.global_batch // self._hook.micro_batch))

    def backward(self, loss: torch.Tensor, *, tokens: int | None = None, mean: bool = True) -> None:
        """Compute the micro-batch's gradients, and add its loss and tokens; see `hook.Step.backward`."""
        self.add(*backward(loss, tokens, self.batch_size or self._hook.micro_batch, is_mean=mean))

    def add(self, loss_sum: float | torch.Tensor, tokens: int | torch.Tensor) -> None:
        """Add the loss and the tokens of the micro-batches just computed."""
        self._hook._loss_sum += to_fixed_point(float(loss_sum))
        self._hook._tokens += int(tokens)

    def samples(self, micro_batch: int) -> tuple[int, ...]:
        """Return the indices of the micro-batch's samples in the data set."""
        return self._hook._sampling.samples(self.iteration, micro_batch)

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the code that reads data; it does nothing here."""
        return contextlib.nullcontext()

    def seed(self, micro_batch: int) -> None:
        """Seed every random number drawn for the micro-batch."""
        from unicrond.agents.trainer.process.randomness import seed_all

        seed_all(work_seed(self._hook.task.seed, self.iteration, micro_batch))


@dataclass(slots=True)
class LocalHook:
    """The hook of a process that is the only replica, with the interface of `hook.Hook`."""

    task: Local
    examination: Examination
    sums: Accumulation
    _sampling: Sampling
    _loaded_iteration: int = 0
    is_leader: bool = True
    in_leader_replica: bool = True
    replicas: int = 1
    stop_reason: str = ""
    _registered: dict[str, Any] = field(default_factory=dict)
    _on_finish: Callable[[], None] | None = None
    _iteration: int = 0
    _first: int = 0
    _loss_sum: float = 0.0
    _tokens: int = 0

    @property
    def iterations(self) -> int:
        """Return after which iteration training ends."""
        return self.task.iterations

    @property
    def global_batch(self) -> int:
        """Return the samples of one iteration."""
        return self.task.global_batch

    @property
    def micro_batch(self) -> int:
        """Return the samples of one micro-batch."""
        return self.task.micro_batch

    @staticmethod
    def create(
        task: Local,
        examination: Examination,
        sums: Accumulation,
        dataset_size: int | None,
        loaded_iteration: int | None,
    ) -> LocalHook:
        """Return the hook over the models of `sums`. `dataset_size`, `loaded_iteration`: as for `Hook.attach`."""
        sampling = Sampling(task.seed, task.global_batch, task.micro_batch, dataset_size)
        return LocalHook(task, examination, sums, sampling, loaded_iteration or 0)

    def steps(self) -> Iterator[LocalStep]:
        """Yield the iterations one after the other. Raises RuntimeError for a step that the loop left early."""
        self.examination.compare_all()
        for iteration in range(self._loaded_iteration + 1, self.task.iterations + 1):
            scaled = any(isinstance(stateful, torch.amp.GradScaler) for stateful in self._registered.values())
            self.examination.compare(iteration, loss_scaled=scaled)
            self.sums.clear()
            self._iteration, self._loss_sum, self._tokens = iteration, 0.0, 0
            step = LocalStep(self, iteration)
            yield step
            if not step.agreed:
                raise RuntimeError("the loop left a step before all its micro-batches were computed")
            if self.stop_reason:
                break
        if self._on_finish is not None:
            self._on_finish()

    def _lists(self, step: LocalStep, at_most: int | None) -> Iterator[list[int]]:
        micro_batches = list(range(self.task.global_batch // self.task.micro_batch))
        size = at_most or len(micro_batches)
        for first in range(0, len(micro_batches), size):
            self._first = first
            self.sums.begin_micro_batches()
            yield micro_batches[first : first + size]
            self.sums.end_micro_batches(micro_batches[first : first + size])
        if self._tokens <= 0:
            raise RuntimeError(f"iteration {step.iteration}: no tokens were added; call step.add(loss_sum, tokens)")
        places = [(start, self.sums.copy(bucket)) for bucket, (start, _) in enumerate(self.sums.spans)]
        self.sums.settle(places, self._tokens)
        step.loss, step.agreed = self._loss_sum / self._tokens, True

    def loader(self, dataset: Any, **options: Any) -> DatasetLoader:
        """Return a loader of the dataset's micro-batches; see `hook.Hook.loader`. Raises BadLoader."""
        sampling = sampling_over(dataset, self._sampling, has_begun=self._iteration > 0)
        loader = make_loader(self, self._registered, dataset, sampling, options)
        self._sampling = sampling
        return loader

    def stop(self, reason: str) -> None:
        """Have training end after this iteration. Raises ValueError without a reason."""
        if not reason:
            raise ValueError("hook.stop(reason): give the reason in a few words")
        self.stop_reason = reason

    def section(self, name: str, *, timeout_s: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: no agent watches this loop. Raises ValueError for the name."""
        check_name(name)
        return contextlib.nullcontext()

    def register(self, name: str, stateful: Any) -> None:
        """Note the name, which must be free; no state travels here. Raises ValueError."""
        if name in self._registered:
            raise ValueError(f"hook.register({name!r}, ...): register each name once, before the first step")
        self._registered[name] = stateful

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Print a line with these numbers and the iteration."""
        text = ", ".join(f"{name} {float(value):g}" for name, value in metrics.items())
        print(f"iteration {self._iteration}: {text}", flush=True)

    def on_finish(self, save: Callable[[], None]) -> None:
        """Have `save` called after the last iteration."""
        self._on_finish = save
