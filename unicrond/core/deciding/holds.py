"""Holds: the one place where a decision that takes something out passes, or is told and not carried out.

`DecisionBatch.add` asks for the limit (nodes/brakes.py); `tell` adds what came of it, once for each thing.
"""

from __future__ import annotations

from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.faults.program_faults import signature_of
from unicrond.core.nodes import brakes
from unicrond.events import vocabulary as v


def tell(batch: DecisionBatch) -> None:
    """Add a DecisionHeld for what is held anew or otherwise, and a HoldLifted for what is wanted no longer."""
    state = batch.state
    for key, event in batch.held.items():
        old = state.holds.get(key)
        if old is None or old.limit != event.limit or signature_of(old.reason) != signature_of(event.reason):
            batch.add(event)
    done = {key for event in batch.events if (key := batch.hold_key_of(event))}
    for key, hold in state.holds.items():
        if key in batch.held or key in done or brakes.stands(state, hold):
            continue
        reason = "nothing asks for it any more"
        batch.add(v.HoldLifted(action=hold.action, node=hold.node, task=hold.task, worker=hold.worker, reason=reason))
