"""From the GPU to memory that CUDA does not know: by two pinned buffers, one filled while the other is emptied.

A copy straight into such memory (a node's memory of states is a mapped file) goes through a small buffer of the
driver's, and nothing else happens meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

STAGE_BYTES = 32 * 1024 * 1024
Pair = tuple[torch.Tensor, torch.Tensor]
_buffers: list[torch.Tensor] = []


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
