"""Drives the lifecycle in a training process: has its effects carried out (`handlers.py`), and stops at its seams.

`seam` is what the lifecycle waits for: the loop's micro-batches (`Compute`), its optimizer's step (`Optimize`), or
nothing more (None). The training loop answers with `advance`, or with `throw`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unicrond.agents.protocol.messages import EXIT_NO_MEMBERSHIP
from unicrond.agents.trainer.lifecycle import effects as e
from unicrond.agents.trainer.lifecycle import run
from unicrond.agents.trainer.lifecycle.failures import RendezvousTimedOut
from unicrond.agents.trainer.loop.handlers import HANDLERS, EffectHandlers


@dataclass(slots=True)
class LifecycleDriver(EffectHandlers):
    """Runs one worker's lifecycle up to each seam. `seam`: what it waits for now; see the module."""

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
