"""Computes the runs of a fixed sum (`lanes.py`) one after the other, in a training process.

Rules
-----
* Whatever touches this shard's group goes through `Rendezvous.together`: a failure of one shard is one of all.
* Whether a running sum has come is put to the vote of the replica, so that all its shards go ahead, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

from unicrond.agents.trainer.gradients.accumulation import Accumulation
from unicrond.agents.trainer.gradients.passing import Passing
from unicrond.agents.trainer.gradients.reduction import Reduction
from unicrond.agents.trainer.groups.group import ShardGroup
from unicrond.agents.trainer.groups.shard_group import Rendezvous
from unicrond.agents.trainer.lifecycle import MemberState
from unicrond.agents.trainer.lifecycle.ledger import LaneLedger
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import Run, initial_assignment, stores_needed
from unicrond.agents.trainer.process.context import Context


@dataclass(slots=True)
class LaneRuns:
    """Computes the runs of one worker: adds its micro-batches to the running sums that other members send, and sends
    its own on."""

    member: MemberState
    context: Context
    accumulation: Accumulation
    reduction: Reduction
    rendezvous: Rendezvous
    passing: Passing
    _memory_generation: int = 0

    @property
    def _ledger(self) -> LaneLedger:
        ledger = self.member.ledger
        assert isinstance(ledger, LaneLedger)
        return ledger

    @property
    def _group(self) -> ShardGroup:
        group = self.rendezvous.group
        assert group is not None
        return group

    def begin(self) -> None:
        """Prepare for computing the runs, in the present group."""
        ledger = self._ledger
        assert ledger.lane_assignment is not None
        self.reduction.ends = ledger.lane_assignment.ends
        self.passing.expect(self._group, ledger.lane_assignment)
        self._log_memory(ledger)

    def _log_memory(self, ledger: LaneLedger) -> None:
        """Log once in each group how much memory its gradient sums take here."""
        group, lanes = self._group, ledger.lanes
        if self._memory_generation != group.generation:
            self._memory_generation = group.generation
            sums, mib = (
                stores_needed(initial_assignment(group.size, lanes).runs[group.rank], lanes),
                self.accumulation.store_bytes / 2**20,
            )
            text = f"{lanes.count} lanes over {group.size} replicas: at most {sums} gradient sums of {mib:.1f} MiB"
            print(f"{self.context.launch.worker}: {text}", flush=True)

    def try_ahead(self, run: Run) -> bool:
        """Go ahead with the run's next micro-batch, if the sum that it continues has not come to all shards; return
        whether."""
        ledger = self._ledger
        if not ledger.may_go_ahead(run):
            return False
        if not self.context.replica.all_true(
            not self.passing.has_arrived(self._group, run)
            and self.accumulation.has_room
            and not self.accumulation.has_several
        ):
            return False
        ledger.go_ahead()
        self.accumulation.go_ahead()
        return True

    def drops_ahead(self) -> bool:
        """Drop the micro-batch that was just computed, if it was computed ahead and gave a parameter several gradients,
        whose sum has not the bits that they have one after the other; return whether. It is computed again."""
        if not self._ledger.is_ahead or self.context.replica.all_true(not self.accumulation.has_several):
            return False
        self._ledger.drop_ahead()
        self.accumulation.drop_ahead()
        return True

    def enter(self, run: Run) -> None:
        """Have gradients added to the run from now on. Waits for the sum that it continues; raises what
        `ShardGroup.finish` raises."""
        ledger, group = self._ledger, self._group
        if run.source is not None and run.lane not in ledger.from_peers:
            self.rendezvous.together(lambda: self.passing.wait(group, run))
            ledger.receive(run.lane, self.passing.accept(run))
        self.accumulation.select_lane(run.lane)
        self.reduction.ending = (run.lane,)

    def end(self, run: Run) -> None:
        """End the run, which has been computed: pass its sum on, or keep it."""
        self.reduction.ending = ()
        if run.target is not None:
            self.passing.send(self._group, run, self._ledger.running[run.lane])
        else:
            self.accumulation.sums.end(run.lane)

    def log_discarded(self) -> None:
        """Log, in a new group, which micro-batches were computed ahead and are in no sum."""
        ledger = self._ledger
        if ledger.ahead:
            micro_batches = " and ".join(map(str, ledger.computed_ahead))
            text = f"iteration {ledger.iteration}: thrown away, for they were computed ahead: {micro_batches}"
            print(f"{self.context.launch.worker}: {text}", flush=True)
