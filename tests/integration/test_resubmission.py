"""A name submitted again, with real workers and real checkpoints: by default, --resume, --restart, --fork."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
from msgspec.structs import replace

from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_regroup import task
from unicrond.agents.trainer.states.checkpoint import newest_iterations
from unicrond.events.vocabulary import CheckpointSpec, ErrorReported, StateLoaded, TaskSpec, TaskStart

Start: TypeAlias = Callable[[TaskSpec], AbstractContextManager[Rig]]
FIRST, ALL = 3, 5


@pytest.fixture
def rig(server: ForkServer, tmp_path: Path) -> Start:
    return partial(Rig, server, tmp_path)


@pytest.fixture
def spec(data: Path) -> TaskSpec:
    """The first run: three iterations, saved at its end. Its schedule ends elsewhere: more iterations are no other."""
    spec = task(data, iterations=FIRST, checkpoint=CheckpointSpec(dir="(the rig says)", interval=0, memory_interval=0))
    return replace(spec, optimizer=replace(spec.optimizer, decay_iterations=ALL), start=TaskStart(run_id="first"))


def train(run: Rig, number: int, spec: TaskSpec) -> StateLoaded:
    """Run the task alone to its end; return where its state came from."""
    worker = f"t.{number}"
    begun = len(run.said)
    run.start(worker, spec=spec)
    run.until(lambda: run.ready(worker))
    run.tell(number, [worker])
    run.until(lambda: worker in run.exits)
    assert run.exits[worker] == 0, run.said[begun:]
    (message,) = run.of(StateLoaded, worker)
    assert isinstance(message, StateLoaded)
    return message


def digest(run: Rig) -> str:
    assert run.completed is not None
    return run.completed.params_digest


def kept(run: Rig, name: str) -> dict[int, object]:
    return dict(newest_iterations(run.checkpoints / f"before-{name}", run.task))


def test_same_settings_go_on(rig: Start, spec: TaskSpec) -> None:
    with rig(spec) as run:
        assert train(run, 1, spec).source == "init"
        loaded = train(run, 2, replace(spec, iterations=ALL, start=TaskStart(run_id="second")))
        assert (loaded.source, loaded.iteration) == ("checkpoint", FIRST)


def test_states_that_the_head_has_compared_go_on_with_other_settings(rig: Start, spec: TaskSpec) -> None:
    """The last run was given another learning rate when its state had been stored, and was submitted again so."""
    with rig(spec) as run:
        train(run, 1, spec)
        changed = replace(spec, iterations=ALL, optimizer=replace(spec.optimizer, lr=0.01))
        loaded = train(run, 2, replace(changed, start=TaskStart(run_id="second", continues=("first",))))
        assert (loaded.source, loaded.iteration) == ("checkpoint", FIRST)


def test_other_seed_is_refused_and_resumed_on_order(rig: Start, spec: TaskSpec) -> None:
    with rig(spec) as run:
        train(run, 1, spec)
        other = replace(spec, iterations=ALL, seed=7, start=TaskStart(run_id="second"))
        run.start("t.2", spec=other)
        run.until(lambda: run.ready("t.2"))
        run.tell(2, ["t.2"])
        run.until(lambda: "t.2" in run.exits)
        assert run.exits["t.2"] != 0
        (error,) = run.of(ErrorReported, "t.2")
        assert isinstance(error, ErrorReported)
        assert "seed: 1234 before, 7 now" in error.message and "--restart" in error.message, error.message
        assert list(newest_iterations(run.checkpoints, run.task)) == [FIRST], "nothing was touched"
        loaded = train(run, 3, replace(other, start=TaskStart(mode="resume", run_id="third")))
        assert (loaded.source, loaded.iteration) == ("checkpoint", FIRST)


def test_restart_trains_as_if_nothing_had_been(rig: Start, spec: TaskSpec) -> None:
    with rig(spec) as run:
        train(run, 1, spec)
        before = digest(run)
        loaded = train(run, 2, replace(spec, start=TaskStart(mode="restart", run_id="second")))
        assert (loaded.source, loaded.iteration, digest(run)) == ("init", 0, before)
        assert list(kept(run, "second")) == [FIRST] and list(newest_iterations(run.checkpoints, run.task)) == [FIRST]
        loaded = train(run, 3, replace(spec, iterations=ALL, start=TaskStart(mode="restart", run_id="second")))
        assert (loaded.source, loaded.iteration) == ("checkpoint", FIRST), "a state of this very run"


def test_fork_begins_from_newest_state_of_its_source(rig: Start, spec: TaskSpec) -> None:
    with rig(spec) as source:
        train(source, 1, spec)
        fork = TaskStart(mode="fork", run_id="fork", source=source.task, source_dir=str(source.checkpoints))
        forked = replace(spec, iterations=ALL, seed=7, start=fork)
        with rig(forked) as run:
            loaded = train(run, 1, replace(forked, name=run.task, checkpoint=run.spec.checkpoint))
            assert (loaded.source, loaded.iteration) == ("checkpoint", FIRST)
            assert max(newest_iterations(run.checkpoints, run.task)) == ALL
        assert list(newest_iterations(source.checkpoints, source.task)) == [FIRST], "its source is as it was"
