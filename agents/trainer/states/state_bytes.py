"""Writes a state tree as one stretch of bytes, as it stands in a slot of a node's memory (`memory.py`), and reads it.

    magic, 8 bytes little-endian length of the skeleton, the skeleton, the tensors' bytes in the skeleton's order,
    each at a multiple of 64 bytes

A state that is only to be passed on is read without a copy: its tensors alias the bytes. One that is to be lived in
must be copied: optimizers keep the tensors that they are given. No pickle (`state.py`).

A copy from a GPU straight into memory that CUDA does not know (a slot is a mapped file) goes through a small buffer of
the driver's, and nothing else happens meanwhile. So it goes through two pinned buffers, one filled while the other is
emptied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unicrond.agents.trainer.states.state import (
    BadState,
    flatten,
    shapes,
    size_bytes,
    tensor_bytes,
    tensor_of,
    unflatten,
)

_MAGIC = b"unicron2"
_FIXED_BYTES = 16
_ALIGN_BYTES = 64
STAGE_BYTES = 32 * 1024 * 1024
Pair = tuple[torch.Tensor, torch.Tensor]
_buffers: list[torch.Tensor] = []


@dataclass(frozen=True, slots=True)
class Flat:
    """A tree prepared for writing: where each of its tensors goes, and how many bytes all take."""

    skeleton: bytes
    tensors: list[torch.Tensor]
    places: list[int]
    size_bytes: int

    @staticmethod
    def of(tree: object) -> Flat:
        """Return the tree ready to be written. Raises BadState on a value that a tree cannot hold."""
        skeleton, tensors = flatten(tree)
        places, end = _places(len(skeleton), [(tensor.dtype, tensor.shape) for tensor in tensors])
        return Flat(skeleton, tensors, places, end)

    def write(self, view: memoryview) -> None:
        """Copy everything into `view`, which has `size_bytes`; everything is there when this returns."""
        head = _MAGIC + len(self.skeleton).to_bytes(8, "little") + self.skeleton
        view[: len(head)] = head
        target = torch.frombuffer(view, dtype=torch.uint8)
        on_gpu = []
        for tensor, at in zip(self.tensors, self.places, strict=True):
            if tensor.numel():
                data = tensor_bytes(tensor)
                place = target[at : at + data.numel()]
                if data.is_cuda:
                    on_gpu.append((data, place))
                else:
                    place.copy_(data)
        if on_gpu:
            copy_from_gpu(on_gpu)


def read(view: memoryview, *, copy: bool) -> dict[str, Any]:
    """Return the tree; unless copied, its tensors alias `view`. Raises BadState."""
    if len(view) < _FIXED_BYTES or view[:8] != _MAGIC:
        raise BadState("these bytes are not a state of this format")
    length = int.from_bytes(view[8:_FIXED_BYTES], "little")
    if length > len(view) - _FIXED_BYTES:
        raise BadState("the skeleton is longer than the bytes that hold it")
    skeleton = bytes(view[_FIXED_BYTES : _FIXED_BYTES + length])
    kinds = shapes(skeleton)
    places, end = _places(length, kinds)
    if end > len(view):
        raise BadState(f"the tensors end at byte {end}, there are {len(view)}")
    source = torch.frombuffer(view, dtype=torch.uint8)
    tensors = [
        tensor_of(source[at : at + size_bytes(dtype, shape)], dtype, shape)
        for at, (dtype, shape) in zip(places, kinds, strict=True)
    ]
    return check(unflatten(skeleton, [tensor.clone() for tensor in tensors] if copy else tensors))


def check(tree: object) -> dict[str, Any]:
    """Return the tree, if it can be a training state: the keys of `TrainingState.capture`, all numbers finite.

    Raises BadState.
    """
    if not isinstance(tree, dict) or not {"iteration", "loss", "tensors", "optimizer", "scheduler"} <= tree.keys():
        raise BadState("these bytes are a tree, but no training state")
    for name, tensor in named_tensors(tree):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BadState(f"{name} holds values that are not finite")
    return tree


def named_tensors(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tree's tensors with their paths ("optimizer.state.0.exp_avg"), in the order of `flatten`."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from named_tensors(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from named_tensors(inner, f"{name}.{number}" if name else str(number))


def _places(skeleton_bytes: int, kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> tuple[list[int], int]:
    places, end = [], _FIXED_BYTES + skeleton_bytes
    for dtype, shape in kinds:
        end = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        places.append(end)
        end += size_bytes(dtype, shape)
    return places, end


def copy_from_gpu(pairs: Sequence[Pair]) -> None:
    """Copy each flat uint8 CUDA tensor into its flat uint8 CPU tensor; done when this returns.

    Waits first for all that is queued on the device: a loop may step its optimizer on a stream of its own.
    """
    torch.cuda.synchronize(pairs[0][0].device)
    if not _buffers:
        _buffers.extend(torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    copy_staged(pairs, _buffers)


def copy_staged(pairs: Iterable[Pair], buffers: Sequence[torch.Tensor]) -> None:
    """Copy through two `buffers` of one size, in turn. Sources that are not on a GPU are copied at once."""
    emptied: tuple[torch.cuda.Event | None, torch.Tensor, torch.Tensor] | None = None
    for number, (source, target) in enumerate(_pieces(pairs, buffers[0].numel())):
        buffer = buffers[number % 2][: source.numel()]
        buffer.copy_(source, non_blocking=True)
        filled = torch.cuda.current_stream(source.device).record_event() if source.is_cuda else None
        _empty(emptied)
        emptied = (filled, buffer, target)
    _empty(emptied)


def _empty(filled: tuple[torch.cuda.Event | None, torch.Tensor, torch.Tensor] | None) -> None:
    if filled is not None:
        event, buffer, target = filled
        if event is not None:
            event.synchronize()
        target.copy_(buffer)


def _pieces(pairs: Iterable[Pair], size_bytes: int) -> Iterator[Pair]:
    for source, target in pairs:
        yield from zip(source.split(size_bytes), target.split(size_bytes), strict=True)
