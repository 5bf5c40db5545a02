"""Why a plan is as it is, in one sentence with numbers: what the best other deal of a worker would bring. Pure."""

from __future__ import annotations

from typing import NamedTuple

from unicrond.core.state.state import ClusterState, Task
from unicrond.core.tasks.reshaping import layouts_of
from unicrond.core.worth.waf import has_scale, linear_flops, waf
from unicrond.display.cluster_tables import si
from unicrond.events.vocabulary.shape import Shape


class Move(NamedTuple):
    """A replica's workers that another task would have. `gain`, `loss`: weighted FLOP/s."""

    giver: str
    taker: str
    workers: int
    gain: int
    loss: int


def why(state: ClusterState) -> str:
    """The sentence; "" where there is no plan, or no task could have what another has."""
    shares = {name: share.workers for name, share in state.plan.assignments.items() if name in state.tasks}
    moves = [
        move
        for taker in shares
        for giver in shares
        if giver != taker and (move := _move(state, state.tasks[giver], state.tasks[taker], shares)) is not None
    ]
    if not moves:
        return ""
    best = max(moves, key=lambda move: move.gain - move.loss)
    has = ", ".join(f"{name} (weight {state.tasks[name].spec.weight:g}) has {count}" for name, count in shares.items())
    count = f"{best.workers} worker{'s' * (best.workers > 1)}"
    known = (
        "what was measured" if all(has_scale(state.tasks[name]) for name in (best.giver, best.taker)) else "the model"
    )
    told = (
        f"{has}; by {known}, {count} moved from {best.giver} to {best.taker} would bring {best.taker} "
        f"{si(best.gain, 'FLOP/s')} and cost {best.giver} {si(best.loss, 'FLOP/s')}, weighted"
    )
    if best.gain <= best.loss:
        return f"{told}: no move is better"
    return f"{told}: more, but less than the move itself would cost before the next failure is due"


def why_layouts(state: ClusterState) -> str:
    """Of each task that has a choice of layouts: what it has, and what the best other one would bring."""
    linear, told = linear_flops(state), []
    for name, share in state.plan.assignments.items():
        task = state.tasks.get(name)
        if task is None or share.shape is None or len(layouts_of(task.spec)) < 2:
            continue
        own = share.shape
        others = [(_best(task, shape, share.workers, linear), shape) for shape in layouts_of(task.spec) if shape != own]
        (flops, workers), other = max(others, key=lambda one: one[0])
        has = waf(task, share.workers, linear, own)
        text = (
            f"{name} on {share.workers} worker{'s' * (share.workers > 1)} in {own}: {si(has, 'FLOP/s')}; "
            f"in {other} {_on(workers, share.workers) + si(flops, 'FLOP/s') if flops else 'nothing'}"
        )
        told.append(f"{text}, which does not pay for a reshape" if flops > has else text)
    return "; ".join(told)


def _best(task: Task, shape: Shape, workers: int, linear: int) -> tuple[int, int]:
    """The most that so many workers bring in the layout, and how many of them it takes."""
    counts = range(shape.workers, workers + 1, shape.workers)
    return max(((waf(task, count, linear, shape), -count) for count in counts), default=(0, 0))


def _on(workers: int, of: int) -> str:
    return "" if -workers == of else f"on {-workers} of them "


def _move(state: ClusterState, giver: Task, taker: Task, shares: dict[str, int]) -> Move | None:
    """One replica of the taker from the giver; None where their layouts or bounds do not allow it."""
    workers, linear = taker.spec.replica_workers, linear_flops(state)
    gives, takes = shares[giver.name], shares[taker.name]
    if giver.pace.gpu != taker.pace.gpu:
        return None  # workers of another type
    if takes + workers > taker.spec.max_workers or gives < workers or workers % giver.spec.replica_workers:
        return None
    gain = waf(taker, takes + workers, linear) - waf(taker, takes, linear)
    return Move(giver.name, taker.name, workers, gain, waf(giver, gives, linear) - waf(giver, gives - workers, linear))
