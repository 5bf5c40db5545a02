"""The agent's socket for its workers stays where they look for it."""

from __future__ import annotations

import asyncio
import logging
import shutil
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from unicrond.agents.core.worker_budgets import GREETING_FRAMES
from unicrond.agents.protocol.framing import frame
from unicrond.agents.protocol.messages import MAX_REPORT_BYTES, ConnectionOwner, Hello
from unicrond.agents.shell import worker_sockets
from unicrond.agents.shell.worker_sockets import WorkerSockets
from unicrond.events.log.entrance import Bucket
from unicrond.events.vocabulary import WorkerReady


class Heard:
    """A socket in `directory`, and what workers have said on it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "agent.sock"
        self.said: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        self.late: dict[str, int] = {}
        self.sockets = WorkerSockets(
            self.path,
            on_connected=lambda hello: self.said.put_nowait((hello.worker, hello)),
            on_message=lambda worker, message: self.said.put_nowait((worker, message)),
            on_disconnected=lambda worker: self.said.put_nowait((worker, None)),
            on_held_up=self._count_late,
            look_every_s=0.01,
        )

    def _count_late(self, worker: str, frames: int) -> None:
        self.late[worker] = self.late.get(worker, 0) + frames

    async def connect(self, worker: str) -> asyncio.StreamWriter:
        """A worker's connection; it may have to look more than once, as workers do."""
        async with asyncio.timeout(10):
            while True:
                try:
                    _, writer = await asyncio.open_unix_connection(str(self.path))
                    break
                except OSError:
                    await asyncio.sleep(0.01)
        writer.write(frame(Hello(worker=worker, task="a", pid=1, generation=0, ready=False)))
        assert (await self.next())[0] == worker
        return writer

    async def next(self) -> tuple[str, object]:
        async with asyncio.timeout(10):
            return await self.said.get()


@pytest.fixture
async def heard(run_dir: Path) -> AsyncIterator[Heard]:
    made = Heard(run_dir / "n1")
    made.path.parent.mkdir()
    await made.sockets.start()
    yield made
    await made.sockets.close()


@pytest.mark.parametrize("how", ["unlinked", "replaced", "the directory is gone for a time"])
async def test_removed_socket_is_bound_again(heard: Heard, how: str, caplog: pytest.LogCaptureFixture) -> None:
    first = await heard.connect("a.1")
    with caplog.at_level(logging.WARNING, logger="unicrond.agents"):
        if how == "unlinked":
            heard.path.unlink()
        elif how == "replaced":
            heard.path.unlink()
            heard.path.write_text("somebody else's")
        else:
            shutil.rmtree(heard.path.parent)
            async with asyncio.timeout(10):
                while "cannot be bound again" not in caplog.text:  # noqa: ASYNC110 - a log offers no event
                    await asyncio.sleep(0.01)
            heard.path.parent.mkdir()
        second = await heard.connect("a.2")
    assert caplog.text.count("was gone: bound it again") == 1
    assert caplog.text.count("cannot be bound again") <= 1, "told once, not at each look"
    assert stat.S_IMODE(heard.path.stat().st_mode) == 0o600
    first.write(frame(WorkerReady(node="n", task="a", worker="a.1")))
    assert await heard.next() == ("a.1", WorkerReady(node="n", task="a", worker="a.1")), (
        "who was connected did not notice"
    )
    for writer in (first, second):
        writer.close()


class Given:
    """Connections that the fork server makes; closed afterwards."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard
        self.writers: list[asyncio.StreamWriter] = []

    async def say(self, *messages: ConnectionOwner | Hello) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_unix_connection(str(self.heard.path))
        self.writers.append(writer)
        writer.write(b"".join(frame(message) for message in messages))
        return reader


@pytest.fixture
async def given(heard: Heard) -> AsyncIterator[Given]:
    made = Given(heard)
    yield made
    for writer in made.writers:
        writer.close()


WHOSE = ConnectionOwner(worker="a.1", task="a", pid=7)
HELLO = Hello(worker="a.1", task="a", pid=7, generation=0, ready=False)


@pytest.mark.parametrize("field", ["worker", "task", "pid", "nothing"])
async def test_worker_cannot_use_name_of_other(heard: Heard, given: Given, field: str) -> None:
    other = {"worker": "b.1", "task": "b", "pid": 8}
    reader = await given.say(WHOSE, replace(HELLO, **{field: other[field]}) if field in other else HELLO)
    if field == "nothing":
        assert await heard.next() == ("a.1", HELLO)
    else:
        assert await reader.read() == b"", "the connection is closed"
        assert heard.said.empty()


async def test_only_fork_server_names_owner_of_connection(heard: Heard, given: Given) -> None:
    assert await (await given.say(WHOSE, replace(WHOSE, worker="b.1"))).read() == b""
    assert heard.said.empty()


async def test_worker_has_one_connection_at_a_time(heard: Heard, given: Given) -> None:
    first = await given.say(WHOSE)
    await given.say(WHOSE, HELLO)
    assert await first.read() == b"", "what it never used is closed"
    assert await heard.next() == ("a.1", HELLO)


async def test_worker_that_says_too_much_is_read_late_over_all_its_connections(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a bucket that is slower than the slowest machine reads."""
    bucket, count = Bucket(512, 2_000), 1000
    monkeypatch.setattr(worker_sockets, "READING", bucket)
    ready = frame(WorkerReady(node="n", task="a", worker="a.1"))
    began_s = time.monotonic()
    first, other = await heard.connect("a.1"), await heard.connect("b.1")
    first.write(ready * bucket.size)
    for _ in range(bucket.size):
        assert (await heard.next())[0] == "a.1"
    first.close()
    second = await heard.connect("a.1")
    second.write(ready * count)
    other.write(frame(WorkerReady(node="n", task="b", worker="b.1")))
    said = [(await heard.next())[0] for _ in range(count + 1)]
    last_read = worker_sockets.READ_BYTES // len(ready) + 1  # is paid for once it has been read
    assert time.monotonic() - began_s > (count + 2 * GREETING_FRAMES - last_read) * bucket.every_us / 1e6
    assert said.index("b.1") < count, "another one does not wait"
    assert heard.late.keys() == {"a.1"} and heard.late["a.1"] >= count - bucket.size
    for writer in (second, other):
        writer.close()


async def test_frame_longer_than_any_report_ends_the_connection(heard: Heard) -> None:
    writer = await heard.connect("a.1")
    writer.write((MAX_REPORT_BYTES + 1).to_bytes(4, "big"))
    assert await heard.next() == ("a.1", None)
    writer.close()
