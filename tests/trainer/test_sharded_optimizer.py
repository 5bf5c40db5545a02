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


@pytest.fixture
def optimizer() -> Iterator[ShardedOptimizer]:
    cpu_shim.apply()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = OptimizerConfig(optimizer="adam", lr=0.1, min_lr=0.0, weight_decay=0.01)
    made = ShardedOptimizer(config, [torch.nn.Linear(3, 2)])
    made.stage([made.initial(StatePart(1, 0))])
    made.adopt()
    yield made
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


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
