"""Containers by runc: an OCI bundle, its process 1, and what a kubelet does with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The parent of all cgroups that are made here.
CGROUP = "unicron-containers"
_CGROUPS = Path("/sys/fs/cgroup")
_MASKED = ("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/sys/firmware")
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


#: Of all containers together, where a process outside has 1024: else all of them count as one process.
_CPU_SHARES = 8 * 1024


def runtime() -> str | None:
    return shutil.which("runc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def cgroup_version() -> int:
    return 2 if (_CGROUPS / "cgroup.controllers").exists() else 1


@dataclass(frozen=True, kw_only=True)
class Box:
    """What a container is made of. `mounts`: place inside -> directory or file outside, and its options. `netns`: ""
    is a new one without links. `hooks`: commands in its mount namespace, before its root becomes the root; {root}
    stands for that."""

    root: Path
    args: Sequence[str]
    env: Mapping[str, str]
    cwd: str = "/"
    uid: int = 0
    gid: int = 0
    hostname: str = "box"
    writable_root: bool = False
    mounts: Mapping[str, tuple[Path, str]] = field(default_factory=dict)
    netns: str = ""
    memory_bytes: int = 0
    cpus: float = 0.0
    capabilities: Sequence[str] = ()
    hooks: Sequence[Sequence[str]] = ()

    def config(self, cgroup: str) -> dict[str, Any]:
        """config.json of the OCI runtime specification."""
        version = cgroup_version()
        kinds = ["pid", "mount", "ipc", "uts", *(["cgroup"] if version == 2 else [])]
        namespaces: list[dict[str, str]] = [{"type": kind} for kind in kinds]
        namespaces.append({"type": "network"} | ({"path": f"/run/netns/{self.netns}"} if self.netns else {}))
        resources: dict[str, Any] = {"devices": [{"allow": False, "access": "rwm"}]}
        if self.memory_bytes:
            resources["memory"] = {"limit": self.memory_bytes}
        if self.cpus:
            resources["cpu"] = {"quota": int(self.cpus * 100_000), "period": 100_000}
        rights = list(self.capabilities)
        kinds_of_rights = ("bounding", "effective", "permitted", "inheritable")
        hooks = [[word.replace("{root}", str(self.root)) for word in hook] for hook in self.hooks]
        return {
            "ociVersion": "1.0.2",
            "process": {
                "terminal": False,
                "user": {"uid": self.uid, "gid": self.gid},
                "args": list(self.args),
                "env": [f"{name}={value}" for name, value in self.env.items()],
                "cwd": self.cwd,
                "capabilities": dict.fromkeys(kinds_of_rights, rights),
                "noNewPrivileges": True,
            },
            "root": {"path": str(self.root), "readonly": not self.writable_root},
            "hostname": self.hostname,
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {
                    "destination": "/dev",
                    "type": "tmpfs",
                    "source": "tmpfs",
                    "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
                },
                {
                    "destination": "/dev/pts",
                    "type": "devpts",
                    "source": "devpts",
                    "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
                },
                {
                    "destination": "/dev/shm",
                    "type": "tmpfs",
                    "source": "shm",
                    "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],  # as containerd does
                },
                {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "nodev", "ro"]},
                {
                    "destination": "/sys/fs/cgroup",
                    "type": "cgroup",
                    "source": "cgroup",
                    "options": ["nosuid", "noexec", "nodev", "relatime", "ro"],
                },
                *(
                    {"destination": at, "type": "bind", "source": str(source), "options": ["rbind", options]}
                    for at, (source, options) in self.mounts.items()
                ),
            ],
            "hooks": {"createContainer": [{"path": shutil.which(hook[0]), "args": hook} for hook in hooks]},
            "linux": {
                "namespaces": namespaces,
                "cgroupsPath": cgroup,
                "resources": resources,
                "maskedPaths": list(_MASKED),
                "readonlyPaths": list(_READ_ONLY),
            },
        }


class Container:
    """One that runs; its name is its own among all of `directory`."""

    def __init__(self, directory: Path, name: str, box: Box) -> None:
        self.name = name
        self.output = directory / f"{name}.log"
        self._state = directory / "runc"
        self._bundle = directory / f"{name}.bundle"
        self._bundle.mkdir(exist_ok=True)
        self._cgroup = f"/{CGROUP}/{name}"
        (self._bundle / "config.json").write_text(json.dumps(box.config(self._cgroup)))
        self._runc: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its output goes to the log."""
        with self.output.open("ab") as output:
            self._runc = subprocess.Popen(
                self._command("run", "--bundle", str(self._bundle), self.name),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        return self._runc is not None and self._runc.poll() is None

    def wait(self, timeout_s: float) -> int:
        """The exit code of process 1: 137 where SIGKILL has ended it."""
        assert self._runc is not None
        return self._runc.wait(timeout_s)

    def kill(self, number: signal.Signals) -> None:
        """A signal for process 1, from outside."""
        subprocess.run(self._command("kill", self.name, number.name), check=True, capture_output=True)

    def remove(self) -> None:
        """End it at once; its name is free again."""
        if self.is_running():
            with contextlib.suppress(subprocess.CalledProcessError):
                self.kill(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(20)
        subprocess.run(self._command("delete", "--force", self.name), check=False, capture_output=True)

    def run_inside(self, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command in it, as `kubectl exec` runs it."""
        return subprocess.run(
            self._command("exec", self.name, *words), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def start_inside(self, *words: str) -> subprocess.Popen[bytes]:
        """The same, without waiting for its end."""
        with self.output.open("ab") as output:
            return subprocess.Popen(
                self._command("exec", self.name, *words), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def pids(self) -> dict[int, str]:
        """Its processes by their ids outside -> their commands; process 1 first."""
        found, listed = {}, self.cgroup("memory") / "cgroup.procs"
        for pid in sorted(map(int, listed.read_text().split())) if listed.exists() else ():
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def zombies(self) -> int:
        """Processes that have ended and that their parent has not asked for."""
        states = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in self._all_pids())
        return sum(state == "Z" for state in states)

    def _all_pids(self) -> list[int]:
        """Zombies too, which a cgroup of version 1 may not list: all of its pid namespace."""
        first = min(self.pids())
        own = Path(f"/proc/{first}/ns/pid").stat().st_ino
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdecimal() and (path / "ns" / "pid").stat().st_ino == own:
                    found.append(int(path.name))
        children = (Path(f"/proc/{pid}/task/{pid}/children") for pid in list(found))
        for each in children:
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in each.read_text().split()]
        return sorted(set(found))

    def cgroup(self, controller: str) -> Path:
        """Its directory, seen from outside."""
        return _CGROUPS / ("" if cgroup_version() == 2 else controller) / self._cgroup.lstrip("/")

    def oom_kills(self) -> int:
        """As the kernel has counted them; after the container's end nothing is left to ask."""
        name = "memory.events" if cgroup_version() == 2 else "memory.oom_control"
        for line in (self.cgroup("memory") / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def _command(self, *words: str) -> list[str]:
        program = runtime()
        assert program is not None
        return [program, "--root", str(self._state), *words]


def run_to_its_end(directory: Path, name: str, box: Box, timeout_s: float) -> str:
    """What a container says that must end well."""
    container = Container(directory, name, box)
    container.output.unlink(missing_ok=True)
    container.start()
    try:
        code = container.wait(timeout_s)
    finally:
        container.remove()
    assert code == 0, f"{name} ended with {code}: {container.said()}"
    return container.said()


def make_cgroups() -> None:
    """The parent of what runc makes, with as much of the processors as so many processes outside have."""
    version = cgroup_version()
    parent = _CGROUPS / ("" if version == 2 else "cpu") / CGROUP
    with contextlib.suppress(OSError):  # no such controller here: then as little as one process
        parent.mkdir(exist_ok=True)
        if version == 1:
            (parent / "cpu.shares").write_text(str(_CPU_SHARES))
        else:
            (parent / "cpu.weight").write_text(str(100 * _CPU_SHARES // 1024))


def remove_cgroups() -> None:
    """The parents of what runc has removed."""
    for top in [_CGROUPS, *_CGROUPS.glob("*")]:
        parent = top / CGROUP
        if parent.is_dir():
            for directory in [*parent.glob("*"), parent]:
                with contextlib.suppress(OSError):
                    if directory.is_dir():
                        directory.rmdir()


def now_us() -> int:
    return time.time_ns() // 1000
