"""Hugging Face's safetensors: files that hold tensors, and nothing that could be executed.

Rules
-----
* Where a model takes more than `SHARD_BYTES`, it is in several files, and an index says which tensor is in which. One
  file at a time is in memory.
* What is read was written by others: the package checks the files, and the index is checked here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from unicrond.agents.trainer.states.state import BadState

SHARD_BYTES = 5_000_000_000
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class _Index(msgspec.Struct, frozen=True):
    """The file of each tensor."""

    weight_map: dict[str, str]


# --- reading -------------------------------------------------------------------------------------


class TensorFiles:
    """Read the tensors of a model in `directory`; `tensors`: on the meta device, by name. Raises OSError, BadState."""

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._files: dict[str, Any] = {}  # by tensor
        for name in _files_in(directory):
            self._open(directory / name)

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise BadState(f"{path.name}: it is not a safetensors file, or torn; fetch it again ({error})") from None
        for name in file.keys():  # noqa: SIM118, no mapping
            tensor = file.get_slice(name)
            if tensor.get_dtype() not in _DTYPES:
                raise BadState(f"{path.name}: {name}: dtype {tensor.get_dtype()} cannot be converted; cast the model")
            if name in self.tensors:
                raise BadState(f"{path.name}: {name} is in two files")
            self.tensors[name] = torch.empty(tensor.get_shape(), dtype=_DTYPES[tensor.get_dtype()], device="meta")
            self._files[name] = file

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self._files[name].get_tensor(name)


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
            raise BadState(f"{INDEX}: {name!r} has to be the name of a file in the same directory")
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
        if files[-1].tensors and files[-1].size_bytes + tensor.nbytes > shard_bytes:
            files.append(_File())
        files[-1].tensors[name] = tensor
        files[-1].size_bytes += tensor.nbytes
    places: dict[str, str] = {}
    for number, file in enumerate(files, start=1):
        path = directory / (FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors")
        places |= dict.fromkeys(file.tensors, path.name)
        # Each has memory of its own: parts of one tensor share theirs, which the package refuses.
        copies = {name: next(contents).clone(memory_format=torch.contiguous_format) for name in file.tensors}
        try:
            save_file(copies, path, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from None
        with path.open("rb+") as handle:
            os.fsync(handle.fileno())
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(file.size_bytes for file in files)}, "weight_map": places}
        (directory / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)) + b"\n")
