"""What is likely to go wrong on this node, looked at before its agent joins.

Rules
-----
* Nothing here keeps an agent from joining: what is found may be meant. `unicron-agent --check` looks, joins nothing,
  and ends with 1 where it finds anything.
* It judges what the node can see alone: itself, and NATS with the log's clock and the coordinator's version. The links
  between nodes `unicronctl doctor` has them try when they have joined, and it shows these findings as well.
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

from agents import host
from agents.accelerators.driver import NoDriver
from agents.accelerators.watch import open_driver
from agents.protocol import container
from agents.protocol.gpus import visible_gpus
from events.finding import Finding, clock_finding
from events.interfaces import interface_of
from events.keys import Key
from events.log import LogUnavailable
from events.nats_connection import Connection, Login, Unanswered
from events.nats_streams import ApiError, api_once
from events.nats_terms import Terms
from events.schemas import SCHEMA, spoken_schema
from events.subjects import EVENT_STREAM
from events.vocabulary import CoordinatorStarted

#: Sockets, pipes and regions of memory of the agent, its fork server and a few workers with many peers.
FILES_MIN = 8192
SHM_MIN_BYTES = 1 << 30
FREE_MIN_BYTES = 1 << 30
#: Of a run directory without logs: sockets, marks and a few small files.
RUN_DIR_MIN_BYTES = 32 << 20
MTU_MIN = 1500
RENEW_BEFORE = timedelta(days=14)
_FOREVER = 1 << 62
_NATS_S = 5.0


class Asked(NamedTuple):
    """What the flags ask for. `memory_bytes`: for states of training; None: a quarter of `Seen.memory_bytes`."""

    slots: int
    address: str
    run_dir: Path
    logs_dir: Path
    memory_bytes: int | None
    nats_is_remote: bool


class Seen(NamedTuple):
    """What the machine says. `mtu`: of the interface that has the address; None where none has it. `free_bytes`: of the
    volumes of run directory and logs. `limits`: soft ones. `torch`: its version, "" without. `run_dir_in_memory`: on a
    tmpfs, of `run_dir_bytes`. `memory_bytes`: that may be used; `container_bytes`: the limit of this container, None
    without. `key_ends`: when the key's certificate ends, None without. `driver_trouble`: why the GPUs' driver does not
    answer."""

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


def look(asked: Asked, key: Key | None) -> Seen:
    """Ask this machine."""
    return Seen(
        gpus=len(visible_gpus()),
        has_rdma=any(Path("/sys/class/infiniband").glob("*")),
        mtu=mtu_of(asked.address),
        memory_bytes=host.memory_total_bytes(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        run_dir_in_memory=_is_tmpfs(asked.run_dir),
        free_bytes={
            "--run-dir": shutil.disk_usage(existing(asked.run_dir)).free,
            "--logs-dir": shutil.disk_usage(existing(asked.logs_dir)).free,
        },
        limits={
            name: _soft(limit)
            for name, limit in {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}.items()
        },
        torch=version_of("torch"),
        key_ends=_certificate_ends(key),
        now=datetime.now(UTC),
        container_bytes=container.memory_limit_bytes(),
        run_dir_bytes=shutil.disk_usage(existing(asked.run_dir)).total,
        driver_trouble=_driver_trouble(visible_gpus()),
    )


def findings(asked: Asked, seen: Seen) -> list[Finding]:
    """What is likely to go wrong with what the machine has."""
    rooms = [*_of_room(asked, seen), *_of_container(asked, seen)]
    return [*_of_gpus(asked, seen), *_of_network(asked, seen), *rooms, *_of_rights(seen)]


async def nats_findings(servers: Sequence[str], login: Login, version: str = "") -> list[Finding]:
    """Whether NATS lets this node in, whether the log's clock is this node's, and whether the coordinator is of
    `version` ("": not asked)."""
    connection = Connection(servers, name="preflight", login=login)
    try:
        await connection.start(_NATS_S)
        async with asyncio.timeout(_NATS_S):
            return [*await _of_clock(connection), *await _of_versions(connection, version)]
    except LogUnavailable as error:
        return [Finding("NATS", str(error), "look at --nats, the head, the network between, and --key")]
    except TimeoutError:
        what = f"does not answer questions about the log within {_NATS_S:g} s"
        return [Finding("NATS", what, "look whether `unicrond run` is up on the head")]
    finally:
        await connection.close()


async def _of_clock(connection: Connection) -> list[Finding]:
    """By the server's own word of what time it is. A server without the log yet says nothing."""
    began_s, before = time.monotonic(), datetime.now(UTC)
    try:
        told = datetime.fromisoformat(str((await api_once(connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["ts"]))
    except (ApiError, Unanswered, KeyError, ValueError):
        return []
    off_s = (before - told).total_seconds()
    return clock_finding("clock", off_s, time.monotonic() - began_s, "the log's")


async def _of_versions(connection: Connection, version: str) -> list[Finding]:
    heard: list[CoordinatorStarted] = []
    await Terms(connection, heard.append).ask()
    if not version or not heard:
        return []
    schema, theirs = spoken_schema(heard[-1].version), heard[-1].version.partition("+")[0]
    if schema < SCHEMA or theirs != version.partition("+")[0]:
        what = f"{version}, of schema {SCHEMA}; the coordinator: {theirs}, of schema {schema}"
        return [Finding("version", what, "bring both to one version (docs/operate/upgrading.md)")]
    return []


def _of_gpus(asked: Asked, seen: Seen) -> Iterator[Finding]:
    if not seen.torch:
        yield Finding("torch", "is not installed where the agent runs", "pip install the build of your machine first")
    elif seen.gpus and "+cpu" in seen.torch:
        yield Finding("torch", f"{seen.torch} computes on the CPU, and there are GPUs", "install its CUDA build")
    if seen.driver_trouble:
        what = f"does not tell of the GPUs' health: {seen.driver_trouble}"
        yield Finding("driver", what, "run nvidia-smi; after an upgrade of the driver reboot, or load its module anew")
    if seen.gpus and asked.slots > seen.gpus:
        what = f"{asked.slots} slots, but {seen.gpus} visible GPU{'s' * (seen.gpus > 1)}"
        yield Finding("--slots", what, "give a slot for each GPU, or look for GPUs that are gone (nvidia-smi)")
    elif asked.slots < seen.gpus:
        what = f"{asked.slots} slot{'s' * (asked.slots > 1)}, but {seen.gpus} visible GPUs: the others idle"
        yield Finding("--slots", what, f"give --slots {seen.gpus}, or hide the others by CUDA_VISIBLE_DEVICES")


def _of_network(asked: Asked, seen: Seen) -> Iterator[Finding]:
    if is_loopback(asked.address):
        if asked.nats_is_remote:
            what = f"{asked.address} cannot be reached by other nodes"
            yield Finding("--address", what, "give this node's address in the training network")
        return
    if seen.mtu is None:
        yield Finding("--address", f"no interface of this node has {asked.address}", "give an address that it has")
    elif seen.mtu < MTU_MIN:
        what = f"the interface of {asked.address} has an MTU of {seen.mtu}"
        yield Finding("--address", what, "raise it on the interface and the switch, or use another network")


def _of_room(asked: Asked, seen: Seen) -> Iterator[Finding]:
    if not seen.run_dir_in_memory:
        what = f"{asked.run_dir} is on a disk; marks of progress are written there many times a second"
        yield Finding("--run-dir", what, "put it on a tmpfs, such as /run/unicron")
    for flag, free_bytes in seen.free_bytes.items():
        holds_logs = flag == "--logs-dir" or asked.logs_dir == asked.run_dir
        if free_bytes < (FREE_MIN_BYTES if holds_logs else RUN_DIR_MIN_BYTES):
            yield Finding(flag, f"its volume has {free_bytes >> 20} MiB free", "make room, or give another directory")
    if seen.shm_bytes < SHM_MIN_BYTES:
        what = f"/dev/shm has {seen.shm_bytes >> 20} MiB; data loaders and NCCL need more"
        yield Finding("shared memory", what, "mount it larger (in containers: --shm-size, or an emptyDir in memory)")
    wanted = asked.memory_bytes
    if seen.container_bytes is None and wanted is not None and seen.memory_bytes and wanted > seen.memory_bytes // 2:
        what = f"{wanted >> 30} GiB for states of {seen.memory_bytes >> 30} GiB of memory"
        yield Finding("--memory-gib", what, "leave half of the host's to the training")


def _of_container(asked: Asked, seen: Seen) -> Iterator[Finding]:
    """What lies in memory counts against the container's limit, and at the limit the kernel kills."""
    if seen.container_bytes is None:
        return
    states = seen.memory_bytes // 4 if asked.memory_bytes is None else asked.memory_bytes
    parts = {"/dev/shm": seen.shm_bytes, "states": states}
    if seen.run_dir_in_memory:
        parts["run directory"] = seen.run_dir_bytes
    if sum(parts.values()) > seen.container_bytes // 2:
        told = ", ".join(f"{name} {size >> 20}" for name, size in parts.items())
        what = f"more than half of its limit of {seen.container_bytes >> 20} MiB may lie in memory ({told} MiB)"
        yield Finding("container", what, "give the volumes a sizeLimit and --memory-gib a number, or raise the limit")


def _of_rights(seen: Seen) -> Iterator[Finding]:
    if seen.limits["nofile"] < FILES_MIN:
        what = f"{seen.limits['nofile']} open files are allowed"
        yield Finding("limits", what, f"ulimit -n {FILES_MIN} or more, or LimitNOFILE= in the unit")
    if (seen.gpus or seen.has_rdma) and seen.limits["memlock"] < _FOREVER:
        what = f"{seen.limits['memlock'] >> 20} MiB may be locked; GPUs and network cards pin memory"
        yield Finding("limits", what, "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit")
    if seen.key_ends is not None and seen.key_ends < seen.now + RENEW_BEFORE:
        ended = "has ended" if seen.key_ends < seen.now else "ends"
        what = f"its certificate {ended} on {seen.key_ends:%Y-%m-%d}"
        yield Finding("--key", what, "enroll the node again (docs/operate/logins.md)")


def mtu_of(address: str) -> int | None:
    """Of the interface that has the address; None where none has it."""
    if not (interface := interface_of(address)):
        return None
    try:
        return int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    except OSError:
        return MTU_MIN  # the kernel does not say


def _is_tmpfs(path: Path) -> bool:
    """Of the mount that the path is on, or will be."""
    real, best, kind = existing(path).resolve(), "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, its_kind, *_ = line.split()
        if real.is_relative_to(place) and len(place) >= len(best):
            best, kind = place, its_kind
    return kind in ("tmpfs", "ramfs")


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def _soft(limit: int) -> int:
    soft, _ = resource.getrlimit(limit)
    return _FOREVER if soft == resource.RLIM_INFINITY else soft


def driver_version(module: Path = Path("/sys/module/nvidia/version")) -> str:
    """Of the GPUs' driver in the kernel, "" without one."""
    with contextlib.suppress(OSError):
        return module.read_text("ascii").strip()[:64]
    return ""


def version_of(package: str) -> str:
    """As it is installed, "" where it is not."""
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
    """NATS is on another machine."""
    here = ("localhost", os.uname().nodename)
    names = [urlsplit(server).hostname or "" for server in servers]
    return not all(name in here or is_loopback(name) for name in names)


def is_loopback(address: str) -> bool:
    """No other machine reaches it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
