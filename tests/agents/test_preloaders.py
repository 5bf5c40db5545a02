"""Workers of tasks with modules of their own: born of a process that has imported them, once."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.agents.conftest import Agents, ForkServers
from tests.agents.processes import AgentSide, children, eventually, has_ended
from tests.agents.test_fork_server import log_of, spawn
from tests.other_users import needs_root, opened
from unicrond.agents.fork_server.cgroups import Cgroups
from unicrond.agents.fork_server.preloaders import PendingFork, Preloaders
from unicrond.agents.fork_server.worker_process import ChildSetup
from unicrond.agents.protocol.messages import (
    Identity,
    Kill,
    ProcessExited,
    ProcessForked,
    ReleaseMemory,
    Spawn,
    SpawnFailed,
)

FLAGS = (
    "--preload=tests.agents.preloading",
    "--worker=tests.agents.preloading:run",
    "--store=tests.agents.preloading:serve",
)
ALICE = Identity(name="alice", uid=61_001, gid=61_001, groups=(61_001,), home="/")


@pytest.fixture
def checkout() -> Iterator[Path]:
    """A directory with a module that says who imported it, and when."""
    path = Path(tempfile.mkdtemp(prefix="un"))
    path.chmod(0o755)
    (path / "theirs.py").write_text("import os\npid, uid = os.getpid(), os.getuid()\nprint('imported', flush=True)\n")
    yield path
    shutil.rmtree(path)


def order(run_dir: Path, worker: str, checkout: Path, entry: str = "wait", **spec: Any) -> Spawn:
    fields = {"preload": ("theirs",), "cwd": str(checkout), **spec}
    return spawn(run_dir, worker, entry, **fields)


def born(side: AgentSide, run_dir: Path, order: Spawn) -> dict[str, Any]:
    """What the worker says of itself."""
    side.send(order)
    forked = side.next(ProcessForked)
    log = log_of(run_dir, forked.worker)
    assert eventually(lambda: log.read_text().endswith("\n"))
    facts: dict[str, Any] = json.loads(log.read_text())
    assert (facts["pid"], facts["sid"]) == (forked.pid, forked.pid)
    return facts


def preload_log(run_dir: Path) -> str:
    return (run_dir / "logs" / "a" / "a.preload.log").read_text()


def test_preloader_imports_modules_once_for_all_workers(
    fork_server: ForkServers, agent: Agents, run_dir: Path, checkout: Path
) -> None:
    server = fork_server("--memory-max-bytes=65536", flags=FLAGS)
    side = agent()
    first = born(side, run_dir, order(run_dir, "a.1", checkout, env={"COLOUR": "red"}))
    begun_s = time.monotonic()
    second = born(side, run_dir, order(run_dir, "a.2", checkout, env={"COLOUR": "red"}))
    print(f"born of a preloader in {(time.monotonic() - begun_s) * 1e3:.0f} ms")
    assert eventually(lambda: preload_log(run_dir) == "imported\n"), "once"
    for facts in (first, second):
        assert facts["preloaded by"] not in (0, facts["pid"], server.pid)
        assert facts["preloaded by"] == first["preloaded by"]
        assert facts["parent"] == server.pid, "the fork server's child, as every worker"
        assert facts["fds"] == sorted(["0", "1", "2", *facts["given"]])
        assert (facts["cwd"], facts["colour"]) == (str(checkout), "red")
    assert str(checkout) not in Path(f"/proc/{server.pid}/maps").read_text()
    os.kill(first["pid"], signal.SIGKILL)
    assert os.WTERMSIG(side.next(ProcessExited).status) == signal.SIGKILL
    side.send(Kill(worker="a.2", signal=signal.SIGTERM))
    assert os.WTERMSIG(side.next(ProcessExited).status) == signal.SIGTERM, "heard as every worker's end"
    side.send(ReleaseMemory(task="a"))
    assert has_ended(first["preloaded by"])
    assert eventually(lambda: len(children(server.pid)) == 1), "the store is left"


def test_failed_import_is_reported_and_retried(
    fork_server: ForkServers, agent: Agents, run_dir: Path, checkout: Path
) -> None:
    fork_server(flags=FLAGS)
    side = agent()
    side.send(order(run_dir, "a.1", checkout, preload=("theirs", "nowhere")))
    side.send(order(run_dir, "a.2", checkout, preload=("theirs", "nowhere")))
    for _ in range(2):
        reason = side.next(SpawnFailed).reason
        assert reason == "preload: it cannot be imported: ModuleNotFoundError: No module named 'nowhere'"
    side.send(order(run_dir, "a.3", checkout, secrets={"A": "file:/nowhere"}))
    assert side.next(SpawnFailed).reason.startswith("preload: it cannot be imported: secret A: /nowhere: No such file")
    (checkout / "nowhere.py").write_text("")
    born(side, run_dir, order(run_dir, "a.4", checkout, preload=("theirs", "nowhere")))


def test_preloader_reason_counts_even_after_its_exit(run_dir: Path, checkout: Path) -> None:
    pids: list[int] = []
    reasons: list[str] = []

    def fork(child: Callable[[], object]) -> int:
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                child()
            finally:
                os._exit(1)
        return pids[-1]

    launch = order(run_dir, "a.1", checkout, secrets={"A": "file:/nowhere"}).launch
    birth = ChildSetup(launch=launch, slot=0, gpus=(), output_fd=-1, inherited_fds=(), parent_pid=os.getpid())
    with selectors.DefaultSelector() as selector:
        preloaders = Preloaders(
            fork, selector, "", "", lambda _: False, Cgroups(None, {}), lambda *_: os.open(os.devnull, os.O_WRONLY)
        )
        preloaders.fork_worker(PendingFork(birth, [], lambda _: None, reasons.append), run_dir / "a.preload.log")
        os.waitpid(pids[0], 0)
        preloaders.ended(pids[0])
    (reason,) = reasons
    assert reason.startswith("preload: it cannot be imported: secret A: /nowhere: No such file")


def test_changed_environment_makes_new_preloader(
    fork_server: ForkServers, agent: Agents, run_dir: Path, checkout: Path
) -> None:
    fork_server(flags=FLAGS)
    side = agent()
    first = born(side, run_dir, order(run_dir, "a.1", checkout))
    second = born(side, run_dir, order(run_dir, "a.2", checkout, env={"COLOUR": "blue"}))
    assert second["preloaded by"] != first["preloaded by"] and second["colour"] == "blue"
    assert has_ended(first["preloaded by"])
    assert not has_ended(first["pid"], 0), "its workers live on"


def test_killed_preloader_takes_no_worker(
    fork_server: ForkServers, agent: Agents, run_dir: Path, checkout: Path
) -> None:
    server = fork_server(flags=FLAGS)
    side = agent()
    first = born(side, run_dir, order(run_dir, "a.1", checkout))
    os.kill(first["preloaded by"], signal.SIGKILL)
    second = born(side, run_dir, order(run_dir, "a.2", checkout))
    assert second["preloaded by"] != first["preloaded by"]
    os.kill(server.pid, signal.SIGKILL)
    assert all(has_ended(pid) for pid in (first["pid"], second["pid"], second["preloaded by"]))


def test_lying_preloader_is_ended(fork_server: ForkServers, agent: Agents, run_dir: Path, checkout: Path) -> None:
    """It says that its parent's pid, then its own, is the worker's: the kernel knows better."""
    (checkout / "theirs.py").write_text(
        "import os, socket, sys\n"
        "control = socket.socket(fileno=os.dup(int(sys.argv[1])))\n"
        "control.send(b'ready'); control.send(b'born'); import time; time.sleep(60)\n"
    )
    server = fork_server(flags=FLAGS)
    side = agent()
    side.send(order(run_dir, "a.1", checkout))
    assert side.next(SpawnFailed).reason == "preload: the process that imports its modules says what is not so"
    assert server.process.poll() is None


@needs_root
def test_preloader_imports_as_task_user(fork_server: ForkServers, agent: Agents, run_dir: Path, checkout: Path) -> None:
    fork_server("--separate", flags=FLAGS, prefix=opened())
    side = agent()
    with (checkout / "theirs.py").open("a") as module:
        module.write("print(os.environ['TOKEN'], flush=True)\n")
    facts = born(side, run_dir, replace(order(run_dir, "a.1", checkout, env={"TOKEN": "s3cret-value"}), user=ALICE))
    assert eventually(lambda: preload_log(run_dir) == "imported\n(hidden)\n"), "as in the workers' logs"
    assert (facts["uid"], facts["imported as"], facts["no new privileges"]) == (ALICE.uid, ALICE.uid, True)
