"""Which saved states a run goes on from, and what becomes of those of other runs on storage."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from unicrond.agents.trainer.lifecycle.candidates import Candidate, split
from unicrond.agents.trainer.megatron.flags import newest_checkpoint
from unicrond.agents.trainer.states import checkpoint
from unicrond.agents.trainer.states.origins import (
    KEY,
    Origin,
    OtherSettings,
    RunOrigin,
    origin_in,
    origin_of,
    put_aside,
)
from unicrond.agents.trainer.states.places import StateDirectory
from unicrond.agents.trainer.states.saving import Saving
from unicrond.agents.trainer.states.sources import Sources
from unicrond.agents.trainer.states.state import BadState
from unicrond.core.tasks.reshaping import reshaped
from unicrond.events.vocabulary import CheckpointSpec, ReshapeRequested, TaskSpec, TaskStart
from unicrond.events.vocabulary.field_types import StartMode
from unicrond.events.vocabulary.shape import Shape


def run_of(name: str, mode: StartMode = "", *, seed: int = 1, **start: Any) -> RunOrigin:
    return RunOrigin(TaskSpec(name="t", seed=seed, start=TaskStart(run_id=name, mode=mode, **start)))


def made_by(run: RunOrigin, program_iteration: int = 0) -> Origin:
    return replace(run.present(), program_iteration=program_iteration)


def verdict(run: RunOrigin, made: Origin | None, loaded_iteration: int = 0) -> str:
    """Return what becomes of a state of this origin where the program has loaded its own after `loaded_iteration`:
    "taken", "passed over" or "refused"."""
    run.note_program_state(loaded_iteration)
    try:
        run.require(made)
    except OtherSettings:
        return "refused"
    except BadState:
        return "passed over"
    return "taken"


@pytest.mark.parametrize("mode", ["", "resume", "restart", "fork"])
@given(seed=st.integers(1, 2), program=st.integers(0, 3), loaded=st.integers(0, 3))
def test_states_of_this_run_are_taken(mode: StartMode, seed: int, program: int, loaded: int) -> None:
    run = run_of("a", mode, seed=seed)
    assert verdict(run, made_by(run_of("a"), program), loaded) == "taken"
    assert run.is_wanted(made_by(run_of("a")))


@given(made=st.none() | st.builds(Origin, run_id=st.sampled_from(["", "b"]), program_iteration=st.integers(0, 9)))
def test_task_of_older_version_takes_everything(made: Origin | None) -> None:
    assert verdict(RunOrigin(TaskSpec(name="t")), made) == "taken"
    assert RunOrigin(TaskSpec(name="t")).is_wanted(made)


def test_settings_of_other_run_decide() -> None:
    same, other = made_by(run_of("b")), made_by(run_of("b", seed=2))
    assert [verdict(run_of("a"), made) for made in (same, other, None)] == ["taken", "refused", "taken"]
    assert [verdict(run_of("a", "resume"), made) for made in (same, other, None)] == ["taken"] * 3
    for mode in ("restart", "fork"):
        assert [verdict(run_of("a", mode), made) for made in (same, other, None)] == ["passed over"] * 3
        assert not run_of("a", mode).is_wanted(same)


def test_settings_that_the_head_has_compared_are_not_compared_again() -> None:
    """The states of the last run may be of before a change of its settings; so may be those that it took itself."""
    run = run_of("c", continues=("b", "a"))
    states = [made_by(run_of(name, seed=2), program_iteration=10) for name in ("a", "b", "x")]
    assert [verdict(run, made, loaded_iteration=10) for made in states] == ["taken", "taken", "refused"]
    assert verdict(run, states[0]) == "refused", "the checkpoint of its program is gone all the same"
    assert verdict(run, states[0], loaded_iteration=5) == "passed over", "or was rolled back"


@pytest.mark.parametrize(
    "spec",
    [
        TaskSpec(name="t", iterations=30),
        TaskSpec(name="t", iterations=30, entry="megatron-lm", args=("x.py", "--train-iters", "30", "--lr", "0.5")),
    ],
    ids=["gpt", "megatron"],
)
@pytest.mark.parametrize("change", [{"iterations": 60}, {"lr": 0.25}, {"iterations": 60, "lr": 0.25}])
def test_change_of_running_task_refuses_no_state_of_earlier_run(spec: TaskSpec, change: dict[str, Any]) -> None:
    """Its states in memory were lost before one was stored, and the head knows nothing of the earlier run."""
    made = RunOrigin(replace(spec, start=TaskStart(run_id="b"))).present()
    spec = replace(spec, start=TaskStart(run_id="a"))
    order: dict[str, Any] = {"task": "t", "tp": 1, "pp": 1, "min_workers": 1, "max_workers": 1, "reason": ""}
    changed = reshaped(spec, ReshapeRequested(**order, **change))
    assert verdict(RunOrigin(changed), made) == "taken"
    assert verdict(RunOrigin(replace(changed, start=TaskStart(run_id="a"))), made) == "refused", "so it was submitted"
    assert verdict(RunOrigin(replace(changed, seed=2, global_batch=16)), made) == "refused"
    assert reshaped(spec, ReshapeRequested(**order, iterations=30, lr=spec.optimizer.lr)).start == spec.start


def test_tree_says_its_origin() -> None:
    with pytest.raises(OtherSettings, match="seed: 2 before, 1 now"):
        run_of("a").require(origin_in({"made_with": {"run_id": "b", "settings": {"seed": "2"}}}))
    assert origin_in({"made_with": "nonsense"}) is None


def test_state_in_memory_says_its_origin(tmp_path: Path) -> None:
    """It has no file beside it: the tree itself says which run has made it."""
    (tmp_path / "memory").touch()
    run, other = run_of("a"), run_of("b", seed=2)
    spec = TaskSpec(name="t", seed=1, start=run.start)
    launch = SimpleNamespace(
        spec=spec, memory=str(tmp_path / "memory"), memory_max_bytes=1 << 20, node="n1", shard=0, worker="t.1"
    )
    replica = SimpleNamespace(shard=0, all_true=bool)
    injection = SimpleNamespace(fire=lambda *_: None)
    context: Any = SimpleNamespace(
        launch=launch, replica=replica, channel=SimpleNamespace(send=lambda _: None), injection=injection, generation=1
    )
    state: Any = SimpleNamespace(capture=lambda iteration, _: tree(iteration))
    saving = Saving(context, state)
    assert saving.capture_and_wait(7, 1, 0.5)
    nobody: Any = SimpleNamespace(peers=(), passes=None, storage_iteration=0)
    searches = [
        Sources(context, saving.memory, nobody, lambda trees: next(iter(trees)), worker) for worker in (run, other)
    ]
    assert searches[0].load(Candidate(7, "memory", 0))[0]["iteration"] == 7
    with pytest.raises(OtherSettings, match="seed: 1 before, 2 now"):
        searches[1].load(Candidate(7, "memory", 0))


def test_checkpoint_of_program_that_was_rolled_back_is_obeyed() -> None:
    made = made_by(run_of("b"), program_iteration=20)
    assert verdict(run_of("a"), made, loaded_iteration=20) == "taken"
    assert verdict(run_of("a"), made, loaded_iteration=30) == "taken"
    run = run_of("a")
    assert verdict(run, made, loaded_iteration=10) == "passed over"
    older = made_by(run_of("b"), program_iteration=10)
    assert verdict(run, older, loaded_iteration=10) == "passed over", "it is of what was rolled back as well"
    assert verdict(run_of("a"), made, loaded_iteration=0) == "refused", "its directory may be missing"
    assert verdict(run_of("a", "resume"), made, loaded_iteration=10) == "taken"


def test_newest_checkpoint_of_program_is_looked_up_when_saving(tmp_path: Path) -> None:
    run = run_of("a")
    run.note_program_state(5)
    run.look_for_program_state = lambda: newest_checkpoint(str(tmp_path))
    assert run.stored().program_iteration == 5
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text, iteration in (("release", 5), ("30\n", 30), ("20", 30)):
        tracker.write_text(text)
        assert run.stored().program_iteration == run.present().program_iteration == iteration


# --- on storage ------------------------------------------------------------------------------------


def tree(iteration: int) -> dict[str, Any]:
    tensors = {"x": torch.arange(3.0)}
    return {"iteration": iteration, "loss": 0.5, "tensors": tensors, "optimizer": {}, "scheduler": None}


def save(directory: Path, iteration: int, origin: RunOrigin | None, task: str = "t") -> None:
    job = checkpoint.WriteJob(directory, task, iteration, 3, 0, Shape(), f"{iteration}", 2, origin)
    made = {} if origin is None else {KEY: to_builtins(origin.present())}
    assert checkpoint.write(job, {**tree(iteration), **made}) is not None


def iterations(directory: Path, task: str = "t") -> list[int]:
    return list(checkpoint.newest_iterations(directory, task))


def storage_of(directory: Path, run: RunOrigin) -> Sources:
    """Return where the one worker of a run of task t, on a node without memory, looks for states."""
    launch = SimpleNamespace(spec=TaskSpec(name="t", checkpoint=CheckpointSpec(dir=str(directory))), shard=0)
    replica = SimpleNamespace(shard=0, gather=lambda row: [row], all_true=bool)
    context: Any = SimpleNamespace(launch=launch, replica=replica, settings=SimpleNamespace(save_wait_s=60.0))
    nobody: Any = SimpleNamespace(peers=(), passes=None, storage_iteration=0)
    return Sources(context, None, nobody, lambda trees: next(iter(trees)), run)


def offers(storage: Sources) -> list[int]:
    return split(tuple(storage.row(is_first=True)))["checkpoint"]


def test_checkpoint_of_program_that_another_run_has_loaded_is_none_of_this_run(tmp_path: Path) -> None:
    """After `--resume`, though the program's own checkpoint had been rolled back from 1000 to 500."""
    before, run = run_of("a"), run_of("b", "resume")
    before.note_program_state(1000)
    save(tmp_path, 1100, before)
    run.note_program_state(500)
    storage = storage_of(tmp_path, run)
    assert offers(storage) == [1100]
    assert storage.load(Candidate(1100, "checkpoint", 0))[0]["iteration"] == 1100
    assert run.present().program_iteration == 500, "else its states were thrown aside when it loads 500 again"


def test_states_that_are_continued_stay_until_pruned(tmp_path: Path) -> None:
    for iteration in (10, 20):
        save(tmp_path, iteration, run_of("a"))
    save(tmp_path, 30, run_of("b"))
    assert iterations(tmp_path) == [30, 20] and not list(tmp_path.glob("before-*"))
    made = origin_of(StateDirectory(tmp_path), 30)
    assert made is not None and (made.run_id, made.settings["seed"]) == ("b", "1")


def test_newer_states_of_other_run_are_kept_out_of_the_way(tmp_path: Path) -> None:
    """As after a checkpoint of the program's own was rolled back to iteration 10."""
    for iteration in (20, 30):
        save(tmp_path, iteration, run_of("a"))
    save(tmp_path, 20, run_of("b"))
    assert iterations(tmp_path) == [20], "not pruned in favour of the others"
    assert iterations(tmp_path / "before-b") == [30, 20]


@pytest.mark.parametrize("mode", ["restart", "fork"])
def test_own_states_stay_where_their_origin_cannot_be_read(
    mode: StartMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A read error is no other run's state: it is gone the next time."""
    run = run_of("a", mode, **({"source": "big", "source_dir": str(tmp_path)} if mode == "fork" else {}))
    for iteration in (10, 20):
        save(tmp_path, iteration, run)
    read_bytes = Path.read_bytes

    def stale(path: Path) -> bytes:
        if path.name == "made-with.json" and path.parent.name == "iteration-00000020":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read_bytes(path)

    with monkeypatch.context() as storage:
        storage.setattr(Path, "read_bytes", stale)
        assert offers(storage_of(tmp_path, run)) == [10]
        assert "skipping checkpoint" in capfd.readouterr().err
        save(tmp_path, 15, run)
    assert iterations(tmp_path) == [20, 15] and not list(tmp_path.glob("before-*"))
    assert offers(storage_of(tmp_path, run)) == [20, 15]
    with monkeypatch.context() as storage:
        storage.setattr(Path, "read_bytes", stale)
        job = checkpoint.WriteJob(tmp_path, "t", 16, 3, 0, Shape(), "16", 1, run)
        checkpoint.write(job, tree(16))
    assert iterations(tmp_path) == [20, 16], "what has just been written is not pruned in favour of it"


@pytest.mark.parametrize("origin", [None, run_of("a")])
def test_restart_keeps_all_earlier_states(tmp_path: Path, origin: RunOrigin | None) -> None:
    for iteration in (10, 20):
        save(tmp_path, iteration, origin)
    for iteration in (15, 25, 35):
        save(tmp_path, iteration, run_of("b", "restart"))
    assert iterations(tmp_path) == [35, 25]
    assert iterations(tmp_path / "before-b") == [20, 10]


def test_states_that_another_worker_has_moved_fail_no_save(tmp_path: Path) -> None:
    save(tmp_path, 10, run_of("a"))
    put_aside(StateDirectory(tmp_path), [20, 10], run_of("b", "restart").start, 5)
    assert iterations(tmp_path) == [] and iterations(tmp_path / "before-b") == [10]


@pytest.mark.parametrize("mode", ["", "restart"])
def test_states_of_another_task_in_the_directory_stay(mode: StartMode, tmp_path: Path) -> None:
    """As after a task was renamed in its file: they are neither put aside nor pruned."""
    for iteration in (20, 30):
        save(tmp_path, iteration, run_of("a"), "other")
    for iteration in (5, 6, 7):
        save(tmp_path, iteration, run_of("b", mode))
    assert iterations(tmp_path) == [7, 6] and iterations(tmp_path, "other") == [30, 20]
    assert not list(tmp_path.glob("before-*"))


def test_fork_leaves_states_of_another_task_in_its_directory(tmp_path: Path) -> None:
    save(tmp_path / "big", 20, run_of("a"), "big")
    save(tmp_path / "fork", 30, run_of("a"), "other")
    checkpoint.fork(tmp_path / "big", "big", tmp_path / "fork", "t", run_of("f", "fork", source="big"))
    assert iterations(tmp_path / "fork") == [20] and iterations(tmp_path / "fork", "other") == [30]


def test_state_is_kept_beside_another_of_its_iteration(tmp_path: Path) -> None:
    for _ in range(3):
        save(tmp_path, 10, run_of("a"))
        save(tmp_path, 5, run_of("b", "restart"))
    archives = [f"before-b{number}" for number in ("", "-2", "-3")]
    assert [iterations(tmp_path / name) for name in archives] == [[10]] * 3


def test_fork_copies_newest_state_once(tmp_path: Path) -> None:
    source, directory = tmp_path / "big", tmp_path / "fork"
    fork = run_of("f", "fork", source="big")
    with pytest.raises(OtherSettings, match="holds no whole checkpoint"):
        checkpoint.fork(source, "big", directory, "t", fork)
    for iteration in (10, 20):
        save(source, iteration, run_of("a", seed=2), "big")
    checkpoint.fork(source, "big", directory, "t", fork)
    assert iterations(directory) == [20] and iterations(source, "big") == [20, 10]
    save(source, 30, run_of("a", seed=2), "big")
    checkpoint.fork(source, "big", directory, "t", fork)
    assert iterations(directory) == [20], "it has begun, and its source goes on without it"
    assert checkpoint.load(directory, "t", 20, 0)[0]["iteration"] == 20
    assert fork.is_wanted(origin_of(StateDirectory(directory), 20))


def test_fork_has_its_state_when_its_source_has_pruned_it(tmp_path: Path) -> None:
    """The files are linked."""
    source, directory, fork = tmp_path / "big", tmp_path / "fork", run_of("f", "fork", source="big")
    save(source, 20, run_of("a"), "big")
    checkpoint.fork(source, "big", directory, "t", fork)
    for iteration in (30, 40):
        save(source, iteration, run_of("a"), "big")
    assert iterations(source, "big") == [40, 30]
    assert checkpoint.load(directory, "t", 20, 0)[0]["iteration"] == 20


@pytest.mark.parametrize("links", [True, False])
def test_fork_is_synced_before_it_has_its_name(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "big", 20, run_of("a"), "big")
    steps: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(handle: int) -> None:
        steps.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    def note_rename(path: Path, target: Path) -> Path:
        steps.append(f"{target.name} appears")
        return rename(path, target)

    def refuse(source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    checkpoint.fork(tmp_path / "big", "big", tmp_path / "fork", "t", run_of("f", "fork", source="big"))
    before = steps[: steps.index("iteration-00000020 appears")]
    files = {file.name for file in (tmp_path / "big/iteration-00000020/shard-0").iterdir()}
    assert {"manifest.json.new", "made-with.json.new", "shard-0"} <= set(before) and before[-1].startswith(".draft-")
    assert files.isdisjoint(before) if links else files <= set(before), "what is linked was synced when it was written"
    assert steps[-1] == "fork"


def test_draft_of_fork_that_died_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, directory, fork = tmp_path / "big", tmp_path / "fork", run_of("f", "fork", source="big")
    save(source, 20, run_of("a"), "big")
    with monkeypatch.context() as storage:
        storage.setattr(os, "getpid", lambda: 1)  # another host may have the same
        storage.setattr(Path, "rename", lambda path, target: (_ for _ in ()).throw(OSError(errno.EIO, "")))
        for _ in range(2):
            with pytest.raises(OSError):
                checkpoint.fork(source, "big", directory, "t", fork)
    assert len(list(directory.iterdir())) == 2, "no host removes another's draft"
    checkpoint.fork(source, "big", directory, "t", fork)
    save(directory, 30, fork)
    assert sorted(path.name for path in directory.iterdir()) == ["iteration-00000020", "iteration-00000030"]


def test_fork_with_damaged_state_does_not_begin_anew(tmp_path: Path) -> None:
    """A damaged copy, the only state: neither from the seed nor, silently, from its source once more."""
    source, directory, fork = tmp_path / "big", tmp_path / "fork", run_of("f", "fork", source="big")
    save(source, 20, run_of("a"), "big")
    checkpoint.fork(source, "big", directory, "t", fork)
    (file,) = (directory / "iteration-00000020/shard-0").glob("*.distcp")
    file.unlink()
    with pytest.raises(OtherSettings, match="cannot be read, and the task has no whole checkpoint"):
        checkpoint.fork(source, "big", directory, "t", fork)
    assert (directory / "iteration-00000020").is_dir()
    checkpoint.fork(source, "big", directory, "t", run_of("g", "fork", source="big"))
    assert iterations(directory) == [20] and (directory / "before-g").is_dir()


def test_fork_into_directory_with_states_keeps_them(tmp_path: Path) -> None:
    save(tmp_path / "big", 20, run_of("a"), "big")
    save(tmp_path / "fork", 20, run_of("x"))
    checkpoint.fork(tmp_path / "big", "big", tmp_path / "fork", "t", run_of("f", "fork", source="big"))
    assert iterations(tmp_path / "fork") == iterations(tmp_path / "fork" / "before-f") == [20]
