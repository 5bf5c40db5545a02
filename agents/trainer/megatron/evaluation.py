"""Evaluates on all replicas together: each micro-batch of an evaluation is computed once, by the replica to which it is
dealt, and the value is that of one replica.

Rules
-----
* Megatron's `evaluate` calls its schedule `--eval-iters` times and adds up what the micro-batches report. Here a call
  computes this replica's share of it and reports nothing; the last call reports the sum of all, which is added up from
  all replicas' reports in the order in which one replica would add them: the same bits on any number of replicas.
* Shares go from replica to replica outside of any group (`groups/shared_results.py`). A share that does not come is
  computed by whoever waits for it: at once where an urgent membership says that its replica is lost, else where nothing
  of it has come for as long as this replica's own shares took. So a death in the middle of an evaluation changes no
  value, and no replica waits for another for ever. Two replicas that compute the same share publish the same bits.
* The shards of a replica take the same turns: its last rank, which holds the losses and prints them, decides. Only
  there the last call reports; where others share its sequences or samples, it reports their sum, and they zeros, which
  Megatron adds to it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import torch

from unicrond.agents.trainer.groups.shared_results import SharedResults
from unicrond.agents.trainer.lifecycle import MemberState
from unicrond.agents.trainer.megatron.data import EvaluationLoader
from unicrond.agents.trainer.megatron.flags import divides_evaluation
from unicrond.agents.trainer.megatron.runs import ScheduleRuns
from unicrond.agents.trainer.process.context import Context
from unicrond.agents.trainer.process.replica import ReplicaWorld

#: What the micro-batches of a call report, by name, as numbers.
Reports: TypeAlias = list[dict[str, list[float]]]
#: Runs the schedule's forward passes for micro-batches of a call; returns their reports in the last stage.
Forward: TypeAlias = Callable[[int, list[int]], Sequence[dict[str, Any]]]
#: A call and a replica: what it is dealt of it.
Share: TypeAlias = tuple[int, int]
#: Seconds for which a share may be late at least, and at most.
_LATE_MIN_S, _LATE_MAX_S = 5.0, 60.0
#: Seconds for which one shard looks for shares, at most, while the replica's others wait for it in a collective.
_TURN_S = 60.0
#: Seconds from one look for shares to the next.
_LOOK_S = 0.02


class Evaluation:
    """One evaluation of so many `calls`. `results`: None: this replica computes all of it. `rank`, `size`: this replica
    among those that evaluate. `wait`: waits a moment for one of them; returns whether that is known to be lost."""

    def __init__(
        self,
        replica: ReplicaWorld,
        calls: int,
        results: SharedResults | None = None,
        rank: int = 0,
        size: int = 1,
        wait: Callable[[int], bool] = bool,
    ) -> None:
        self._replica = replica
        self.calls = calls
        self._results = results
        self._rank = rank
        self._size = size
        self._wait = wait
        self._per_call = 0
        self._call = 0
        self._own_s = 0.0
        self._reports: dict[Share, Reports] = {}
        #: Replicas whose shares are late, and of which nothing has come since.
        self._laggards: set[int] = set()

    def compute(self, forward: Forward, micro_batches: int) -> Sequence[dict[str, Any]]:
        """Compute this replica's share of the next call of so many micro-batches. Return what Megatron is to add up."""
        call, self._call = self._call, self._call + 1
        if self._results is None or call >= self.calls:
            reports = forward(call, list(range(micro_batches)))
            if self._replica.sharers == 1 or call >= self.calls:
                return reports
            reports = self._of_all_sharers(reports)  # in the order in which several replicas' are added up
            return reports if self._decides else [_zeros(report) for report in reports]
        self._per_call = micro_batches
        begin_s = time.monotonic()
        self._compute((call, self._rank), forward)
        self._own_s += time.monotonic() - begin_s
        if self._call < self.calls:
            return [{}]
        while (number := self._replica.highest(self._turn())[0]) > 0:
            if number <= self.calls * self._size:
                self._compute(divmod(number - 1, self._size), forward)
        totals: list[dict[str, torch.Tensor]] = [{}]
        if self._decides:
            self._results.end(map(_key, self._reports), self._size)
            totals = self._total()
        if self._replica.sharers == 1:
            return totals
        sizes = msgspec.msgpack.encode({name: total.numel() for name, total in totals[0].items()})
        names = msgspec.msgpack.decode(self._replica.from_last_rank(sizes), type=dict[str, int])
        empty = {name: torch.empty(size, device=self._replica.device) for name, size in names.items()}
        return totals if self._decides else [_zeros(empty)]

    @property
    def _decides(self) -> bool:
        return self._replica.shard == self._replica.size - 1

    def _micro_batches_of(self, share: Share) -> list[int]:
        """Return the micro-batches of the share."""
        call, rank = share
        first = call * self._per_call
        return [number for number in range(self._per_call) if (first + number) % self._size == rank]

    def _compute(self, share: Share, forward: Forward) -> None:
        micro_batches = self._micro_batches_of(share)
        if not micro_batches:
            return
        reports = forward(share[0], micro_batches)
        if self._replica.sharers > 1:
            reports = self._of_all_sharers(reports)
        if self._decides and self._results is not None:
            numbers = [
                {name: torch.as_tensor(value).detach().view(-1).tolist() for name, value in report.items()}
                for report in reports
            ]
            self._reports[share] = numbers
            self._results.publish(_key(share), msgspec.msgpack.encode(numbers))

    def _of_all_sharers(self, reports: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return what the sharers report together: of sums with their counts, the sums; all in the last stage call
        this."""
        flat = [{name: torch.as_tensor(value).view(-1) for name, value in report.items()} for report in reports]
        pairs = [(report, name) for report in flat for name in report if report[name].numel() == 2]
        if pairs:
            sums = torch.stack([report[name] for report, name in pairs])
            self._replica.sum_over_sharers(sums)
            for (report, name), total in zip(pairs, sums, strict=True):
                report[name] = total
        return flat

    def _turn(self) -> int:
        """Return what the replica's shards do next: 0: all shares are known; n: the share of number n - 1 is computed,
        or where there is none of that number, they ask again."""
        if not self._decides:
            return 0
        end_s = time.monotonic() + _TURN_S
        ranks = [(self._rank + place) % self._size for place in range(1, self._size)]
        for rank in ranks:
            while missing := self._missing(rank):
                if time.monotonic() > end_s:
                    return self.calls * self._size + 1
                if not self._take(missing, rank):
                    self._laggards.add(rank)
                    call, _ = missing[-1 - self._rank % len(missing)]  # those who wait begin at different places
                    return call * self._size + rank + 1
        return 0

    def _missing(self, rank: int) -> list[Share]:
        shares = [(call, rank) for call in range(self.calls)]
        return [share for share in shares if share not in self._reports and self._micro_batches_of(share)]

    def _take(self, missing: Sequence[Share], rank: int) -> bool:
        """Wait for these shares of a replica until it is late. Return whether some have come."""
        assert self._results is not None
        results, keys = self._results, {_key(share): share for share in missing}
        late_s = time.monotonic() + min(max(_LATE_MIN_S, self._own_s), _LATE_MAX_S)
        while not results.are_there(list(keys)):
            if rank in self._laggards or not results.is_there or time.monotonic() > late_s or self._wait(rank):
                break
        values = results.take(list(keys))
        for key, value in values.items():
            self._reports[keys[key]] = msgspec.msgpack.decode(value, type=Reports)
        if values:
            self._laggards.discard(rank)
        return bool(values)

    def _total(self) -> list[dict[str, torch.Tensor]]:
        """Return one report that holds the sum, and as many empty ones as make up the number of all."""
        totals: dict[str, torch.Tensor] = {}
        for reports in self._calls_in_order():
            for name in reports[0]:
                rows = [torch.tensor(report[name], device=self._replica.device) for report in reports]
                value = torch.vstack(rows).sum(dim=0) if rows[0].numel() == 2 else torch.cat(rows).sum()
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
        zeros = {name: torch.zeros_like(total) for name, total in totals.items()}
        return [totals, *(zeros for _ in range(self.calls * self._per_call - 1))]

    def _calls_in_order(self) -> Iterator[Reports]:
        """Yield the reports of each call's micro-batches, in their order."""
        for call in range(self.calls):
            by_number: dict[int, dict[str, list[float]]] = {}
            for rank in range(self._size):
                by_number.update(
                    zip(self._micro_batches_of((call, rank)), self._reports.get((call, rank), ()), strict=True)
                )
            yield [by_number[number] for number in range(self._per_call)]


def _zeros(report: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a report that adds nothing to another of these names."""
    return {name: torch.zeros_like(value) for name, value in report.items()}


def _key(share: Share) -> str:
    return f"{share[0]}/{share[1]}"


class Evaluations:
    """The evaluations of one worker. `count`: of those behind."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.count = 0
        #: By split, of the data that is evaluated on.
        self._loaders: dict[str, list[EvaluationLoader]] = {"valid": [], "test": []}
        self._present: Evaluation | None = None
        self._results = SharedResults(context.launch.task)
        #: The replicas that have trained the last iteration: a newcomer does not evaluate after it.
        self._trainers: list[int] = []

    def add_loader(self, split: str, loader: EvaluationLoader) -> EvaluationLoader:
        """Note a loader of "valid" or "test", which reads this replica's share; return it."""
        self._loaders[split].append(loader)
        return loader

    def set_offset(self, offset: int) -> None:
        """Have validation begin so many samples behind where the evaluations behind have ended."""
        for loader in self._loaders["valid"]:
            loader.offset = offset

    def note_trainers(self, member: MemberState) -> None:
        """Note who has trained the iteration that is about to be committed."""
        self._trainers = [peer.replica for peer in member.peers]

    @contextlib.contextmanager
    def begin(self, member: MemberState, name: str, args: Any) -> Iterator[None]:
        """Deal the calls of Megatron's `evaluate`, within, over the replicas that have trained the iteration before.
        `name`: of the evaluation, one of its kind in the iteration. `args`: Megatron's."""
        if divides_evaluation(args):
            self._present = self._deal(member, name, args.eval_iters)
        try:
            yield
        finally:
            self._present = None
        self.count += 1

    def _deal(self, member: MemberState, name: str, calls: int) -> Evaluation:
        context, membership = self._context, member.membership
        number = context.launch.replica
        replicas = [peer.replica for peer in member.peers if peer.replica in self._trainers]
        if membership is None or number not in replicas or len(replicas) == 1:
            return Evaluation(context.replica, calls)
        self._results.begin(membership.store, f"{membership.generation}/{context.iteration}/{name}")

        channel = context.channel

        def is_lost(rank: int) -> bool:
            """Return whether an urgent membership has it no more."""
            urgent = channel.newest(membership.generation, urgent_only=True)
            return urgent is not None and all(peer.replica != replicas[rank] for peer in urgent.members)

        def wait(rank: int) -> bool:
            """Wait for the next look, or for such a membership."""
            return channel.wait(lambda: is_lost(rank), _LOOK_S)

        return Evaluation(context.replica, calls, self._results, replicas.index(number), len(replicas), wait)

    def compute(self, runs: ScheduleRuns | None, schedule: Callable[..., Any], options: dict[str, Any]) -> Any:
        """Run the schedule for a call of an evaluation. Return what Megatron is to add up."""
        if runs is None or self._present is None:
            return schedule(**options)
        calls = self._present.calls

        def forward(call: int, micro_batches: list[int]) -> Sequence[dict[str, Any]]:
            """Run it for these micro-batches of the call."""

            def request(padded: list[int]) -> None:
                """Tell all loaders of them; that of the data that is evaluated on reads them."""
                for split, loaders in self._loaders.items():
                    behind = self.count * calls if split == "valid" else 0
                    for loader in loaders:
                        loader.request_if_read(behind + call + 1, padded)

            return runs.evaluate(schedule, micro_batches, options, request)

        return self._present.compute(forward, options["num_microbatches"])
