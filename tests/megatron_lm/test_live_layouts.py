"""Megatron-LM on a live cluster whose plan chooses its layout: a node dies and comes back, and nobody asks for a
reshape. `make megatron-lm`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from tests.integration.test_layouts_cluster import BY_TABLE, decides_again, newest_copy, told_again, until
from tests.integration.test_reshape_cluster import told, trains
from tests.megatron_lm.fixtures import MODEL, checkout
from unicrond.ctl.client import Client
from unicrond.local.dev import small_cluster

pytestmark = [pytest.mark.timeout(840), pytest.mark.megatron_lm]
#: Workers import megatron.training before they are ready.
PATIENCE_S = 240.0
FLAGS = MODEL.replace("--train-iters 5", "--train-iters 20000").replace(
    "--global-batch-size 6", "--global-batch-size 8"
)


async def test_lost_stage_moves_to_other_node_and_back(tmp_path: Path) -> None:
    """pp 2 with two chunks each on two nodes, then pp 1, then as before."""
    flags = f"{FLAGS.replace('--num-layers 2', '--num-layers 4')} --pipeline-model-parallel-size 2"
    task = {
        "name": "big",
        "entry": "megatron-lm",
        "cwd": str(checkout()),
        "args": ["pretrain_gpt.py", *flags.split(), "--num-layers-per-virtual-pipeline-stage", "1"],
        "min_workers": 1,
        "max_workers": 2,
        "layouts": [{"pp": 2, "throughput": {"2": 4 * 10**9}}, {"throughput": {"1": 10**9}}],
        "checkpoint": {"interval": 0, "memory_interval": 5},
        "env": {"OMP_NUM_THREADS": "1"},
    }
    async with small_cluster(tmp_path, nodes=2, slots=1, heartbeat_s=1.0) as dev:
        await dev.submit(task)
        seen = await until(dev, "two stages train", lambda task: trains(task, (1, 2, 2), 12), timeout_s=PATIENCE_S)
        assert seen.spec.vpp == 2
        at, node = seen.progress.iteration, seen.membership.members[1].node  # type: ignore[union-attr]
        await dev.kill_node(node)
        seen = await until(dev, "one worker trains", lambda task: trains(task, (1, 1, 1), at + 3), timeout_s=PATIENCE_S)
        at = seen.progress.iteration
        await dev.bring_back(node)
        await until(dev, "two stages train again", lambda task: trains(task, (1, 2, 2), at + 3), timeout_s=PATIENCE_S)
        client = Client(dev.url)
        reshapes = [(e["pp"], e.get("vpp", 1), e["plan"] > 0) for e in told(client, "TaskReshaped")]
        assert reshapes[-2:] == [(1, 1, True), (2, 2, True)], "before these the nodes came one by one"
        from_where = [e["resharded_from"] for e in told(client, "StateLoaded") if e["resharded_from"]]
        assert [where for where, _ in groupby(from_where)][-2:] == ["tp 1, pp 2, vpp 2", "tp 1, pp 1"]
        state, _ = await dev.state()
        lost = sum(one.iterations_lost for one in state.closed_incidents)
        put_together = [e for e in told(client, "StateLoaded") if e["resharded_from"] == "tp 1, pp 2, vpp 2"]
        assert put_together[-1]["iteration"] >= newest_copy(client, node) > 0
        assert told_again(client) == lost <= 10, "a capture is kept every five iterations, the newest may be on its way"
        await decides_again(dev)


async def test_node_loss_moves_task_to_best_layout_and_back(tmp_path: Path) -> None:
    """tp 2 x dp 2 on 2 nodes of 2 slots: two pairs, then two singles, then two pairs. No step is lost."""
    flags = f"{FLAGS} --sequence-parallel --tensor-model-parallel-size 2"
    task = {
        "name": "big",
        "entry": "megatron-lm",
        "cwd": str(checkout()),
        "args": ["pretrain_gpt.py", *flags.split()],
        "min_workers": 1,
        "max_workers": 4,
        "layouts": BY_TABLE,
        "checkpoint": {"interval": 0, "memory_interval": 5},
        "env": {"OMP_NUM_THREADS": "1"},
    }
    async with small_cluster(tmp_path, nodes=2, slots=2, heartbeat_s=1.0) as dev:
        client = Client(dev.url)
        await dev.submit(task)
        seen = await until(dev, "two pairs train", lambda task: trains(task, (2, 1, 4), 3), timeout_s=PATIENCE_S)
        at, node = seen.progress.iteration, seen.membership.members[0].node  # type: ignore[union-attr]
        await dev.kill_node(node)
        seen = await until(dev, "two singles train", lambda task: trains(task, (1, 1, 2), at + 2), timeout_s=PATIENCE_S)
        at = seen.progress.iteration
        assert seen.spec.micro_batch == 2, "that of the layout"
        await dev.bring_back(node)
        await until(dev, "two pairs train again", lambda task: trains(task, (2, 1, 4), at + 2), timeout_s=PATIENCE_S)
        reshapes = [(e["tp"], e["plan"] > 0) for e in told(client, "TaskReshaped")]
        assert reshapes[-2:] == [(1, True), (2, True)], "before these the nodes came one by one"
        assert told(client, "ReshapeRequested") == []
        from_where = [e["resharded_from"] for e in told(client, "StateLoaded") if e["resharded_from"]]
        assert [where for where, _ in groupby(from_where)][-2:] == ["tp 2, pp 1", "tp 1, pp 1"]
        assert told_again(client) <= 1, "the lead died, and the next one told of the step that it did not know was told"
        state, _ = await dev.state()
        assert [one.iterations_lost for one in state.closed_incidents] == [0]
        await decides_again(dev)
