"""Work: the model FLOP that tasks have committed. Integers; light to import."""

from __future__ import annotations

from unicrond.core.state.state import Task
from unicrond.events.vocabulary import TaskSpec

#: FLOP/s of one worker where nothing is known: only ratios matter then.
LINEAR_FLOPS = 10**9


def iteration_flop(spec: TaskSpec) -> int:
    """Return the model FLOP of one iteration, forward and backward: 6 * parameters * tokens + attention.

    Formula: Narayanan et al. 2021 (arXiv 2104.04473), equation 3, without recomputation.
    """
    m = spec.model
    tokens = spec.global_batch * m.seq
    per_token = 72 * m.layers * m.hidden**2 + 12 * m.layers * m.hidden * m.seq + 6 * m.hidden * m.vocab
    return tokens * per_token


def delivered_flop(task: Task) -> int:
    """Return the weighted model FLOP that the task has committed (iterations rolled back count once)."""
    return int(task.spec.weight * iteration_flop(task.spec) * task.progress.iteration)


def achieved_waf(task: Task, now_us: int) -> int:
    """Return the weighted FLOP/s that the task has achieved since its first step was committed.

    Never over less time than its iterations took by their own clock: where appends have waited, many are recorded at
    once."""
    elapsed_us = max(now_us - task.progress.first_commit_us, task.progress.trained_us)
    if not task.progress.first_commit_us or elapsed_us <= 0:
        return 0
    return delivered_flop(task) * 1_000_000 // elapsed_us
