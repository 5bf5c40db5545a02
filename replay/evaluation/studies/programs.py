"""The study of garbage programs in docs/results/evaluation.md: do the tasks of others pay for them?"""

from __future__ import annotations

from typing import NamedTuple

from unicrond.replay.evaluation.model.assumptions import DEFAULTS
from unicrond.replay.evaluation.model.traces import Trace, trace
from unicrond.replay.evaluation.model.virtual_time import DAY_US
from unicrond.replay.evaluation.model.workload import Cluster, Workload, six, workload
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.simulator.program_driver import ProgramDriver, ProgramStay
from unicrond.replay.evaluation.studies.comparison import head, line
from unicrond.replay.evaluation.studies.studies import GPU, Bench

#: How long the worst user waits before he submits again.
IMPATIENCE_S = 600.0
#: Nodes, copies of the six tasks, and users with garbage: 30 % of all programs, as near as it goes.
SIZES = ((16, 1, 3), (64, 2, 5))


class ProgramDay(NamedTuple):
    """Hold what the measured tasks deliver in one day, as shares of failure-free.

    Beside garbage programs, beside idle ones in the same places, and alone. `submissions`: of programs."""

    garbage: float
    idle: float
    alone: float
    submissions: int


def program_day(work: Workload, faults: Trace, users: int, patience_s: float) -> ProgramDay:
    """Play one day three times: with garbage programs, with idle ones in their places, and without either."""
    garbage, stays = _delivered(work, faults, users, patience_s)
    idle, _ = _delivered(work, faults, stays=stays)
    alone, _ = _delivered(work, faults)
    return ProgramDay(garbage, idle, alone, len(stays))


def _delivered(
    work: Workload, faults: Trace, users: int = 0, patience_s: float = 0.0, stays: tuple[ProgramStay, ...] = ()
) -> tuple[float, tuple[ProgramStay, ...]]:
    world = EvaluationWorld(work, faults, DEFAULTS)
    driver = ProgramDriver(world, users, patience_s, stays)
    world.play(driver)
    costs = world.meter.total()
    return costs.delivered / costs.failure_free, driver.stays()


def programs(bench: Bench) -> str:
    """Run a day with 30 % garbage programs of lower priority beside the six tasks."""
    titles = ("nodes, programs", "users", "faults", "submitted", "alone %", "idle programs %", "garbage %",
              "garbage over idle")  # fmt: skip
    rows = [head(titles)]
    runs = [
        (size, patience_s, spec)
        for size in SIZES
        for patience_s in (0.0, IMPATIENCE_S)
        for spec in ("", "poisson:days=1")
    ]
    for nth, ((nodes, copies, users), patience_s, spec) in enumerate(runs, start=1):
        work = workload(Cluster(GPU, nodes), six(copies))
        faults = trace(spec, nodes, bench.seeds[0]) if spec else Trace("none", nodes, DAY_US, ())
        day = program_day(work, faults, users, patience_s)
        count = len(work.tasks)
        shares = (f"{100 * share:.2f}" for share in (day.alone, day.idle, day.garbage))
        user = f"again every {patience_s / 60:g} min" if patience_s else "patient"
        rows.append(
            line([f"{nodes}, {users} of {count + users}", user, faults.name, str(day.submissions), *shares,
                  f"{day.garbage / day.idle:.4f}"])
        )  # fmt: skip
        bench.progress(nth, len(runs), "programs")
    return "\n".join(rows)
