"""Megatron's own accounts of auxiliary losses (of experts, of multi-token prediction), kept beside the gradients.

Megatron adds to them in every forward pass and reads them when it logs, divided by the iteration's micro-batches. After
each call of the schedule they are moved into the present sum; behind the sum over the replicas they are put back, so
that the leader logs the whole iteration's. They change no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_EXPERTS = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")


class Trackers:
    """The accounts of a model with that many layers, those of multi-token prediction included."""

    def __init__(self, config: Any) -> None:
        self._layers = int(config.num_layers) + int(getattr(config, "mtp_num_layers", None) or 0)
        self._any = bool(getattr(config, "num_moe_experts", None) or getattr(config, "mtp_num_layers", None))

    @property
    def numel(self) -> int:
        """Return the elements of a sum; 0 where the model has no such losses."""
        return (len(_EXPERTS) + 1) * self._layers if self._any else 0

    def take(self, room: torch.Tensor) -> None:
        """Move what the trackers hold into `room`."""
        for place, values in self._pairs(room):
            place[: values.numel()] += values.detach()
            values.zero_()

    def put_back(self, room: torch.Tensor) -> None:
        """Let the trackers hold what is in `room`."""
        for place, values in self._pairs(room):
            values.copy_(place[: values.numel()])

    def _pairs(self, room: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        places = room.split(self._layers) if self.numel else ()
        for place, values in zip(places, _values() if self.numel else (), strict=True):
            if values is not None:
                yield place, values


def _values() -> Iterator[torch.Tensor | None]:
    from megatron.core.transformer import multi_token_prediction as prediction
    from megatron.core.transformer.moe import moe_utils

    tracker: dict[str, Any] = getattr(moe_utils, "get_moe_layer_wise_logging_tracker", dict)()
    for name in _EXPERTS:
        yield tracker.get(name, {}).get("values")
    helper = getattr(prediction, "MTPLossLoggingHelper", None)
    yield getattr(helper, "tracker", {}).get("values")
