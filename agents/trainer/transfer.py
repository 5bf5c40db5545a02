"""Giving the training state to members that have none: one skeleton, then its bytes in chunks, by broadcast.

A chunk bounds the memory; a member that already has state takes part, since a broadcast is the whole group's, and
lets go of each chunk.
"""

from __future__ import annotations

from typing import Any

import torch

from agents.trainer.group import Group
from agents.trainer.state import BadState, flatten, shapes, size_bytes, tensor_bytes, tensor_of, unflatten

CHUNK_BYTES = 32 * 1024 * 1024
_SKELETON_BYTES_MAX = 256 * 1024 * 1024


def give(group: Group, tree: object) -> None:
    """Broadcast the tree from this member. Raises what `Group.finish` raises."""
    skeleton, tensors = flatten(tree)
    group.broadcast(torch.tensor([len(skeleton)], dtype=torch.int64, device=group.device), group.rank)
    group.finish()
    told = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8).to(group.device)
    group.broadcast(told, group.rank)
    group.finish()
    for tensor in tensors:
        data = tensor_bytes(tensor).to(group.device)
        _broadcast(group, data, group.rank)


def take(group: Group, source: int, keep: bool) -> tuple[Any, int]:
    """Receive member `source`'s tree, None where `keep` is false, and the bytes of its tensors.

    Raises what `Group.finish` raises, and BadState.
    """
    length = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.broadcast(length, source)
    group.finish()
    if not 0 < int(length) <= _SKELETON_BYTES_MAX:
        raise BadState(f"a skeleton of {int(length)} bytes is announced")
    told = torch.zeros(int(length), dtype=torch.uint8, device=group.device)
    group.broadcast(told, source)
    group.finish()
    skeleton = told.cpu().numpy().tobytes()
    tensors, received_bytes = [], 0
    for dtype, shape in shapes(skeleton):
        data = torch.empty(size_bytes(dtype, shape), dtype=torch.uint8, device=group.device)
        _broadcast(group, data, source)
        received_bytes += data.numel()
        if keep:
            tensors.append(tensor_of(data, dtype, shape))
    return (unflatten(skeleton, tensors) if keep else None), received_bytes


def _broadcast(group: Group, data: torch.Tensor, source: int) -> None:
    for chunk in data.split(CHUNK_BYTES):
        if chunk.numel():
            group.broadcast(chunk, source)
    group.finish()
