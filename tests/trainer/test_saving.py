"""A replica's shards save together, into storage that fails at the worst moment."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.test_checkpoint import same, tree
from unicrond.agents.trainer.lifecycle.results import SaveSchedule
from unicrond.agents.trainer.states import checkpoint
from unicrond.agents.trainer.states.places import StateDirectory
from unicrond.agents.trainer.states.saving import Saving
from unicrond.events.vocabulary import CheckpointSaved, SaveFailed, TaskSpec
from unicrond.events.vocabulary.tasks import CheckpointSpec

TO_STORAGE = SaveSchedule(to_memory=False, to_storage=True)


class ShardsInThreads:
    """A replica whose shards are threads, each with a `Saving` of its own; `events`: all that they send."""

    def __init__(self, directory: Path | str, shards: int = 2, *, wait_s: float = 60.0) -> None:
        self.events: list[Any] = []
        self._votes = [True] * shards
        self._barrier = Barrier(shards, timeout=60)
        self._pool = ThreadPoolExecutor(shards)
        spec = TaskSpec(name="t", tp=shards, checkpoint=CheckpointSpec(dir=str(directory), interval=5))
        self.savings = [self._saving(spec, shard, wait_s) for shard in range(shards)]

    def _saving(self, spec: TaskSpec, shard: int, wait_s: float) -> Saving:
        reporter = {"node": "n1", "task": "t", "worker": f"t.{shard}"}
        context: Any = SimpleNamespace(
            launch=SimpleNamespace(
                spec=spec, memory="", memory_max_bytes=0, node="n1", shard=shard, worker=f"t.{shard}", replica="0",
                reporter=reporter,
            ),
            replica=SimpleNamespace(shard=shard, all_true=lambda vote: self._all_true(shard, vote)),
            settings=SimpleNamespace(save_wait_s=wait_s),
            channel=SimpleNamespace(send=self.events.append),
            injection=SimpleNamespace(fire=lambda *_: None),
            generation=3,
        )  # fmt: skip
        state: Any = SimpleNamespace(capture=lambda iteration, _: tree(iteration))
        return Saving(context, state)

    def _all_true(self, shard: int, vote: bool) -> bool:
        self._votes[shard] = vote
        self._barrier.wait()
        verdict = all(self._votes)
        self._barrier.wait()
        return verdict

    def together(self, call: Callable[[Saving], None]) -> None:
        list(self._pool.map(call, self.savings))

    def capture(self, iteration: int) -> None:
        """Save at a boundary, and wait until storage has it, or not."""
        membership: Any = SimpleNamespace(generation=3)

        def save(saving: Saving) -> None:
            saving.boundary(iteration, 1.0, 0.5, membership, leads=True, schedule=TO_STORAGE)
            saving._await_seal()
            saving._storage.wait(last_word=True)

        self.together(save)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def test_last_word_is_published_though_the_capture_before_failed_after_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until now both shards held it for saved, as the claim was there, and the process ended without a checkpoint."""
    shards = ShardsInThreads(tmp_path)
    with monkeypatch.context() as storage:

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        storage.setattr(StateDirectory, "publish", full)
        shards.capture(5)
    assert len(shards.of(SaveFailed)) == 1 and checkpoint.newest_iterations(tmp_path, "t") == {}
    shards.together(lambda saving: saving.save_and_wait(5, 3, 0.5))
    assert list(checkpoint.newest_iterations(tmp_path, "t")) == [5] and len(shards.of(CheckpointSaved)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-00000005"], "the disk has room for one draft"
    for shard in range(2):
        assert same(checkpoint.load(tmp_path, "t", 5, shard)[0]["optimizer"], tree(5)["optimizer"])


def test_write_without_memory_is_given_up_when_it_is_late(tmp_path: Path) -> None:
    """The shard's record is a FIFO without a reader; training would have waited for ten times as long."""
    record = tmp_path / ".draft-00000005-0-3" / "shard-0.json.new"
    record.parent.mkdir()
    os.mkfifo(record)
    shards = ShardsInThreads(tmp_path, 1, wait_s=2.0)
    shards.together(lambda saving: saving._write_now(5, 3, 0.5, must=False))
    late, given_up = [event.reason for event in shards.of(SaveFailed)]
    assert "it goes on" in late
    assert given_up.endswith("given up") and float(given_up.split(" for ")[1].split()[0]) < 10
    (saving,) = shards.savings
    while saving._storage.is_busy:
        with suppress(OSError):  # it has not come to the record yet
            os.close(os.open(record, os.O_RDONLY | os.O_NONBLOCK))
