"""Parts of the GPU path that a CPU can run: the bound on an abort, the staged copies, who sits where."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu import acceptance, devices
from tests.integration.kill_chain import ACTIONS, POINTS, VICTIMS, Cell, Chain
from tests.trainer.test_group import channels
from unicrond.agents.protocol.messages import Reporter
from unicrond.agents.trainer.groups import group as group_module
from unicrond.agents.trainer.groups.forming import FormedGroup
from unicrond.agents.trainer.groups.group import AbortHangs, Operation, ShardGroup
from unicrond.agents.trainer.process.channel import AgentChannel
from unicrond.agents.trainer.process.faults import error_report
from unicrond.agents.trainer.states.state_bytes import copy_staged

REPORTER = Reporter(node="n", task="t", worker="t.1")

__all__ = ["channels"]  # fixtures


class Communicator:
    """Stands for a NCCL communicator in whose abort the driver hangs until `mended`."""

    def __init__(self) -> None:
        self.aborting = threading.Event()
        self.mended = threading.Event()

    def abort(self) -> None:
        self.aborting.set()
        self.mended.wait(30)


@pytest.fixture
def communicator() -> Iterator[Communicator]:
    made = Communicator()
    yield made
    made.mended.set()


def on_gpu(communicator: Communicator, channel: AgentChannel) -> ShardGroup:
    return ShardGroup(FormedGroup(communicator), 1, 0, 2, channel, torch.device("cuda", 0))


def test_hanging_abort_ends_process(
    communicator: Communicator, channels: tuple[AgentChannel, AgentChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_ABORT_TIMEOUT_S", 0.05)
    group = on_gpu(communicator, channels[0])
    with pytest.raises(AbortHangs) as caught:
        group.close()
    assert communicator.aborting.is_set()
    assert error_report(REPORTER, caught.value, 1, 1, "regroup").kind == "nccl_error", (
        "SEV2: another process takes its place"
    )
    group.close()  # nothing is left to do


def test_abort_is_awaited(communicator: Communicator, channels: tuple[AgentChannel, AgentChannel]) -> None:
    communicator.mended.set()
    on_gpu(communicator, channels[0]).close()
    assert communicator.aborting.is_set()


def test_operation_succeeds_once_done() -> None:
    operation = Operation(torch.ones(1))
    assert not operation.succeeded
    operation.mark_done()
    assert operation.succeeded


@pytest.mark.parametrize("sizes", [[], [1], [16], [17, 0, 1], [5, 64, 33, 16]])
def test_staged_copies_are_complete_and_in_place(sizes: list[int]) -> None:
    sources = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    copy_staged(list(zip(sources, targets, strict=True)), [torch.empty(16, dtype=torch.uint8) for _ in range(2)])
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_chain_members_never_share_seat(size: int) -> None:
    chain = Chain([Cell(action, point, victim) for point in POINTS for action in ACTIONS for victim in VICTIMS], size)
    seats = chain.seats()
    assert set(seats) == set(range(chain.born))
    for stage in chain.stages:
        taken = [seats[member] for member in stage.members]
        assert len(taken) == len(set(taken)) and max(taken) < 3


def test_gpu_acceptance_without_gpu_prints_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "COUNT", 0)
    record = tmp_path / "record.json"
    assert acceptance.main(["--record", str(record)]) == 2 and not record.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing was run: needs 1 CUDA device" in line
