"""Which source is tried first, and what a source of another layout is good for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.memory_nodes import OtherNode
from tests.trainer.test_checkpoint import tree
from tests.trainer.test_places import job
from unicrond.agents.protocol.memory import Memory
from unicrond.agents.trainer.lifecycle.candidates import (
    OFFERS_MAX,
    UNKNOWN,
    Candidate,
    Kind,
    is_storage_seen,
    newest,
    oldest_allowed,
    ordered,
    row_of,
    split,
)
from unicrond.agents.trainer.states import checkpoint, sources
from unicrond.agents.trainer.states.origins import RunOrigin
from unicrond.agents.trainer.states.places import StateDirectory
from unicrond.agents.trainer.states.sources import Sources
from unicrond.agents.trainer.states.state import BadState
from unicrond.events.vocabulary import CheckpointSpec, TaskSpec
from unicrond.events.vocabulary.shape import Shape

told = st.fixed_dictionaries(
    {kind: st.lists(st.integers(1, 50), max_size=count, unique=True) for kind, count in OFFERS_MAX.items()}
)


@given(told)
def test_source_rows_survive_round_trip(one: dict[Kind, list[int]]) -> None:
    assert {kind: set(found) for kind, found in split(row_of(one)).items()} == {k: set(i) for k, i in one.items()}


@given(st.lists(told, min_size=1, max_size=4))
def test_sources_sort_by_iteration_then_distance(all_told: list[dict[Kind, list[int]]]) -> None:
    rows = [row_of(one) for one in all_told]
    order = ordered(rows)
    nearness = {"memory": 0, "peer": 1, "checkpoint": 2}
    keys = [(-one.iteration, nearness[one.kind], one.rank) for one in order]
    assert keys == sorted(keys)
    named = {(i, kind, rank) for rank, one in enumerate(all_told) for kind, found in one.items() for i in found}
    assert {(one.iteration, one.kind, one.rank) for one in order} == named
    assert newest(rows, "checkpoint") == max((i for one in all_told for i in one["checkpoint"]), default=0)


def test_sources_sort_as_in_example() -> None:
    rows = [row_of({"peer": [7], "checkpoint": [7, 5]}), row_of({"memory": [7, 6]}), row_of({"memory": [8]})]
    assert ordered(rows) == [
        Candidate(8, "memory", 2),
        Candidate(7, "memory", 1),
        Candidate(7, "peer", 0),
        Candidate(7, "checkpoint", 0),
        Candidate(6, "memory", 1),
        Candidate(5, "checkpoint", 0),
    ]


def kept(states: dict[int, Shape]) -> Memory:
    """By iteration, in which layout; what is kept is the layout's name."""
    memory = Memory.private(1 << 20)
    for iteration, shape in states.items():
        draft = memory.draft(len(str(shape)))
        assert draft is not None
        draft.view[:] = str(shape).encode()
        draft.seal(iteration, 1, layout=shape)
    return memory


@pytest.mark.parametrize("other", [Shape(2, 2), Shape(2, 2, vpp=2), Shape(2, 2, ep=2)], ids=str)
def test_other_layout_of_same_size_needs_all_shards(other: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of it in this node's own memory is none of its own, but one with the other shards' on other nodes."""
    monkeypatch.setattr(sources, "read", lambda view, copy: {"iteration": 7, "kept": bytes(view).decode()})
    own = Shape(2, 2, vpp=2, ep=2)
    spec = TaskSpec(name="t", tp=2, pp=2, vpp=2, ep=2)
    launch = SimpleNamespace(spec=spec, task="t", shard=1, node="n1", worker="t.1")
    context: Any = SimpleNamespace(launch=launch, replica=SimpleNamespace(gather=lambda row: [row], all_true=bool))
    memories = {shard: kept({7: other, 5: own} if shard == 1 else {7: other}) for shard in range(4)}
    with (
        OtherNode("n1", {1: memories[1]}) as here,
        OtherNode("n2", {shard: memories[shard] for shard in (0, 2, 3)}) as there,
    ):
        told: Any = SimpleNamespace(peers=(here, there), passes=None, storage_iteration=0)
        looking = Sources(
            context, memories[1], told, lambda shards: {**next(iter(shards)), "rest": len([*shards])}, RunOrigin(spec)
        )
        assert split(tuple(looking.row(is_first=True))) == {"memory": [5], "peer": [7], "checkpoint": []}
        tree, size_bytes = looking.load(Candidate(7, "peer", 0))
        assert cast(object, tree) == {"iteration": 7, "kept": str(other), "rest": 3}
        assert (size_bytes, looking.resharded_from) == (4 * len(str(other)), str(other))
        alone: Any = SimpleNamespace(peers=(there,), passes=None, storage_iteration=0)
        looking = Sources(context, memories[1], alone, lambda shards: {}, RunOrigin(spec))
        assert split(tuple(looking.row(is_first=True)))["peer"] == [], "one shard is nowhere"
    for memory in memories.values():
        memory.close()


def looking_for(directory: str, memory: Memory | None, storage_iteration: int | None = 0) -> Sources:
    spec = TaskSpec(name="t", checkpoint=CheckpointSpec(dir=directory))
    context: Any = SimpleNamespace(
        launch=SimpleNamespace(spec=spec, task="t", shard=0, node="n1", worker="t.1"),
        replica=SimpleNamespace(shard=0, gather=lambda row: [row], all_true=bool, highest=lambda *values: values),
        settings=SimpleNamespace(save_wait_s=0.1),
    )
    nobody: Any = SimpleNamespace(peers=(), passes=None, storage_iteration=storage_iteration)
    return Sources(context, memory, nobody, lambda shards: next(iter(shards)), RunOrigin(spec))


@pytest.fixture
def memory() -> Iterator[Memory]:
    """With the state after iteration 7."""
    memory = kept({7: Shape()})
    yield memory
    memory.close()


def test_hanging_storage_keeps_nobody_from_a_state_in_memory(
    memory: Memory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The manifest is a FIFO, which hangs in the kernel until somebody writes to it."""
    manifest = tmp_path / "iteration-00000009" / "manifest.json"
    manifest.parent.mkdir()
    os.mkfifo(manifest)
    row = looking_for(str(tmp_path), memory).row(is_first=True)
    assert split(row) == {"memory": [7], "peer": [], "checkpoint": []} and not is_storage_seen([row])
    assert f"t.1: no state from {tmp_path}: no answer for 0 s" in capfd.readouterr().err
    with ThreadPoolExecutor(1) as pool:
        rows = [pool.submit(looking_for(str(tmp_path), None).row, is_first=True)]
        assert not wait(rows, 0.5).done, "with nothing else it waits"
        rows.append(pool.submit(looking_for(str(tmp_path), memory).row, is_first=True, must_see_storage=True))
        while not all(row.done() for row in rows):
            with suppress(OSError):  # nobody reads
                os.close(os.open(manifest, os.O_WRONLY | os.O_NONBLOCK))
            wait(rows, 0.01)
    assert [split(row.result())["memory"] for row in rows] == [[], [7]]
    assert all(is_storage_seen([row.result()]) for row in rows)


def test_refusing_storage_keeps_nobody_from_a_state_in_memory(
    memory: Memory, capfd: pytest.CaptureFixture[str]
) -> None:
    url = "nowhere://bucket/prefix"
    assert not is_storage_seen([looking_for(url, memory).row(is_first=True)])
    assert f"t.1: no state from {url}: OSError: " in capfd.readouterr().err
    with pytest.raises(OSError, match="nowhere"):
        looking_for(url, None).row(is_first=True)
    with pytest.raises(OSError, match="nowhere"):
        looking_for(url, memory).row(is_first=True, must_see_storage=True)


@pytest.mark.parametrize(
    ("storage_iteration", "last_write", "oldest"),
    [(0, 0, 1), (9000, 0, 9000), (9000, 9010, 9010), (None, 9010, UNKNOWN)],
)
def test_unseen_storage_allows_what_is_as_new_as_the_newest_known_checkpoint(
    memory: Memory, storage_iteration: int | None, last_write: int, oldest: int
) -> None:
    """By the word of the head, or of the process that has saved it."""
    row = looking_for("nowhere://bucket/prefix", memory, storage_iteration).row(is_first=True, last_write=last_write)
    assert split(row)["memory"] == [7] and oldest_allowed([row, row_of({"memory": [9001]})]) == oldest


def test_storage_that_refuses_once_is_asked_again(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has is found then, and newer than what memory has kept from long ago."""
    checkpoint.write(job(str(tmp_path), 9000), tree(9000))
    answers = iter([OSError("503 SlowDown"), None])
    list_all = StateDirectory.iterations

    def refuse_once(place: StateDirectory) -> list[int]:
        if (refusal := next(answers)) is not None:
            raise refusal
        return list_all(place)

    monkeypatch.setattr(StateDirectory, "iterations", refuse_once)
    looking = looking_for(str(tmp_path), memory, 9000)
    assert oldest_allowed([looking.row(is_first=True)]) == 9000
    rows = [looking.row(is_first=True, must_see_storage=True)]
    assert oldest_allowed(rows) == 0 and ordered(rows)[0] == Candidate(9000, "checkpoint", 0)


def test_storage_is_waited_for_aloud_and_its_late_answer_is_none(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint.write(job(str(tmp_path), 9000), tree(9000))
    storage, list_all = threading.Event(), StateDirectory.iterations

    def hang(place: StateDirectory) -> list[int]:
        storage.wait()
        return list_all(place)

    monkeypatch.setattr(StateDirectory, "iterations", hang)
    looking = looking_for(str(tmp_path), memory)
    assert not is_storage_seen([looking.row(is_first=True)])
    with ThreadPoolExecutor(1) as pool:
        row = pool.submit(looking_for(str(tmp_path), None).row, is_first=True)
        lines, line = "", f"t.1: waiting for {tmp_path}: no answer for 0 s"
        for _ in range(100):
            wait([row], 0.05)
            if line in (lines := lines + capfd.readouterr().err):
                break
        storage.set()
        assert line in lines and split(row.result())["checkpoint"] == [9000]
    for thread in threading.enumerate():
        if thread.name.startswith("look"):
            thread.join()
    with pytest.raises(BadState, match="not on storage"):
        looking.load(Candidate(9000, "checkpoint", 0))
