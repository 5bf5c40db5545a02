"""Megatron-LM on a live cluster: what a task file of six lines needs, and what faults leave of it. `make
megatron-lm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live import Live, live_cluster, members, nodes_of
from tests.integration.regroup_rig import ForkServer
from tests.megatron_lm.fixtures import MODEL, checkout, task
from tests.megatron_lm.runs import told, unbroken
from unicrond.core.state.state import ClusterState, Incident, TaskStatus

pytestmark = [pytest.mark.timeout(1200), pytest.mark.megatron_lm]
NAME = "lm"


def of_iterations(iterations: int, flags: str = "") -> str:
    return f"{MODEL} {flags}".replace("--train-iters 5", f"--train-iters {iterations}")


async def submit(live: Live, model: str) -> None:
    await live.dev.submit(
        {
            "name": NAME,
            "entry": "megatron-lm",
            "cwd": str(checkout()),
            "args": ["pretrain_gpt.py", *model.split()],
            "min_workers": 1,
            "max_workers": 3,
            "env": {"OMP_NUM_THREADS": "1"},  # as in the rig: bits may depend on the number of threads
        }
    )


def times(incident: Incident) -> str:
    detection_us = incident.detection_us or max(0, incident.detected_us - incident.occurred_us)
    return f"found in {detection_us / 1e3:.0f} ms, healed in {incident.transition_us / 1e3:.0f} ms"


async def whole(live: Live, beyond: int = 0) -> ClusterState:
    """Three members train, so many iterations on."""
    return await live.training(None, beyond, NAME)


async def completed(live: Live) -> str:
    """The digest of its last parameters."""
    state = await live.until("it is complete", lambda s: s.tasks[NAME].status is TaskStatus.COMPLETED)
    assert not state.tasks[NAME].ending.reason or "stop" not in state.tasks[NAME].ending.reason
    return str(live.events("TaskCompleted")[-1]["params_digest"])


async def test_task_with_killed_worker_ends_with_same_bits(server: ForkServer, tmp_path: Path) -> None:
    model = of_iterations(200)  # so many that the fault comes in time, on a busy machine as well
    expected = unbroken(server, tmp_path / "whole", task(model=model), 3).completed
    async with live_cluster(tmp_path, nodes=3, workers=3, injection=True) as live:
        await submit(live, model)
        await whole(live, 2)
        await live.run("unicronctl", "--url", live.dev.url, "inject", "kill", "--task", NAME, "--rank", "1")
        assert await completed(live) == expected.params_digest
        (incident,) = (await live.dev.state())[0].closed_incidents
        assert incident.kind == "process_exit"
        told(f"a worker killed: {times(incident)}")


FAULTS = [
    "kill --phase forward",
    "kill --phase backward",
    "kill --phase reduce",
    "kill --phase step",
    "exception --phase forward",
    "hang --phase forward",
    "stop --phase backward",
]


async def test_faults_in_all_phases_change_no_bit(server: ForkServer, tmp_path: Path) -> None:
    """In all phases, and on a node, while it evaluates and saves. (In these themselves: test_checkpoints.py.)"""
    longer = of_iterations(800).replace("--global-batch-size 6", "--global-batch-size 12")
    model = longer.replace("--eval-iters 0 --eval-interval 1000", "--eval-iters 2 --eval-interval 25")
    model += f" --save-interval 40 --save {tmp_path / 'saved'}"
    spec = task(model=longer)
    expected = unbroken(server, tmp_path / "whole", spec, 2).completed
    async with live_cluster(tmp_path, nodes=4, workers=3, injection=True) as live:
        await submit(live, model)
        await whole(live, 2)
        for fault in FAULTS:
            await live.run("unicronctl", "--url", live.dev.url, "inject", *fault.split(), "--task", NAME, "--rank", "1")
            await live.until(fault, lambda s, n=live.incidents: len(s.closed_incidents) > n)  # type: ignore[misc]
            state = await whole(live, 3)
            one = state.closed_incidents[-1]
            told(f"{fault}: {one.kind}, {times(one)}, iteration {state.tasks[NAME].progress.iteration}")
        state = await whole(live)
        node = state.tasks[NAME].workers[members(state, NAME)[1]].node
        await live.run("unicronctl", "--url", live.dev.url, "inject", "kill", "--node", node)
        await live.until("the node is lost", lambda s: node not in nodes_of(s, NAME))
        assert await completed(live) == expected.params_digest
