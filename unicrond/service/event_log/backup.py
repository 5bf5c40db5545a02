"""`unicrond backup` and `unicrond restore`: all that a head needs, as files; and a head made from them.

Format
------
    DIR/archive/      the log: entries 1 to the last, in segments, with the heartbeats that prove losses
    DIR/state/        what else lies in state_dir: keys, the list of nodes, certificates
    DIR/keys/         the keys, where they lie elsewhere
    DIR/unicron.yaml, DIR/api.tokens      the configuration and the list of tokens, where there are any
    DIR/backup.json   when, of which entry, by which version; each file with its digest

Rules
-----
* A backup is taken while the coordinator runs, and appears whole or not at all. It holds secrets: mode 0700.
* Checkpoints are not in it: they lie where every node sees them.
* A restore changes nothing where a log is already. It compares every file with its digest, and reads the log through.
* The restored stream begins after the last entry of the backup; what stands before it is read from the archive. It is
  another log to the agents: they stop their workers and join again, and tasks go on from their checkpoints. So nothing
  that was decided after the backup can be taken for something that is decided now.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from unicrond import VERSION
from unicrond.events.log.event_log import LogDamaged, LogError
from unicrond.events.log.segment_writer import LOCK
from unicrond.events.log.segments import cut_torn_tail, read_entries, segment_paths
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.server import EmbeddedServer, ServerError
from unicrond.events.nats.streams import STREAM_EXISTS_WITH_OTHER_CONFIG, JetStreamError, api, event_stream_config
from unicrond.events.trust.logins import Role
from unicrond.intake.config import Config, login_as
from unicrond.service.coordinator.other_processes import sole_user
from unicrond.service.event_log import archive_command
from unicrond.service.event_log.archive_command import CONNECT_TIMEOUT_S
from unicrond.service.event_log.known_event_log import FILE, KnownLog

MANIFEST = "backup.json"
#: Left out of state_dir: the log itself, what is copied elsewhere, and locks and caches.
_NOT_STATE = {"nats", "archive", "checkpoints", "unicrond.lock", FILE}


class BackupManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a backup. `files`: path within the backup -> SHA-256. `made_at_s`: Unix time."""

    version: str
    made_at_s: int
    last_seq: int
    files: dict[str, str]


class Backup(NamedTuple):
    """A backup that was written or restored: entries 1 to `last_seq`."""

    directory: str
    last_seq: int
    files: int

    def __str__(self) -> str:
        entries = f"entries 1 to {self.last_seq}" if self.last_seq else "an empty log"
        return f"{self.directory}: {entries}, {self.files} files"


# --- to a backup ---------------------------------------------------------------------------------


def back_up(config: Config, config_path: Path | None, to: Path) -> Backup:
    """Write a backup of the running head. Raises LogError, OSError."""
    if to.exists():
        raise LogError(f"{to}: is there already; name a new directory")
    report = asyncio.run(archive_command.run(config))
    part = Path(tempfile.mkdtemp(prefix=f".{to.name}.", suffix=".part", dir=to.parent))
    try:
        for source, target in _sources(config, config_path):
            (part / target).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copyfile(source, part / target)
            (part / target).chmod(0o600)
        for segment in segment_paths(part / "archive")[-1:]:
            cut_torn_tail(segment)  # the head may be writing
        last_seq = _read_through(part / "archive", report.last_seq)
        files = {str(path.relative_to(part)): _digest(path) for path in _files(part)}
        manifest = BackupManifest(VERSION, int(time.time()), last_seq, files)
        (part / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        _make_durable(part)
        part.rename(to)
        _sync(to.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Backup(str(to), last_seq, len(files))


def _sources(config: Config, config_path: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield each file to copy, with its path in the backup."""
    state_dir, archive = Path(config.state_dir), config.archive
    for path in _files(archive):
        if path.name != LOCK:
            yield path, f"archive/{path.relative_to(archive)}"
    for top in sorted(state_dir.iterdir()):
        if top.name not in _NOT_STATE and top.resolve() != archive.resolve():
            for path in [top] if top.is_file() else _files(top):
                yield path, f"state/{path.relative_to(state_dir)}"
    if config.keys.is_dir() and not config.keys.resolve().is_relative_to(state_dir.resolve()):
        for path in _files(config.keys):
            yield path, f"keys/{path.relative_to(config.keys)}"
    if config_path is not None:
        yield config_path, "unicron.yaml"
    if config.api.tokens_file:
        yield Path(config.api.tokens_file), "api.tokens"


# --- from a backup -------------------------------------------------------------------------------


def restore(config: Config, source: Path) -> Backup:
    """Make the head of a configuration from a backup; start it afterwards. Raises LogError, OSError."""
    manifest = _verify(source)
    state_dir, archive = Path(config.state_dir), config.archive
    with ExitStack() as stack:
        if not config.nats.url:
            stack.enter_context(sole_user(state_dir))
        if _files(archive) or (state_dir / "nats" / "store").exists():
            raise LogError(f"{state_dir}: holds a log already; move it away, or set another state_dir")
        _read_through(source / "archive", manifest.last_seq)
        for begin, place in (("archive", archive), ("state", state_dir), ("keys", config.keys)):
            for path in _files(source / begin):
                target = place / path.relative_to(source / begin)
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                if target.exists() and _digest(target) != _digest(path):
                    raise LogError(f"{target}: is there already and differs from the backup's; move it away")
                shutil.copyfile(path, target)
                target.chmod(0o600)
        _make_durable(archive)
        KnownLog(state_dir).take(time.time_ns() // 1000)  # a person has chosen this log
        asyncio.run(_make_stream(config, manifest.last_seq + 1))
    return Backup(str(source), manifest.last_seq, len(manifest.files))


def _verify(source: Path) -> BackupManifest:
    """Return the manifest of a backup whose files all have the right digest. Raises LogError, LogDamaged."""
    try:
        manifest = msgspec.json.decode((source / MANIFEST).read_bytes(), type=BackupManifest)
    except FileNotFoundError:
        raise LogError(f"{source}: is no backup: it has no {MANIFEST}") from None
    except msgspec.MsgspecError as error:
        raise LogDamaged(f"{source / MANIFEST}: {error}") from None
    paths = {str(path.relative_to(source)) for path in _files(source)} - {MANIFEST}
    for name in sorted(paths ^ set(manifest.files)):
        raise LogDamaged(f"{source / name}: is {'missing' if name in manifest.files else 'not part of the backup'}")
    for name, digest in manifest.files.items():
        if _digest(source / name) != digest:
            raise LogDamaged(f"{source / name}: was changed since the backup; take another backup")
    return manifest


async def _make_stream(config: Config, first_seq: int) -> None:
    """Create the event stream, empty, so that its first entry has the number `first_seq`."""
    if config.nats.url:
        connection = await connect(
            config.nats.url, name="unicrond-restore", login=login_as(config, Role.OPERATOR), timeout_s=CONNECT_TIMEOUT_S
        )
        try:
            await _create(connection, config, first_seq)
        finally:
            await connection.close()
        return
    login = Login(user="unicrond-restore", password=secrets.token_urlsafe(24))  # for this moment
    server = EmbeddedServer(
        Path(config.state_dir) / "nats", login=login, dies_with_us=True, sha256=config.nats.server_sha256
    )
    try:
        await server.start()
        connection = await connect(server.url, name="unicrond-restore", login=login, timeout_s=CONNECT_TIMEOUT_S)
        try:
            await _create(connection, config, first_seq)
        finally:
            await connection.close()
    except ServerError as error:
        raise LogError(f"nats-server: {error}") from None
    finally:
        await server.stop()


async def _create(connection: Connection, config: Config, first_seq: int) -> None:
    ours = {**event_stream_config(config.nats.replicas), "first_seq": first_seq}
    try:
        info = await api(connection, f"STREAM.CREATE.{EVENT_STREAM}", ours)
    except JetStreamError as error:
        if error.code != STREAM_EXISTS_WITH_OTHER_CONFIG:
            raise
        raise LogError(f"{connection.urls}: has a stream {EVENT_STREAM} already; a cluster may live there") from None
    if info["state"]["last_seq"] != first_seq - 1 or info["state"]["messages"]:
        raise LogError(f"{connection.urls}: has a stream {EVENT_STREAM} already; a cluster may live there")


# --- files ---------------------------------------------------------------------------------------


def _read_through(archive: Path, last_seq: int) -> int:
    """Read the whole archive; return the number of its last entry. Raises LogDamaged where that is below `last_seq`."""
    seq = 0
    if _files(archive):
        for entry in read_entries(archive):
            seq = entry.seq
    if seq < last_seq:
        raise LogDamaged(f"{archive}: ends with entry {seq}, not {last_seq}")
    return seq


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else []


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make_durable(directory: Path) -> None:
    for path in _files(directory):
        _sync(path)
    for path in [directory, *(path for path in directory.rglob("*") if path.is_dir())]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
