"""Broadcasts the training state to members that have none: one skeleton, then its bytes in chunks.

A chunk bounds the memory; a member that already has state takes part, since a broadcast is the whole group's, and
lets go of each chunk. Small tensors share one: a state has hundreds, and everybody stands while it is given.

With NCCL everything travels from GPU to GPU. What lived on the CPU (generators' states, an optimizer's step counts) is
put back there: torch takes it from nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from unicrond.agents.trainer.groups.group import ShardGroup
from unicrond.agents.trainer.states.state import (
    BadState,
    flatten,
    shapes,
    size_bytes,
    tensor_bytes,
    tensor_of,
    unflatten,
)

CHUNK_BYTES = 32 * 1024 * 1024
_SKELETON_BYTES_MAX = 256 * 1024 * 1024


def send_state(group: ShardGroup, tree: object) -> None:
    """Broadcast the tree from this member. Raises what `ShardGroup.finish` raises."""
    skeleton, tensors = flatten(tree)
    on_cpu = bytes(tensor.device.type == "cpu" for tensor in tensors)
    head = torch.tensor([len(skeleton), len(tensors)], dtype=torch.int64, device=group.device)
    group.broadcast(head, group.rank)
    group.finish()
    payload = torch.frombuffer(bytearray(skeleton + on_cpu), dtype=torch.uint8).to(group.device)
    group.broadcast(payload, group.rank)
    group.finish()
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    for together in _chunks(sizes):
        parts = [tensor_bytes(tensor).to(group.device) for tensor in tensors[together]]
        _broadcast(group, parts[0] if len(parts) == 1 else torch.cat(parts), group.rank)


def receive_state(group: ShardGroup, source: int, keep: bool) -> tuple[Any, int]:
    """Receive member `source`'s tree, None where `keep` is false, and the bytes of its tensors.

    Raises what `ShardGroup.finish` raises, and BadState.
    """
    head = torch.zeros(2, dtype=torch.int64, device=group.device)
    group.broadcast(head, source)
    group.finish()
    length, count = (int(value) for value in head.tolist())
    if not 0 < length <= _SKELETON_BYTES_MAX or not 0 <= count <= length:
        raise BadState(f"announced skeleton of {length} bytes with {count} tensors")
    payload = torch.zeros(length + count, dtype=torch.uint8, device=group.device)
    group.broadcast(payload, source)
    group.finish()
    received = payload.cpu().numpy().tobytes()
    skeleton, on_cpu = received[:length], received[length:]
    kinds = shapes(skeleton)
    if len(kinds) != count:
        raise BadState(f"{count} tensors announced, the skeleton has {len(kinds)}")
    sizes = [size_bytes(dtype, shape) for dtype, shape in kinds]
    tensors = []
    for together in _chunks(sizes):
        data = torch.empty(sum(sizes[together]), dtype=torch.uint8, device=group.device)
        _broadcast(group, data, source)
        if keep:  # each in memory of its own: a freed one must not keep the others, and it must be aligned
            parts = [data] if len(sizes[together]) == 1 else [part.clone() for part in data.split(sizes[together])]
            tensors += [
                tensor_of(part.cpu() if lived_on_cpu else part, *kind)
                for part, kind, lived_on_cpu in zip(parts, kinds[together], on_cpu[together], strict=True)
            ]
    return (unflatten(skeleton, tensors) if keep else None), sum(sizes)


def _chunks(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield which tensors travel together, in order: at most CHUNK_BYTES, or one that is larger."""
    begin, length = 0, 0
    for number, size in enumerate(sizes):
        if number > begin and length + size > CHUNK_BYTES:
            yield slice(begin, number)
            begin, length = number, 0
        length += size
    if sizes:
        yield slice(begin, len(sizes))


def _broadcast(group: ShardGroup, data: torch.Tensor, source: int) -> None:
    for chunk in data.split(CHUNK_BYTES):
        if chunk.numel():
            group.broadcast(chunk, source)
    group.finish()
