"""Checkpoints on storage: the slowest source of state, and the only one that outlives all nodes.

    <dir>/iteration-00000120/manifest.json     task, iteration, generation, layout; per shard files and what lies where
    <dir>/iteration-00000120/made-with.json    which run has made it, with which settings (origins.py)
    <dir>/iteration-00000120/shard-0/          torch's distributed-checkpoint format: .metadata, __0_0.distcp

Rules
-----
* A directory `iteration-<number>` is complete, or was damaged later: it is written under another name, synced, and
  renamed by the shard that finishes last. Shards need not talk to each other: each leaves its record in the draft.
* Each shard of a replica is a checkpoint of its own, which `torch.distributed.checkpoint.load` reads; keys are paths
  in the state tree ("tensors.0.embedding...", "optimizer.state.3.exp_avg"), "skeleton" is everything but the tensors.
* Nothing that is read is executed: the manifest says where each tensor lies, torch's weights-only loader reads it.
  `.metadata`, which is a pickle, is for others.
* Sizes and blake2b of all files, and that every number is finite, are checked before a state is used.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from unicrond.agents.trainer.states import origins
from unicrond.agents.trainer.states.origins import RunOrigin
from unicrond.agents.trainer.states.state import BadState, flatten, shapes, unflatten
from unicrond.agents.trainer.states.state_bytes import check, named_tensors
from unicrond.events.vocabulary.shape import Shape

FORMAT = 3
_NAME = re.compile(r"^iteration-([0-9]{8,})$")
_DRAFT = re.compile(r"^\.draft-([0-9]{8,})-")
_MANIFEST = "manifest.json"
_SKELETON = "skeleton"
_CHUNK_BYTES = 1 << 20


class TensorLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The place of one tensor: a file of the shard, offset and length in bytes; a stream of torch.save."""

    file: str
    offset: int
    length: int


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file, relative to the checkpoint's directory. `blake2b`: 64 hex digits."""

    name: str
    size_bytes: int
    blake2b: str


class ShardRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shard's files, and the places of its skeleton and of its tensors in the skeleton's order."""

    files: tuple[File, ...]
    skeleton: TensorLocation
    tensors: tuple[TensorLocation, ...]


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The list of what a checkpoint consists of."""

    format: int
    task: str
    iteration: int
    generation: int
    tp: int
    pp: int
    shards: tuple[ShardRecord, ...]
    vpp: int = 1
    ep: int = 1

    @property
    def layout(self) -> Shape:
        """Return the replica's layout."""
        return Shape(self.tp, self.pp, self.vpp, self.ep)

    @property
    def size_bytes(self) -> int:
        """Return the size of all files of all shards."""
        return sum(file.size_bytes for record in self.shards for file in record.files)


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that was written: where, and its size over all shards."""

    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WriteJob:
    """A checkpoint to write, of which this process writes `shard` of a replica in `layout`. `writer` keeps the drafts
    of different attempts apart and is the same for all shards of one. `origin`: of the state; None: it has none."""

    directory: Path
    task: str
    iteration: int
    generation: int
    shard: int
    layout: Shape
    writer: str
    keep: int
    origin: RunOrigin | None = None


def write(job: WriteJob, tree: object, midway: Callable[[], None] = lambda: None) -> WrittenCheckpoint | None:
    """Write this shard's part; the shard that comes last publishes, and is the one that gets a result.

    Needs no communication, so any thread may do it. Removes checkpoints older than the newest `keep`. `midway` is
    called when this shard's files are written and nothing is published. Raises OSError.
    """
    final = path_of(job.directory, job.iteration)
    draft = job.directory / f".draft-{job.iteration:08d}-{job.writer}"
    draft.mkdir(parents=True, exist_ok=True)
    record = _write_shard(draft, job.shard, tree)
    midway()
    _write_synced(draft / f"shard-{job.shard}.json", msgspec.json.encode(record))
    records = [_record(draft, shard) for shard in range(job.layout.workers)]
    if any(shard_record is None for shard_record in records) or not _is_publisher(draft):
        return None
    manifest = CheckpointManifest(
        format=FORMAT,
        task=job.task,
        iteration=job.iteration,
        generation=job.generation,
        tp=job.layout.tp,
        pp=job.layout.pp,
        vpp=job.layout.vpp,
        ep=job.layout.ep,
        shards=tuple(shard_record for shard_record in records if shard_record is not None),
    )
    _write_synced(draft / _MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    if job.origin is not None:
        _write_synced(draft / origins.FILE, msgspec.json.encode(job.origin.stored()))
        origins.put_aside(job.directory, _own_checkpoints(job.directory, job.task), job.origin.start, job.iteration)
    _sync(draft)
    _publish(draft, final)
    _sync(job.directory)
    _remove_old(job.directory, job.task, job.keep, final)
    return WrittenCheckpoint(final, manifest.size_bytes)


def path_of(directory: Path, iteration: int) -> Path:
    """Return the directory of the checkpoint after `iteration`."""
    return directory / f"iteration-{iteration:08d}"


def manifest_of(path: Path) -> CheckpointManifest:
    """Return the manifest of the checkpoint in this directory. Raises OSError, BadState."""
    match = _NAME.match(path.name)
    if match is None:
        raise BadState("is no checkpoint's directory (iteration-<number>)")
    try:
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=CheckpointManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadState(f"{_MANIFEST}: {error}") from None
    return _manifest(path, manifest.task, int(match[1]))


def newest_iterations(directory: Path, task: str, origin: RunOrigin | None = None) -> dict[int, Shape]:
    """Return the layout of each checkpoint that looks whole (manifest and sizes) by iteration, newest first; print the
    others to stderr. `origin`: leave out what its run may not look at."""
    layouts = {}
    for iteration, path in _list_checkpoints(directory):
        try:
            manifest = _manifest(path, task, iteration)
            if origin is None or origin.is_wanted(origins.origin_of(path)):
                layouts[iteration] = manifest.layout
        except (OSError, BadState) as error:
            print(f"skipping checkpoint {path}: {error}", file=sys.stderr, flush=True)
    return layouts


def fork(source: Path, source_task: str, directory: Path, task: str, origin: RunOrigin) -> None:
    """Give `task` a copy of the newest whole checkpoint of another task, as one of its own run, unless it has any.
    Raises OSError, OtherSettings where there is none, or where those that it has are all damaged."""
    if newest_iterations(directory, task, origin):
        return
    for _, path in _list_checkpoints(directory):
        if origin.is_wanted(origins.origin_of(path)):
            raise origins.OtherSettings(
                f"{path} of task {task} is damaged or cannot be read, and the task has no whole checkpoint; submit it "
                f"with --fork again to begin from task {source_task} once more"
            )
    iteration = max(newest_iterations(source, source_task), default=0)
    if not iteration:
        raise origins.OtherSettings(
            f"task {task} was submitted with --fork of task {source_task}, and {source} holds no whole checkpoint of "
            "it; wait for one, or submit it without --fork"
        )
    newest = path_of(source, iteration)
    manifest = msgspec.structs.replace(_manifest(newest, source_task, iteration), task=task)
    directory.mkdir(parents=True, exist_ok=True)
    origins.put_aside(directory, _own_checkpoints(directory, task), origin.start, iteration)
    texts = {_MANIFEST: msgspec.json.encode(manifest), origins.FILE: msgspec.json.encode(origin.present())}
    _copy(newest, path_of(directory, iteration), texts)


def load(directory: Path, task: str, iteration: int, shard: int) -> tuple[dict[str, Any], int]:
    """Load one shard's tree; return it and the bytes that were read. Raises OSError, BadState."""
    path = path_of(directory, iteration)
    manifest = _manifest(path, task, iteration)
    if shard >= len(manifest.shards):
        raise BadState(f"it has {len(manifest.shards)} shards, and none of number {shard}")
    record = manifest.shards[shard]
    for file in record.files:
        if _digest(path / file.name) != file.blake2b:
            raise BadState(f"{file.name} does not have the digest that the manifest names")
    skeleton = bytes(_read(path, record.skeleton).tolist())
    expected = shapes(skeleton)
    tensors = [_read(path, place) for place in record.tensors]
    if expected != [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]:
        raise BadState("the tensors differ from those that the skeleton names")
    return check(unflatten(skeleton, tensors)), sum(file.size_bytes for file in record.files)


# --- reading -------------------------------------------------------------------------------------


def _list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """List the checkpoints by name, newest first."""
    if not directory.is_dir():
        return []
    matches = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.match(path.name))]
    return sorted(matches, reverse=True)


def _own_checkpoints(directory: Path, task: str) -> list[tuple[int, Path]]:
    """List the same without those of other tasks; a damaged one counts as the task's own."""
    return [(iteration, path) for iteration, path in _list_checkpoints(directory) if _task_of(path) in ("", task)]


def _task_of(path: Path) -> str:
    try:
        return msgspec.json.decode((path / _MANIFEST).read_bytes(), type=CheckpointManifest).task
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return ""


def _manifest(path: Path, task: str, iteration: int) -> CheckpointManifest:
    content = (path / _MANIFEST).read_bytes()
    try:
        manifest = msgspec.json.decode(content, type=CheckpointManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise BadState(f"{_MANIFEST}: {error}") from None
    if (manifest.format, manifest.task, manifest.iteration) != (FORMAT, task, iteration):
        raise BadState(f"its manifest is of task {manifest.task}, iteration {manifest.iteration}")
    if len(manifest.shards) != manifest.tp * manifest.pp:
        raise BadState(f"it has {len(manifest.shards)} shards, of tp * pp = {manifest.tp} * {manifest.pp}")
    for number, record in enumerate(manifest.shards):
        for file in record.files:
            if Path(file.name).parts[:-1] != (f"shard-{number}",) or "\0" in file.name:
                raise BadState(f"its manifest names {file.name!r}, which is not a file of shard {number}")
            size = (path / file.name).stat().st_size
            if size != file.size_bytes:
                raise BadState(f"{file.name} has {size} bytes instead of {file.size_bytes}")
        sizes = {file.name: file.size_bytes for file in record.files}
        for place in (record.skeleton, *record.tensors):
            if place.offset < 0 or place.length < 0 or place.offset + place.length > sizes.get(place.file, -1):
                raise BadState(f"its manifest places a tensor outside of {place.file}")
    return manifest


def _read(path: Path, place: TensorLocation) -> torch.Tensor:
    with (path / place.file).open("rb") as file:
        file.seek(place.offset)
        data = file.read(place.length)
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load names no types
        raise BadState(f"{place.file}, byte {place.offset}: not a tensor: {error}") from None
    if not isinstance(tensor, torch.Tensor):
        raise BadState(f"{place.file}, byte {place.offset}: no tensor")
    return tensor


def _digest(path: Path) -> str:
    digest = blake2b(digest_size=32)
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


# --- writing -------------------------------------------------------------------------------------


def _write_shard(draft: Path, shard: int, tree: object) -> ShardRecord:
    skeleton, tensors = flatten(tree)
    keys = [name for name, _ in named_tensors(tree)]
    if len(set(keys)) != len(keys) or _SKELETON in keys:
        raise BadState("two tensors of the state have the same path")
    entries = {key: tensor.cpu() for key, tensor in zip(keys, tensors, strict=True)}
    entries[_SKELETON] = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)
    directory = draft / f"shard-{shard}"
    shutil.rmtree(directory, ignore_errors=True)
    places = _write_distributed_format(directory, entries)
    _sync(directory)
    files = tuple(
        File(f"{directory.name}/{path.name}", path.stat().st_size, _digest(path))
        for path in sorted(directory.iterdir())
    )
    return ShardRecord(files, places[_SKELETON], tuple(places[key] for key in keys))


def _write_distributed_format(directory: Path, entries: Mapping[str, torch.Tensor]) -> dict[str, TensorLocation]:
    """Write what `torch.distributed.checkpoint.save` does for a single process; return where each entry was put."""
    writer, planner = FileSystemWriter(directory), DefaultSavePlanner()
    writer.reset()
    writer.set_up_storage_writer(True)
    planner.set_up_planner(dict(entries), writer.storage_meta(), True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
    return {
        result.index.fqn: TensorLocation(
            f"{directory.name}/{result.storage_data.relative_path}",
            result.storage_data.offset,
            result.storage_data.length,
        )
        for result in results
    }


def _record(draft: Path, shard: int) -> ShardRecord | None:
    try:
        return msgspec.json.decode((draft / f"shard-{shard}.json").read_bytes(), type=ShardRecord)
    except FileNotFoundError:
        return None


def _is_publisher(draft: Path) -> bool:
    """Return True to exactly one of the callers."""
    try:
        os.close(os.open(draft / ".publisher", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:  # it is there, or the draft has its final name already
        return False
    return True


def _publish(draft: Path, final: Path) -> None:
    """Give the draft its name. Where a checkpoint of that name stands (an earlier run's), the new one replaces it."""
    try:
        draft.rename(final)
    except OSError:
        old = draft.with_name(draft.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        draft.rename(final)
        shutil.rmtree(old, ignore_errors=True)


def _copy(source: Path, final: Path, texts: Mapping[str, bytes]) -> None:
    """Publish a copy of the checkpoint `source`, with other contents for the files in `texts`."""
    prefix = f".draft-{final.name.removeprefix('iteration-')}-fork-"
    draft = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    shutil.copytree(source, draft, copy_function=_link, ignore=shutil.ignore_patterns(*texts), dirs_exist_ok=True)
    for name, content in texts.items():
        _write_synced(draft / name, content)
    for path in (*draft.iterdir(), draft):
        if path.is_dir():
            _sync(path)
    try:
        draft.rename(final)
    except OSError:  # another attempt has been quicker
        if not final.is_dir():
            raise
        shutil.rmtree(draft, ignore_errors=True)
    _sync(final.parent)


def _link(source: str, target: str) -> None:
    """Give a file of a checkpoint, which is never written again, a second name; copy it where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        _sync(Path(target))


def _remove_old(directory: Path, task: str, keep: int, final: Path) -> None:
    """Keep the task's newest checkpoints, and `final`, which is the last word even where newer ones could not be put
    aside; drafts of lower iterations were left by writers that died."""
    checkpoints = _own_checkpoints(directory, task)
    for _, path in checkpoints[keep:]:
        if path != final:
            shutil.rmtree(path, ignore_errors=True)
    for path in directory.iterdir():
        match = _DRAFT.match(path.name)
        if match and int(match[1]) < checkpoints[0][0]:
            shutil.rmtree(path, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    """Write the file under another name first, so that a file under its own name is complete."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
