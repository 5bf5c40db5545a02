"""The reason of a plan in one sentence with numbers: the effect of the best other assignment of workers. Pure."""

from __future__ import annotations

from typing import NamedTuple

from unicrond.core.state.state import ClusterState, Task
from unicrond.core.tasks.reshaping import layouts_of
from unicrond.core.worth.waf import has_scale, linear_flops, waf
from unicrond.display.worth import waf_in
from unicrond.events.vocabulary.shape import Shape


class WorkerMove(NamedTuple):
    """A move of one replica's workers from one task to another. `gain`, `loss`: weighted FLOP/s."""

    giver: str
    taker: str
    workers: int
    gain: int
    loss: int


def explain_plan(state: ClusterState) -> str:
    """Return the sentence; "" where there is no plan, or no task could have what another has."""
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
    source = (
        "what was measured" if all(has_scale(state.tasks[name]) for name in (best.giver, best.taker)) else "the model"
    )
    sentence = (
        f"{has}; by {source}, {count} moved from {best.giver} to {best.taker} would bring {best.taker} "
        f"{waf_in(state, best.gain)} and cost {best.giver} {waf_in(state, best.loss)}"
    )
    if best.gain <= best.loss:
        return f"{sentence}: no move is better"
    return f"{sentence}: more, but less than the move itself would cost before the next failure is due"


def explain_layouts(state: ClusterState) -> str:
    """Describe, for each task with a choice of layouts, its layout and what the best other one would achieve."""
    linear, sentences = linear_flops(state), []
    for name, share in state.plan.assignments.items():
        task = state.tasks.get(name)
        if task is None or share.shape is None or len(layouts_of(task.spec)) < 2:
            continue
        present = share.shape
        alternatives = [
            (_best(task, shape, share.workers, linear), shape) for shape in layouts_of(task.spec) if shape != present
        ]
        (flops, workers), best = max(alternatives, key=lambda entry: entry[0])
        has = waf(task, share.workers, linear, present)
        text = (
            f"{name} on {share.workers} worker{'s' * (share.workers > 1)} in {present}: {waf_in(state, has)}; "
            f"in {best} {_on(workers, share.workers) + waf_in(state, flops) if flops else 'nothing'}"
        )
        sentences.append(f"{text}, which does not pay for a reshape" if flops > has else text)
    return "; ".join(sentences)


def _best(task: Task, shape: Shape, workers: int, linear: int) -> tuple[int, int]:
    """Return the most that so many workers achieve in the layout, and the negative number of workers needed."""
    counts = range(shape.workers, workers + 1, shape.workers)
    return max(((waf(task, count, linear, shape), -count) for count in counts), default=(0, 0))


def _on(workers: int, of: int) -> str:
    return "" if -workers == of else f"on {-workers} of them "


def _move(state: ClusterState, giver: Task, taker: Task, shares: dict[str, int]) -> WorkerMove | None:
    """Return the move of one replica to the taker; None where layouts or bounds do not allow it."""
    workers, linear = taker.spec.replica_workers, linear_flops(state)
    gives, takes = shares[giver.name], shares[taker.name]
    if giver.pace.gpu != taker.pace.gpu:
        return None  # workers of another type
    if takes + workers > taker.spec.max_workers or gives < workers or workers % giver.spec.replica_workers:
        return None
    gain = waf(taker, takes + workers, linear) - waf(taker, takes, linear)
    return WorkerMove(
        giver.name, taker.name, workers, gain, waf(giver, gives, linear) - waf(giver, gives - workers, linear)
    )


def gap_text(gap_ppm: int) -> str:
    """Say how far below the best plan a plan may be."""
    if gap_ppm >= 1_000_000:
        return "not proven: other minimums might be met"
    return f"within {gap_ppm / 10_000:.4g} %" if gap_ppm else "proven"
