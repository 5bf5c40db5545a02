"""What Megatron logs of the whole iteration: the leader's replica alone writes it, with all replicas' auxiliary losses.

Rules
-----
* TensorBoard and W&B: a writer is made when it is first written to by a process of the leader's replica. Before it is
  known which replica leads, and on all others, what is written is dropped.
* Auxiliary losses (of experts, of multi-token prediction): Megatron adds to its trackers in every forward pass and
  reads them when it logs, divided by the iteration's micro-batches. After each call of the schedule they are moved into
  the present sum, beside the gradients; behind the sum over the replicas they are put back. They change no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class LeadWriter:
    """Stands in for one of Megatron's writers. `leads`: whether this process is in the leader's replica. `make`: the
    real one; None where it cannot be made.
    """

    def __init__(self, leads: Callable[[], bool], make: Callable[[], Any]) -> None:
        self._leads = leads
        self._make = make
        self._writers: list[Any] = []

    def __bool__(self) -> bool:
        return self._leads() and self._real() is not None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the class of the real one: Megatron's timers write to a SummaryWriter alone."""
        real = self._real() if self._leads() else None
        return LeadWriter if real is None else type(real)

    def __eq__(self, other: object) -> bool:
        """Return whether the other is the real one: Megatron's timers write to the module `wandb` alone."""
        return self is other or (self._leads() and self._real() is other)

    __hash__ = object.__hash__

    def _real(self) -> Any:
        if not self._writers:
            self._writers.append(self._make())
        return self._writers[0]

    def __getattr__(self, name: str) -> Any:
        if not self._leads():
            real = self._writers[0] if self._writers and name in ("flush", "finish", "close") else None
            return getattr(real, name) if real is not None else _Dropped()
        return getattr(self._real(), name)


class _Dropped:
    """Takes every call and every attribute, and does nothing."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None

    def __getattr__(self, _: str) -> _Dropped:
        return self


_EXPERTS = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")
#: Of multi-token prediction: `values` until core_v0.18; then also how many tokens were right, for rates.
_PREDICTION = ("values", "loss_values", "correct_values", "total_values")


class Trackers:
    """Megatron's trackers of auxiliary losses, of each layer of a model, those of multi-token prediction included."""

    def __init__(self, config: Any) -> None:
        self._layers = int(config.num_layers) + int(getattr(config, "mtp_num_layers", None) or 0)
        self._any = bool(getattr(config, "num_moe_experts", None) or getattr(config, "mtp_num_layers", None))

    @property
    def numel(self) -> int:
        """Return the elements of a sum; 0 where the model has no such losses."""
        return (len(_EXPERTS) + len(_prediction_names())) * self._layers if self._any else 0

    def take(self, room: torch.Tensor) -> None:
        """Move what the trackers hold into `room`."""
        for place, values in self._pairs(room):
            place[: values.numel()] += values.detach()
            values.zero_()

    def put_back(self, room: torch.Tensor) -> None:
        """Let the trackers hold what is in `room`."""
        for place, values in self._pairs(room):
            values.copy_(place[: values.numel()])

    def values(self) -> list[torch.Tensor]:
        """Return the trackers themselves."""
        return [values for values in _values() if values is not None] if self.numel else []

    def _pairs(self, room: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        places = room.split(self._layers) if self.numel else ()
        for place, values in zip(places, _values() if self.numel else (), strict=True):
            if values is not None:
                yield place, values


def _values() -> Iterator[torch.Tensor | None]:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    experts = _expert_values()
    yield from (experts.get(name) for name in _EXPERTS)
    yield from (MTPLossLoggingHelper.tracker.get(name) for name in _prediction_names())


def _prediction_names() -> tuple[str, ...]:
    """Return those that this Megatron-core has: an older hook in the group, which knows `values` alone, sums as many
    elements with it."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    return _PREDICTION if hasattr(MTPLossLoggingHelper, "save_metrics_to_tracker") else _PREDICTION[:1]


def _expert_values() -> dict[str, torch.Tensor]:
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # until core_v0.17
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return {name: entry["values"] for name, entry in get_moe_layer_wise_logging_tracker().items()}
    return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
