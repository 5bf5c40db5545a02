"""Lightning's Trainer, healed: a strategy that gives its loop an iteration of the hook in the place of batches.

    trainer = lightning.Trainer(strategy=LightningStrategy(), accumulate_grad_batches=8, max_epochs=3)

Rules
-----
* Lightning's loop stays as it is: clipping, the optimizer's step, schedules, callbacks, loggers, validation,
  checkpoints. What it takes for the last batch of an accumulation is an iteration of the hook (`training_step`), the
  others are empty; so batches, steps and epochs count as it counts them.
* The order of samples is that of the module's or data module's own DataLoader. Gradients are those of Lightning alone
  with `accumulate_grad_batches`: batches weigh the same, those of a short last accumulation too.
* The progress of Lightning's loops and the states of its callbacks are part of the training state, taken between two
  iterations. A replica whose loop stands elsewhere than a state that it receives ends, and is started anew.
* Each replica validates, to the same metrics; the leader alone logs and writes files.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from unicrond.agents.trainer.loop.examination import CannotAttach
from unicrond.agents.trainer.loop.hook import Hook, Local, Step
from unicrond.agents.trainer.loop.local import LocalHook, LocalStep
from unicrond.agents.trainer.process import context

#: In a state, of a dict that stands for a scalar tensor.
_SCALAR = "scalar tensor"


class _LightningBatch:
    """What Lightning's loop takes for a batch: for the last of an accumulation an iteration of the hook, of so many
    batches."""

    def __init__(self, step: Step | LocalStep | None, count: int) -> None:
        self.step, self.count = step, count


class _LightningBatches:
    """The batches of an epoch as Lightning's loop gets them."""

    def __init__(self, strategy: LightningStrategy, length: int) -> None:
        self._strategy, self._length = strategy, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[_LightningBatch]:
        return self._strategy._deal(self._length)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: where the data stands follows from the iteration."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


class _LoopProgress:
    """Hold the progress of Lightning's loops and callbacks, and the metrics that callbacks and schedules watch, as part
    of the training state. It is the progress between two iterations, which `note` takes: a state is also taken during
    an iteration, when the loops have gone further."""

    def __init__(self, strategy: LightningStrategy, trainer: pl.Trainer) -> None:
        self._strategy, self._trainer = strategy, trainer
        self.note()

    def note(self) -> None:
        """Note where they stand now."""
        self._state: dict[str, Any] = _plain_copy(
            {
                "fit_loop": self._trainer.fit_loop.state_dict(),
                "callbacks": call._call_callbacks_state_dict(self._trainer),
                "metrics": self._trainer._logger_connector._callback_metrics,
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, before the loop has begun."""
        self._state = state
        if self._strategy._has_begun:
            self._strategy._has_moved = True
            return
        state = _given_back(state)
        self._trainer.fit_loop.load_state_dict(state["fit_loop"])
        call._call_callbacks_load_state_dict(self._trainer, state)
        metrics = {name: metric.to(self._strategy.root_device) for name, metric in state.get("metrics", {}).items()}
        self._trainer._logger_connector._callback_metrics.update(metrics)


def _plain_copy(value: Any) -> Any:
    """Return a copy with numbers in the place of scalar tensors: those of a training state are finite, and a metric
    need not be, nor is the best score before the first. Named tuples become plain ones, as in any state."""
    if isinstance(value, dict):
        return {key: _plain_copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(_plain_copy, value))
    if isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point():
        return {_SCALAR: value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    return copy.deepcopy(value)


def _given_back(value: Any) -> Any:
    """Return the inverse of `_plain_copy`, on the CPU."""
    if isinstance(value, dict):
        if _SCALAR in value:
            return torch.tensor(value[_SCALAR], dtype=getattr(torch, value["dtype"]))
        return {key: _given_back(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(_given_back, value))
    return value


class LightningStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """A strategy of lightning.Trainer for a task of unicrond; in any other process, one local replica (`Local`).

    `timeout_s`: how long a validation or a checkpoint may take, at most."""

    hook: Hook | LocalHook | None = None
    _steps: Iterator[Step | LocalStep] | None = None
    _next: Step | LocalStep | None = None
    _has_begun = False
    _has_moved = False
    _is_over = False

    def __init__(self, *, timeout_s: float = 1800.0) -> None:
        super().__init__("cuda:0" if torch.cuda.is_available() else "cpu")
        self._timeout_s = timeout_s
        self._validation = contextlib.ExitStack()

    # --- Lightning's loop ------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up as of one device, and keep the gradients that the hook has made. Raises CannotAttach."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        for sentence in _lightning_refusals(trainer):
            raise CannotAttach(sentence)
        self.hook = None
        trainer.lightning_module.optimizer_zero_grad = _keep_gradients
        if context.is_worker():
            rank_zero_only.rank = 1  # the leader is not known
            trainer.num_sanity_val_steps = 0  # or those who wait for a newcomer would wait for that

    def process_dataloader(self, dataloader: object) -> object:
        """Attach where this is the training's DataLoader, and return what deals out iterations. Raises CannotAttach,
        BadLoader."""
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader) or self.hook is not None:
            kind = type(dataloader).__name__ if self.hook is None else "second DataLoader"
            raise CannotAttach(
                f"train_dataloader gives a {kind}: the order of samples is taken from one torch DataLoader; return that"
            )
        accumulation, loop = trainer.accumulate_grad_batches, trainer.fit_loop
        updates = -(-len(dataloader) // accumulation)
        ends = [loop.max_steps] * (loop.max_steps > 0) + [loop.max_epochs * updates] * ((loop.max_epochs or -1) > 0)
        if not ends:
            raise CannotAttach("lightning.Trainer: give max_epochs or max_steps, the end of the task's iterations")
        batch_size = dataloader.batch_size or 1
        local = Local(min(ends), accumulation * batch_size, batch_size)
        if context.is_worker():
            _require_lightning_task(local, accumulation)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self.hook = hook = Hook.attach_or_local(local, self.lightning_module, list(self.optimizers), schedulers)
        self._loader = hook.loader(dataloader)
        self._progress = _LoopProgress(self, trainer)
        hook.register("lightning", self._progress)
        self._has_begun = self._is_over = False
        steps: Iterator[Step | LocalStep] = iter(hook.steps())
        self._steps = steps
        self._next, self._has_begun = next(steps, None), True
        return _LightningBatches(self, len(dataloader))

    def _deal(self, length: int) -> Iterator[_LightningBatch]:
        """Yield the rest of an epoch's batches, from where Lightning's loop stands."""
        trainer = self.lightning_module.trainer
        accumulation, loop = trainer.accumulate_grad_batches, trainer.fit_loop
        step: Step | LocalStep | None = None
        for place in range(loop.epoch_loop.batch_progress.current.ready, length):
            first = place - place % accumulation
            last = min(first + accumulation, length) - 1
            if place == first:
                updates = -(-length // accumulation)
                step = self._take(loop.epoch_progress.current.processed * updates + first // accumulation + 1)
                if step is None:
                    trainer.should_stop = True
                    return
            yield _LightningBatch(step if place == last else None, last - first + 1)

    def _take(self, iteration: int) -> Step | LocalStep | None:
        """Return the hook's next iteration, which is this one of Lightning's; None where training ends. Raises
        RuntimeError for another."""
        assert self.hook is not None and self._steps is not None
        if self._next is None:
            self._progress.note()
        step, self._next = self._next or next(self._steps, None), None
        if step is None:
            self._is_over = True
        elif self._has_moved or step.iteration != iteration:
            raise RuntimeError(
                f"a state for iteration {step.iteration} has come while Lightning's loop was at {iteration}: this"
                " replica begins anew from it"
            )
        else:
            self.lightning_module.trainer.fit_loop.epoch_loop._batches_that_stepped = iteration - 1
            rank_zero_only.rank = 0 if self.hook.is_leader else 1
        return step

    def batch_to_device(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        """Move a batch of samples."""
        return batch if isinstance(batch, _LightningBatch) else super().batch_to_device(batch, *arguments, **options)

    def training_step(self, batch: Any, *rest: Any) -> Any:
        """Compute this replica's batches of the iteration; return the mean loss of all, as Lightning takes it."""
        trainer, module = self.lightning_module.trainer, self.lightning_module
        accumulation = trainer.accumulate_grad_batches
        if batch.step is None:
            return torch.zeros((), device=self.root_device)
        for samples in self._loader(batch.step):
            inputs = super().batch_to_device(self.precision_plugin.convert_input(samples))
            trainer._logger_connector.on_batch_start(inputs)
            output = super().training_step(inputs, *rest)
            loss = output["loss"] if isinstance(output, Mapping) else output
            if loss is None:
                raise RuntimeError(
                    f"{type(module).__name__}.training_step has returned no loss: return 0 * loss instead"
                )
            loss = loss * (batch.count / accumulation)  # of a short accumulation Lightning takes no mean
            super().backward(loss, self.optimizers[0])
            batch.step.add(loss.detach(), 1)
        return torch.tensor(batch.step.loss * accumulation, device=self.root_device)

    def backward(self, closure_loss: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        """Return the loss as it is: the gradients are there."""
        return closure_loss

    def on_train_end(self) -> None:
        """End the task where Lightning ends. Raises RuntimeError where the task goes on."""
        hook, steps = self.hook, self._steps
        if hook is None or steps is None or self._is_over:
            return
        self._is_over = True
        self._progress.note()
        position = self.lightning_module.trainer.global_step
        if position < hook.iterations:
            hook.stop(f"trainer.should_stop at step {position}")
            steps.close()  # type: ignore[attr-defined]
        elif next(steps, None) is not None:
            raise RuntimeError(f"Lightning has ended at step {position}, and the task has not")

    # --- validation, logs and files --------------------------------------------------------------

    def _section(self, name: str) -> contextlib.AbstractContextManager[None]:
        if self.hook is None or self._is_over:
            return contextlib.nullcontext()
        return self.hook.section(name, timeout_s=self._timeout_s)

    def on_validation_start(self) -> None:
        """Declare the validation, on every replica."""
        self._validation.enter_context(self._section("validation"))

    def on_validation_end(self) -> None:
        """End what was declared."""
        self._validation.close()

    @property
    def is_global_zero(self) -> bool:
        """Return whether this process logs and writes files: the task's leader."""
        return self.hook.is_leader if self.hook is not None else not context.is_worker()

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Save as Lightning does, in the leader alone."""
        with self._section("checkpoint"):
            super().save_checkpoint(*arguments, **options)


def _keep_gradients(*_: Any) -> None:
    """Stand in the place of the module's `optimizer_zero_grad`: the hook clears what it has summed."""


def _lightning_refusals(trainer: pl.Trainer) -> Iterator[str]:
    """Yield a sentence for each thing that would train otherwise than Lightning alone."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        yield (
            "automatic_optimization = False: the module steps by itself, and cannot give a step back that a fault has"
            " taken; use automatic optimization, or loop over hook.steps()"
        )
    if trainer.precision == "16-mixed":
        yield 'lightning.Trainer(precision="16-mixed"): its loss scale is not healed; use "bf16-mixed"'
    if trainer.limit_train_batches != 1.0 or trainer.overfit_batches:
        yield (
            "lightning.Trainer(limit_train_batches, overfit_batches): an epoch has all batches of its DataLoader here;"
            " leave them out, and give a smaller dataset"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        yield (
            "lightning.Trainer(reload_dataloaders_every_n_epochs): the order of samples is taken once, from one"
            " DataLoader; leave it out"
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        yield (
            "GradientAccumulationScheduler: an iteration has as many batches as the task says, from the first to the"
            " last; leave it out, and give accumulate_grad_batches"
        )
    if trainer.ckpt_path:
        yield (
            "trainer.fit(ckpt_path=...): the task goes on from its own states; leave it out, and begin from a"
            " checkpoint's weights by load_from_checkpoint"
        )
    for name in ("on_before_batch_transfer", "optimizer_zero_grad"):
        if is_overridden(name, module):
            yield (
                f"{type(module).__name__}.{name}: Lightning calls it once for an iteration and not for each batch; do"
                " its work in training_step"
            )


def _require_lightning_task(local: Local, accumulation: int) -> None:
    """Raises CannotAttach where the task's numbers are not those of the Trainer."""
    spec = context.current().launch.spec
    product = f"the DataLoader's batch_size {local.micro_batch} x accumulate_grad_batches {accumulation}"
    for name, number, source in (
        ("iterations", local.iterations, "max_steps, or max_epochs of this DataLoader,"),
        ("global_batch", local.global_batch, product),
        ("micro_batch", local.micro_batch, "the DataLoader's batch_size"),
    ):
        if getattr(spec, name) != number:
            raise CannotAttach(
                f"lightning.Trainer: {source} makes {number}, and the task's {name} is {getattr(spec, name)}; write"
                f" `{name}: {number}` in the task file, or change the arguments"
            )
