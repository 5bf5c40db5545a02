"""Drives the lifecycle in a training process: has its effects carried out (`handlers.py`), and stops at its seams.

`seam` is what the lifecycle waits for: the loop's micro-batches (`Compute`), its optimizer's step (`Optimize`), or
nothing more (None). The training loop answers with `advance`, or with `throw`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from unicrond.agents.protocol.messages import EXIT_NO_MEMBERSHIP
from unicrond.agents.protocol.sampling import Sampling
from unicrond.agents.trainer.detection.observing import Detection
from unicrond.agents.trainer.gradients.accumulation import BUCKET_BYTES, Accumulation
from unicrond.agents.trainer.gradients.carried_buffers import CarriedBuffers
from unicrond.agents.trainer.gradients.finishing import gradient_finalizer
from unicrond.agents.trainer.gradients.passing import Passing
from unicrond.agents.trainer.gradients.reduction import Reduction
from unicrond.agents.trainer.gradients.runs import LaneRuns
from unicrond.agents.trainer.groups.shard_group import Rendezvous
from unicrond.agents.trainer.lifecycle import MemberState, run
from unicrond.agents.trainer.lifecycle import effects as e
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.member_state import lanes_of
from unicrond.agents.trainer.lifecycle.results import RendezvousTimedOut
from unicrond.agents.trainer.loop import examination
from unicrond.agents.trainer.loop.comparison import ReplicaComparison
from unicrond.agents.trainer.loop.handlers import HANDLERS, EffectHandlers
from unicrond.agents.trainer.process import randomness
from unicrond.agents.trainer.process.context import Context
from unicrond.agents.trainer.sharded.optimizer import ShardedOptimizer
from unicrond.agents.trainer.sharded.sharing import Sharing
from unicrond.agents.trainer.states.layout import layout_of
from unicrond.agents.trainer.states.saving import Saving
from unicrond.agents.trainer.states.state import TrainingState


@dataclass(slots=True)
class LifecycleDriver(EffectHandlers):
    """Runs one worker's lifecycle up to each seam. `seam`: the effect of the training loop that it waits for now, None
    before the first and behind the last."""

    seam: e.Seam | None = None
    _flow: e.Flow[None] | None = None

    def begin(self) -> None:
        """Run the lifecycle up to its first seam."""
        self._flow = run(self.member)
        self._run_effects(lambda flow: next(flow))

    def advance(self) -> None:
        """Go on to the next seam: the loop has done what the present one asked for. Raises what ends the worker."""
        self._run_effects(lambda flow: flow.send(None))

    def throw(self, failure: BaseException) -> None:
        """Go on as `advance` does, where the seam has failed with GroupBroken, MembershipSuperseded or
        ProgramLeftLoop."""
        self._run_effects(lambda flow: flow.throw(failure))

    def _run_effects(self, enter: Callable[[e.Flow[None]], e.Effect[Any]]) -> None:
        flow, self._flow = self._flow, None
        if flow is None:
            raise RuntimeError("the lifecycle has not begun, or an error has ended it: let that error end the program")
        try:
            effect = enter(flow)
            while not isinstance(effect, e.Seam):
                try:
                    result = HANDLERS[type(effect)](self, effect)
                except BaseException as failure:
                    effect = flow.throw(failure)
                else:
                    effect = flow.send(result)
            self._flow, self.seam = flow, effect
        except StopIteration:
            self.seam = None
        except RendezvousTimedOut:
            raise SystemExit(EXIT_NO_MEMBERSHIP) from None

    @property
    def alive(self) -> bool:
        """Return whether the lifecycle waits at a seam; False once it or an error has ended it."""
        return self._flow is not None


def make_driver(
    process: Context,
    models: Sequence[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    dataset_size: int | None,
    gradients: Callable[[Lanes | None, int], Accumulation] | None,
) -> LifecycleDriver:
    """Return the driver of this process's lifecycle, which has not begun, with all that its effects act on.

    The arguments are those of `Hook.attach`. Raises CannotFinish for a model that would train wrongly.
    """
    spec = process.launch.spec
    lanes = lanes_of(spec)
    ranks = process.replica.sharers if gradients is None else 1
    buffers = CarriedBuffers(models if gradients is None else (), ranks)
    make = gradients or partial(plain_accumulation, models, optimizer, buffers)
    accumulation = make(lanes, process.settings.bucket_bytes)
    sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
    state = TrainingState(
        models, optimizer, scheduler, randomness, partial(_describe_layout, process, models, optimizer)
    )
    extents, saves = ((), None) if sharded is None else (sharded.extents, sharded.saves)
    member = MemberState(process.launch, len(accumulation), time.monotonic, extents, saves=saves)
    reduction, rendezvous = Reduction(accumulation, lanes), Rendezvous(process)
    detection = Detection(
        process,
        [*(parameter for module in models for parameter in module.parameters()), *buffers.tensors],
        loss_scaled=_loss_scaled(optimizer),
    )
    driver = LifecycleDriver(
        member=member,
        context=process,
        state=state,
        saving=Saving(process, state),
        sampling=Sampling(spec.seed, spec.global_batch, spec.replica_batch // ranks, dataset_size, ranks),
        accumulation=accumulation,
        reduction=reduction,
        rendezvous=rendezvous,
        detection=detection,
        comparison=ReplicaComparison(member, process, rendezvous, detection),
        sharing=None if sharded is None else Sharing(sharded),
    )
    if lanes is not None:
        driver.runs = LaneRuns(member, process, accumulation, reduction, rendezvous, Passing(accumulation, lanes))
    if gradients is None:
        driver.finalize_gradients = gradient_finalizer(models)
    return driver


def plain_accumulation(
    models: Sequence[torch.nn.Module],
    optimizer: Any,
    buffers: CarriedBuffers,
    lanes: Lanes | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Accumulation:
    """Return the accumulation of the models' parameters, each once, for the optimizers that step them."""
    parameters = dict.fromkeys(parameter for module in models for parameter in module.parameters())
    return Accumulation(
        parameters,
        lanes=lanes,
        bucket_bytes=bucket_bytes,
        torch_grads=examination.needs_torch_grads(optimizer),
        buffers=buffers,
    )


def _describe_layout(process: Context, models: Sequence[torch.nn.Module], optimizer: Any) -> object:
    spec = process.launch.spec
    try:
        return msgspec.to_builtins(layout_of(models, optimizer, spec.tp, spec.pp))
    except Exception as error:  # a model's own account of itself: without it the state keeps its layout
        print(f"{process.launch.worker}: no layout: {type(error).__name__}: {error}", flush=True)
        return None


def _loss_scaled(optimizer: Any) -> bool:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return any(getattr(inner, "grad_scaler", None) is not None for inner in chained)
