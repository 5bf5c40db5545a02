"""The first moments of a container: `deploy/container/enter` is process 1, and a SIGTERM is obeyed whenever it comes.

In a pid namespace of its own, where the kernel drops a signal for which process 1 has no handler. For more tries:
`python -m tests.unicrond.test_first_moments 50`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.agents.processes import LIGHT, ROOT, children, environment, eventually, kill
from unicrond.events.host.init_process import keeps
from unicrond.events.nats.connection import connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.events.vocabulary import NodeJoined, NodeLeft

ENTER = ROOT / "deploy" / "container" / "enter"
BIN = Path(sys.executable).parent
TRIES = 6
FIRST_S = 3.0
END_S = 10.0
#: A container's first process, and nothing of it outlives it.
_NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


def _handles(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


class Container:
    """A program behind `enter`, as process 1 of a pid namespace; ended with the context."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.output = directory / "output.log"
        with self.output.open("ab") as log:
            self.outside = subprocess.Popen(
                [*_NAMESPACE, "sh", str(ENTER), *words],
                stdout=log,
                stderr=log,
                env=environment() | {"NUMBA_CACHE_DIR": str(directory), "PATH": f"{BIN}:{os.environ['PATH']}"},
            )
        assert eventually(lambda: children(self.outside.pid))
        (self.first,) = children(self.outside.pid)
        #: unshare becomes the shell a moment after it was forked, and that has its traps 4 ms later.
        assert eventually(lambda: b"enter" in Path(f"/proc/{self.first}/cmdline").read_bytes())
        assert eventually(lambda: _handles(self.first, signal.SIGTERM), 1.0)

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        kill(self.first)
        kill(self.outside.pid)
        self.outside.wait()

    def ends_s(self) -> float:
        """How long it takes to end after a SIGTERM to its first process."""
        start_s = time.monotonic()
        os.kill(self.first, signal.SIGTERM)
        self.outside.wait(2 * END_S)
        return time.monotonic() - start_s


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="un") as directory:
        yield Path(directory)


async def agents_that_were_ended(moments_s: Sequence[float], *more: str, runs: str = "") -> list[float]:
    """Start an agent for each moment, with more flags, and end it then, but not before a process with `runs` in its
    command line is there; return how long each took to end. None may be a node then."""
    ends_s: list[float] = []
    with short_directory() as directory:
        server = EmbeddedServer(directory / "nats")
        await server.start()
        try:
            connection = await connect(server.url, name="test", timeout_s=10)
            await create_streams(connection)
            for number, moment_s in enumerate(moments_s):
                flags = [
                    "--nats",
                    server.url,
                    "--node",
                    "n1",
                    "--slots",
                    "1",
                    "--run-dir",
                    str(directory / f"r{number}"),
                ]
                flags += [
                    "--accelerators",
                    "fake",
                    "--grace-s",
                    "5",
                    *(f"--fork-server={flag}" for flag in LIGHT),
                    *more,
                ]
                with Container(directory, "unicron-agent", "--supervise", *flags) as agent:
                    await asyncio.sleep(moment_s)
                    assert await asyncio.to_thread(eventually, lambda: runs in command_lines())
                    ends_s.append(await asyncio.to_thread(agent.ends_s))
                    assert agent.outside.returncode == 143, f"at {moment_s:.3f} s:\n{agent.output.read_text()[-4000:]}"
            await asyncio.sleep(1.0)  # whoever is alive all the same joins meanwhile
            assert await nodes_of(NatsEventLog(connection)) == set()
            await connection.close()
        finally:
            await server.kill()
    return ends_s


def command_lines() -> str:
    """Return the command lines of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(lines)


async def nodes_of(log: NatsEventLog) -> set[str]:
    """The nodes that have joined and not left."""
    nodes: set[str] = set()
    if last_seq := await log.last_seq():
        async with aclosing(log.read(0, until_seq=last_seq)) as entries:
            async for entry in entries:
                event = entry.envelope.event
                if isinstance(event, NodeJoined):
                    nodes.add(event.node)
                elif isinstance(event, NodeLeft):
                    nodes.discard(event.node)
    return nodes


async def heads_that_were_ended(moments_s: Sequence[float]) -> list[float]:
    """Start a head with its embedded log for each moment and end it then; return how long each took to end."""
    ends_s: list[float] = []
    for moment_s in moments_s:
        with short_directory() as directory:
            config = directory / "unicron.yaml"
            config.write_text(f"state_dir: {directory / 'state'}\nauth: 'off'\napi: {{port: 0}}\nnats: {{port: 0}}\n")
            with Container(directory, "unicrond", "run", "--config", str(config)) as head:
                await asyncio.sleep(moment_s)
                ends_s.append(await asyncio.to_thread(head.ends_s))
                text = head.output.read_text()
                assert head.outside.returncode in (0, 143), f"at {moment_s:.3f} s:\n{text[-4000:]}"
                assert "nats-server stays" not in text
    return ends_s


def moments(count: int) -> list[float]:
    """Random moments of the first seconds; the first ones of all among them."""
    return [0.0, 0.005, *(random.uniform(0, FIRST_S) for _ in range(count - 2))]


async def test_agent_obeys_sigterm_in_its_first_moments() -> None:
    ends_s = await agents_that_were_ended(moments(TRIES))
    assert max(ends_s) < END_S


async def test_agent_does_not_wait_for_a_fork_server_that_imports() -> None:
    """torch takes seconds to load, on a busy machine more than a pod is given."""
    preload = "--preload=tests.agents.slow_preload"
    (end_s,) = await agents_that_were_ended([0.0], f"--fork-server={preload}", runs=f"\0{preload}\0")
    assert end_s < END_S / 4


async def test_head_obeys_sigterm_in_its_first_moments() -> None:
    ends_s = await heads_that_were_ended(moments(TRIES))
    assert max(ends_s) < END_S


def test_shell_passes_code_signals_and_reaps(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: os._exit(7))\n"
        "os.fork() or (os.fork() and os._exit(0)) or os._exit(0)\n"
        "print('ready', signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL, flush=True); time.sleep(60)\n"
    )
    with Container(tmp_path, sys.executable, "-c", program) as container:
        assert eventually(lambda: "ready" in container.output.read_text())
        assert "ready True" in container.output.read_text()
        assert eventually(lambda: len(children(container.first)) == 1), "the orphan is reaped"
        os.kill(container.first, signal.SIGINT)
        assert container.outside.wait(END_S) == 7
    with Container(tmp_path, "sh", "-c", "sleep 1; kill -9 $$") as container:
        assert container.outside.wait(END_S) == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("init", "is_kept"),
    [
        ("/bin/sh /opt/unicron/enter unicrond run --standby", True),
        ("tini -- unicrond run --standby", True),
        ("/opt/bin/python /opt/bin/unicrond run --standby", True),
        ("/sbin/init", False),
        ("/lib/systemd/systemd --system", False),
        ("/bin/sh /opt/unicron/enter unicrond run", False),
        ("run --standby", False),
    ],
)
def test_head_knows_its_keeper(init: str, is_kept: bool) -> None:
    assert keeps(init.split(), ["/opt/bin/python", "/opt/bin/unicrond", "run", "--standby"]) is is_kept


if __name__ == "__main__":
    for program, ended in (("agent", agents_that_were_ended), ("head", heads_that_were_ended)):
        seconds = sorted(asyncio.run(ended(moments(int(sys.argv[1])))))
        slowest = ", ".join(f"{end_s:.1f}" for end_s in seconds[-3:])
        print(f"{program}: {len(seconds)} ended, the slowest after {slowest} s")
