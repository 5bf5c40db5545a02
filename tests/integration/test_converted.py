"""Checkpoints that were converted, taken up by real workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
from msgspec.structs import replace

from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_regroup import complete
from tests.integration.test_reshape import ITERATIONS, Form, spec_of, workers_of
from unicrond.agents.trainer.converters import convert
from unicrond.agents.trainer.states import checkpoint
from unicrond.events.vocabulary import StateLoaded, TaskSpec

Start: TypeAlias = Callable[[TaskSpec], AbstractContextManager[Rig]]
HALF = ITERATIONS // 2


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Start:
    return partial(Rig, server, tmp_path)


def losses_from(run: Rig, form: Form) -> dict[int, float]:
    """Train to the end; the loss of each iteration."""
    workers = workers_of(1, form)
    run.start(*workers)
    run.until(lambda: run.ready(*workers))
    run.tell(1, workers)
    complete(run)
    return {iteration: commit.loss for iteration, commit in run.iterations().items()}


def newest(run: Rig) -> Path:
    return run.checkpoints / f"iteration-{max(checkpoint.newest_iterations(run.checkpoints, run.task)):08d}"


def converted(*words: object) -> None:
    assert convert.main(["convert", *map(str, words)]) == 0


def test_task_goes_on_from_its_state_by_way_of_torch_dist(start: Start, data: Path, tmp_path: Path) -> None:
    """The losses of a run that was never converted, to the last bit."""
    spec = spec_of(data, (1, 1, 1))
    with start(spec) as unbroken:
        expected = losses_from(unbroken, (1, 1, 1))
    with start(replace(spec, iterations=HALF)) as first:
        losses_from(first, (1, 1, 1))
        converted(newest(first), tmp_path / "megatron", "--to=torch-dist")
    with start(spec) as second:
        converted(tmp_path / "megatron", second.checkpoints, "--to=portable", f"--task={second.task}")
        losses = losses_from(second, (1, 1, 1))
        (taken,) = second.of(StateLoaded)
        assert isinstance(taken, StateLoaded) and (taken.source, taken.iteration) == ("checkpoint", HALF)
    assert losses == {iteration: expected[iteration] for iteration in range(HALF + 1, ITERATIONS + 1)}


def test_tasks_in_any_layout_take_up_a_model_of_hugging_face(start: Start, data: Path, tmp_path: Path) -> None:
    """With the plain optimizer and the sharded one, in two layouts: the same losses, and not those of a fresh model."""
    spec = spec_of(data, (1, 1, 1))
    with start(spec) as first:
        fresh = losses_from(first, (1, 1, 1))
        converted(newest(first), tmp_path / "hf", "--to=hf")
    courses = []
    for form, is_distributed in (((1, 1, 1), False), ((2, 1, 2), True)):
        begun = spec_of(data, form)
        with start(replace(begun, optimizer=replace(begun.optimizer, distributed=is_distributed))) as run:
            converted(tmp_path / "hf", run.checkpoints, "--to=portable", f"--task={run.task}")
            courses.append(losses_from(run, form))
            taken = run.of(StateLoaded)[0]
            assert isinstance(taken, StateLoaded) and (taken.source, taken.iteration) == ("checkpoint", 1)
    assert list(courses[0]) == list(range(2, ITERATIONS + 1))
    assert courses[1] == pytest.approx(courses[0], rel=1e-6)
    assert courses[0][2] < fresh[2] * 0.999
