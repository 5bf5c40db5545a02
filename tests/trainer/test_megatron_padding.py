"""What a micro-batch that fills up an interleaved pipeline leaves behind: nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch.utils.checkpoint import checkpoint

from unicrond.agents.trainer.megatron.padding import Padding, auxiliary_scales

SCALE = 0.5


class Router:
    """Has a loss of its own, and counts in each pass that is to have a gradient, as Megatron's does."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.counter = torch.zeros(2)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.counter += 1
        logits = values * self.weight
        return MoEAuxLossAutoScaler.apply(logits, (self.weight**2).sum())


@pytest.fixture
def router() -> Router:
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(SCALE))
    return Router()


@pytest.mark.parametrize("recomputed", [False, True])
def test_padding_changes_no_sum(router: Router, recomputed: bool) -> None:
    padding = Padding(lambda: [router.counter], auxiliary_scales(SimpleNamespace(num_moe_experts=2)))
    values = torch.ones(2, requires_grad=True)

    def output() -> torch.Tensor:
        """Run one forward pass."""
        return checkpoint(router, values, use_reentrant=True) if recomputed else router(values)

    real = output()
    with padding.forward():
        fill = output()
    padding.prepare_backward(fill)
    counted = 0.0 if recomputed else 1.0
    assert router.counter.tolist() == [counted] * 2
    (fill.sum() * 0.0).backward()
    assert router.weight.grad is not None and router.weight.grad.tolist() == [0.0, 0.0]
    assert router.counter.tolist() == [counted] * 2
    real.sum().backward()
    assert router.weight.grad.tolist() == [1.0 + 2 * SCALE] * 2 and router.counter.tolist() == [1.0, 1.0]


def test_scales_are_those_of_the_losses_inside_of_the_model() -> None:
    assert auxiliary_scales(SimpleNamespace(num_moe_experts=None)) == []
    both = SimpleNamespace(num_moe_experts=4, mtp_num_layers=1)
    assert auxiliary_scales(both) == [MoEAuxLossAutoScaler, MTPLossAutoScaler]
