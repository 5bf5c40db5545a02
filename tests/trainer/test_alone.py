"""The hook's loop in a process that unicrond did not start."""

from __future__ import annotations

import pytest
import torch

from unicrond import Hook, Local


def trained(alone: Local, *, stop_at: int = 0) -> tuple[torch.nn.Module, list[float], list[str]]:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hook = Hook.attach_or_local(alone, model, optimizer, dataset_size=50)
    ends: list[str] = []
    hook.on_finish(lambda: ends.append("saved"))
    losses = []
    for step in hook.steps():
        for micro_batch in step:
            samples = step.samples(micro_batch)
            with step.loading():
                rows = torch.tensor([[sample, 1.0, 2.0] for sample in samples]) / 50
            loss = (model(rows) ** 2).sum()
            loss.backward()
            step.add(loss.detach(), len(samples))
        optimizer.step()
        losses.append(step.loss)
        with hook.section("evaluation", timeout_s=1.0):
            hook.log({"loss": step.loss})
        if step.iteration == stop_at:
            hook.stop("enough")
        if step.is_last:
            ends.append(f"last {step.iteration}")
    return model, losses, ends


def test_local_program_trains_as_in_task(capsys: pytest.CaptureFixture[str]) -> None:
    model, losses, ends = trained(Local(iterations=20, global_batch=6, micro_batch=2))
    assert len(losses) == 20 and losses[-1] < losses[0] / 2
    assert ends == ["last 20", "saved"]
    assert f"iteration 20: loss {losses[-1]:g}" in capsys.readouterr().out
    assert model.weight.grad is not None


def test_local_gradients_are_mean_over_global_batch() -> None:
    one, _, _ = trained(Local(iterations=3, global_batch=6, micro_batch=6))
    many, _, _ = trained(Local(iterations=3, global_batch=6, micro_batch=1))
    assert torch.allclose(one.weight, many.weight, atol=1e-7)


def test_local_loop_stops_on_request() -> None:
    _, losses, ends = trained(Local(iterations=20), stop_at=4)
    assert len(losses) == 4 and ends == ["last 4", "saved"]


def test_abandoned_step_is_error() -> None:
    model = torch.nn.Linear(3, 1)
    hook = Hook.attach_or_local(Local(iterations=2), model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(RuntimeError, match="the loop left a step"):
        for step in hook.steps():
            next(iter(step))
