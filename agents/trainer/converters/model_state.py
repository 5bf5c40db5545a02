"""A model between two formats: whole tensors under Megatron's global names, each read when it is written.

    embedding.word_embeddings.weight                            (rows of the vocabulary, hidden)
    decoder.layers.self_attention.linear_qkv.weight             (layers, rows, hidden): all layers in one

Every format is read into this and written from it, so each speaks of itself alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from unicrond.agents.trainer.states.distributed_format import Reader
from unicrond.agents.trainer.states.resharding import SETTINGS, WHOLE, Piece, StateLayout
from unicrond.agents.trainer.states.state_bytes import named_tensors

_REPORT_S = 5.0
TENSORS = "tensors."
#: Of a state that holds nothing but a model: a task's first one, since 0 would be none.
FIRST = 1


@dataclass(slots=True)
class ModelState:
    """A model, and with `tree` the training state of which it is a part.

    `iteration`: 0 of a model that does not say any. `tensors`: on the meta device, by global name. `reader`: gives one
    of them. `settings`: what its task was trained with (`training_settings.py`), as far as that is known. `tree`: a
    portable state whose tensors are on the meta device; None: the model alone. `state_reader`: returns a tensor of the
    tree by its path.
    """

    iteration: int
    settings: dict[str, str]
    tensors: dict[str, torch.Tensor]
    reader: Reader
    tree: dict[str, Any] | None = None
    state_reader: Reader | None = None

    def alone(self) -> ModelState:
        """Return the model without the rest of its state."""
        return ModelState(self.iteration, self.settings, self.tensors, self.reader)


def from_tree(tree: dict[str, Any], reader: Reader) -> ModelState:
    """Return the model of a portable state; its optimizer's state too, where it has any."""
    model = ModelState(
        int(tree["iteration"]),
        dict(tree.get(SETTINGS) or {}),
        tree["tensors"],
        lambda name: reader(f"{TENSORS}{name}"),
    )
    if tree["optimizer"]:
        model.tree, model.state_reader = tree, reader
    return model


def to_tree(model: ModelState) -> tuple[dict[str, Any], Reader]:
    """Return the portable state, and what reads its tensors. Of a model alone the state says so: its optimizer's part
    is empty, and whoever takes it up begins with fresh moments."""
    if model.tree is not None and model.state_reader is not None:
        return {**model.tree, SETTINGS: model.settings}, model.state_reader
    tree = {
        "iteration": model.iteration or FIRST,
        "loss": 0.0,
        "layout": msgspec.to_builtins(whole_layout(model.tensors, {})),
        "tensors": model.tensors,
        "optimizer": {},
        "scheduler": None,
        "generators": None,
        "registered": {},
        SETTINGS: model.settings,
        WHOLE: True,
    }
    return tree, lambda path: model.reader(path.removeprefix(TENSORS))


def whole_layout(tensors: Mapping[str, torch.Tensor], optimizer: dict[str, str]) -> StateLayout:
    """Return the layout of a state whose tensors are whole. `optimizer`: the tensor of each path in its state."""
    pieces: dict[str, tuple[Piece, ...]] = {}
    for name, tensor in tensors.items():
        shape, nowhere = tuple(tensor.shape), (0,) * tensor.dim()
        pieces[name] = (Piece(name, shape, nowhere, nowhere, shape),)
    return StateLayout(1, 1, pieces, optimizer)


@dataclass(slots=True)
class Progress:
    """Say on stderr, now and then, how much of `total_bytes` has been read."""

    total_bytes: int
    done_bytes: int = 0
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    _due_s: float = field(default_factory=lambda: time.monotonic() + _REPORT_S)

    def watched(self, reader: Reader) -> Reader:
        """Return the reader, with what it reads counted."""

        def count(name: str) -> torch.Tensor:
            """Read a tensor and count it."""
            tensor = reader(name)
            self.done_bytes += tensor.nbytes
            if time.monotonic() >= self._due_s:
                self._due_s = time.monotonic() + _REPORT_S
                self.say(f"{self.done_bytes / 1e9:.1f} of {self.total_bytes / 1e9:.1f} GB")
            return tensor

        return count


def watch(model: ModelState) -> ModelState:
    """Return the model; reading its tensors shows the progress on stderr."""
    whole = dict(_all_tensors(model))
    progress = Progress(sum(tensor.nbytes for tensor in whole.values()))
    state_reader = None if model.state_reader is None else progress.watched(model.state_reader)
    return ModelState(
        model.iteration, model.settings, model.tensors, progress.watched(model.reader), model.tree, state_reader
    )


def _all_tensors(model: ModelState) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.tensors.items() if model.tree is None else named_tensors(model.tree)
