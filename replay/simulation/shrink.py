"""From a history that breaks a rule to a small one that still does: faults are left out, one at a time."""

from __future__ import annotations

from replay.simulation.run import Outcome, simulate


def shrink(failed: Outcome) -> Outcome:
    """The last failing outcome of the same rule; none of its faults can be left out alone."""
    smallest, shrunk = failed, True
    while shrunk:  # once a fault is left out, others may be needed no longer
        shrunk = False
        # Later faults go first: what comes early decides more of what follows.
        for at in reversed(range(len(smallest.faults))):
            fewer = simulate(failed.seed, smallest.faults[:at] + smallest.faults[at + 1 :])
            if fewer.rule == failed.rule:
                smallest, shrunk = fewer, True
    return smallest


def kept(smallest: Outcome, failed: Outcome) -> list[int]:
    """Which faults of the whole history are left, by their places in it."""
    return [place for place, fault in enumerate(failed.faults) if fault in smallest.faults]
