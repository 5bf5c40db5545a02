"""A Slurm of one machine: munged, slurmctld and a slurmd per node, all on loopback, in one directory, without root.

Its nodes are n1, n2, ...; all have this host's name, and a task of a job knows its node by SLURMD_NODENAME.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
_SBIN = "/usr/sbin:/sbin"
#: How many times as long everything may take; for a machine that is busy with others.
PATIENCE = float(os.environ.get("UNICRON_TEST_PATIENCE", "1"))
_CONF = """\
ClusterName=lab
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={dir}/munge/munge.sock,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/run/slurmctld.pid
SlurmdPidFile={dir}/run/slurmd-%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=1
SlurmdTimeout=3
SlurmctldTimeout=10
MessageTimeout=2
TCPTimeout=1
KillWait=2
JobRequeue=1
PartitionName=main Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_NODE = (
    "NodeName=n{nth} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=2 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN\n"
)


def missing() -> str:
    """What of Slurm is not installed here; "" where all is."""
    path = f"{os.environ.get('PATH', '')}:{_SBIN}"
    return ", ".join(name for name in NEEDED if shutil.which(name, path=path) is None)


class Lab:
    """A running one. Made by `lab`."""

    def __init__(self, directory: Path, nodes: int) -> None:
        self.directory = directory
        self.names = [f"n{nth}" for nth in range(1, nodes + 1)]
        self.env = dict(os.environ, SLURM_CONF=str(directory / "slurm.conf"))
        self.env["PATH"] += f":{_SBIN}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *command: str, timeout_s: float = 20.0, more: Mapping[str, str] | None = None) -> str:
        """One of Slurm's commands; its output. Raises CalledProcessError."""
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**self.env, **(more or {})},
            cwd=self.directory,
        )
        assert ran.returncode == 0, f"{command}: {ran.stderr}{ran.stdout}"
        return ran.stdout.strip()

    def state_of(self, node: str) -> str:
        """As sinfo says it, with the reason."""
        return self.run("sinfo", "--Node", "--noheader", f"--nodes={node}", "--format=%T %E")

    def job_state(self, job: str) -> str:
        """RUNNING, COMPLETED, ..."""
        fields = dict(part.partition("=")[::2] for part in self.run("scontrol", "show", "job", job, "-o").split())
        return fields["JobState"]

    def processes_of(self, node: str) -> list[psutil.Process]:
        """All that run there but slurmd."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                env = process.environ()
                if env.get("SLURMD_NODENAME") == node and env.get("SLURM_CONF") == self.env["SLURM_CONF"]:
                    found.append(process)
        return found

    def start(self) -> None:
        """Start it, and wait until its nodes are idle."""
        for name in ("state", "spool", "log", "munge", "run"):
            (self.directory / name).mkdir(mode=0o755, parents=True)
        host, first = socket.gethostname().partition(".")[0], _free_ports(len(self.names) + 1)
        text = _CONF.format(host=host, port=first, user=getpass.getuser(), dir=self.directory, count=len(self.names))
        text += "".join(_NODE.format(nth=nth, host=host, port=first + nth) for nth in range(1, len(self.names) + 1))
        (self.directory / "slurm.conf").write_text(text)
        munge = self.directory / "munge"
        key = munge / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        flags = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "seed"}
        paths = [f"--{flag}={munge / name}" for flag, name in flags.items()]
        self._start("munged", "munged", "--foreground", *paths, f"--log-file={munge / 'munged.log'}")
        until(lambda: (munge / "munge.sock").exists(), 10, "munged's socket")
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for name in self.names:
            self._start(name, "slurmd", "-D", "-N", name)
        until(lambda: self.all_idle(), 30, "idle nodes")

    def all_idle(self) -> bool:
        """Each node answers and is free."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            said = self.run("sinfo", "--Node", "--noheader", "--format=%T", timeout_s=5.0).split()
            return said == ["idle"] * len(self.names)
        return False

    def kill_node(self, node: str) -> None:
        """SIGKILL for all that runs on it: it is off."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        for process in [*self._step_daemons(node), *self.processes_of(node)]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _step_daemons(self, node: str) -> list[psutil.Process]:
        """slurmstepd's of that node: their log is slurmd's."""
        log, found = str(self.directory / "log" / f"slurmd-{node}.log"), []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.name() == "slurmstepd" and log in {file.path for file in process.open_files()}:
                    found.append(process)
        return found

    def start_node(self, node: str) -> None:
        """It is on again."""
        self._start(node, "slurmd", "-D", "-N", node)

    def stop(self) -> None:
        """End all jobs, and all daemons."""
        with contextlib.suppress(Exception):
            self.run("scancel", f"--user={getpass.getuser()}", "--signal=KILL", "--full")
            self.run("scancel", f"--user={getpass.getuser()}")
        for name in [*self.names, "slurmctld", "munged"]:
            if name in self._daemons:
                _end(self._daemons[name])
        for name in self.names:
            for process in self.processes_of(name):
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def _start(self, name: str, *command: str) -> None:
        with (self.directory / "log" / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=self.env, start_new_session=True
            )


@contextlib.contextmanager
def lab(nodes: int) -> Iterator[Lab]:
    """A Slurm of so many nodes, which ends with the block. munged's socket lies where everybody may look."""
    with tempfile.TemporaryDirectory(prefix="slurm-lab-") as directory:
        Path(directory).chmod(0o755)
        made = Lab(Path(directory), nodes)
        try:
            made.start()
            yield made
        finally:
            made.stop()


def until(holds: object, limit_s: float, what: str) -> None:
    """Wait until `holds()`, at most so long, times PATIENCE."""
    limit_s *= PATIENCE
    ends_s = time.monotonic() + limit_s
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < ends_s, f"no {what} within {limit_s:g} s"
        time.sleep(0.1)


def _free_ports(count: int) -> int:
    """The first of so many neighbouring ports that are free."""
    for first in range(21_000, 32_000, 100):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                sock = held.enter_context(socket.socket())
                sock.bind(("127.0.0.1", port))
            return first
    raise RuntimeError("no free ports")


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(5)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
