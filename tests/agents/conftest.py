"""Run directories (short: Unix sockets) and fork servers that are gone, with all theirs, when a test ends."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agents.processes import AgentSide, ForkServerProcess, children, has_ended, kill


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A private directory with a short path."""
    path = Path(tempfile.mkdtemp(prefix="un"))
    yield path
    shutil.rmtree(path)


ForkServers = Callable[..., ForkServerProcess]
Agents = Callable[[], AgentSide]


@pytest.fixture
def fork_server(run_dir: Path) -> Iterator[ForkServers]:
    """Starts fork servers; afterwards they are killed, and no child of theirs may be left."""
    started: list[ForkServerProcess] = []

    def start(*arguments: str, **options: tuple[str, ...]) -> ForkServerProcess:
        started.append(ForkServerProcess(run_dir, *arguments, **options))
        return started[-1]

    yield start
    for server in started:
        theirs = children(server.pid)
        kill(server.pid)
        server.process.wait()
        assert all(has_ended(pid) for pid in theirs), "a child outlives its fork server"


@pytest.fixture
def agent(run_dir: Path) -> Iterator[Agents]:
    """Connects agents to the fork server of `run_dir`."""
    connected: list[AgentSide] = []

    def connect() -> AgentSide:
        connected.append(AgentSide(run_dir))
        return connected[-1]

    yield connect
    for one in connected:
        one.close()
