"""Running sums of lanes on their way from one member to the next (`lanes.py`): with each its loss and its tokens.

Rules
-----
* What others will give is waited for in rooms of its own, from the beginning: it arrives while this member computes.
  With NCCL operations run in the order in which they are begun, and what is waited for holds up what is given; so it is
  begun when its run's turn has come. Runs are ordered so that no members wait in a circle (`lanes.py`). NCCL knows no
  tags either: of two that come from one member, that is begun first which it gives first.
* What is given stays here as well, and counts if the other is lost. Nothing is added to it meanwhile.
* A group that is left takes with it what was on its way: the next one deals anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agents.trainer.gradients.accumulation import Accumulation, Store
from agents.trainer.gradients.lanes import Deal, Lanes, Run
from agents.trainer.groups.group import Group, Operation
from agents.trainer.ledger import Running


@dataclass(slots=True)
class _Coming:
    """`flat`: where it is written to, for a group on the CPU not the store itself."""

    store: Store
    flat: torch.Tensor
    account: torch.Tensor
    operations: tuple[Operation, Operation]


class Passing:
    """One member's end of it."""

    def __init__(self, accumulation: Accumulation, lanes: Lanes) -> None:
        self._accumulation = accumulation
        self._lanes = lanes
        self._coming: dict[int, _Coming] = {}
        self._begun: set[int] = set()
        #: By member, the runs here that go on with what it gives, in the order in which it does.
        self._given_by: list[list[Run]] = []

    def expect(self, group: Group, deal: Deal) -> None:
        """Take what this member's runs go on with."""
        self._coming, self._begun = {}, set()
        own = {run.lane: run for run in deal.runs[group.rank] if run.source is not None}
        self._given_by = [[own[run.lane] for run in runs if run.target == group.rank] for runs in deal.runs]
        if not group.keeps_order:
            for run in own.values():
                self._begin(group, run)

    def _take(self, group: Group, run: Run) -> _Coming:
        assert run.source is not None
        given = self._given_by[run.source]
        for before in given[: given.index(run) + 1]:
            self._begin(group, before)
        return self._coming[run.lane]

    def _begin(self, group: Group, run: Run) -> None:
        if run.lane not in self._begun:
            assert run.source is not None
            self._begun.add(run.lane)
            store = self._accumulation.room(spare=True)
            flat = store.flat.to(group.device)
            account = torch.zeros(2, dtype=torch.float64, device=group.device)
            operations = (
                group.take(flat, run.source, 2 * run.lane),
                group.take(account, run.source, 2 * run.lane + 1),
            )
            self._coming[run.lane] = _Coming(store, flat, account, operations)

    def is_here(self, group: Group, run: Run) -> bool:
        """Whether what the run goes on with has come to this shard."""
        return all(operation.succeeded for operation in self._take(group, run).operations)

    def wait(self, group: Group, run: Run) -> None:
        """Until what the run goes on with is here. Raises what `Group.finish` raises."""
        group.finish(*self._take(group, run).operations)

    def arrived(self, run: Run) -> Running:
        """It is here, for all shards: from now on it is this member's."""
        coming = self._coming.pop(run.lane)
        if coming.flat is not coming.store.flat:
            coming.store.flat.copy_(coming.flat)
        self._accumulation.go_on(run.lane, coming.store)
        loss_sum, tokens = coming.account.tolist()
        return Running(run.micro_batches[0] - self._lanes.of(run.lane)[0], loss_sum, int(tokens))

    def give(self, group: Group, run: Run, running: Running) -> None:
        """Start giving the next member what this one has of the run's lane."""
        assert run.target is not None
        account = torch.tensor([running.loss_sum, running.tokens], dtype=torch.float64, device=group.device)
        group.give(self._accumulation.sums.running[run.lane].flat.to(group.device), run.target, 2 * run.lane)
        group.give(account, run.target, 2 * run.lane + 1)
