"""Hugging Face's safetensors: files that hold tensors, and nothing that could be executed.

    8 bytes little-endian length of the header, the header in JSON (dtype, shape and place of each tensor), the tensors

Rules
-----
* Written and read here tensor by tensor; the package `safetensors` takes all tensors of a file at once.
* Where a model takes more than `SHARD_BYTES`, it is in several files, and an index says which tensor is in which.
* What is read was written by others: the header's lengths, places and names are checked before they are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from unicrond.agents.trainer.states.state import BadState, size_bytes, tensor_bytes

SHARD_BYTES = 5_000_000_000
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_MAX_BYTES = 100_000_000
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"


class _Entry(msgspec.Struct, frozen=True):
    """A tensor of a file. `data_offsets`: where it begins and ends, in bytes behind the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    """The file of each tensor."""

    weight_map: dict[str, str]


# --- reading -------------------------------------------------------------------------------------


class TensorFiles:
    """Read the tensors of a model in `directory`; `tensors`: on the meta device, by name. Raises OSError, BadState."""

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for name in _files_in(directory):
            self._open(directory / name)

    def _open(self, path: Path) -> None:
        total_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(total_bytes - 8, _HEADER_MAX_BYTES):
                raise BadState(f"{path.name}: it is not a safetensors file, or torn")
            header = file.read(length)
        try:
            fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            fields.pop(_METADATA, None)
            entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items()}
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadState(f"{path.name}: header: {error}") from None
        for name, entry in entries.items():
            begin, end = entry.data_offsets
            if entry.dtype not in _DTYPES:
                raise BadState(f"{path.name}: {name}: dtype {entry.dtype} cannot be converted; cast the model first")
            dtype = _DTYPES[entry.dtype]
            if min(entry.shape, default=0) < 0 or end - begin != size_bytes(dtype, entry.shape):
                raise BadState(f"{path.name}: {name}: {end - begin} bytes are no {entry.dtype} of {entry.shape}")
            if begin < 0 or 8 + length + end > total_bytes:
                raise BadState(f"{path.name}: {name} ends behind the file, which is torn; fetch it again")
            if name in self.tensors:
                raise BadState(f"{path.name}: {name} is in two files")
            self.tensors[name] = torch.empty(entry.shape, dtype=dtype, device="meta")
            self._places[name] = (path, 8 + length + begin)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor. Raises OSError, BadState."""
        (path, begin), like = self._places[name], self.tensors[name]
        content = bytearray(like.nbytes)
        with path.open("rb") as file:
            file.seek(begin)
            if file.readinto(content) != len(content):
                raise BadState(f"{path.name}: {name} is torn")
        flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return flat.view(like.dtype).reshape(like.shape)


def _files_in(directory: Path) -> list[str]:
    index = directory / INDEX
    if not index.is_file():
        if (directory / FILE).is_file():
            return [FILE]
        hint = "; files of pickle (pytorch_model.bin) are not read" if any(directory.glob("*.bin")) else ""
        raise BadState(f"{directory} has neither {FILE} nor {INDEX}{hint}")
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadState(f"{INDEX}: {error}") from None
    for name in names:
        if Path(name).name != name or "\0" in name:
            raise BadState(f"{INDEX}: {name!r} is no file beside it")
        if not (directory / name).is_file():
            raise BadState(f"{INDEX}: {name} is missing; fetch it")
    return sorted(names)


# --- writing -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _File:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    size_bytes: int = 0


def write(
    directory: Path, tensors: Mapping[str, torch.Tensor], contents: Iterator[torch.Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Write a model. `tensors`: names, dtypes and shapes, on the meta device; `contents`: the tensors, in that order.
    Raises OSError, BadState."""
    files = [_File()]
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise BadState(f"{name}: safetensors has no dtype {tensor.dtype}")
        if files[-1].tensors and files[-1].size_bytes + tensor.nbytes > shard_bytes:
            files.append(_File())
        files[-1].tensors[name] = tensor
        files[-1].size_bytes += tensor.nbytes
    names = [FILE] if len(files) == 1 else [f"model-{n:05}-of-{len(files):05}.safetensors" for n in _numbers(files)]
    for name, file in zip(names, files, strict=True):
        with (directory / name).open("wb") as handle:
            handle.write(_header(file.tensors))
            for key, like in file.tensors.items():
                _append(handle, key, like, next(contents))
            handle.flush()
            os.fsync(handle.fileno())
    if len(files) > 1:
        places = {key: name for name, file in zip(names, files, strict=True) for key in file.tensors}
        index = {"metadata": {"total_size": sum(file.size_bytes for file in files)}, "weight_map": places}
        (directory / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)) + b"\n")


def _numbers(files: Sequence[_File]) -> range:
    return range(1, len(files) + 1)


def _append(handle: BinaryIO, name: str, like: torch.Tensor, tensor: torch.Tensor) -> None:
    if (tensor.dtype, tensor.shape) != (like.dtype, like.shape):
        raise BadState(f"{name}: it is {tuple(tensor.shape)} {tensor.dtype}, and was to be {tuple(like.shape)}")
    handle.write(memoryview(tensor_bytes(tensor).numpy()))


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    fields: dict[str, Any] = {_METADATA: {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        fields[name] = _Entry(_NAMES[tensor.dtype], tuple(tensor.shape), (begin, end))
        begin = end
    header = msgspec.json.encode(fields)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
