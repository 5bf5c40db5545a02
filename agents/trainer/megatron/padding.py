"""Keeps a micro-batch that only fills up a group of an interleaved pipeline out of all sums.

Rules
-----
* Its loss has weight 0 (`runs.py`), so what is added to the gradients behind its loss is 0.
* Experts and multi-token prediction have losses of their own, which enter the backward in the middle of the model, at
  one scale for all micro-batches. It is 0 for as long as a padding's backward takes, and then what it was.
* What the forward pass counts (`beside`: auxiliary losses for the log, the tokens of each expert) is put back behind
  it. With recomputed activations the backward counts again: it is put back there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


class Padding:
    """Runs the passes of paddings. `beside`: returns the tensors in which forward passes count. `scales`: the classes
    of Megatron that hold the scale of a loss inside of the model (`auxiliary_scales`)."""

    def __init__(self, beside: Callable[[], Iterable[torch.Tensor]], scales: Iterable[Any]) -> None:
        self._beside = beside
        self._scales = tuple(scales)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Put back behind the block what a padding's forward pass in it counts."""
        put_back = self._snapshot()
        yield
        put_back()

    def prepare_backward(self, output: torch.Tensor) -> None:
        """Have the backward that begins at a padding's `output` leave nothing behind."""
        if self._scales and output.requires_grad:
            output.register_hook(self._begin)

    def _begin(self, _: torch.Tensor) -> None:
        put_back = [self._snapshot(), *(_silence(scale) for scale in self._scales)]
        for action in put_back:  # at the end of this backward
            torch.autograd.Variable._execution_engine.queue_callback(action)

    def _snapshot(self) -> Callable[[], None]:
        copies = [(values, values.clone()) for values in self._beside()]

        def put_back() -> None:
            """Let the tensors hold what they held."""
            for values, before in copies:
                values.copy_(before)

        return put_back


def _silence(scale: Any) -> Callable[[], None]:
    """Let the losses inside of the model weigh nothing. Return what lets them weigh as before."""
    value = scale.main_loss_backward_scale
    if not isinstance(value, torch.Tensor):  # no forward pass has set it: there is no such loss
        return lambda: None
    before = value.clone()
    scale.set_loss_scale(torch.zeros_like(value))
    return partial(scale.set_loss_scale, before)


def auxiliary_scales(config: Any) -> list[Any]:
    """Return Megatron's classes whose scale the losses inside of this model have. `config`: the model's."""
    scales: list[Any] = []
    if getattr(config, "num_moe_experts", None):
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        scales.append(MoEAuxLossAutoScaler)
    if getattr(config, "mtp_num_layers", None):
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        scales.append(MTPLossAutoScaler)
    return scales
