"""Checkpoints: the last resort, when no replica is left that could give its state.

Rules
-----
* A checkpoint is a directory `iteration-<number>` with one file per shard of a replica and a manifest, which names
  every file with its size and blake2b. It is written under another name, synced, and renamed: a directory of that
  name is complete, or was damaged later.
* Loading takes the newest that is whole: each shard checks all sizes and its own file's digest, and the shards vote.
  A damaged one is told on stderr and passed over.
* A shard's file: magic, 8 bytes little-endian length of the skeleton, the skeleton, the tensors' bytes (`state.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from agents.trainer.state import BadState, flatten, shapes, size_bytes, tensor_bytes, tensor_of, unflatten

_MAGIC = b"unicron1"
_NAME = re.compile(r"^iteration-([0-9]{8,})$")
_DRAFT = re.compile(r"^\.draft-([0-9]{8,})-")
_MANIFEST = "manifest.json"
_DIGEST_BYTES = 32
_SIZE_BYTES = 8


class Shards(Protocol):
    """The shards of one replica, acting together (`replica.Replica`)."""

    size: int
    shard: int

    def all_true(self, value: bool) -> bool: ...

    def gather(self, row: bytes) -> list[bytes]: ...


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shard's file in a checkpoint. `blake2b`: 64 hex digits."""

    name: str
    size_bytes: int
    blake2b: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint consists of; `format` is 1."""

    format: int
    task: str
    iteration: int
    shards: tuple[ShardFile, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was written: where, and its size over all shards."""

    path: Path
    size_bytes: int


def save(
    directory: Path, task: str, iteration: int, tree: object, shards: Shards, writer: str, keep: int,
    midway: Callable[[], None] = lambda: None,
) -> Saved:  # fmt: skip
    """Write the state after `iteration`; every shard of one replica calls this with its own tree.

    `writer` (a worker's name) keeps attempts of different replicas apart. Older checkpoints than the newest `keep`
    are removed. `midway` is called when the shard's file is written and the checkpoint is not. Raises OSError.
    """
    final = directory / f"iteration-{iteration:08d}"
    draft = directory / f".draft-{iteration:08d}-{writer}"
    if shards.shard == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    shards.all_true(True)
    name = f"shard-{shards.shard}.bin"
    digest, length = _write_shard(draft / name, tree)
    midway()
    rows = shards.gather(digest + length.to_bytes(_SIZE_BYTES, "little"))
    files = tuple(
        ShardFile(f"shard-{shard}.bin", int.from_bytes(row[_DIGEST_BYTES:], "little"), row[:_DIGEST_BYTES].hex())
        for shard, row in enumerate(rows)
    )
    if shards.shard == 0:
        manifest = Manifest(format=1, task=task, iteration=iteration, shards=files)
        _write_synced(draft / _MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        _sync_directory(draft)
        _publish(draft, final)
        _sync_directory(directory)
        _remove_old(directory, keep)
    shards.all_true(True)
    return Saved(final, sum(file.size_bytes for file in files))


def load_newest(directory: Path, task: str, shards: Shards) -> dict[str, Any] | None:
    """The newest whole checkpoint's tree for this shard; None if there is none."""
    for iteration, path in _found(directory):
        try:
            tree = _load(path, task, iteration, shards)
        except (OSError, BadState, msgspec.MsgspecError) as error:
            print(f"checkpoint {path} is passed over: {error}", file=sys.stderr, flush=True)
            tree = None
        if shards.all_true(tree is not None):
            return tree
    return None


def _found(directory: Path) -> Iterator[tuple[int, Path]]:
    """Checkpoints by name, newest first."""
    if not directory.is_dir():
        return
    named = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.match(path.name))]
    yield from sorted(named, reverse=True)


def _load(path: Path, task: str, iteration: int, shards: Shards) -> dict[str, Any]:
    manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest)
    if (manifest.format, manifest.task, manifest.iteration) != (1, task, iteration):
        raise BadState(f"its manifest is of task {manifest.task}, iteration {manifest.iteration}")
    if len(manifest.shards) != shards.size:
        raise BadState(f"it has {len(manifest.shards)} shards, this task has tp * pp = {shards.size}")
    for file in manifest.shards:
        size = (path / Path(file.name).name).stat().st_size
        if size != file.size_bytes:
            raise BadState(f"{file.name} has {size} bytes, {file.size_bytes} were written")
    mine = manifest.shards[shards.shard]
    return _read_shard(path / Path(mine.name).name, mine.blake2b)


def _write_shard(path: Path, tree: object) -> tuple[bytes, int]:
    skeleton, tensors = flatten(tree)
    digest, length = blake2b(digest_size=_DIGEST_BYTES), 0
    with path.open("xb") as file:
        for part in _parts(skeleton, tensors):
            digest.update(part)
            length += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.digest(), length


def _parts(skeleton: bytes, tensors: list[torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield _MAGIC
    yield len(skeleton).to_bytes(_SIZE_BYTES, "little")
    yield skeleton
    for tensor in tensors:
        if tensor.numel():
            yield memoryview(tensor_bytes(tensor.cpu()).numpy())


def _read_shard(path: Path, expected: str) -> dict[str, Any]:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    with path.open("rb") as file:

        def read(count: int) -> bytearray:
            data = bytearray(count)
            if file.readinto(data) != count:
                raise BadState(f"{path.name} ends early")
            digest.update(data)
            return data

        if read(len(_MAGIC)) != _MAGIC:
            raise BadState(f"{path.name} is no checkpoint of this format")
        length = int.from_bytes(read(_SIZE_BYTES), "little")
        if length > path.stat().st_size:
            raise BadState(f"{path.name} announces a skeleton longer than itself")
        skeleton = bytes(read(length))
        tensors = []
        for dtype, shape in shapes(skeleton):
            data = read(size_bytes(dtype, shape))
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            tensors.append(tensor_of(flat, dtype, shape))
    if digest.hexdigest() != expected:
        raise BadState(f"{path.name} does not have the digest that its manifest names")
    tree: dict[str, Any] = unflatten(skeleton, tensors)
    return tree


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


def _remove_old(directory: Path, keep: int) -> None:
    """Keep the newest checkpoints; drafts of lower iterations were left by writers that died."""
    found = list(_found(directory))
    for _, path in found[keep:]:
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.iterdir():
        match = _DRAFT.match(path.name)
        if match and int(match[1]) < found[0][0]:
            shutil.rmtree(path, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
