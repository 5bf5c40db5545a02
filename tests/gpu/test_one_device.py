"""What one CUDA device can show: states leave it and come back, gloo reduces its tensors, several ranks heal on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import ENV
from tests.gpu.devices import missing
from tests.integration.kill_chain import ACTIONS, POINTS, VICTIMS, Cell
from tests.integration.regroup_rig import ForkServer
from tests.integration.test_kill_matrix import chains, check, failure_free_digests, possible
from tests.trainer.test_group import both, channels, store
from unicrond.agents.protocol.gpus import visible_gpus
from unicrond.agents.trainer.process import randomness
from unicrond.agents.trainer.states.state import TrainingState
from unicrond.agents.trainer.states.state_bytes import STAGE_BYTES, Flat, read
from unicrond.events.vocabulary import StoreAddress

__all__ = ["channels", "store"]  # fixtures

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.skipif(bool(missing(1)), reason=missing(1))]

#: Every point once, with the kinds and the victims in turn.
CELLS = [
    cell
    for number, point in enumerate(POINTS)
    if possible(cell := Cell(ACTIONS[number % 3], point, VICTIMS[number // 3 % 2]), "dp")
]


def model(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
    return made, torch.optim.AdamW(made.parameters(), lr=1e-2)


def step(made: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    made(torch.randn(8, 64, device="cuda")).square().sum().backward()
    optimizer.step()


def test_state_survives_round_trip_through_gpu() -> None:
    """The next step of who took it over is the very step of who gave it, dropout's generators included."""
    source, target = model(1), model(2)
    step(*source)
    tree = TrainingState([source[0]], source[1], None, randomness).capture(1, 0.5)
    flat = Flat.of(tree)
    memory = memoryview(bytearray(flat.size_bytes))
    flat.write(memory)
    step(*source)
    after = [parameter.detach().clone() for parameter in source[0].parameters()]
    TrainingState([target[0]], target[1], None, randomness).restore(read(memory, copy=True))
    step(*target)
    for mine, theirs in zip(target[0].parameters(), after, strict=True):
        assert mine.is_cuda and torch.equal(mine, theirs)


def test_large_tensor_is_copied_whole_and_in_order() -> None:
    stream = torch.cuda.Stream()
    big = torch.zeros(STAGE_BYTES + 12_345, dtype=torch.float32, device="cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        big += torch.arange(big.numel(), device="cuda")
    tree = {"iteration": 1, "loss": 0.0, "tensors": {"big": big}, "optimizer": {}, "scheduler": None}
    flat = Flat.of(tree)
    memory = memoryview(bytearray(flat.size_bytes))
    flat.write(memory)
    assert torch.equal(read(memory, copy=False)["tensors"]["big"], big.cpu())


def test_gloo_sums_cuda_tensors_and_stream_waits(store: StoreAddress, channels) -> None:  # type: ignore[no-untyped-def]
    groups = both(store, channels)
    for _ in range(50):
        tensors = [torch.full((1 << 20,), float(rank + 1), device="cuda") for rank in range(2)]
        operations = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
        for group in groups:
            group.finish()
        assert all(operation.succeeded for operation in operations)
        assert [float(tensor.sum()) for tensor in tensors] == [3.0 * (1 << 20)] * 2
    for group in groups:
        group.close()


def test_gloo_survives_kill_matrix_on_one_gpu(
    server: ForkServer, data: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    changes: dict[str, object] = {"backend": "gloo", "env": {**ENV, "CUDA_VISIBLE_DEVICES": visible_gpus()[0]}}
    known = failure_free_digests(server, data, tmp_path_factory, **changes)
    for number, cells in enumerate(chains(CELLS, 8)):
        directory = tmp_path / str(number)
        directory.mkdir()
        check(server, directory, data, "dp", cells, known, **changes)
