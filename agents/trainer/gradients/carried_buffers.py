"""Carries the buffers that change in training (running means of a norm, averages): one micro-batch's are everyone's.

Rules
-----
* Each micro-batch begins with the buffers that the iteration began with. After the iteration all replicas have those
  that its micro-batch 0 has left. So DistributedDataParallel has rank 0's, where each rank computes one micro-batch;
  so they depend neither on who computes what nor on who dies.
* They travel in the sums of gradients, as 16-bit integers in float32: micro-batch 0 adds its own, all others add zero.
  So they are there when the sums are, whoever has died, and they are the same to the last bit.
* Carried are persistent buffers: floating ones of at most 1 MiB, others of at most 64 KiB, and those of torch's norms.
  Larger ones must stay as they are. Buffers that are not persistent are a module's own caches, and left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

FLOATING_MAX_BYTES, OTHER_MAX_BYTES = 1024 * 1024, 64 * 1024
#: The micro-batch whose buffers are everyone's.
MICRO_BATCH = 0
_ALIGN_BYTES = 8


class BufferMoved(RuntimeError):
    """A buffer has changed in a way that cannot be carried to the other replicas."""


@dataclass(slots=True)
class _BufferPlace:
    """A buffer in its module. `tensor`: the one that stands there between micro-batches; `size`: elements in a
    store."""

    module: torch.nn.Module
    key: str
    name: str
    tensor: torch.Tensor
    size: int
    before: torch.Tensor | None = None

    @property
    def current(self) -> torch.Tensor:
        """Return what stands there now."""
        buffer = self.module._buffers[self.key]
        if buffer is None or buffer.shape != self.tensor.shape or buffer.dtype != self.tensor.dtype:
            raise BufferMoved(
                f"{self.name}: this buffer has got another shape or dtype in a micro-batch; give it its final one"
                " before Hook.attach, or make it persistent=False if it is a cache"
            )
        return buffer


class CarriedBuffers:
    """The persistent buffers of `models`. `ranks`: workers of a replica, each of which computes a part of its
    micro-batches. `size`: elements that the carried ones take in a store."""

    def __init__(self, models: Sequence[torch.nn.Module], ranks: int = 1) -> None:
        self._ranks = ranks
        places = [place for number, model in enumerate(models) for place in _places(model, number, len(models))]
        self._small = [place for place in places if _is_small(place)]
        self._large = [place for place in places if not _is_small(place)]
        self._versions = [place.tensor._version for place in self._large]
        #: One element says that micro-batch 0 has left its buffers.
        self.size = 1 + sum(place.size for place in self._small) if self._small else 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the carried buffers, as they stand between micro-batches."""
        return [place.tensor for place in self._small]

    def begin(self) -> None:
        """Keep what the buffers are before a micro-batch."""
        for place in self._small:
            place.tensor = place.current
            place.before = place.tensor.detach().clone()
        self._versions = [place.tensor._version for place in self._large]

    def end(self, micro_batches: Sequence[int], room: torch.Tensor) -> None:
        """Put the buffers into `room` if micro-batch 0 has left them so, and set them back. Raises BufferMoved."""
        for place, version in zip(self._large, self._versions, strict=True):
            if place.current is not place.tensor or place.tensor._version != version:
                raise BufferMoved(
                    f"{place.name}: a buffer of {place.tensor.nbytes / 2**20:.1f} MiB changes in a micro-batch, and is"
                    " too large to be carried to the other replicas; make it smaller (1 MiB), or a parameter"
                )
        if not self._small:
            return
        is_strict = len(micro_batches) > 1 or self._ranks > 1
        if is_strict and any(not _equal(place.current, place.before) for place in self._small):
            name = next(place.name for place in self._small if not _equal(place.current, place.before))
            if self._ranks > 1:
                raise BufferMoved(
                    f"{name}: a buffer changes in a micro-batch, otherwise on each of the {self._ranks} workers of a"
                    " replica; make it persistent=False if it is a cache, or keep the model whole"
                )
            raise BufferMoved(
                f"{name}: a buffer changes in a list of {len(micro_batches)} micro-batches; compute them one at a time:"
                " for micro_batch in step"
            )
        if MICRO_BATCH in micro_batches:
            words = torch.cat([_words(place.current, place.size) for place in self._small])
            room[0] = 1.0
            room[1:].copy_(words)
        with torch.no_grad():
            for place in self._small:
                assert place.before is not None
                place.tensor.copy_(place.before)
                place.module._buffers[place.key] = place.tensor
                place.before = None

    def adopt(self, room: torch.Tensor) -> None:
        """Have the buffers that stand in the sum of all micro-batches. Raises RuntimeError where not exactly one has
        left its own there."""
        if float(room[0]) != 1.0:
            raise RuntimeError(f"the buffers of {float(room[0]):g} micro-batches were summed, not of one")
        words = room[1:].to(torch.int16)
        with torch.no_grad():
            for place, piece in zip(self._small, words.split([place.size for place in self._small]), strict=True):
                data = piece.clone().view(torch.uint8)[: place.tensor.nbytes].clone()
                place.tensor.copy_(data.view(place.tensor.dtype).reshape(place.tensor.shape))
                place.module._buffers[place.key] = place.tensor


def _places(model: torch.nn.Module, number: int, count: int) -> Iterator[_BufferPlace]:
    """Yield the persistent buffers, each once."""
    numbers: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in numbers:
                continue
            numbers.add(id(buffer))
            name = ".".join(filter(None, (str(number) if count > 1 else "", prefix, key)))
            yield _BufferPlace(module, key, name, buffer, -(-buffer.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES // 2)


def _is_small(place: _BufferPlace) -> bool:
    if isinstance(place.module, torch.nn.modules.batchnorm._NormBase):
        return True
    most = FLOATING_MAX_BYTES if place.tensor.is_floating_point() else OTHER_MAX_BYTES
    return bool(place.tensor.nbytes <= most)


def _words(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return the tensor's bytes as `size` 16-bit integers."""
    data = torch.zeros(2 * size, dtype=torch.uint8, device=tensor.device)
    data[: tensor.nbytes] = _bytes(tensor)
    return data.view(torch.int16)


def _equal(first: torch.Tensor, second: torch.Tensor | None) -> bool:
    return second is not None and torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
