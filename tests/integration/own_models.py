"""A task's entry for tests: loops of a program's own over small torch models, one kind of model or optimizer each.

    entry: tests/integration/own_models.py
    args: [CASE, ITERATIONS, GLOBAL_BATCH, MICRO_BATCH]

Each process prints a line after each iteration: the loss, and a digest of parameters, buffers and optimizer state. In a
process that unicrond did not start, the same loop is a local one.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch

from unicrond import Hook, Local

WIDTH, CLASSES, SAMPLES = 12, 5, 64


class Net(torch.nn.Module):
    """Two layers, with a norm between them where `norm` gives one."""

    def __init__(self, norm: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = norm or torch.nn.Identity()
        self.last = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the classes' scores."""
        return self.last(self.norm(self.first(rows)).relu())


class Centre(torch.nn.Module):
    """Subtracts a mean that it learns in a buffer, which it replaces by another tensor each time, and then uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the centred rows."""
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * rows.detach().mean(0)
        return rows - self.mean


def build(case: str) -> tuple[torch.nn.Module, Any, Any]:
    """Return model, optimizers and schedulers of the case, as `Hook.attach` takes them."""
    model = Net(
        {"batchnorm": torch.nn.BatchNorm1d(WIDTH), "centre": Centre(), "bf16norm": torch.nn.BatchNorm1d(WIDTH)}.get(
            case
        )
    )
    if case in ("bf16", "bf16norm"):
        model.bfloat16()
    if case == "fp16":
        model.half()
    if case == "frozen":
        model.first.requires_grad_(False)
    if case == "tied":
        model.norm = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
        model.norm[1].weight = model.first.weight
    if case in ("compiled", "eager"):
        model.compile(backend="aot_eager" if case == "compiled" else "eager")
    if case in ("two", "two-schedulers"):
        matrices = [weight for weight in model.parameters() if weight.dim() == 2]
        others = [weight for weight in model.parameters() if weight.dim() != 2]
        optimizers = [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(others, 0.01)]
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) for optimizer in optimizers]
        return model, optimizers, schedulers if case == "two-schedulers" else None
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 0.01, eps=1e-4)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def listed(value: Any) -> list[Any]:
    """Return a list of what may be one, several, or none."""
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a tree."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner)


def digest(model: torch.nn.Module, optimizers: list[Any]) -> str:
    """Return a digest of all that the model and the optimizers hold."""
    number = blake2b(digest_size=8)
    for tensor in tensors([dict(model.state_dict()), [one.state_dict()["state"] for one in optimizers]]):
        number.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return number.hexdigest()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and their classes."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(SAMPLES, WIDTH, generator=generator)
    return rows, (rows[:, :CLASSES] + 0.1 * rows[:, -CLASSES:]).argmax(1)


class Jittered(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The rows with noise that is drawn when they are read."""

    def __init__(self) -> None:
        self.rows, self.classes = data()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[sample] + 0.1 * torch.randn(WIDTH) + random.random(), self.classes[sample]


class JitteredStream(torch.utils.data.IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same, in order, and less than an iteration's samples too many; each epoch is another one."""

    def __init__(self) -> None:
        self.samples, self.epoch = Jittered(), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for sample in range(SAMPLES - 7):
            rows, label = self.samples[sample]
            yield rows + self.epoch, label


class PlacedStream(JitteredStream):
    """The same with a state: it never reads again what has been read."""

    def __init__(self) -> None:
        super().__init__()
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.next = state_dict["next"]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self.next == SAMPLES - 7:
            self.next = 0
        while self.next < SAMPLES - 7:
            rows, label = self.samples[self.next]
            self.next += 1
            yield rows + self.epoch, label


DATASETS = {"loaded": Jittered, "stream": JitteredStream, "placed-stream": PlacedStream}


def main(case: str, iterations: int, global_batch: int, micro_batch: int) -> None:
    """Train through all iterations, and print a line after each."""
    torch.set_num_threads(1)  # with two, sums over a batch have other bits
    torch.manual_seed(1)
    if case == "ranks":
        torch.manual_seed(int(os.environ["LOCAL_RANK"]))
    if case == "world":
        torch.distributed.init_process_group("gloo")
    if case == "other-world":
        torch.distributed.destroy_process_group()
        torch.distributed.distributed_c10d.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    model, optimizer, scheduler = build(case)
    if case == "left-out":
        optimizer = torch.optim.AdamW(model.first.parameters(), 0.01)
    if case == "unported":
        for _ in range(11):
            optimizer.step()
    dtype = next(model.parameters()).dtype
    rows, classes = data()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2, enabled=case == "scaled")
    hook = Hook.attach_or_local(
        Local(iterations, global_batch, micro_batch),
        model,
        optimizer,
        scheduler,
        dataset_size=None if case in DATASETS else SAMPLES,
    )
    loader = hook.loader(DATASETS[case](), num_workers=int(case != "stream")) if case in DATASETS else None
    hook.register("scaler", scaler)
    for step in hook.steps():
        for noisy_rows, noisy_classes in loader(step) if loader else ():
            step.backward(torch.nn.functional.cross_entropy(model(noisy_rows), noisy_classes))
        for number in step if loader is None else ():
            step.seed(number)
            places = list(step.samples(number))
            with torch.autocast("cpu", torch.float16, enabled=case == "scaled"):
                scores = model(rows[places].to(dtype)).float()
                loss = torch.nn.functional.cross_entropy(scores, classes[places], reduction="sum")
            scaler.scale(loss).backward()
            step.add(loss.detach(), len(places))
        for one in listed(optimizer):
            scaler.unscale_(one) if case == "scaled" else None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in listed(optimizer):
            scaler.step(one)
        scaler.update()
        for one in listed(scheduler) if case != "scaled" else ():  # it warns of steps that are left out
            one.step()
        print(f"iteration {step.iteration}: {step.loss!r} {digest(model, listed(optimizer))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
