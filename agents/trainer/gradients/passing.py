"""Passes running sums of lanes (`lanes.py`), each with its loss and its tokens, from one member of a chain to the next.

Rules
-----
* What others will give is waited for in rooms of its own, from the beginning: it arrives while this member computes.
  With NCCL operations run in the order in which they are begun, and what is waited for holds up what is given; so it is
  begun when its run's turn has come. Runs are ordered so that no members wait in a circle
  (`micro_batch_assignment.py`). NCCL knows no tags either: of two that come from one member, that is begun first which
  it gives first.
* What is given stays here as well, and counts if the other is lost. Nothing is added to it meanwhile.
* A group that is left takes with it what was on its way: the next one deals anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unicrond.agents.trainer.gradients.accumulation import Accumulation, GradientStore
from unicrond.agents.trainer.groups.group import Operation, ShardGroup
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.ledger import RunningSum
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import Assignment, Run


@dataclass(slots=True)
class _IncomingSum:
    """A running sum that another member will send. `flat`: where it is written to, for a group on the CPU not the store
    itself."""

    store: GradientStore
    flat: torch.Tensor
    account: torch.Tensor
    operations: tuple[Operation, Operation]


class Passing:
    """Sends and receives one member's running sums."""

    def __init__(self, accumulation: Accumulation, lanes: Lanes) -> None:
        self._accumulation = accumulation
        self._lanes = lanes
        self._incoming: dict[int, _IncomingSum] = {}
        self._started: set[int] = set()
        #: By member, the runs here that go on with what it gives, in the order in which it does.
        self._runs_by_source: list[list[Run]] = []

    def expect(self, group: ShardGroup, assignment: Assignment) -> None:
        """Start receiving what this member's runs go on with."""
        self._incoming, self._started = {}, set()
        incoming_runs = {run.lane: run for run in assignment.runs[group.rank] if run.source is not None}
        self._runs_by_source = [
            [incoming_runs[run.lane] for run in runs if run.target == group.rank] for runs in assignment.runs
        ]
        if not group.keeps_order:
            for run in incoming_runs.values():
                self._start(group, run)

    def _incoming_of(self, group: ShardGroup, run: Run) -> _IncomingSum:
        assert run.source is not None
        queue = self._runs_by_source[run.source]
        for earlier in queue[: queue.index(run) + 1]:
            self._start(group, earlier)
        return self._incoming[run.lane]

    def _start(self, group: ShardGroup, run: Run) -> None:
        if run.lane not in self._started:
            assert run.source is not None
            self._started.add(run.lane)
            store = self._accumulation.take_store(spare=True)
            flat = store.flat.to(group.device)
            account = torch.zeros(2, dtype=torch.float64, device=group.device)
            operations = (
                group.receive(flat, run.source, 2 * run.lane),
                group.receive(account, run.source, 2 * run.lane + 1),
            )
            self._incoming[run.lane] = _IncomingSum(store, flat, account, operations)

    def has_arrived(self, group: ShardGroup, run: Run) -> bool:
        """Return whether the sum that the run goes on with has come to this shard."""
        return all(operation.succeeded for operation in self._incoming_of(group, run).operations)

    def wait(self, group: ShardGroup, run: Run) -> None:
        """Wait for the sum that the run goes on with. Raises what `ShardGroup.finish` raises."""
        group.finish(*self._incoming_of(group, run).operations)

    def accept(self, run: Run) -> RunningSum:
        """Take over the sum, which has come to all shards: from now on it is this member's."""
        incoming = self._incoming.pop(run.lane)
        if incoming.flat is not incoming.store.flat:
            incoming.store.flat.copy_(incoming.flat)
        self._accumulation.resume_lane(run.lane, incoming.store)
        loss_sum, tokens = incoming.account.tolist()
        return RunningSum(run.micro_batches[0] - self._lanes.of(run.lane)[0], loss_sum, int(tokens))

    def send(self, group: ShardGroup, run: Run, running: RunningSum) -> None:
        """Start sending the next member what this one has of the run's lane."""
        assert run.target is not None
        account = torch.tensor([running.loss_sum, running.tokens], dtype=torch.float64, device=group.device)
        group.send(self._accumulation.sums.running[run.lane].flat.to(group.device), run.target, 2 * run.lane)
        group.send(account, run.target, 2 * run.lane + 1)
