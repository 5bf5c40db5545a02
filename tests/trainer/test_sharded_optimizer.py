"""The sharded optimizer by itself, in a replica of one shard; what it does in groups is an integration test's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig

from unicrond.agents.trainer.lifecycle.optimizer_shards import StatePart
from unicrond.agents.trainer.process import cpu_shim
from unicrond.agents.trainer.sharded.optimizer import ShardedOptimizer
from unicrond.agents.trainer.states.state import BadState

CONFIG = OptimizerConfig(optimizer="adam", lr=0.1, min_lr=0.0, weight_decay=0.01)


@pytest.fixture
def world() -> Iterator[None]:
    cpu_shim.apply()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def optimizer(world: None) -> ShardedOptimizer:
    optimizer = ShardedOptimizer(CONFIG, [torch.nn.Linear(3, 2)])
    optimizer.stage([optimizer.initial(StatePart(1, 0))])
    optimizer.adopt()
    return optimizer


def test_biases_do_not_decay_unless_program_says_so(world: None) -> None:
    """As of `get_megatron_optimizer`, which some releases of Megatron-core tell by None and others by a table."""
    for overrides, decays in ((None, {2: 1.0, 1: 0.0}), ({}, {2: 1.0, 1: 1.0})):
        optimizer = ShardedOptimizer(CONFIG, [torch.nn.Linear(3, 2)], overrides)
        groups = zip(optimizer.whole_groups, optimizer.param_groups, strict=True)
        assert {p.dim(): group["wd_mult"] for parameters, group in groups for p in parameters} == decays


def test_refused_state_leaves_optimizer_unchanged(optimizer: ShardedOptimizer) -> None:
    whole = optimizer.whole_tree(optimizer.initial(StatePart(1, 0)).rows)
    spans = optimizer.spans()
    assert spans
    other = {**whole, "state": {number: entry for number, entry in whole["state"].items() if number}}
    for refused in (other, {"steps": 7, "groups": []}):
        with pytest.raises(BadState):
            optimizer.load_state_dict(refused)
        assert (optimizer.spans(), optimizer.steps) == (spans, 0)
        assert len(optimizer.chained_optimizers) == 1
