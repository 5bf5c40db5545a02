"""A task's entry for tests: a plain torch loop whose model `fully_shard` spreads over the workers of a replica.

    entry: tests/integration/sharded_loop.py
    args: [TRACES, CASE]

It writes `TRACES/WORKER.trace` as `traced_gpt.py` does. In a process that unicrond did not start, the same loop is a
local one, with the whole model. Sizes do not divide among the workers, some have no
shard of one.
"""

from __future__ import annotations

import sys
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from unicrond import Hook, Local
from unicrond.agents.trainer.process import context
from unicrond.agents.trainer.process.shards import shard_of

WIDTH, HIDDEN, CLASSES, SAMPLES = 6, 9, 5, 72


class Block(torch.nn.Module):
    """A residual block, with dropout and a scale of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = torch.nn.Linear(2 * HIDDEN, HIDDEN)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows with what the block adds."""
        hidden = torch.nn.functional.dropout(self.up(rows).relu(), 0.1)
        return rows + self.scale * self.down(hidden)


class Net(torch.nn.Module):
    """Two blocks between a layer that is frozen in part and one with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, HIDDEN)
        self.first.bias.requires_grad_(False)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.last = torch.nn.Linear(HIDDEN, CLASSES)
        self.register_buffer("temperature", torch.tensor(0.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the classes' scores."""
        rows = self.first(rows)
        for block in self.blocks:
            rows = block(rows)
        return self.last(self.norm(rows)) * self.temperature


def data() -> TensorDataset:
    """Return rows and their classes."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(SAMPLES, WIDTH, generator=generator)
    return TensorDataset(rows, rows[:, :CLASSES].argmax(1))


def shard(model: Net, case: str) -> None:
    """Spread the model as the case says."""
    options: dict[str, Any] = {}
    if case == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if case == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, **options)
    if case != "rest":
        fully_shard(model, **options)


def digest(model: torch.nn.Module) -> str:
    """Return a digest of this worker's shards."""
    number = blake2b(digest_size=16)
    for _, parameter in sorted(model.named_parameters(), key=lambda named: named[0]):
        number.update(shard_of(parameter).contiguous().view(torch.uint8).numpy().tobytes())
    return number.hexdigest()


def optimizer_of(case: str, model: Net) -> Any:
    """Return the optimizer of the case."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case == "momentum":
        return torch.optim.SGD(parameters, 0.01, momentum=0.9)
    return torch.optim.AdamW(parameters, 0.01)


def main(traces: str, case: str, iterations: int = 0, global_batch: int = 0, micro_batch: int = 0) -> None:
    """Train through all iterations; write a line for each micro-batch and each step."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, is_worker = Net(), context.is_worker()
    if is_worker and case != "whole":
        shard(model, case)
    if case == "unsynchronized":
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
    optimizer = optimizer_of(case, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    local = Local(iterations, global_batch, micro_batch)
    hook = Hook.attach_or_local(local, model, optimizer, scheduler, overlap=case == "overlap")
    dataset = data()
    loader = hook.loader(DataLoader(dataset, hook.micro_batch, shuffle=True) if case == "dataloader" else dataset)
    worker = context.current().launch.worker if is_worker else "local"
    ranks = dist.get_world_size() if is_worker else 1
    with (Path(traces) / f"{worker}.trace").open("a", buffering=1) as trace:
        for step in hook.steps():
            for rows, classes in loader(Traced(step, ranks, trace)):
                loss = torch.nn.functional.cross_entropy(model(rows).float(), classes)
                if case == "accumulating":
                    model.set_requires_gradient_sync(False)  # type: ignore[operator]
                step.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            with torch.no_grad():  # leaves the root's parameters whole
                model(dataset.tensors[0][:2])
            print("stepped", step.iteration, digest_after(model), repr(step.loss), time.monotonic(), 0.0, file=trace)


def digest_after(model: Net) -> str:
    """Return the digest of the shards, also where the root's parameters are whole."""
    if hasattr(model, "reshard"):
        model.reshard()
        found = digest(model)
        with torch.no_grad():
            model(torch.zeros(1, WIDTH))
        return found
    return digest(model)


class Traced:
    """A step that writes down which micro-batches of the replica it gives."""

    def __init__(self, step: Any, ranks: int, trace: TextIO) -> None:
        self._step, self._ranks, self._trace = step, ranks, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __iter__(self) -> Any:
        for micro_batch in self._step:
            print("computed", self._step.iteration, micro_batch // self._ranks, file=self._trace)
            yield micro_batch


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
