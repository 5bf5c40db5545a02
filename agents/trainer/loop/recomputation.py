"""Has the loop compute micro-batches for their bits: twice where a task begins (`process/determinism.py`), and now and
then in an audit (`detection/audits.py`). A micro-batch that is computed for its bits alone does not count."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from random import Random

import torch

from unicrond.agents.trainer.detection.checksum import checksum
from unicrond.agents.trainer.detection.divergence import gradients_number
from unicrond.agents.trainer.lifecycle.ledger import LaneLedger
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import Run
from unicrond.agents.trainer.loop.driver import LifecycleDriver
from unicrond.agents.trainer.process import determinism

#: What an audit that is not clear at once takes more.
_MORE = 2


@dataclass(slots=True)
class Recomputation:
    """Gives out the micro-batches of one worker that are computed for their bits. `is_apart`: the one under way does
    not count."""

    driver: LifecycleDriver
    is_apart: bool = False

    def compare(self) -> Iterator[list[int]]:
        """Yield what is computed for its bits before the rest of the iteration. Raises what the comparison raises."""
        driver = self.driver
        if driver.member.lanes is None:
            return
        if driver.member.is_new and driver.context.settings.deterministic != "off":
            first = yield from self._compute_apart(determinism.MICRO_BATCH)
            second = yield from self._compute_apart(determinism.MICRO_BATCH)
            driver.check_bits([first, second])
        elif driver.detection.audits.is_due(driver.member.ledger.iteration, driver.rendezvous.generation):
            yield from self._audit()

    def _audit(self) -> Iterator[list[int]]:
        driver, ledger = self.driver, self.driver.member.ledger
        assert isinstance(ledger, LaneLedger)
        owner, run = audited_run(ledger)
        micro_batch = run.micro_batches[0]
        has_room = driver.context.replica.all_true(driver.accumulation.has_room)
        if owner == ledger.rank:
            numbers = [(yield from self._compute_first(run))]
        elif has_room:
            numbers = [(yield from self._compute_apart(micro_batch))]
        else:
            numbers = [0]
        if driver.audit(numbers):
            for _ in range(_MORE):
                numbers.append((yield from self._compute_apart(micro_batch)) if has_room else 0)
            driver.audit(numbers)

    def _compute_first(self, run: Run) -> Generator[list[int], None, int]:
        """Have the first micro-batch of this replica's first run computed, for its sum; return its number."""
        driver, ledger = self.driver, self.driver.member.ledger
        assert driver.runs is not None
        driver.runs.enter(run)
        driver.context.mark.begin_micro_batch(ledger.finished)
        driver.fire("micro_batch")
        driver.detection.compute_time.begin()
        micro_batches = list(run.micro_batches[:1])
        driver.accumulation.begin_micro_batches()
        yield micro_batches
        driver.accumulation.end_micro_batches(micro_batches)
        driver.detection.compute_time.end(1)
        ledger.finish(1)
        return _number(driver.accumulation.sums.running[run.lane].flat)

    def _compute_apart(self, micro_batch: int) -> Generator[list[int], None, int]:
        """Have the micro-batch computed for its bits alone; return its number."""
        accumulation = self.driver.accumulation
        self.is_apart = True
        with accumulation.scratch_store() as gradients:
            accumulation.begin_micro_batches()
            yield [micro_batch]
            accumulation.end_micro_batches([micro_batch])
            number = _number(gradients)
        self.is_apart = False
        return number


def audited_run(ledger: LaneLedger) -> tuple[int, Run]:
    """Return whose micro-batch is audited in the iteration, by rank, and its run: one that begins its lane, of another
    member each time. Of an iteration of which no member has anything yet."""
    assignment = ledger.lane_assignment
    assert assignment is not None
    first_runs = [
        (rank, runs[0])
        for rank, runs in enumerate(assignment.runs)
        if runs and runs[0].source is None and runs[0].micro_batches
    ]
    # Not in turn: every n-th iteration would meet the same of n replicas.
    return first_runs[int(Random(ledger.iteration).random() * len(first_runs))]


def _number(gradients: torch.Tensor) -> int:
    return gradients_number(checksum([gradients]), float(torch.linalg.vector_norm(gradients)))
