"""What is told of the OOM killer: by real ones in a memory cgroup of the test's own, and by written witnesses."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.conftest import Agents, ForkServers
from tests.agents.processes import AgentSide, has_ended, kill
from tests.agents.test_fork_server import born, spawn
from unicrond.agents.fork_server.oom_witnesses import OomWitness
from unicrond.agents.protocol.messages import ProcessExited

LIMIT_BYTES = 96 * 1024 * 1024


class MemoryCgroup:
    """A memory cgroup of version 1 or 2 below our own."""

    def __init__(self) -> None:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        own = {controllers: path.lstrip("/") for _, controllers, path in lines}
        if "memory" in own:
            above, limit = Path("/sys/fs/cgroup/memory") / own["memory"], "memory.limit_in_bytes"
        else:
            above, limit = Path("/sys/fs/cgroup") / own.get("", ""), "memory.max"
        self.path = above / f"unicron-test-{os.getpid()}"
        self.path.mkdir()
        try:
            (self.path / limit).write_text(str(LIMIT_BYTES))
        except OSError:
            self.path.rmdir()
            raise

    def take(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def members(self) -> list[int]:
        return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]

    def remove(self) -> None:
        for pid in self.members():
            kill(pid)
            has_ended(pid)
        for _ in range(100):  # nothing tells when the kernel has let go of the last process
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.02)
        self.path.rmdir()


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    try:
        made = MemoryCgroup()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield made
    made.remove()


def died(side: AgentSide) -> ProcessExited:
    exited = side.next(ProcessExited)
    assert isinstance(exited, ProcessExited) and os.WTERMSIG(exited.status) == signal.SIGKILL
    return exited


def test_oom_kill_differs_from_sigkill(
    cgroup: MemoryCgroup, fork_server: ForkServers, agent: Agents, run_dir: Path
) -> None:
    server = fork_server()
    cgroup.take(server.pid)
    side = agent()
    murdered = born(side, spawn(run_dir, "a.1", "sleep"))
    born(side, spawn(run_dir, "a.2", "eat"))
    starved = died(side)
    assert (starved.worker, starved.oom) == ("a.2", "yes")
    os.kill(murdered, signal.SIGKILL)
    other = died(side)
    assert (other.worker, other.oom) == ("a.1", "no"), "the OOM kill before is not counted twice"


def test_exit_reports_core_dump(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        pytest.skip("core dumps go to a program here")
    fork_server()
    side = agent()
    born(side, spawn(run_dir, "a.1", "crash", cwd=str(run_dir)))
    status = side.next(ProcessExited).status
    assert os.WTERMSIG(status) == signal.SIGABRT and os.WCOREDUMP(status)


# --- written witnesses ---------------------------------------------------------------------------


class FakeMachine:
    """A fake /proc, cgroup tree and kernel log; two processes are born in one cgroup."""

    def __init__(self, directory: Path, version: int = 2, *, inside: bool = False) -> None:
        """`inside`: a container, whose mount begins at a cgroup that the kernel names by the machine's path."""
        self.proc, self.root, self.log = directory / "proc", directory / "cgroup", directory / "kmsg"
        self.version = version
        self.log.touch()
        for pid in (1, 2):
            (self.proc / str(pid)).mkdir(parents=True)
            path = "/pods/c1/task" if inside else "/task"
            line = f"0::{path}" if version == 2 else f"9:cpu:/else\n4:memory:{path}"
            (self.proc / str(pid) / "cgroup").write_text(line + "\n")
        mount = f"{self.root} rw - cgroup2 c rw" if version == 2 else f"{self.root}/memory rw - cgroup c rw,memory"
        (self.proc / "self").mkdir()
        (self.proc / "self" / "mountinfo").write_text(f"31 23 0:29 {'/pods/c1' if inside else '/'} {mount}\n")
        self.machine(0)

    def machine(self, kills: int) -> None:
        (self.proc / "vmstat").write_text(f"nr_free_pages 7\noom_kill {kills}\n")

    def cgroup(self, kills: int) -> None:
        place = self.root / ("task/memory.events" if self.version == 2 else "memory/task/memory.oom_control")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"low 0\noom 3\noom_kill {kills}\n")

    def logged(self, pid: int) -> None:
        with self.log.open("a") as log:
            log.write(f"3,845,61,-;Memory cgroup out of memory: Killed process {pid} (python) total-vm:75232kB\n")

    def witness(self) -> OomWitness:
        witness = OomWitness(self.log, self.proc)
        witness.track(1)
        witness.track(2)
        return witness


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_counter_explains_as_many_deaths_as_it_grew(tmp_path: Path, version: int, inside: bool) -> None:
    machine = FakeMachine(tmp_path, version, inside=inside)
    machine.cgroup(5)
    witness = machine.witness()
    machine.cgroup(6)
    machine.machine(1)
    assert witness.ended(1) == "yes"
    assert witness.ended(2) == "no"


def test_kernel_log_names_killed_process(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.logged(2)  # before our time
    witness = machine.witness()
    machine.machine(1)
    machine.logged(1)
    assert witness.ended(1) == "yes"
    assert witness.ended(2) == "no"
    witness.close()


def test_machine_counter_alone_answers_no_or_maybe(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.log.unlink()
    witness = machine.witness()
    assert witness.ended(1) == "no"
    machine.machine(3)
    assert witness.ended(2) == "maybe"


def test_constant_cgroup_counter_excludes_oom(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.cgroup(5)
    witness = OomWitness(machine.log, machine.proc)
    witness.track(1)
    witness.track(2, stays=False)  # in a cgroup of its own by now, whose kills may be counted elsewhere
    machine.machine(1)
    assert witness.ended(1) == "no"
    machine.machine(2)
    assert witness.ended(2) == "maybe"


def test_oom_evidence_is_maybe_without_sources(tmp_path: Path) -> None:
    witness = OomWitness(tmp_path / "none", tmp_path / "none")
    witness.track(1)
    witness.forget(3)
    assert witness.ended(1) == "maybe"
