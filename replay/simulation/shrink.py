"""From a history that breaks a rule to a small one that still does: faults are left out, one at a time."""

from __future__ import annotations

from unicrond.replay.simulation.run import RunOutcome, simulate


def shrink(failure: RunOutcome) -> RunOutcome:
    """Return the last failing outcome of the same rule; none of its faults can be left out alone."""
    smallest, shrunk = failure, True
    while shrunk:  # once a fault is left out, others may be needed no longer
        shrunk = False
        # Later faults go first: what comes early decides more of what follows.
        for at in reversed(range(len(smallest.faults))):
            fewer = simulate(failure.seed, smallest.faults[:at] + smallest.faults[at + 1 :])
            if fewer.rule == failure.rule:
                smallest, shrunk = fewer, True
    return smallest


def remaining_places(smallest: RunOutcome, failure: RunOutcome) -> list[int]:
    """Return the places, in the whole history, of the faults that are left."""
    return [place for place, fault in enumerate(failure.faults) if fault in smallest.faults]
