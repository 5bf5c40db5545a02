"""Checks this node for common problems before its agent joins the cluster.

Rules
-----
* Nothing here keeps an agent from joining: a finding may be intended. `unicron-agent --check` looks, joins nothing,
  and ends with 1 where it finds anything.
* It judges what the node can see alone: itself, and NATS with the log's clock and the coordinator's version.
  `unicronctl doctor` has the nodes try the links between them when they have joined, and it shows these findings as
  well.
* `look` asks the machine; `findings` is pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from unicrond.agents.accelerators.driver import NoDriver
from unicrond.agents.accelerators.watch import open_driver
from unicrond.agents.host import host_resources as host
from unicrond.agents.protocol.gpus import visible_gpus
from unicrond.events.host.network_addresses import interface_of
from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, Login, NoReply
from unicrond.events.nats.streams import JetStreamError, api_once
from unicrond.events.nats.terms import Terms
from unicrond.events.queries.node_checks import Finding, clock_finding
from unicrond.events.trust.keys import Key
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.schemas import SCHEMA, spoken_schema

#: Sockets, pipes and regions of memory of the agent, its fork server and a few workers with many peers.
FILES_MIN = 8192
SHM_MIN_BYTES = 1 << 30
FREE_MIN_BYTES = 1 << 30
#: The least room for a run directory without logs: sockets, marks and a few small files.
RUN_DIR_MIN_BYTES = 32 << 20
MTU_MIN = 1500
RENEW_BEFORE = timedelta(days=14)
_FOREVER = 1 << 62
_NATS_S = 5.0


class NodeFlags(NamedTuple):
    """The flags that the preflight looks at. `memory_bytes`: for states of training; None: a quarter of
    `MachineFacts.memory_bytes`."""

    slots: int
    address: str
    run_dir: Path
    logs_dir: Path
    memory_bytes: int | None
    nats_is_remote: bool


class MachineFacts(NamedTuple):
    """What the machine offers. `mtu`: of the interface that has the address; None where none has it. `free_bytes`: of
    the volumes of run directory and logs. `limits`: soft ones. `torch`: its version, "" without. `run_dir_in_memory`:
    on a tmpfs, of `run_dir_bytes`. `memory_bytes`: that may be used; `container_bytes`: the limit of this container,
    None without. `key_ends`: when the key's certificate ends, None without. `driver_trouble`: why the GPUs' driver does
    not answer."""

    gpus: int
    has_rdma: bool
    mtu: int | None
    memory_bytes: int
    shm_bytes: int
    run_dir_in_memory: bool
    free_bytes: Mapping[str, int]
    limits: Mapping[str, int]
    torch: str
    key_ends: datetime | None
    now: datetime
    container_bytes: int | None = None
    run_dir_bytes: int = 0
    driver_trouble: str = ""


def look(flags: NodeFlags, key: Key | None) -> MachineFacts:
    """Read the facts of this machine."""
    return MachineFacts(
        gpus=len(visible_gpus()),
        has_rdma=any(Path("/sys/class/infiniband").glob("*")),
        mtu=mtu_of(flags.address),
        memory_bytes=host.memory_total_bytes(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        run_dir_in_memory=_is_tmpfs(flags.run_dir),
        free_bytes={
            "--run-dir": shutil.disk_usage(existing(flags.run_dir)).free,
            "--logs-dir": shutil.disk_usage(existing(flags.logs_dir)).free,
        },
        limits={
            name: _soft(limit)
            for name, limit in {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}.items()
        },
        torch=version_of("torch"),
        key_ends=_certificate_ends(key),
        now=datetime.now(UTC),
        container_bytes=host.cgroup_memory_limit_bytes(),
        run_dir_bytes=shutil.disk_usage(existing(flags.run_dir)).total,
        driver_trouble=_driver_trouble(visible_gpus()),
    )


def findings(flags: NodeFlags, machine: MachineFacts) -> list[Finding]:
    """Return what is likely to go wrong with this machine."""
    rooms = [*_room_findings(flags, machine), *_container_findings(flags, machine)]
    return [*_gpu_findings(flags, machine), *_network_findings(flags, machine), *rooms, *_right_findings(machine)]


async def nats_findings(servers: Sequence[str], login: Login, version: str = "") -> list[Finding]:
    """Check that NATS lets this node in, that the log's clock is this node's, and that the coordinator is of `version`
    ("": unchecked)."""
    connection = Connection(servers, name="preflight", login=login)
    try:
        await connection.start(_NATS_S)
        async with asyncio.timeout(_NATS_S):
            return [*await _clock_findings(connection), *await _version_findings(connection, version)]
    except LogUnavailable as error:
        return [Finding("NATS", str(error), "look at --nats, the head, the network between, and --key")]
    except TimeoutError:
        problem = f"does not answer questions about the log within {_NATS_S:g} s"
        return [Finding("NATS", problem, "look whether `unicrond run` is up on the head")]
    finally:
        await connection.close()


async def _clock_findings(connection: Connection) -> list[Finding]:
    """Compare this node's clock with the NATS server's. A server without the log yet gives no finding."""
    began_s, before = time.monotonic(), datetime.now(UTC)
    try:
        server_time = datetime.fromisoformat(str((await api_once(connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["ts"]))
    except (JetStreamError, NoReply, KeyError, ValueError):
        return []
    off_s = (before - server_time).total_seconds()
    return clock_finding("clock", off_s, time.monotonic() - began_s, "the log's")


async def _version_findings(connection: Connection, version: str) -> list[Finding]:
    starts: list[CoordinatorStarted] = []
    await Terms(connection, starts.append).ask()
    if not version or not starts:
        return []
    schema, coordinator_version = spoken_schema(starts[-1].version), starts[-1].version.partition("+")[0]
    if schema < SCHEMA or coordinator_version != version.partition("+")[0]:
        problem = f"{version}, of schema {SCHEMA}; the coordinator: {coordinator_version}, of schema {schema}"
        return [Finding("version", problem, "bring both to one version (docs/operate/upgrading.md)")]
    return []


def _gpu_findings(flags: NodeFlags, machine: MachineFacts) -> Iterator[Finding]:
    if not machine.torch:
        yield Finding("torch", "is not installed where the agent runs", "pip install the build of your machine first")
    elif machine.gpus and "+cpu" in machine.torch:
        yield Finding("torch", f"{machine.torch} computes on the CPU, and there are GPUs", "install its CUDA build")
    if machine.driver_trouble:
        problem = f"does not tell of the GPUs' health: {machine.driver_trouble}"
        yield Finding(
            "driver", problem, "run nvidia-smi; after an upgrade of the driver reboot, or load its module anew"
        )
    if machine.gpus and flags.slots > machine.gpus:
        problem = f"{flags.slots} slots, but {machine.gpus} visible GPU{'s' * (machine.gpus > 1)}"
        yield Finding("--slots", problem, "give a slot for each GPU, or look for GPUs that are gone (nvidia-smi)")
    elif flags.slots < machine.gpus:
        problem = f"{flags.slots} slot{'s' * (flags.slots > 1)}, but {machine.gpus} visible GPUs: the others idle"
        yield Finding("--slots", problem, f"give --slots {machine.gpus}, or hide the others by CUDA_VISIBLE_DEVICES")


def _network_findings(flags: NodeFlags, machine: MachineFacts) -> Iterator[Finding]:
    if is_loopback(flags.address):
        if flags.nats_is_remote:
            problem = f"{flags.address} cannot be reached by other nodes"
            yield Finding("--address", problem, "give this node's address in the training network")
        return
    if machine.mtu is None:
        yield Finding("--address", f"no interface of this node has {flags.address}", "give an address that it has")
    elif machine.mtu < MTU_MIN:
        problem = f"the interface of {flags.address} has an MTU of {machine.mtu}"
        yield Finding("--address", problem, "raise it on the interface and the switch, or use another network")


def _room_findings(flags: NodeFlags, machine: MachineFacts) -> Iterator[Finding]:
    if not machine.run_dir_in_memory:
        problem = f"{flags.run_dir} is on a disk; marks of progress are written there many times a second"
        yield Finding("--run-dir", problem, "put it on a tmpfs, such as /run/unicron")
    for flag, free_bytes in machine.free_bytes.items():
        holds_logs = flag == "--logs-dir" or flags.logs_dir == flags.run_dir
        if free_bytes < (FREE_MIN_BYTES if holds_logs else RUN_DIR_MIN_BYTES):
            yield Finding(flag, f"its volume has {free_bytes >> 20} MiB free", "make room, or give another directory")
    if machine.shm_bytes < SHM_MIN_BYTES:
        problem = f"/dev/shm has {machine.shm_bytes >> 20} MiB; data loaders and NCCL need more"
        yield Finding("shared memory", problem, "mount it larger (in containers: --shm-size, or an emptyDir in memory)")
    states_bytes = flags.memory_bytes
    if (
        machine.container_bytes is None
        and states_bytes is not None
        and machine.memory_bytes
        and states_bytes > machine.memory_bytes // 2
    ):
        problem = f"{states_bytes >> 30} GiB for states of {machine.memory_bytes >> 30} GiB of memory"
        yield Finding("--memory-gib", problem, "leave half of the host's to the training")


def _container_findings(flags: NodeFlags, machine: MachineFacts) -> Iterator[Finding]:
    """Compare the memory of volumes and states with the container's limit: the kernel kills at the limit."""
    if machine.container_bytes is None:
        return
    states = machine.memory_bytes // 4 if flags.memory_bytes is None else flags.memory_bytes
    parts = {"/dev/shm": machine.shm_bytes, "states": states}
    if machine.run_dir_in_memory:
        parts["run directory"] = machine.run_dir_bytes
    if sum(parts.values()) > machine.container_bytes // 2:
        sizes = ", ".join(f"{name} {size >> 20}" for name, size in parts.items())
        problem = f"more than half of its limit of {machine.container_bytes >> 20} MiB may lie in memory ({sizes} MiB)"
        yield Finding(
            "container", problem, "give the volumes a sizeLimit and --memory-gib a number, or raise the limit"
        )


def _right_findings(machine: MachineFacts) -> Iterator[Finding]:
    if machine.limits["nofile"] < FILES_MIN:
        problem = f"{machine.limits['nofile']} open files are allowed"
        yield Finding("limits", problem, f"ulimit -n {FILES_MIN} or more, or LimitNOFILE= in the unit")
    if (machine.gpus or machine.has_rdma) and machine.limits["memlock"] < _FOREVER:
        problem = f"{machine.limits['memlock'] >> 20} MiB may be locked; GPUs and network cards pin memory"
        yield Finding("limits", problem, "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit")
    if machine.key_ends is not None and machine.key_ends < machine.now + RENEW_BEFORE:
        ended = "has ended" if machine.key_ends < machine.now else "ends"
        problem = f"its certificate {ended} on {machine.key_ends:%Y-%m-%d}"
        yield Finding("--key", problem, "enroll the node again (docs/operate/logins.md)")


def mtu_of(address: str) -> int | None:
    """Return the MTU of the interface that has the address; None where none has it."""
    if not (interface := interface_of(address)):
        return None
    try:
        return int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    except OSError:
        return MTU_MIN  # the kernel does not say


def _is_tmpfs(path: Path) -> bool:
    """Return whether the mount that the path is on, or will be, is in memory."""
    real, best, kind = existing(path).resolve(), "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, mount_kind, *_ = line.split()
        if real.is_relative_to(place) and len(place) >= len(best):
            best, kind = place, mount_kind
    return kind in ("tmpfs", "ramfs")


def existing(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    return next(directory for directory in (path.absolute(), *path.absolute().parents) if directory.exists())


def _soft(limit: int) -> int:
    soft, _ = resource.getrlimit(limit)
    return _FOREVER if soft == resource.RLIM_INFINITY else soft


def driver_version(module: Path = Path("/sys/module/nvidia/version")) -> str:
    """Return the version of the GPUs' driver in the kernel, "" without one."""
    with contextlib.suppress(OSError):
        return module.read_text("ascii").strip()[:64]
    return ""


def version_of(package: str) -> str:
    """Return the installed version of the package, "" where it is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def _driver_trouble(gpus: tuple[str, ...]) -> str:
    if not gpus:
        return ""
    try:
        if driver := open_driver("nvml", gpus, len(gpus)):
            driver.close()
    except NoDriver as error:
        return str(error)
    return ""


def _certificate_ends(key: Key | None) -> datetime | None:
    if key is None or not key.has_certificate:
        return None
    from cryptography import x509

    return x509.load_pem_x509_certificates(key.pem.encode())[0].not_valid_after_utc


def is_remote(servers: Sequence[str]) -> bool:
    """Return whether NATS is on another machine."""
    local_names = ("localhost", os.uname().nodename)
    names = [urlsplit(server).hostname or "" for server in servers]
    return not all(name in local_names or is_loopback(name) for name in names)


def is_loopback(address: str) -> bool:
    """Return whether no other machine reaches the address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
