"""torch's distributed-checkpoint format: one process writes a folder of it, tensor by tensor, and reads a tensor by its
place. What a checkpoint consists of: `checkpoint.py`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from unicrond.agents.trainer.states.state import BadState

#: Returns a tensor by its name.
Reader: TypeAlias = Callable[[str], torch.Tensor]


class TensorLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The place of one tensor: a file of the shard, offset and length in bytes; a stream of torch.save."""

    file: str
    offset: int
    length: int


def read_tensor(path: Path, location: TensorLocation) -> torch.Tensor:
    """Return the tensor that lies there, below `path`. Nothing is executed. Raises OSError, BadState."""
    with (path / location.file).open("rb") as file:
        file.seek(location.offset)
        data = file.read(location.length)
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load names no types
        raise BadState(f"{location.file}, byte {location.offset}: not a tensor: {error}") from None
    if not isinstance(tensor, torch.Tensor):
        raise BadState(f"{location.file}, byte {location.offset}: no tensor")
    return tensor


class _OneByOne(DefaultSavePlanner):  # type: ignore[misc]
    """Have entries on the meta device read when they are written."""

    def __init__(self, content: Reader | None) -> None:
        super().__init__()
        self._content = content

    def lookup_object(self, index: Any) -> Any:
        """Return the entry of this index."""
        entry = super().lookup_object(index)
        is_awaited = self._content is not None and isinstance(entry, torch.Tensor) and entry.is_meta
        return self._content(index.fqn) if self._content is not None and is_awaited else entry


def write_distributed_format(
    directory: Path, name: str, entries: Mapping[str, Any], content: Reader | None = None
) -> dict[str, TensorLocation]:
    """Write what `torch.distributed.checkpoint.save` does for a single process; return where each entry was put.
    `content` gives those on the meta device. What is no tensor is stored as torch.save has it."""
    writer, planner = FileSystemWriter(directory), _OneByOne(content)
    writer.reset()
    writer.set_up_storage_writer(True)
    planner.set_up_planner(dict(entries), writer.storage_meta(), True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
    return {
        result.index.fqn: TensorLocation(
            f"{name}/{result.storage_data.relative_path}",
            result.storage_data.offset,
            result.storage_data.length,
        )
        for result in results
    }
