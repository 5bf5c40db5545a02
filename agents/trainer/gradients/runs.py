"""The runs of a fixed sum (`lanes.py`), one after the other, as a training process computes them.

Rules
-----
* Whatever touches this shard's group goes through `Rendezvous.together`: a failure of one shard is one of all.
* Whether a running sum has come is put to the vote of the replica, so that all its shards go ahead, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

from agents.trainer.gradients.accumulation import Accumulation
from agents.trainer.gradients.lanes import Run, begin, rooms
from agents.trainer.gradients.passing import Passing
from agents.trainer.gradients.reduction import Reduction
from agents.trainer.groups.group import Group
from agents.trainer.groups.rendezvous import Rendezvous
from agents.trainer.ledger import LaneLedger
from agents.trainer.lifecycle import Books
from agents.trainer.process.context import Context


@dataclass(slots=True)
class Runs:
    """One worker's."""

    books: Books
    here: Context
    accumulation: Accumulation
    reduction: Reduction
    rendezvous: Rendezvous
    passing: Passing
    _memory_told: int = 0

    @property
    def _ledger(self) -> LaneLedger:
        ledger = self.books.ledger
        assert isinstance(ledger, LaneLedger)
        return ledger

    @property
    def _group(self) -> Group:
        group = self.rendezvous.group
        assert group is not None
        return group

    def begin(self) -> None:
        """The runs are about to be computed, in the present group."""
        ledger = self._ledger
        assert ledger.the_deal is not None
        self.reduction.ends = ledger.the_deal.ends
        self.passing.expect(self._group, ledger.the_deal)
        self._tell_memory(ledger)

    def _tell_memory(self, ledger: LaneLedger) -> None:
        """Once in each group: what its gradients take here."""
        group, lanes = self._group, ledger.lanes
        if self._memory_told != group.generation:
            self._memory_told = group.generation
            sums, mib = rooms(begin(group.size, lanes).runs[group.rank], lanes), self.accumulation.store_bytes / 2**20
            told = f"{lanes.count} lanes over {group.size} replicas: at most {sums} gradient sums of {mib:.1f} MiB"
            print(f"{self.here.launch.worker}: {told}", flush=True)

    def goes_ahead(self, run: Run) -> bool:
        """What the run goes on with has not come to all shards: its next micro-batch is computed meanwhile."""
        ledger = self._ledger
        if not ledger.may_go_ahead(run):
            return False
        if not self.here.replica.all_true(not self.passing.is_here(self._group, run) and self.accumulation.has_room):
            return False
        ledger.go_ahead()
        self.accumulation.go_ahead()
        return True

    def enter(self, run: Run) -> None:
        """From now on gradients are the run's. Waits for what it goes on with; raises what `Group.finish` raises."""
        ledger, group = self._ledger, self._group
        if run.source is not None and run.lane not in ledger.taken:
            self.rendezvous.together(lambda: self.passing.wait(group, run))
            ledger.take(run.lane, self.passing.arrived(run))
        self.accumulation.turn(run.lane)
        self.reduction.ending = (run.lane,)

    def end(self, run: Run) -> None:
        """The run has been computed."""
        self.reduction.ending = ()
        if run.target is not None:
            self.passing.give(self._group, run, self._ledger.running[run.lane])
        else:
            self.accumulation.sums.end(run.lane)

    def say_lost(self) -> None:
        """In a new group: what has been computed ahead is in no sum."""
        ledger = self._ledger
        if ledger.ahead:
            lost = " and ".join(map(str, ledger.computed_ahead))
            told = f"iteration {ledger.iteration}: thrown away, for they were computed ahead: {lost}"
            print(f"{self.here.launch.worker}: {told}", flush=True)
