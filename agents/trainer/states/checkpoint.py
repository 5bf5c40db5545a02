"""Checkpoints on storage: the slowest source of state, and the only one that outlives all nodes.

    <dir>/iteration-00000120/manifest.json     task, iteration, generation, layout; per shard files and what lies where
    <dir>/iteration-00000120/made-with.json    which run has made it, with which settings (origins.py)
    <dir>/iteration-00000120/shard-0/          torch's distributed-checkpoint format: .metadata, __0_0.distcp

<dir> is a directory or a prefix of an object store (`places.py`), where all but the manifest are in a folder of the
attempt's.

Rules
-----
* A checkpoint `iteration-<number>` is complete, or was damaged later: it is published by the shard that finishes last.
  Shards need not talk to each other: each leaves its record in the draft.
* Each shard of a replica is a checkpoint of its own, which `torch.distributed.checkpoint.load` reads; keys are paths
  in the state tree ("tensors.0.embedding...", "optimizer.state.3.exp_avg"), "skeleton" is everything but the tensors.
* Nothing that is read is executed: the manifest says where each tensor lies, torch's weights-only loader reads it.
  `.metadata`, which is a pickle, is for others.
* Sizes and blake2b of all files, and that every number is finite, are checked before a state is used.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch

from unicrond.agents.trainer.states import origins
from unicrond.agents.trainer.states.distributed_format import (
    Reader,
    TensorLocation,
    read_tensor,
    write_distributed_format,
)
from unicrond.agents.trainer.states.origins import RunOrigin
from unicrond.agents.trainer.states.places import FOLDER, MANIFEST, NAME, StatePlace, name_of, place_of
from unicrond.agents.trainer.states.state import BadState, flatten, shapes, unflatten
from unicrond.agents.trainer.states.state_bytes import check, named_tensors
from unicrond.events.vocabulary.shape import Shape

FORMAT = 3
_SKELETON = "skeleton"
_CHUNK_BYTES = 1 << 20
_DIFFERENT = "the tensors differ from those that the skeleton names"


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


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The list of what a checkpoint consists of. `folder`: of the checkpoint's, which has the files; "": its own."""

    format: int
    task: str
    iteration: int
    generation: int
    tp: int
    pp: int
    shards: tuple[ShardRecord, ...]
    vpp: int = 1
    ep: int = 1
    folder: str = ""
    cp: int = 1
    etp: int = 0

    @property
    def layout(self) -> Shape:
        """Return the replica's layout."""
        return Shape(self.tp, self.pp, self.vpp, self.ep, cp=self.cp, etp=self.etp)

    @property
    def size_bytes(self) -> int:
        """Return the size of all files of all shards."""
        return sum(file.size_bytes for record in self.shards for file in record.files)


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that was written: its path or URL, and its size over all shards."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WriteJob:
    """A checkpoint to write, of which this process writes `shard` of a replica in `layout`. `writer` keeps the drafts
    of different attempts apart and is the same for all shards of one. `origin`: of the state; None: it has none.
    `replaces`: the writer of an attempt that has ended on all shards, and whose draft is removed first; "": none."""

    directory: str | Path
    task: str
    iteration: int
    generation: int
    shard: int
    layout: Shape
    writer: str
    keep: int
    origin: RunOrigin | None = None
    replaces: str = ""

    def attempt(self, writer: str) -> str:
        """Return the name of a writer's draft."""
        run_id = self.origin.start.run_id if self.origin is not None else ""
        return f"{run_id}-{writer}".strip("-")


def write(
    job: WriteJob, tree: object, midway: Callable[[], None] = lambda: None, content: Reader | None = None
) -> WrittenCheckpoint | None:
    """Write this shard's part; the shard that comes last publishes, and is the one that gets a result.

    Needs no communication, so any thread may do it. Removes checkpoints older than the newest `keep`. `midway` is
    called when this shard's files are written and nothing is published; what it raises ends the attempt. `content`
    gives tensors that are on the meta device in the tree, each when it is written. Raises OSError.
    """
    place = place_of(job.directory)
    if job.replaces:
        place.remove_draft(job.iteration, job.attempt(job.replaces))
    draft, folder = place.draft(job.iteration, job.attempt(job.writer))
    record = _write_shard(place, draft, job.shard, tree, content)
    midway()
    place.write(f"{draft}/shard-{job.shard}.json", msgspec.json.encode(record))
    records = [_record(place, draft, shard) for shard in range(job.layout.workers)]
    if any(shard_record is None for shard_record in records):
        return None
    if not place.claim(f"{draft}/publisher", f"shard-{job.shard}"):
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
        cp=job.layout.cp,
        etp=job.layout.etp,
        shards=tuple(shard_record for shard_record in records if shard_record is not None),
        folder=folder,
    )
    if damage := _damage(place, draft, manifest):  # a write that was late, and others have taken its draft for dead
        raise OSError(f"{place.path_of(draft)}: {damage}")
    texts = {MANIFEST: msgspec.json.format(msgspec.json.encode(manifest))}
    if job.origin is not None:
        texts[origins.FILE] = msgspec.json.encode(job.origin.stored())
        origins.put_aside(place, _own_checkpoints(place, job.task), job.origin.start, job.iteration)
    place.publish(draft, job.iteration, texts)
    _remove_old(place, job.task, job.keep, job.iteration)
    return WrittenCheckpoint(place.path_of(name_of(job.iteration)), manifest.size_bytes)


def split(path: str) -> tuple[str, int]:
    """Return the directory or URL and the iteration of a checkpoint's path. Raises BadState."""
    directory, _, name = path.rstrip("/").rpartition("/")
    match = NAME.match(name)
    if match is None:
        raise BadState("is no checkpoint's directory (iteration-<number>)")
    return directory or ".", int(match[1])


def manifest_of(path: str) -> CheckpointManifest:
    """Return the manifest of the checkpoint at this path or URL. Raises OSError, BadState."""
    directory, iteration = split(path)
    place = place_of(directory)
    try:
        content = place.content(f"{name_of(iteration)}/{MANIFEST}")
        manifest = msgspec.json.decode(content, type=CheckpointManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadState(f"{MANIFEST}: {error}") from None
    return _manifest(place, manifest.task, iteration)


def newest_iterations(directory: str | Path, task: str, origin: RunOrigin | None = None) -> dict[int, Shape]:
    """Return the layout of each checkpoint that looks whole (manifest and sizes) by iteration, newest first; print the
    others to stderr. `origin`: leave out what its run may not look at."""
    place, layouts = place_of(directory), {}
    for iteration in place.iterations():
        try:
            manifest = _manifest(place, task, iteration)
            if origin is None or origin.is_wanted(origins.origin_of(place, iteration)):
                layouts[iteration] = manifest.layout
        except (OSError, BadState) as error:
            path = place.path_of(name_of(iteration))
            print(f"skipping checkpoint {path}: {error}", file=sys.stderr, flush=True)
    return layouts


def fork(source: str | Path, source_task: str, directory: str | Path, task: str, origin: RunOrigin) -> None:
    """Give `task` a copy of the newest whole checkpoint of another task, as one of its own run, unless it has any.
    Raises OSError, OtherSettings where there is none, or where those that it has are all damaged."""
    if newest_iterations(directory, task, origin):
        return
    place, source_place = place_of(directory), place_of(source)
    for iteration in place.iterations():
        if origin.is_wanted(origins.origin_of(place, iteration)):
            raise origins.OtherSettings(
                f"{place.path_of(name_of(iteration))} of task {task} is damaged or cannot be read, and the task has no "
                f"whole checkpoint; submit it with --fork again to begin from task {source_task} once more"
            )
    iteration = max(newest_iterations(source, source_task), default=0)
    if not iteration:
        raise origins.OtherSettings(
            f"task {task} was submitted with --fork of task {source_task}, and {source} holds no whole checkpoint of "
            "it; wait for one, or submit it without --fork"
        )
    manifest = _manifest(source_place, source_task, iteration)
    draft, folder = place.draft(iteration, f"fork-{secrets.token_hex(4)}")
    origins.put_aside(place, _own_checkpoints(place, task), origin.start, iteration)
    for number, record in enumerate(manifest.shards):
        with _files(source_place, manifest, record) as files, place.workspace(f"{draft}/shard-{number}") as shard:
            for file in record.files:
                _link(str(files / file.name), str(shard / Path(file.name).name))
    manifest = msgspec.structs.replace(manifest, task=task, folder=folder)
    texts = {MANIFEST: msgspec.json.encode(manifest), origins.FILE: msgspec.json.encode(origin.present())}
    place.publish(draft, iteration, texts, replace=False)


class OpenShard:
    """Give the tree of one shard, with its tensors on the meta device, and reads these one by one. `size_bytes`: of its
    files."""

    def __init__(self, path: Path, record: ShardRecord) -> None:
        self._path = path
        skeleton = bytes(read_tensor(path, record.skeleton).tolist())
        self._kinds, locations = shapes(skeleton), record.tensors
        if len(self._kinds) != len(locations):
            raise BadState(_DIFFERENT)
        empty = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in self._kinds]
        self._skeleton, self.tree = skeleton, unflatten(skeleton, empty)
        self._numbers = {name: number for number, (name, _) in enumerate(named_tensors(self.tree))}
        self._locations = locations
        self.size_bytes = sum(file.size_bytes for file in record.files)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of this path. Raises OSError, BadState."""
        return self._read(self._numbers[name])

    def whole(self) -> dict[str, Any]:
        """Return the tree with all its tensors. Raises OSError, BadState."""
        return check(unflatten(self._skeleton, [self._read(number) for number in range(len(self._kinds))]))

    def _read(self, number: int) -> torch.Tensor:
        tensor = read_tensor(self._path, self._locations[number])
        if self._kinds[number] != (tensor.dtype, tuple(tensor.shape)):
            raise BadState(_DIFFERENT)
        return tensor


def load(directory: str | Path, task: str, iteration: int, shard: int) -> tuple[dict[str, Any], int]:
    """Load one shard's tree; return it and the bytes that were read. Raises OSError, BadState."""
    with opened(directory, task, iteration, shard) as stored:
        return stored.whole(), stored.size_bytes


@contextmanager
def opened(directory: str | Path, task: str, iteration: int, shard: int) -> Iterator[OpenShard]:
    """Enter with one shard, whose files have the digests that the manifest names. Raises OSError, BadState."""
    place = place_of(directory)
    manifest = _manifest(place, task, iteration)
    if shard >= len(manifest.shards):
        raise BadState(f"it has {len(manifest.shards)} shards, and none of number {shard}")
    record = manifest.shards[shard]
    with _files(place, manifest, record) as path:
        for file in record.files:
            if _digest(path / file.name) != file.blake2b:
                raise BadState(f"{file.name} does not have the digest that the manifest names")
        yield OpenShard(path, record)


# --- reading -------------------------------------------------------------------------------------


def _own_checkpoints(place: StatePlace, task: str) -> list[int]:
    """List the checkpoints, newest first, without those of other tasks; a damaged one counts as the task's own."""
    return [iteration for iteration in place.iterations() if _task_of(place, iteration) in ("", task)]


def _task_of(place: StatePlace, iteration: int) -> str:
    try:
        return msgspec.json.decode(place.content(f"{name_of(iteration)}/{MANIFEST}"), type=CheckpointManifest).task
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return ""


def _files(place: StatePlace, manifest: CheckpointManifest, record: ShardRecord) -> Any:
    """Enter with a path that has a shard's files, by the names that its record gives them."""
    return place.files(_folder(manifest), [file.name for file in record.files])


def _folder(manifest: CheckpointManifest) -> str:
    return f"{name_of(manifest.iteration)}/{manifest.folder}".rstrip("/")


def _manifest(place: StatePlace, task: str, iteration: int) -> CheckpointManifest:
    content = place.content(f"{name_of(iteration)}/{MANIFEST}")
    try:
        manifest = msgspec.json.decode(content, type=CheckpointManifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise BadState(f"{MANIFEST}: {error}") from None
    if (manifest.format, manifest.task, manifest.iteration) != (FORMAT, task, iteration):
        raise BadState(f"its manifest is of task {manifest.task}, iteration {manifest.iteration}")
    if min(*manifest.layout[:4], manifest.cp) < 1 or manifest.etp < 0:
        raise BadState(f"its manifest has a layout that there is not: {manifest.layout}")
    if len(manifest.shards) != (size := manifest.layout.workers):
        raise BadState(f"it has {len(manifest.shards)} shards, of {size} ({manifest.layout})")
    if not FOLDER.fullmatch(manifest.folder):
        raise BadState(f"its manifest names {manifest.folder!r}, which is no folder of an attempt")
    for number, record in enumerate(manifest.shards):
        for file in record.files:
            if Path(file.name).parts[:-1] != (f"shard-{number}",) or "\0" in file.name:
                raise BadState(f"its manifest names {file.name!r}, which is not a file of shard {number}")
        sizes = {file.name: file.size_bytes for file in record.files}
        for location in (record.skeleton, *record.tensors):
            end = location.offset + location.length
            if location.offset < 0 or location.length < 0 or end > sizes.get(location.file, -1):
                raise BadState(f"its manifest places a tensor outside of {location.file}")
    if damage := _damage(place, _folder(manifest), manifest):
        raise BadState(damage)
    return manifest


def _damage(place: StatePlace, folder: str, manifest: CheckpointManifest) -> str:
    """Return which file of a checkpoint, or of its draft, has another size than it was written with; "" for none."""
    sizes_bytes = place.sizes_bytes(folder)
    for record in manifest.shards:
        for file in record.files:
            size_bytes = sizes_bytes.get(file.name)
            if size_bytes is None:
                return f"{file.name} is missing"
            if size_bytes != file.size_bytes:
                return f"{file.name} has {size_bytes} bytes instead of {file.size_bytes}"
    return ""


def _digest(path: Path) -> str:
    digest = blake2b(digest_size=32)
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


# --- writing -------------------------------------------------------------------------------------


def _write_shard(place: StatePlace, draft: str, shard: int, tree: object, content: Reader | None) -> ShardRecord:
    skeleton, tensors = flatten(tree)
    keys = [name for name, _ in named_tensors(tree)]
    if len(set(keys)) != len(keys) or _SKELETON in keys:
        raise BadState("two tensors of the state have the same path")
    pairs = zip(keys, tensors, strict=True)
    entries = {key: tensor if tensor.is_meta and content is not None else tensor.cpu() for key, tensor in pairs}
    entries[_SKELETON] = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)
    name = f"shard-{shard}"
    with place.workspace(f"{draft}/{name}") as directory:
        locations = write_distributed_format(directory, name, entries, content)
        files = tuple(
            File(f"{name}/{path.name}", path.stat().st_size, _digest(path)) for path in sorted(directory.iterdir())
        )
    return ShardRecord(files, locations[_SKELETON], tuple(locations[key] for key in keys))


def _record(place: StatePlace, draft: str, shard: int) -> ShardRecord | None:
    try:
        return msgspec.json.decode(place.content(f"{draft}/shard-{shard}.json"), type=ShardRecord)
    except FileNotFoundError:
        return None


def _link(source: str, target: str) -> None:
    """Give a file of a checkpoint, which is never written again, a second name; copy it where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        with Path(target).open("rb") as file:
            os.fsync(file.fileno())


def _remove_old(place: StatePlace, task: str, keep: int, final: int) -> None:
    """Keep the task's newest checkpoints that look whole, those that are damaged and newer, and `final`, which is the
    last word even where newer ones could not be put aside; drafts of lower iterations were left by writers that
    died."""
    iterations = _own_checkpoints(place, task)
    whole = list(islice((iteration for iteration in iterations if _is_whole(place, task, iteration)), keep))
    for iteration in iterations:
        if len(whole) == keep and iteration < whole[-1] and iteration != final:
            place.remove(iteration)
    place.remove_drafts(final)


def _is_whole(place: StatePlace, task: str, iteration: int) -> bool:
    try:
        return bool(_manifest(place, task, iteration))
    except (OSError, BadState):
        return False
