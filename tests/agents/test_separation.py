"""Tasks as users of their own, with a privileged fork server and tasks that attack it (attacks.py). As root only."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.agents.attacks import ATTEMPTS
from tests.agents.conftest import Agents, ForkServers
from tests.agents.processes import AgentSide, ForkServerProcess, eventually, has_ended
from tests.agents.test_fork_server import born, log_of, spawn
from tests.other_users import USER, needs_root, opened
from unicrond.agents.fork_server.cgroups import NoCgroup, own_cgroup, prepare
from unicrond.agents.fork_server.masked_output import values_of
from unicrond.agents.host.prctl import capabilities
from unicrond.agents.protocol import marks
from unicrond.agents.protocol.framing import Unframer
from unicrond.agents.protocol.messages import (
    ConnectionOwner,
    FromWorker,
    Identity,
    Kill,
    MemoryReserved,
    ProcessExitAck,
    ProcessExited,
    Spawn,
    SpawnFailed,
    Sum,
)
from unicrond.events.vocabulary import TaskSpec

pytestmark = needs_root

FLAGS = ("--preload=tests.agents.attacks", "--worker=tests.agents.attacks:run", "--store=tests.agents.attacks:serve")
#: No passwd entry is needed: the agent sends numbers.
ALICE, BOB = 61_001, 61_002


def user(uid: int, home: Path | str = "/") -> Identity:
    return Identity(name=f"u{uid}", uid=uid, gid=uid, groups=(uid, uid + 100), home=str(home))


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter: pytest's own are closed to others."""
    path = Path(tempfile.mkdtemp(prefix="un"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """For the workers' cgroups, below this process's own. To be asked for before the fork server, which ends first."""
    try:
        found = prepare(own_cgroup(), f"test-{os.getpid()}", ())
    except NoCgroup as error:
        pytest.skip(f"no cgroup (v2) to write to: {error}")
    yield found
    assert eventually(lambda: not [one for one in found.iterdir() if one.is_dir() and not _removed(one)])
    found.rmdir()


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:
        return False
    return True


class Listening:
    """The agent's socket: takes connections, and says what it is told first."""

    def __init__(self, run_dir: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(run_dir / "agent.sock"))
        (run_dir / "agent.sock").chmod(0o600)
        self._socket.listen(8)
        self.heard: list[object] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.heard += Unframer[FromWorker | ConnectionOwner](FromWorker | ConnectionOwner).feed(
                    connection.recv(4096)
                )

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def order(run_dir: Path, worker: str, entry: str, who: Identity | None, facts: dict[str, Any], **spec: Any) -> Spawn:
    return replace(spawn(run_dir, worker, entry, json.dumps(facts), **spec), user=who)


def test_task_reaches_nothing_of_agent_or_other_tasks(
    cgroup: Path, fork_server: ForkServers, agent: Agents, run_dir: Path, place: Path
) -> None:
    key, others_file = run_dir / "n1.key", place / "bob"
    key.write_text("SEED")
    key.chmod(0o600)
    others_file.write_text("gradients")
    others_file.chmod(0o600)
    os.chown(others_file, BOB, BOB)
    program = Path(shutil.copy("/usr/bin/id", place / "id"))
    os.chown(program, 0, 0)
    program.chmod(0o4755)
    listening = Listening(run_dir)
    server = fork_server(
        "--separate", "--limit=nofile=512", f"--cgroup={cgroup}", "--memory-max-bytes=1048576", flags=FLAGS
    )
    side = agent()
    assert side.inventory().separates
    other = born(side, order(run_dir, "b.1", "wait", user(BOB), {}))
    facts = {
        "key": str(key),
        "run_dir": str(run_dir),
        "others_file": str(others_file),
        "others_log": str(log_of(run_dir, "b.1")),
        "other": other,
        "other_uid": BOB,
        "agent": os.getpid(),
        "setuid_program": str(program),
        "cgroup": str(cgroup),
    }
    pid = born(side, order(run_dir, "a.1", "attack", user(ALICE, place), facts))
    exited = side.next(ProcessExited)
    listening.close()
    said = log_of(run_dir, "a.1").read_text()
    assert (exited.worker, os.waitstatus_to_exitcode(exited.status)) == ("a.1", 0), said
    got = json.loads(said)
    refused = {name: got.pop(name) for name in tuple(got) if got[name] in ("EACCES", "EPERM")}
    assert sorted(refused) == sorted(
        [
            "read the agent's key", "list the run directory", "connect to agent.sock", "connect to fork.sock",
            "read another task's file", "read another task's environment", "read another task's log",
            "signal another task", "signal the agent", "signal the fork server", "read the fork server's environment",
            "read the fork server's descriptors", "write the agent's memory", "write the fork server's memory",
            "trace the agent", "take a descriptor of the agent", "take a descriptor of the fork server", "become root",
            "become another user", "take root's group", "take more groups", "make the mark grow",
            "make the memory shrink", "leave the cgroup",
        ]
    ), got  # fmt: skip
    control = subprocess.run([program, "-u"], capture_output=True, text=True, check=True, user=ALICE, group=ALICE)
    assert control.stdout.strip() == "0", "the program gives root away where nothing forbids it"
    assert got.pop("run a setuid program") == str(ALICE)
    assert got.pop("raise a limit") == "stays 512"
    assert got.pop("use another descriptor") == []
    assert got.pop("find another's secret") == []
    assert got.pop("its ids") == [ALICE] * 6 + [ALICE, ALICE + 100]
    assert got.pop("its capabilities") == ["0" * 16] * 3 + ["1"]
    assert got.pop("its home") == [str(place), f"u{ALICE}", str(place)]
    assert got.pop("its cgroup").splitlines()[-1].endswith(f"/{cgroup.name}/a.1")
    assert got.pop("speak to its agent") == "connected"
    assert listening.heard == [ConnectionOwner(worker="a.1", task="a", pid=pid)], (
        "the agent knows whose connection it is"
    )
    assert got.pop("what was imported") == []
    assert got == {"write a mark": None, "open its memory": None}
    mark = marks.read(marks.path_of(str(run_dir / "agent.sock"), "a.1"))
    assert mark is not None and mark.iteration == 7, "kept until the agent has read it"
    side.send(ProcessExitAck(worker="a.1"))
    assert eventually(lambda: not (run_dir / "marks" / "a.1").is_symlink())
    assert capabilities() and server.process.poll() is None


def test_document_lists_every_attack() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operate" / "separation.md").read_text()
    listed = re.findall(r"^\| ([^|]+) \|", text.partition("## What was tried")[2].partition("\n## ")[0], re.MULTILINE)
    allowed = {"write a mark", "open its memory", "speak to its agent", "what was imported"}
    tried = [name for name in ATTEMPTS if name not in allowed and not name.startswith("its ")]
    assert [name for name in listed if name not in ("attempt", "---")] == tried


def test_lingering_process_ends_with_its_worker(
    cgroup: Path, fork_server: ForkServers, agent: Agents, run_dir: Path
) -> None:
    fork_server("--separate", f"--cgroup={cgroup}", flags=FLAGS)
    side = agent()
    born(side, order(run_dir, "a.1", "linger", user(ALICE), {}))
    side.next(ProcessExited)
    lingering = int(log_of(run_dir, "a.1").read_text())
    assert has_ended(lingering), "a session of its own is no way out of a cgroup"
    assert eventually(lambda: not (cgroup / "a.1").exists())


def test_new_fork_server_ends_leftover_processes(
    cgroup: Path, fork_server: ForkServers, agent: Agents, run_dir: Path
) -> None:
    left = subprocess.Popen(["sleep", "600"])
    (cgroup / "a.9").mkdir()
    (cgroup / "a.9" / "cgroup.procs").write_text(str(left.pid))
    fork_server("--separate", f"--cgroup={cgroup}", flags=FLAGS)
    agent().inventory()
    assert left.wait(30) == -signal.SIGKILL


def test_worker_of_other_user_dies_with_fork_server(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    server = fork_server("--separate", flags=FLAGS)
    pid = born(agent(), order(run_dir, "a.1", "wait", user(ALICE), {}))
    os.kill(server.pid, signal.SIGKILL)
    assert has_ended(pid), "a change of user makes the kernel forget it: it was asked again"


def without_root(fork_server: ForkServers, agent: Agents, run_dir: Path) -> tuple[ForkServerProcess, AgentSide]:
    """A fork server and its agent as their unit has them: a user with three capabilities."""
    capable = "+setuid,+setgid,+kill"
    become = ("setpriv", "--reuid", USER, "--regid", "nogroup", "--clear-groups")
    os.chown(run_dir, pwd.getpwnam(USER).pw_uid, -1)
    server = fork_server(
        "--separate", flags=FLAGS, prefix=(*opened(), *become, "--inh-caps", capable, "--ambient-caps", capable)
    )
    os.seteuid(pwd.getpwnam(USER).pw_uid)  # the agent's
    try:
        return server, agent()
    finally:
        os.seteuid(0)


def test_fork_server_needs_no_root(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    """A worker has none of its capabilities."""
    server, side = without_root(fork_server, agent, run_dir)
    pid = born(side, order(run_dir, "a.1", "wait", user(ALICE), {}))

    def facts(who: int) -> list[str]:
        lines = Path(f"/proc/{who}/status").read_text().splitlines()
        found = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        return [found["Uid"][1], *(found[name][0].lstrip("0") for name in ("CapPrm", "CapEff", "CapAmb", "CapInh"))]

    assert facts(server.pid) == [str(pwd.getpwnam(USER).pw_uid), *["e0"] * 4]
    assert eventually(lambda: facts(pid) == [str(ALICE), *[""] * 4]), facts(pid)
    side.send(Kill(worker="a.1", signal=signal.SIGKILL))
    assert side.next(ProcessExited).worker == "a.1", "it may signal its own workers"


def test_separating_fork_server_needs_user(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server("--separate", flags=FLAGS)
    side = agent()
    side.send(order(run_dir, "a.1", "wait", None, {}))
    assert "runs each task as a user, and the agent named none" in side.next(SpawnFailed).reason


def test_fork_server_without_flag_refuses_users(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server(flags=FLAGS)
    side = agent()
    assert not side.inventory().separates
    side.send(order(run_dir, "a.1", "wait", user(ALICE), {}))
    assert "cannot run tasks as another user" in side.next(SpawnFailed).reason


def test_task_reads_only_files_of_its_user(fork_server: ForkServers, agent: Agents, run_dir: Path, place: Path) -> None:
    fork_server("--separate", flags=FLAGS)
    side = agent()
    secret, closed = place / "secret", place / "closed"
    secret.write_text("s3cret")
    secret.chmod(0o600)
    closed.mkdir(mode=0o700)
    for number, spec, said in (
        (1, {"secrets": {"A": f"file:{secret}"}}, f"secret A: {secret}: Permission denied"),
        (2, {"cwd": str(closed)}, f"cwd: cannot enter {closed} as user u{ALICE}: Permission denied"),
    ):
        born(side, order(run_dir, f"a.{number}", "attack", user(ALICE), {}, **spec))
        assert os.waitstatus_to_exitcode(side.next(ProcessExited).status) == 1
        assert log_of(run_dir, f"a.{number}").read_text().startswith(said)


def test_log_mask_reads_secrets_as_user(place: Path) -> None:
    """Else a task could name a file that is closed to it, print guesses, and see which are hidden."""
    for name, who in (("alice", ALICE), ("bob", BOB)):
        (place / name).write_text(f"secret-of-{name}")
        (place / name).chmod(0o600)
        os.chown(place / name, who, who)
    mine = TaskSpec(name="a", secrets={"A": f"file:{place}/alice", "B": f"file:{place}/bob"})
    before = (os.getresuid(), os.getresgid(), os.getgroups(), capabilities(), Path("/proc/self/environ").stat().st_uid)
    assert values_of(mine, user(ALICE)) == ["secret-of-alice"]
    assert values_of(mine, user(BOB)) == ["secret-of-bob"]
    after = (os.getresuid(), os.getresgid(), os.getgroups(), capabilities(), Path("/proc/self/environ").stat().st_uid)
    assert after == before


def test_unprivileged_fork_server_masks_secret_of_user(
    fork_server: ForkServers, agent: Agents, run_dir: Path, place: Path
) -> None:
    secret = place / "secret"
    secret.write_text("s3cret-of-alice")
    secret.chmod(0o600)
    os.chown(secret, ALICE, ALICE)
    server, side = without_root(fork_server, agent, run_dir)
    born(side, order(run_dir, "a.1", "tell", user(ALICE), {}, secrets={"TOKEN": f"file:{secret}"}))
    side.next(ProcessExited)
    assert log_of(run_dir, "a.1").read_text() == "the token is (hidden)\n"
    assert Path(f"/proc/{server.pid}/environ").stat().st_uid != 0, "its agent may still read its descriptors"


def test_store_process_has_no_privileges(fork_server: ForkServers, agent: Agents) -> None:
    server = fork_server("--separate", flags=FLAGS)
    agent().inventory()
    (store,) = [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]

    def facts() -> dict[str, str]:
        lines = Path(f"/proc/{store}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    assert eventually(lambda: facts()["NoNewPrivs"] == "1" and int(facts()["CapPrm"], 16) == 0)


def test_fork_server_imports_nothing_of_task(
    fork_server: ForkServers, agent: Agents, run_dir: Path, place: Path
) -> None:
    """A checkout with modules that shadow ours: they run as the user, in the worker, and nowhere else."""
    (place / "msgspec.py").write_text("raise SystemExit('shadowed')")
    (place / "theirs.py").write_text("import os; print('imported by', os.getuid(), flush=True)")
    server = fork_server(
        "--separate",
        flags=("--preload=tests.agents.attacks", "--worker=tests.agents.test_separation:importer", FLAGS[2]),
    )
    side = agent()
    for number in (1, 2):
        born(side, order(run_dir, f"a.{number}", "x", user(ALICE), {}, cwd=str(place), env={"PYTHONPATH": str(place)}))
        side.next(ProcessExited)
        assert log_of(run_dir, f"a.{number}").read_text() == f"imported by {ALICE}\n"
    assert str(place) not in Path(f"/proc/{server.pid}/maps").read_text()
    assert not [fd for fd in Path(f"/proc/{server.pid}/fd").iterdir() if str(place) in os.readlink(fd)]  # noqa: PTH115
    born(side, order(run_dir, "a.3", "x", user(BOB), {}, cwd=str(place)))
    side.next(ProcessExited)
    assert log_of(run_dir, "a.3").read_text() == f"imported by {BOB}\n", "not from what an earlier worker imported"


def importer(launch: Any) -> None:
    """As runpy does with a script: its directory comes first."""
    sys.path.insert(0, launch.spec.cwd)
    import theirs  # type: ignore[import-not-found]  # noqa: F401


def test_sum_process_has_no_privileges(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    fork_server("--separate", "--sum=tests.agents.entries:tell_rights", flags=FLAGS)
    told = Sum(
        address="127.0.0.1", token="0" * 16, pairs=(), library="gloo", limit_s=1.0, answer=str(run_dir / "sum.sock"),
        asked_s=0.0,
    )  # fmt: skip
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(told.answer)
        listener.listen()
        listener.settimeout(20)
        agent().send(told)
        connection, _ = listener.accept()
        with connection, connection.makefile() as said:
            assert json.loads(said.read()) == [] and capabilities()


def test_agent_shares_memory_by_descriptor(fork_server: ForkServers, agent: Agents, run_dir: Path) -> None:
    server = fork_server("--separate", "--memory-max-bytes=65536", flags=FLAGS)
    side = agent()
    side.send(order(run_dir, "a.1", "wait", user(ALICE), {}))
    kept = side.next(MemoryReserved)
    fd = os.open(f"/proc/{server.pid}/fd/{kept.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
        os.ftruncate(fd, 0)
    os.close(fd)
