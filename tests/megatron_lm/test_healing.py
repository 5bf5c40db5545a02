"""An unmodified pretrain_gpt.py in the trainer's rig: three replicas on gloo, faults, newcomers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer
from tests.megatron_lm.fixtures import MODEL, task
from tests.megatron_lm.runs import Outcome, broken, same_bits, unbroken


@pytest.fixture(scope="module")
def calm(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return unbroken(server, tmp_path_factory.mktemp("calm"), task(), 3)


def test_three_replicas_train_unmodified_script(calm: Outcome) -> None:
    assert [message.micro_batches_by_rank for message in calm.iterations.values()] == [(2, 2, 2)] * 5
    assert calm.completed.iteration == 5
    first = calm.logs["t.1"]
    assert "no GPU here: Megatron-LM runs on the CPU" in first
    # The whole task's numbers, and by the lead alone.
    assert "iteration        5/       5 | consumed samples:           30" in first
    assert f"global batch size:     6 | lm loss: {calm.losses[-1]:.6E}" in first
    assert "lm loss" not in calm.logs["t.2"] + calm.logs["t.3"]


def test_dead_replica_and_newcomer_change_no_bit(server: ForkServer, calm: Outcome, tmp_path: Path) -> None:
    healed = broken(server, tmp_path, task(), "kill@iteration=3,micro_batch=1", joins=False)
    assert healed.iterations[3].micro_batches_repeated == 2
    assert healed.losses == calm.losses
    assert healed.completed.params_digest == calm.completed.params_digest
    assert same_bits(healed.shards, calm.shards)


@pytest.mark.megatron_lm
def test_replica_alone_makes_same_bits_as_three(server: ForkServer, calm: Outcome, tmp_path: Path) -> None:
    alone = unbroken(server, tmp_path, task(), 1)
    assert [message.micro_batches_by_rank for message in alone.iterations.values()] == [(6,)] * 5
    assert alone.completed.params_digest == calm.completed.params_digest


@pytest.mark.megatron_lm
def test_newcomer_takes_state_and_enters_loop(server: ForkServer, calm: Outcome, tmp_path: Path) -> None:
    longer = MODEL.replace("--train-iters 5", "--train-iters 12")
    healed = broken(server, tmp_path, task(model=longer), "kill@iteration=3,micro_batch=1")
    last = healed.iterations[12]
    assert len(last.micro_batches_by_rank) == 3, "the newcomer came too late"
    whole = unbroken(server, tmp_path / "whole", task(model=longer), 3)
    assert healed.completed.params_digest == whole.completed.params_digest
