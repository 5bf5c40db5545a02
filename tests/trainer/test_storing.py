"""Storage that hangs or fills: nobody waits for longer than said, and what was given up is never published."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.test_checkpoint import tree
from unicrond.agents.trainer.states import checkpoint
from unicrond.agents.trainer.states.checkpoint import WriteJob
from unicrond.agents.trainer.states.places import StateDirectory
from unicrond.agents.trainer.states.storing import StorageWriter
from unicrond.events.vocabulary import CheckpointSaved, SaveFailed
from unicrond.events.vocabulary.shape import Shape

WAIT_S = 0.1
REPORTER = {"node": "n1", "task": "t", "worker": "t.1"}


class Desk:
    """A writer, and what it sends."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.events: list[Any] = []
        context: Any = SimpleNamespace(
            settings=SimpleNamespace(save_wait_s=wait_s),
            channel=SimpleNamespace(send=self.events.append),
            launch=SimpleNamespace(reporter=REPORTER, worker="t.1"),
        )
        self.writer = StorageWriter(context)
        self.is_read = True

    def begin(self, directory: Path | str, iteration: int, midway: Any = lambda: None) -> None:
        @contextmanager
        def slot() -> Iterator[None]:
            self.is_read = True
            yield
            self.is_read = False

        resources = ExitStack()
        resources.enter_context(slot())
        job = WriteJob(str(directory), "t", iteration, 3, 0, Shape(), "0-3", 2)
        self.writer.begin(job, lambda: tree(iteration), midway, resources)

    def end(self) -> None:
        """Wait for the thread, however long it hangs."""
        write = self.writer._write
        assert write is not None
        write.future.result()
        self.writer.look()


def test_hung_write_is_late_then_given_up_and_never_published(tmp_path: Path) -> None:
    desk, storage = Desk(), threading.Event()
    desk.begin(tmp_path, 1, storage.wait)
    assert not desk.writer.wait(last_word=False)
    assert desk.writer.is_busy and desk.is_read
    assert not desk.writer.wait(last_word=False), "at once: it is late"
    (late,) = desk.events
    assert isinstance(late, SaveFailed) and late.iteration == 1
    assert late.reason.startswith(f"TimeoutError: {tmp_path} has not taken it since 20") and "it goes on" in late.reason
    assert not desk.writer.wait(last_word=True)
    assert not desk.is_read, "what it reads may be overwritten from here on"
    assert desk.events[1].reason.endswith("given up") and len(desk.events) == 2
    assert desk.writer.is_busy, "nothing else is begun while it hangs"
    storage.set()
    desk.end()
    assert checkpoint.newest_iterations(tmp_path, "t") == {} and len(desk.events) == 2
    desk.begin(tmp_path, 2)
    assert desk.writer.wait(last_word=True)
    assert isinstance(desk.events[-1], CheckpointSaved) and list(checkpoint.newest_iterations(tmp_path, "t")) == [2]


@pytest.fixture
def storage() -> Iterator[threading.Event]:
    """What a write waits for; it has it when the test ends, or its thread would hold up the end of all."""
    event = threading.Event()
    yield event
    event.set()


def test_write_after_one_that_was_given_up_has_twice_the_time(tmp_path: Path, storage: threading.Event) -> None:
    """Storage that needs 1,000 s for a state, where 600 s is the limit, never got a checkpoint."""
    desk = Desk(60.0)

    def begin(iteration: int, age_s: float) -> None:
        storage.clear()
        desk.begin(tmp_path, iteration, storage.wait)
        assert desk.writer._write is not None
        desk.writer._write.begun_s -= age_s
        desk.writer.look()

    def reasons() -> list[str]:
        return [event.reason.rpartition("; ")[2] for event in desk.events if isinstance(event, SaveFailed)]

    begin(1, 601)
    assert reasons() == ["it goes on", "given up"]
    storage.set()
    desk.end()
    begin(2, 1000)
    assert reasons()[2:] == ["it goes on"]
    storage.set()
    desk.end()
    assert list(checkpoint.newest_iterations(tmp_path, "t")) == [2]
    begin(3, 31_000)
    assert reasons()[3:] == ["it goes on", "given up"], "the longest that was made is the measure again"
    assert desk.writer.give_up() is not None and len(reasons()) == 5, "which is said once"
    storage.set()
    desk.end()


def test_write_that_hung_in_its_publication_is_no_measure_of_the_next(
    tmp_path: Path, storage: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty times a day is a month."""
    desk, is_publishing = Desk(60.0), threading.Event()
    publish = StateDirectory.publish

    def hang(*arguments: Any, **options: Any) -> None:
        is_publishing.set()
        storage.wait()
        publish(*arguments, **options)

    monkeypatch.setattr(StateDirectory, "publish", hang)
    desk.begin(tmp_path, 1)
    is_publishing.wait()
    write = desk.writer._write
    assert write is not None
    write.begun_s -= 86_400
    desk.writer.look()
    assert write.is_given_up
    storage.set()
    desk.end()
    assert isinstance(desk.events[-1], CheckpointSaved) and desk.writer.newest == 1
    desk.begin(tmp_path, 2)
    assert desk.writer.wait(last_word=True) and desk.writer.longest_s < 60


def test_write_for_which_training_stands_still_has_twice_the_time_of_one_that_was_given_up(
    tmp_path: Path, storage: threading.Event
) -> None:
    desk = Desk(60.0)
    for iteration, age_s in ((1, 61), (2, 100)):
        storage.clear()
        desk.begin(tmp_path, iteration, storage.wait)
        assert desk.writer._write is not None
        desk.writer._write.begun_s -= age_s
        if iteration == 1:
            assert not desk.writer.wait(last_word=False, in_place=True)
            assert desk.writer.give_up() is not None
            desk.writer._context.channel.send = lambda event: (desk.events.append(event), storage.set())
            storage.set()
            desk.end()
    assert desk.writer.wait(last_word=False, in_place=True), "storage answers as it is said to be late"
    assert list(checkpoint.newest_iterations(tmp_path, "t")) == [2]


def test_slow_write_ends_well_though_late(tmp_path: Path) -> None:
    desk, storage = Desk(), threading.Event()
    desk.begin(tmp_path, 1, storage.wait)
    assert not desk.writer.wait(last_word=False)
    storage.set()
    assert desk.writer.wait(last_word=True)
    assert [type(event) for event in desk.events] == [SaveFailed, CheckpointSaved]
    assert list(checkpoint.newest_iterations(tmp_path, "t")) == [1] and not desk.is_read


def test_real_hang_of_a_file_system_blocks_nobody(tmp_path: Path) -> None:
    """The shard's record is a FIFO without a reader: to open it for writing hangs in the kernel."""
    draft = tmp_path / ".draft-00000001-0-3"
    draft.mkdir(parents=True)
    os.mkfifo(draft / "shard-0.json.new")
    desk = Desk()
    desk.begin(tmp_path, 1)
    assert not desk.writer.wait(last_word=True)
    assert desk.writer.is_busy and desk.writer.give_up() is not None
    reader = os.open(draft / "shard-0.json.new", os.O_RDONLY | os.O_NONBLOCK)  # and the write is back
    desk.end()
    os.close(reader)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A tmpfs of 64 KiB, in a namespace of its own."""
    command = "mount -t tmpfs -o size=64k none /mnt && echo mounted && exec sleep 600"
    with subprocess.Popen(["unshare", "-rm", "sh", "-c", command], stdout=subprocess.PIPE) as namespace:
        try:
            assert namespace.stdout is not None
            if not namespace.stdout.readline():
                pytest.skip("no namespaces here")
            yield Path(f"/proc/{namespace.pid}/root/mnt")
        finally:
            namespace.kill()


def test_full_disk_fails_the_write_and_no_other(small_disk: Path) -> None:
    desk, ballast = Desk(60.0), small_disk / "ballast"
    desk.begin(small_disk, 1)
    assert desk.writer.wait(last_word=True)
    room = os.statvfs(small_disk)
    ballast.write_bytes(bytes(room.f_bavail * room.f_frsize - 4096))
    desk.begin(small_disk, 2)
    assert desk.writer.wait(last_word=True)
    assert isinstance(desk.events[-1], SaveFailed) and os.strerror(errno.ENOSPC) in desk.events[-1].reason
    assert list(checkpoint.newest_iterations(small_disk, "t")) == [1]
    ballast.unlink()
    desk.begin(small_disk, 3)
    assert desk.writer.wait(last_word=True)
    assert isinstance(desk.events[-1], CheckpointSaved)
