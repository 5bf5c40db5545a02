"""The built-in training data: the standard library's own sources, byte by byte (vocabulary 256), which every Python
has.

Written once into Megatron's indexed-dataset format (`<prefix>.bin`, `<prefix>.idx`), one document per file, in the
order of the files' names: the same Python gives the same corpus. Read as one stream, cut into windows of seq + 1
bytes, of which neighbours share one byte.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

CORPUS_BYTES_MAX = 4 * 1024 * 1024
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "turtledemo"}


class DataError(RuntimeError):
    """The training data is missing or is not what the task says."""


def default_prefix() -> Path:
    """Return the path prefix at which the corpus is kept for tasks that name no data."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "unicron" / f"stdlib-{sysconfig.get_python_version()}"


def build(prefix: Path) -> None:
    """Write the corpus unless it is there. Several processes may do so at once: each writes the same, and renames."""
    if _part(prefix, ".idx").exists():
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)
    draft = prefix.with_name(f".{prefix.name}.{os.getpid()}")
    builder = IndexedDatasetBuilder(str(_part(draft, ".bin")), dtype=numpy.uint8)
    for path in _sources():
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        builder.add_document(text, [text.numel()])
    builder.finalize(str(_part(draft, ".idx")))
    _part(draft, ".bin").replace(_part(prefix, ".bin"))
    _part(draft, ".idx").replace(_part(prefix, ".idx"))


def _part(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _sources() -> Iterator[Path]:
    """Yield the non-empty Python files of the standard library in name order, up to CORPUS_BYTES_MAX in all."""
    root, total_bytes = Path(sysconfig.get_path("stdlib")), 0
    for path in sorted(root.rglob("*.py")):
        size_bytes = path.stat().st_size
        if _LEFT_OUT.intersection(path.relative_to(root).parts) or not size_bytes:
            continue
        total_bytes += size_bytes
        if total_bytes > CORPUS_BYTES_MAX:
            return
        yield path


class Corpus:
    """An indexed dataset of bytes, as windows of `seq` + 1 tokens."""

    def __init__(self, prefix: Path, seq: int) -> None:
        """Raises DataError where the files are missing or too short."""
        if not _part(prefix, ".idx").exists() or not _part(prefix, ".bin").exists():
            raise DataError(f"data: {prefix}.idx or .bin is missing; give the path prefix of an indexed dataset")
        self._documents = IndexedDataset(str(prefix))
        self._ends = numpy.cumsum(self._documents.sequence_lengths, dtype=numpy.int64)
        self._seq = seq
        if len(self) < 1:
            raise DataError(f"data: {prefix} has {int(self._ends[-1])} tokens, a sample takes {seq + 1}")

    def __len__(self) -> int:
        """Return the number of samples."""
        return int((self._ends[-1] - 1) // self._seq) if len(self._ends) else 0

    def sample(self, index: int) -> torch.Tensor:
        """Return the tokens of sample `index` in [0, len): int64, shape (seq + 1,)."""
        position, end = index * self._seq, index * self._seq + self._seq + 1
        pieces = []
        while position < end:
            document = int(numpy.searchsorted(self._ends, position, side="right"))
            start = int(self._ends[document]) - int(self._documents.sequence_lengths[document])
            length = min(end, int(self._ends[document])) - position
            pieces.append(self._documents.get(document, offset=position - start, length=length))
            position += length
        return torch.from_numpy(numpy.concatenate(pieces).astype(numpy.int64))
