"""What the adapters take of Hugging Face's and Lightning's Trainer, and refuse, in a process of no task."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from unicrond import HuggingFaceTrainer, LightningStrategy
from unicrond.agents.trainer.adapters.hugging_face import _Progress
from unicrond.agents.trainer.loop.examination import CannotAttach
from unicrond.agents.trainer.loop.local import LocalHook, LocalStep
from unicrond.agents.trainer.states.state import flatten, unflatten
from unicrond.agents.trainer.states.state_bytes import check

SAMPLES = [{"rows": torch.tensor([place / 11, 1.0]), "labels": torch.tensor([place % 3 - 1.0])} for place in range(11)]


class MeanLoss(torch.nn.Module):
    """A model whose loss is the mean of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(rows), labels)}


class TokenLoss(MeanLoss):
    """A model whose loss is divided by what Trainer says."""

    def forward(self, rows: torch.Tensor, labels: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
        loss = torch.nn.functional.mse_loss(self.layer(rows), labels, reduction="sum")
        return {"loss": loss / options.get("num_items_in_batch", len(rows))}


class DeafLoss(MeanLoss):
    """A model that takes what Trainer says and passes over it."""

    def forward(self, rows: torch.Tensor, labels: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
        return super().forward(rows, labels)


def make(
    kind: type[Trainer], directory: Path, model: type[MeanLoss] = MeanLoss, *callbacks: TrainerCallback, **options: Any
) -> Trainer:
    arguments = TrainingArguments(
        str(directory),
        num_train_epochs=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        **options,
    )
    return kind(model(), arguments, train_dataset=SAMPLES, eval_dataset=SAMPLES, callbacks=list(callbacks))


def history(trainer: Trainer) -> list[dict[str, float]]:
    trainer.train()
    lines = trainer.state.log_history
    return [{name: line[name] for name in ("step", "epoch", "loss", "grad_norm") if name in line} for line in lines]


@pytest.mark.parametrize("options", [{}, {"dataloader_drop_last": True}, {"train_sampling_strategy": "sequential"}])
@pytest.mark.parametrize("model", [MeanLoss, TokenLoss])
def test_trainer_logs_what_it_logs_alone(tmp_path: Path, model: type[MeanLoss], options: dict[str, Any]) -> None:
    """Means of micro-batches and of tokens; a last micro-batch of one sample, a last update of one or two of them."""
    alone = history(make(Trainer, tmp_path, model, **options))
    assert len(alone) == 10
    for line, expected in zip(history(make(HuggingFaceTrainer, tmp_path, model, **options)), alone, strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


class StopAt(TrainerCallback):
    """Ends the training, or the epoch, at a step."""

    def __init__(self, flag: str, step: int = 5) -> None:
        self.flag, self.step = flag, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        setattr(control, self.flag, state.global_step == self.step)


def test_callback_ends_training_where_it_does_alone(tmp_path: Path) -> None:
    alone = history(make(Trainer, tmp_path, MeanLoss, StopAt("should_training_stop")))
    trainer = make(HuggingFaceTrainer, tmp_path, MeanLoss, StopAt("should_training_stop"))
    assert [line["step"] for line in history(trainer)] == [line["step"] for line in alone] == [1, 2, 3, 4, 5, 5]
    assert trainer.hook.stop_reason == "control.should_training_stop at step 5"


def test_callback_that_ends_an_epoch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=re.escape("a callback has set control.should_epoch_stop")):
        make(HuggingFaceTrainer, tmp_path, MeanLoss, StopAt("should_epoch_stop")).train()


def test_trainer_goes_on_where_a_state_received_in_mid_iteration_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second iteration of the first epoch it gets the state after the sixth of nine; then it makes that step."""

    def steps(hook: LocalHook) -> Iterator[LocalStep]:
        for iteration in (1, 2, 8, 9):
            hook.sums.clear()
            hook._iteration, hook._loss_sum, hook._tokens = iteration, 0.0, 0
            yield LocalStep(hook, iteration)

    monkeypatch.setattr(LocalHook, "steps", steps)
    trainer = make(HuggingFaceTrainer, tmp_path, eval_strategy="epoch")
    compute = trainer.compute_loss

    def receive(model: Any, inputs: Any, **options: Any) -> Any:
        if trainer.state.global_step == 1:
            state = _Progress(trainer).state_dict()
            fields = {**json.loads(state["state"]), "global_step": 6, "log_history": []}
            _Progress(trainer).load_state_dict({**state, "state": json.dumps(fields), "epochs": 2, "step_logged": 6})
        return compute(model, inputs, **options)

    monkeypatch.setattr(trainer, "compute_loss", receive)
    trainer.train()
    lines = [(line["step"], line["epoch"], "eval_loss" in line) for line in trainer.state.log_history[:-1]]
    assert lines == [
        (7, pytest.approx(7 / 3), False),
        (8, pytest.approx(2 + 4 / 6), False),
        (9, 3, False),
        (9, 3, True),
    ]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("deepspeed", "zero.json", "TrainingArguments.deepspeed: shards the model and reduces gradients itself"),
        ("fsdp", "full_shard", "TrainingArguments.fsdp: shards the model over ranks, and parameters must be whole"),
        ("parallelism_config", object(), "TrainingArguments.parallelism_config: cuts the model over ranks"),
        ("fp16", True, "TrainingArguments.fp16: its loss scale is not healed; use bf16=True; leave fp16 out"),
        ("torch_compile", True, "TrainingArguments.torch_compile: is untested here; compile the model itself"),
        ("auto_find_batch_size", True, "would change the micro-batches of one replica"),
        ("eval_on_start", True, "would have a worker that joins evaluate while the others wait"),
        ("enable_jit_checkpoint", True, "is not needed: the task's own states are saved when a node is drained"),
        ("ignore_data_skip", True, "would have a worker that joins begin its epoch anew"),
        ("push_to_hub", True, "is not handed on when the leader is lost"),
        ("load_best_model_at_end", True, "needs a checkpoint that a lost leader may not have written"),
        ("include_num_input_tokens_seen", "all", "input tokens are not summed over replicas"),
        ("train_sampling_strategy", "batch_rebalance", "makes batches of several sizes for a number of ranks"),
        ("_n_gpu", 2, "Trainer sees 1 processes and 2 GPUs: without unicrond HuggingFaceTrainer trains in one process"),
    ],
)
def test_training_argument_is_refused_with_its_reason(tmp_path: Path, name: str, value: Any, sentence: str) -> None:
    trainer = make(HuggingFaceTrainer, tmp_path)
    setattr(trainer.args, name, value)
    with pytest.raises(CannotAttach, match=re.escape(sentence)):
        trainer.train()
    assert trainer.hook is None


def test_checkpoint_and_trial_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotAttach, match="the task goes on from its own states"):
        make(HuggingFaceTrainer, tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(CannotAttach, match="a task trains once; submit a task for each trial"):
        make(HuggingFaceTrainer, tmp_path).train(trial={})


def test_own_training_step_is_refused(tmp_path: Path) -> None:
    kind = type("OwnStep", (HuggingFaceTrainer,), {"training_step": lambda self, *_: None})
    with pytest.raises(
        CannotAttach, match=r"OwnStep\.training_step: an iteration is the hook's; override compute_loss"
    ):
        make(kind, tmp_path).train()


def test_loss_that_passes_over_the_number_of_items_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotAttach, match="the loss does not follow num_items_in_batch: divide the sum"):
        make(HuggingFaceTrainer, tmp_path, DeafLoss).train()
    histories = []
    for kind in (Trainer, HuggingFaceTrainer):
        trainer = make(kind, tmp_path, DeafLoss)
        trainer.loss_is_scaled_for_ga = False
        histories.append(history(trainer))
    for expected, line in zip(*histories, strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


# --- Lightning ------------------------------------------------------------------------------------


class Line(lightning.LightningModule):  # type: ignore[misc]
    """A line through eleven samples."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(2, 1)
        for name, value in options.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.mse_loss(self.layer(batch["rows"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), 0.1)


class Weights(lightning.Callback):  # type: ignore[misc]
    """Notes the weights after each step; ends the training after the fourth where it is told to."""

    def __init__(self, *, ends: bool = False) -> None:
        self.ends = ends
        self.rows: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.rows.append(module.layer.weight.flatten().tolist())
            trainer.should_stop = self.ends and len(self.rows) == 4


def fit(strategy: Any, directory: Path, *callbacks: Any, module: Any = None, data: Any = None, **options: Any) -> Any:
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        default_root_dir=directory,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"accumulate_grad_batches": 3, "max_epochs": 3, **options},
    )
    trainer.fit(module or Line(), DataLoader(SAMPLES, 2) if data is None else data)
    return trainer


class ValidatedLine(Line):
    """Logs a metric in each validation, which is no number in the first epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer.weight.sum() * (float("nan") if self.current_epoch == 0 else 1.0))

    def val_dataloader(self) -> Any:
        return DataLoader(SAMPLES, 2)


class LoopStates(lightning.Callback):  # type: ignore[misc]
    """Collects what the training state has of Lightning in each step."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.states.append(trainer.strategy._progress.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_lightning_state_has_the_metrics_that_are_watched(tmp_path: Path) -> None:
    """A newcomer's monitors find them before its own first validation; no score yet, or none that is a number, makes
    the state one that nobody may take."""
    seen = LoopStates()
    stopping = {"check_finite": False, "patience": 9, "strict": False}
    trainer = fit(LightningStrategy(), tmp_path, seen, EarlyStopping("val_loss", **stopping), module=ValidatedLine())
    assert len(seen.states) == 18
    for state in seen.states:
        check({"iteration": 1, "loss": 0.0, "tensors": {}, "optimizer": {}, "scheduler": None, "lightning": state})
    watched = trainer.callback_metrics["val_loss"]
    trainer.strategy._progress.note()
    state = trainer.strategy._progress.state_dict()
    other = fit(LightningStrategy(), tmp_path, EarlyStopping("val_loss", **stopping), max_epochs=1)
    other.strategy._has_begun = False
    other.strategy._progress.load_state_dict(state)
    assert torch.equal(other.callback_metrics["val_loss"], watched) and watched.isfinite()
    assert torch.equal(other.early_stopping_callback.best_score, trainer.early_stopping_callback.best_score)


class Best(NamedTuple):
    """The best score of a callback, and its step."""

    score: torch.Tensor
    step: int


class BestScore(lightning.Callback):  # type: ignore[misc]
    """Keeps a named tuple in its state."""

    def __init__(self) -> None:
        self.best: tuple[Any, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        return {"best": Best(torch.tensor(float("nan")), 3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


@pytest.mark.filterwarnings("ignore")
def test_named_tuple_in_state_of_lightning_callback_arrives_as_plain_one(tmp_path: Path) -> None:
    trainer = fit(LightningStrategy(), tmp_path, best := BestScore(), max_epochs=1)
    trainer.strategy._has_begun = False
    trainer.strategy._progress.load_state_dict(unflatten(*flatten(trainer.strategy._progress.state_dict())))
    score, step = best.best
    assert score.isnan() and step == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"max_steps": 5, "max_epochs": -1}])
@pytest.mark.parametrize("ends", [False, True])
def test_lightning_makes_the_steps_that_it_makes_alone(tmp_path: Path, ends: bool, options: dict[str, Any]) -> None:
    """A short last batch in a full accumulation; an end before the task's."""
    alone, ours = Weights(ends=ends), Weights(ends=ends)
    fit("auto", tmp_path, alone, **options)
    strategy = LightningStrategy()
    fit(strategy, tmp_path, ours, **options)
    assert len(alone.rows) == (4 if ends else min(6, options.get("max_steps", 6)))
    assert ours.rows == [pytest.approx(row, rel=1e-5) for row in alone.rows]
    assert strategy.hook is not None
    assert strategy.hook.stop_reason == ("trainer.should_stop at step 4" if ends else "")


@pytest.mark.filterwarnings("ignore")
def test_lightning_weighs_a_short_accumulation_as_alone(tmp_path: Path) -> None:
    """The last accumulation of an epoch has two batches of four."""
    alone, ours = Weights(), Weights()
    fit("auto", tmp_path, alone, accumulate_grad_batches=4)
    fit(LightningStrategy(), tmp_path, ours, accumulate_grad_batches=4)
    assert len(alone.rows) == 6 and ours.rows == [pytest.approx(row, rel=1e-5) for row in alone.rows]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"callbacks": [GradientAccumulationScheduler({0: 4})], "accumulate_grad_batches": 1},
            "GradientAccumulationScheduler: an iteration has as many batches as the task says",
        ),
        (
            {"module": Line(automatic_optimization=False), "accumulate_grad_batches": 1},
            "automatic_optimization = False: the module steps by itself",
        ),
        ({"limit_train_batches": 2}, "an epoch has all batches of its DataLoader here"),
        ({"reload_dataloaders_every_n_epochs": 1}, "the order of samples is taken once, from one DataLoader"),
        ({"max_epochs": -1}, "give max_epochs or max_steps, the end of the task's iterations"),
        (
            {"data": {"a": DataLoader(SAMPLES, 2), "b": DataLoader(SAMPLES, 2)}},
            "train_dataloader gives a second DataLoader",
        ),
        ({"data": [SAMPLES[0]]}, "train_dataloader gives a Tensor: the order of samples"),
    ],
)
def test_lightning_option_is_refused_with_its_reason(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CannotAttach, match=re.escape(sentence)):
        fit(
            LightningStrategy(),
            tmp_path,
            *options.get("callbacks", ()),
            **{name: value for name, value in options.items() if name != "callbacks"},
        )
