"""Hugging Face's Trainer, healed: its own loop, with an iteration of the hook in the place of its micro-batches.

    from unicrond import HuggingFaceTrainer as Trainer

Rules
-----
* Trainer's loop stays as it is: clipping, the optimizer's step, schedules, callbacks, logs, evaluation, checkpoints.
  What it takes for the last micro-batch of an update is an iteration of the hook (`training_step`), the others are
  empty; so steps and epochs count as it counts them.
* The order of samples is that of its own DataLoader, the loss that of its `compute_loss`: of a mean over the tokens of
  the global batch the sum is taken, and divided by all tokens in the end.
* What Trainer knows of its progress (`TrainerState`, the loss since the last log, callbacks with a state) is part of
  the training state. Where this replica receives a state, Trainer's loop over an epoch begins anew at that position.
* Each replica evaluates, to the same metrics; the leader alone logs and writes files.
* What cannot be trained so is refused before the first step, in one sentence with the argument and the fix.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import transformers
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback

from unicrond.agents.trainer.loop.examination import CannotAttach
from unicrond.agents.trainer.loop.hook import Hook, Local, Step
from unicrond.agents.trainer.loop.local import LocalHook, LocalStep
from unicrond.agents.trainer.process import context

#: What is overridden of Trainer's loop, beside what it documents.
_SEAMS = ("_prepare_for_training", "_run_epoch", "_maybe_log_save_evaluate", "_load_rng_state", "_save_checkpoint")
#: What a subclass cannot have in its own way: an iteration would be its own.
_METHODS = ("training_step", "get_batch_samples")
#: Fields of TrainerState that are each process's own.
_LOCAL_FIELDS = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")
if missing := [name for name in _SEAMS if not hasattr(transformers.Trainer, name)]:
    raise ImportError(
        f"HuggingFaceTrainer: transformers {transformers.__version__} has no Trainer.{missing[0]}; install 5.23 or a"
        " newer one"
    )


class _IterationBatch(dict[str, Any]):
    """What Trainer's loop takes for a batch: an iteration of the hook, without any tensor."""

    def __init__(self, step: Step | LocalStep | None = None) -> None:
        super().__init__()
        self.step = step


class _PositionChanged(Exception):
    """A received state stands elsewhere than Trainer's loop over an epoch."""


class _Progress:
    """What Trainer knows of its progress, as part of the training state."""

    def __init__(self, trainer: HuggingFaceTrainer) -> None:
        self._trainer = trainer

    def _callbacks(self) -> list[ExportableState]:
        callbacks = self._trainer.callback_handler.callbacks
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and a tensor."""
        trainer = self._trainer
        fields = {name: value for name, value in asdict(trainer.state).items() if name not in _LOCAL_FIELDS}
        return {
            "state": json.dumps(fields, default=float),
            "callbacks": json.dumps([callback.state()["attributes"] for callback in self._callbacks()], default=float),
            "loss": trainer._tr_loss,
            "loss_logged": float(trainer._total_loss_scalar),
            "step_logged": int(trainer._globalstep_last_logged),
            "epochs": trainer._epochs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        trainer = self._trainer
        for name, value in json.loads(state["state"]).items():
            setattr(trainer.state, name, value)
        for callback, attributes in zip(self._callbacks(), json.loads(state["callbacks"]), strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)
        trainer._tr_loss.copy_(state["loss"])
        trainer._total_loss_scalar = state["loss_logged"]
        trainer._globalstep_last_logged = state["step_logged"]
        trainer._epochs = state["epochs"]
        trainer._has_moved = True


class HuggingFaceTrainer(transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer in a task of unicrond; in any other process, Trainer on one local replica (`Local`)."""

    hook: Hook | LocalHook | None = None
    _steps: Iterator[Step | LocalStep] | None = None
    _next: Step | LocalStep | None = None
    _is_over = False
    _has_moved = False
    #: Epochs that have ended, with all that Trainer does then.
    _epochs = 0
    _loss_is_examined = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if context.is_worker() and self.pop_callback(ProgressCallback) is not None:
            self.add_callback(PrinterCallback)  # a log has no room for bars

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **options: Any) -> Any:
        """Train as Trainer does, from wherever the task stands. Raises CannotAttach."""
        for sentence in _refusals(self, resume_from_checkpoint, trial):
            raise CannotAttach(sentence)
        return super().train(**options)

    # --- Trainer's loop --------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        args = self.args
        accumulation = args.gradient_accumulation_steps
        local = Local(max_steps, args.train_batch_size * accumulation, args.train_batch_size, args.seed)
        if context.is_worker():
            _require_task_of(local, accumulation)
        self.hook = hook = Hook.attach_or_local(local, self.model, self.optimizer.optimizer, self.lr_scheduler)
        self._loader = hook.loader(getattr(train_dataloader, "base_dataloader", train_dataloader))
        self._steps, self._next, self._is_over, self._epochs = None, None, False, 0
        return prepared

    def _begin(self) -> Iterator[Step | LocalStep]:
        """Register what belongs to the state, and receive it."""
        assert self.hook is not None
        self.hook.register("trainer", _Progress(self))
        steps: Iterator[Step | LocalStep] = iter(self.hook.steps())
        self._next, self._has_moved = next(steps, None), False
        return steps

    def _run_epoch(self, **options: Any) -> None:
        if self._steps is None:
            self._steps = self._begin()
        epoch, self._updates = options["epoch"], options["num_update_steps_per_epoch"]
        while self._epochs == epoch and not self._is_over:
            position = self.state.global_step - epoch * self._updates
            # As Trainer goes on from a checkpoint of its own.
            options |= {
                "resume_from_checkpoint": "",
                "epochs_trained": epoch,
                "steps_trained_in_current_epoch": position * self.args.gradient_accumulation_steps,
            }
            with contextlib.suppress(_PositionChanged):
                super()._run_epoch(**options)
                self._epochs = epoch + 1
                self._end_epoch()

    def _end_epoch(self) -> None:
        """End the training where Trainer does. Raises RuntimeError where it would end the epoch alone."""
        hook, steps, control = self.hook, self._steps, self.control
        assert hook is not None and steps is not None
        if control.should_epoch_stop and not control.should_training_stop:
            raise RuntimeError(
                "a callback has set control.should_epoch_stop: the next epoch's samples would be other ones on a"
                " replica that joins; set control.should_training_stop, or leave it"
            )
        if not control.should_training_stop or self._is_over:
            return
        self._is_over = True
        if self.state.global_step < hook.iterations:
            hook.stop(f"control.should_training_stop at step {self.state.global_step}")
            steps.close()  # type: ignore[attr-defined]
        elif next(steps, None) is not None:
            raise RuntimeError(f"Trainer has ended at step {self.state.global_step}, and the task has not")

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Return an iteration of the hook as Trainer's next update: so many batches, of which the last has it."""
        assert self.hook is not None and self._steps is not None
        step, self._next = self._next or next(self._steps, None), None
        if step is None:
            self._is_over = self.control.should_training_stop = True
            return [], None
        if self._has_moved:
            self._next = step
            self._begin_anew()
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.hook.is_leader
        return [*(_IterationBatch() for _ in range(num_batches - 1)), _IterationBatch(step)], None

    def _begin_anew(self) -> None:
        self._has_moved = False
        raise _PositionChanged

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute this replica's micro-batches of the iteration; return the mean loss of all."""
        if (step := inputs.step) is None:
            return torch.zeros((), device=self.args.device)
        self.current_gradient_accumulation_steps = 1
        for batch in self._loader(step):
            items = self._get_num_items_in_batch([batch], self.args.device)
            is_mean = self._takes_mean(model, batch, items)
            loss = super().training_step(model, batch, None if items is None else torch.ones_like(items))
            step.add(loss, 1 if is_mean else items)
        return torch.tensor(step.loss, device=self.args.device)

    def _takes_mean(self, model: torch.nn.Module, batch: Any, items: torch.Tensor | None) -> bool:
        """Return whether Trainer takes the mean of the micro-batches' losses, or else the sum over their items divided
        by the number of all. Raises CannotAttach where the loss is neither."""
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = self.compute_loss_func is not None or (self.model_accepts_loss_kwargs and items is not None)
        if not is_scaled or self._loss_is_examined:
            return not is_scaled
        losses = [0.0, 0.0]
        if items is not None:
            model.eval()  # draws no random number, changes no statistics
            with torch.no_grad(), self.compute_loss_context_manager():
                for place in (0, 1):
                    count = (1 + place) * torch.ones_like(items)
                    loss = self.compute_loss(model, self._prepare_inputs(dict(batch)), num_items_in_batch=count)
                    losses[place] = float(loss)
        if items is None or abs(losses[0] - 2 * losses[1]) > 1e-3 * abs(losses[0]):
            raise CannotAttach(
                "the loss does not follow num_items_in_batch: divide the sum over the items by it, or set"
                " trainer.loss_is_scaled_for_ga = False and return the mean of a micro-batch"
            )
        self._loss_is_examined = True
        return False

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        if self._has_moved:
            self.state.epoch = self.state.global_step / self._updates
        super()._maybe_log_save_evaluate(*arguments, **options)
        if self._has_moved:
            self._begin_anew()

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Load nothing: each micro-batch has its own random numbers."""

    # --- evaluation, logs and files --------------------------------------------------------------

    def _section(self, name: str) -> contextlib.AbstractContextManager[None]:
        if self.hook is None or self._steps is None or self._is_over:
            return contextlib.nullcontext()
        return self.hook.section(name, timeout_s=float(self.args.ddp_timeout))

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate as Trainer does, on each replica; the longest time is TrainingArguments.ddp_timeout."""
        with self._section("evaluation"):
            return super().evaluate(*arguments, **options)

    def is_world_process_zero(self) -> bool:
        """Return whether this process logs and writes files: the task's leader."""
        if self.hook is not None:
            return self.hook.is_leader
        return bool(not context.is_worker() and super().is_world_process_zero())

    def is_local_process_zero(self) -> bool:
        """Return the same."""
        return self.is_world_process_zero()

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """Save as Trainer does, in the leader alone."""
        if self.is_world_process_zero():
            super().save_model(*arguments, **options)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        with self._section("checkpoint"):
            if self.is_world_process_zero():
                super()._save_checkpoint(model, trial)


def _refusals(trainer: HuggingFaceTrainer, resume_from_checkpoint: Any, trial: Any) -> Iterator[str]:
    """Yield a sentence for each thing that would train otherwise than Trainer alone."""
    args = trainer.args
    if args.world_size > 1 or args.n_gpu > 1:
        yield (
            f"Trainer sees {args.world_size} processes and {args.n_gpu} GPUs: without unicrond HuggingFaceTrainer"
            " trains in one process on one GPU; submit it as a task, or set CUDA_VISIBLE_DEVICES=0"
        )
    reasons = {
        "deepspeed": "shards the model and reduces gradients itself",
        "fsdp": "shards the model over ranks, and parameters must be whole in each replica",
        "parallelism_config": "cuts the model over ranks, and parameters must be whole in each replica",
        "fp16": "its loss scale is not healed; use bf16=True",
        "torch_compile": "is untested here; compile the model itself (model.compile()) before the Trainer is made",
        "auto_find_batch_size": "would change the micro-batches of one replica; give per_device_train_batch_size",
        "eval_on_start": "would have a worker that joins evaluate while the others wait; call trainer.evaluate()",
        "ignore_data_skip": "would have a worker that joins begin its epoch anew; no data is skipped here",
        "push_to_hub": "is not handed on when the leader is lost; push the saved model after the task",
        "load_best_model_at_end": "needs a checkpoint that a lost leader may not have written; load it after the task",
        "enable_jit_checkpoint": "is not needed: the task's own states are saved when a node is drained",
    }
    for name, reason in reasons.items():
        if getattr(args, name, None):
            yield f"TrainingArguments.{name}: {reason}; leave {name} out"
    if args.include_num_input_tokens_seen not in ("no", False):
        yield "TrainingArguments.include_num_input_tokens_seen: input tokens are not summed over replicas; leave it out"
    if args.train_sampling_strategy == "batch_rebalance":
        yield (
            "TrainingArguments.train_sampling_strategy: batch_rebalance makes batches of several sizes for a number of"
            " ranks, which changes here; use random, sequential or group_by_length"
        )
    if resume_from_checkpoint:
        yield (
            "trainer.train(resume_from_checkpoint=...): the task goes on from its own states; leave it out, and begin"
            " from a checkpoint's weights by from_pretrained(checkpoint)"
        )
    if trial is not None or trainer.hp_search_backend is not None:
        yield "hyperparameter_search: a task trains once; submit a task for each trial"
    for name in _METHODS:
        if getattr(type(trainer), name) is not getattr(HuggingFaceTrainer, name):
            yield f"{type(trainer).__name__}.{name}: an iteration is the hook's; override compute_loss instead"


def _require_task_of(local: Local, accumulation: int) -> None:
    """Raises CannotAttach where the task's numbers are not those of TrainingArguments."""
    spec = context.current().launch.spec
    product = f"per_device_train_batch_size {local.micro_batch} x gradient_accumulation_steps {accumulation}"
    numbers = {"iterations": local.iterations, "global_batch": local.global_batch, "micro_batch": local.micro_batch}
    for name, number in numbers.items():
        if getattr(spec, name) != number:
            source = {
                "iterations": "max_steps, or num_train_epochs of this data,",
                "global_batch": product,
                "micro_batch": "per_device_train_batch_size",
            }[name]
            raise CannotAttach(
                f"TrainingArguments: {source} makes {number}, and the task's {name} is {getattr(spec, name)}; write"
                f" `{name}: {number}` in the task file, or change the arguments"
            )
