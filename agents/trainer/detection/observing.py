"""Observes a task's training in one worker: iteration times, compute times, losses, gradient norms, checksums.

Rules
-----
* It observes and tells; what is to be done is the coordinator's.
* What all replicas need to know travels with the agreement that ends an iteration (`Sighting`, one row per replica):
  no collective of its own. The leader judges it; checksums are judged by all, before the step (`divergence.py`).
* Compute time is a replica's own time for its micro-batches, waits excluded (`own_time.py`), told per micro-batch as
  they may be assigned unevenly. `stragglers.py` compares the replicas of each shard; `straggler_reports.py` tells.
* Per iteration it costs a few microseconds, one pass over the gradients and one over the parameters; every
  `checksum_every` iterations that is a slower one, whose checksum the log gets.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import msgspec
import torch

from unicrond.agents.protocol.marks import Marker, now_us
from unicrond.agents.protocol.messages import GroupMembership, IterationCommitted
from unicrond.agents.protocol.sampling import DIGEST_MODULUS
from unicrond.agents.trainer.detection.audits import Audits
from unicrond.agents.trainer.detection.baseline import RECENT, SLOW, Baseline
from unicrond.agents.trainer.detection.checksum import ParameterDigest, checksum
from unicrond.agents.trainer.detection.divergence import NEWCOMER_ITERATIONS, ReplicaDifference, judge_parameters
from unicrond.agents.trainer.detection.own_time import ComputeTime
from unicrond.agents.trainer.detection.sections import ProgramSection, ProgramSections
from unicrond.agents.trainer.detection.spikes import Spikes
from unicrond.agents.trainer.detection.straggler_reports import StragglerReports
from unicrond.agents.trainer.groups.group import ShardGroup
from unicrond.agents.trainer.lifecycle.deal import Deal
from unicrond.agents.trainer.lifecycle.ledger import Total
from unicrond.agents.trainer.process.channel import AgentChannel
from unicrond.agents.trainer.process.context import Context, WorkerSettings
from unicrond.events.vocabulary import (
    Checksums,
    CorruptionSign,
    CorruptionSuspected,
    DegradationObserved,
    WorkerBusy,
)
from unicrond.events.vocabulary.training import SUSPECTS_MAX

#: An iteration that spent more than this part on a checkpoint is not a plain one: 1 / _SAVING.
_SAVING = 20
#: A last state may be large, and storage slow.
_END_S = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one shard of a replica has measured in an iteration. Travels as a row of signed 64-bit integers.

    `compute_us`: see the rules; of all `micro_batches`. `norm`: of the gradient sums of its own micro-batches.
    `checksum` of the parameters, 0: none was made. `is_newcomer`: see `divergence.judge_parameters`.
    """

    compute_us: int
    micro_batches: int
    norm: float
    checksum: int
    is_newcomer: bool = False

    def row(self) -> list[int]:
        """Return four signed 64-bit integers; the norm as the bits of its float64. A newcomer's has the sign, which no
        norm needs: hooks of before read over it."""
        norm = math.copysign(self.norm, -1.0 if self.is_newcomer else 1.0)
        (norm_bits,) = struct.unpack("<q", struct.pack("<d", norm))
        return [self.compute_us, self.micro_batches, norm_bits, self.checksum]

    @staticmethod
    def from_row(row: Sequence[int]) -> Sighting:
        """Return the sighting of such a row; the inverse of `row`."""
        compute_us, micro_batches, norm_bits, checksum = row
        (norm,) = struct.unpack("<d", struct.pack("<q", norm_bits))
        return Sighting(compute_us, micro_batches, abs(norm), checksum, math.copysign(1.0, norm) < 0)


class Detection:
    """Measures each iteration of one worker, compares it with the other replicas' and reports what is wrong.
    `parameters`: this shard's."""

    def __init__(
        self, context: Context, parameters: Iterable[torch.nn.Parameter], *, loss_scaled: bool = False
    ) -> None:
        """Begin to observe. `loss_scaled`: gradients grow with a scale that changes, and overflow when it is too large:
        their norms say nothing."""
        self.loss_scaled = loss_scaled
        settings, spec = context.settings, context.launch.spec
        self._mark: Marker = context.mark
        self._channel: AgentChannel = context.channel
        self._reporter = context.launch.reporter
        self._settings: WorkerSettings = settings
        self._interval = (spec.checkpoint.interval or 0) if spec.checkpoint.dir else 0
        self._parameters = list(parameters)
        self._digest = ParameterDigest(self._parameters)
        floor_us = int(settings.hang_floor_s * 1e6)
        self._baseline = Baseline(floor_us=floor_us, start_us=int(settings.start_s * 1e6))
        self._sections = ProgramSections(self._mark, floor_us)
        self._group: ShardGroup | None = None
        self._spikes: dict[CorruptionSign, Spikes] = {
            "loss": Spikes(rise=1.0),
            "gradient_norm": Spikes(rise=9.0),
        }
        self._recent: deque[tuple[float, ...]] = deque(maxlen=RECENT)
        self._stragglers = StragglerReports(context.channel, context.launch.reporter)
        self.compute_time = ComputeTime()
        #: A replica is one worker: what one sees, no other shard has to.
        self._is_alone = spec.replica_workers == 1
        self.audits = Audits(settings.audit_budget, is_able=_can_audit(context))
        self._saving_us = self._busy_us = 0
        #: Of the last iteration, 0 where it was not plain.
        self._plain_us = 0
        self._busiest_s = 0.0
        self._sightings: list[Sighting] = []
        #: The iteration that they are of, and the checksum that all replicas have made in it, 0 for none.
        self._iteration = self._checksum = 0
        #: In how many iterations all parameters were the same since this worker received the state; None: it received
        #: none from a replica.
        self._agreements: int | None = None
        #: Whether this replica was at fault in the last agreement.
        self._is_odd = False
        #: Whom this worker has accused in this generation.
        self._accused: set[str] = set()
        #: Of the sums of that iteration's gradients, where this worker has made it.
        self._sums = 0

    # --- where the iteration stands --------------------------------------------------------------

    def start_generation(self, group: ShardGroup, *, share: int = 0, joins: bool = False) -> None:
        """Start observing another group. `share`, `joins`: see Baseline.reset."""
        self._mark.enter_group(group.generation)
        self._sections.begin_turn()
        self._group = group
        group.mark = self._mark
        self._baseline.reset(share=share, joins=joins)
        self._recent.clear()
        self._sightings = []
        self._accused.clear()
        self._stragglers.regrouped()
        self.compute_time.clear()
        self._limit_collectives(group)

    def words(self) -> dict[str, Any]:
        """Return what a newcomer is to know of the times of iterations and sections; travels with the state."""
        return {
            "usual": self._baseline.words(),
            "sections": self._sections.words(),
            "audits": self.audits.words(),
        }

    def inherit(self, state: Mapping[str, Any]) -> None:
        """Inherit the words that came with the state that was loaded."""
        self._baseline.inherit(state.get("usual"))
        self._sections.inherit(state.get("sections"))
        self.audits.inherit(state.get("audits"))

    def section(self, name: str, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """Return the context of a section of the program. `timeout_s`: the limit of work that is not training; None:
        the limit is calculated. Raises ValueError for the name."""
        section = self._sections.named(name)
        return section if timeout_s is None and section.is_usual else self._declared(section, timeout_s)

    @contextmanager
    def _declared(self, section: ProgramSection, timeout_s: float | None) -> Iterator[None]:
        """Run what comes on top of the iteration's time, or may do so: no hang within its limit; and unless most
        iterations have it, no plain iteration."""
        mark, sections = self._mark, self._sections
        limit_us_before = mark.limit_us
        phase, is_calculated = mark.phase, timeout_s is None and bool(section.limit_us)
        sections.enter(section, section.limit_us if is_calculated else 0)
        on_top = timeout_s is not None or section.is_rare
        if on_top:
            self._allow(self._settings.start_s if timeout_s is None else timeout_s)
        may_take_us = section.limit_us if is_calculated else int((timeout_s or self._settings.start_s) * 1e6)
        report = partial(WorkerBusy, **self._reporter)
        self._channel.send(report(section=section.encoded.decode(), limit_us=may_take_us))
        mark.phase = "busy"
        if limit_us_before:
            mark.limit_us = max(limit_us_before, mark.elapsed_us + may_take_us)
        has_failed = True
        try:
            with self.compute_time.exclude() if on_top else nullcontext():
                yield
            has_failed = False
        finally:
            took_us = sections.leave(has_failed=has_failed)
            mark.phase = phase
            if limit_us_before:
                mark.limit_us = limit_us_before + took_us
            self._busy_us += took_us if on_top else 0
            self._channel.send(report(section="", limit_us=0))

    def _allow(self, busy_s: float) -> None:
        """Have the others' collectives wait for as long: only one replica may have work in the section."""
        if busy_s > self._busiest_s:
            self._busiest_s = busy_s
            if self._group is not None:
                self._limit_collectives(self._group)

    def start_iteration(self, iteration: int) -> None:
        """Start the clock of an iteration, which begins or goes on in another group."""
        self._sections.begin_turn(iteration)
        self._mark.begin_iteration(iteration, self._baseline.limit_us(checkpoint=self._is_saving(iteration)))

    def start_final_save(self, iteration: int, group: ShardGroup, longest_s: float | None) -> None:
        """Start the clock of the last state's save: all iterations are done. `longest_s`: this worker writes it, which
        took so long at most (0: it wrote none yet); None: others write. The others wait for as long as it takes: its
        mark says when that is too long."""
        longest_us = None if longest_s is None else int(longest_s * 1e6)
        self._mark.begin_iteration(iteration, self._baseline.end_limit_us(longest_us))
        group.set_timeout(max(self._settings.collective_timeout_s, _END_S))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Widen this worker's limit around what may write a checkpoint: as long as one member is not late, no worker is
        judged, however long the others wait for it."""
        began_us, limit_us = now_us(), self._mark.limit_us
        if limit_us:
            self._mark.limit_us = limit_us + self._baseline.limit_us(checkpoint=True)
        yield
        took_us = now_us() - began_us
        if limit_us:
            self._mark.limit_us = limit_us + took_us
        self._saving_us += took_us

    def record_agreement(self, rows: Sequence[Sequence[int]]) -> None:
        """Record the agreement of all; `rows` are the sightings of all replicas, in rank order."""
        self._sightings = [Sighting.from_row(row) for row in rows]
        checksums = {sighting.checksum for sighting in self._sightings}
        is_logged = len(checksums) == 1 and self.checksums_due(self._iteration)
        self._checksum = checksums.pop() if is_logged else 0

    def receive_state(self) -> None:
        """Note that this worker has received the state of a replica that trains."""
        self._agreements = None if self._is_odd else 0

    def compare_parameters(self, rank: int) -> ReplicaDifference:
        """Judge the parameters that all replicas began the agreed iteration with. `rank`: this replica's."""
        checksums = [sighting.checksum for sighting in self._sightings]
        newcomers = [rank for rank, sighting in enumerate(self._sightings) if sighting.is_newcomer]
        if self._agreements is not None:
            self._agreements += len(set(checksums)) == 1 and 0 not in checksums
        difference = judge_parameters(checksums, newcomers)
        self._is_odd = rank in difference.odd
        return difference

    def commit(self, iteration: int, duration_us: int, group: ShardGroup) -> None:
        """Note the end of the iteration, after `duration_us`."""
        saved = self.has_saved(duration_us)
        self._plain_us = duration_us if self.is_plain(duration_us) else 0
        if _SAVING * self._busy_us <= duration_us:
            self._baseline.add(duration_us, checkpoint=saved or self._is_saving(iteration))
        self._saving_us = self._busy_us = 0
        self._sections.learn()
        self._limit_collectives(group)

    def has_saved(self, duration_us: int) -> bool:
        """Return whether the present iteration, of so long, has stood still for a checkpoint."""
        return _SAVING * self._saving_us > duration_us

    def is_plain(self, duration_us: int) -> bool:
        """Return whether it has stood still neither for a checkpoint nor for a section of the program."""
        return not self.has_saved(duration_us) and _SAVING * self._busy_us <= duration_us

    def _is_saving(self, iteration: int) -> bool:
        """Return whether the iteration's time holds the checkpoint of the one before."""
        return bool(self._interval) and iteration > 1 and (iteration - 1) % self._interval == 0

    def _limit_collectives(self, group: ShardGroup) -> None:
        timeout_s = min(self._baseline.collective_timeout_us() / 1e6, self._settings.collective_timeout_s)
        group.set_timeout(timeout_s + self._busiest_s)

    # --- reports to the others -------------------------------------------------------------------

    def observe(self, iteration: int, micro_batches: int, norm: float) -> Sighting:
        """Return this shard's sighting for the agreement on `iteration`."""
        self._iteration, self._sums = iteration, 0
        number = 0
        if self._settings.checksum_every:
            number = checksum(self._parameters) if self.checksums_due(iteration) else self._digest.number()
        compute_time = self.compute_time
        compute_us = (
            compute_time.compute_us * micro_batches // max(1, compute_time.micro_batches)
        )  # some may have been of another group
        compute_time.clear()
        is_newcomer = self._agreements is not None and 0 < self._agreements <= NEWCOMER_ITERATIONS
        return Sighting(compute_us, micro_batches, 0.0 if self.loss_scaled else norm, number, is_newcomer)

    def checksums_due(self, iteration: int) -> bool:
        """Return whether the checksums that the log gets are made in the iteration."""
        interval = self._settings.checksum_every
        return bool(interval) and iteration % interval == 0

    def record_sums(self, number: int) -> None:
        """Record the checksum of the sums of gradients of the iteration that was observed last."""
        self._sums = number

    def complete(self, commit: IterationCommitted, *, is_writing: bool) -> IterationCommitted:
        """Return the commit of the present iteration with what was observed in it. `is_writing`: a state is on its way
        to storage."""
        is_plain = self.is_plain(commit.duration_us) and not is_writing
        return msgspec.structs.replace(self.with_checksums(commit), is_plain=is_plain)

    def with_checksums(self, commit: IterationCommitted) -> IterationCommitted:
        """Return the commit with the checksums of the parameters that it began with, if all replicas have made the
        same, and of its sums."""
        if commit.iteration != self._iteration or not self._checksum:
            return commit
        return msgspec.structs.replace(
            commit,
            checksums=Checksums(
                iteration=commit.iteration - 1,
                parameters=self._checksum % DIGEST_MODULUS,
                sums=self._sums % DIGEST_MODULUS,
            ),
        )

    # --- reports to the agent -------------------------------------------------------------------

    def judge(
        self, iteration: int, total: Total, membership: GroupMembership, shard: int, rank: int, deal: Deal
    ) -> None:
        """Judge an agreed iteration, and tell the agent what is remarkable. `rank`: this replica's. `deal`: of the next
        iteration."""
        if len(self._sightings) != len(total.accounts):
            return  # agreed on in another group: its rows are gone
        workers = [member.worker for member in membership.members if member.shard == shard]
        times = [(sighting.compute_us, sighting.micro_batches) for sighting in self._sightings]
        self._stragglers.judge(iteration, times, membership, shard, deal, self._plain_us, tells=not rank)
        if rank:
            return
        if shard == 0:
            self._judge_pace(iteration, membership.generation, workers)
            losses = [account.loss_sum / max(1, account.tokens) for account in total.accounts]
            self._judge_values("loss", losses, iteration, membership.generation, workers)
        norms = [
            sighting.norm / max(1, account.tokens)
            for sighting, account in zip(self._sightings, total.accounts, strict=True)
        ]
        self._judge_values("gradient_norm", norms, iteration, membership.generation, workers)

    def accuse(
        self, ranks: Iterable[int], sign: CorruptionSign, iteration: int, generation: int, workers: Sequence[str]
    ) -> None:
        """Tell the agent that the replicas of these ranks have something else than the majority: of each once in a
        generation."""
        suspects = [worker for rank in ranks if (worker := workers[rank]) not in self._accused]
        for suspect in suspects[:SUSPECTS_MAX]:  # the others at the next comparison
            self._accused.add(suspect)
            self._suspect(sign, suspect, 0.0, 0.0, iteration, generation)

    def _judge_values(
        self, sign: CorruptionSign, values: list[float], iteration: int, generation: int, workers: list[str]
    ) -> None:
        for spike in self._spikes[sign].check(values):
            if self._is_alone:
                self.audits.attend()
            suspect = "" if spike.rank is None else workers[spike.rank]
            self._suspect(sign, suspect, spike.value, spike.usual, iteration, generation)

    def _suspect(
        self, sign: CorruptionSign, suspect: str, value: float, usual: float, iteration: int, generation: int
    ) -> None:
        self._channel.send(
            CorruptionSuspected(
                **self._reporter,
                generation=generation,
                iteration=iteration,
                sign=sign,
                suspect=suspect,
                value=value,
                usual=usual,
            )
        )

    def _judge_pace(self, iteration: int, generation: int, workers: list[str]) -> None:
        self._recent.append(tuple(sighting.compute_us / max(1, sighting.micro_batches) for sighting in self._sightings))
        slow_us = self._baseline.detect_slowdown()
        if not slow_us:
            return
        by_rank = [median(row[rank] for row in self._recent) for rank in range(len(workers))]
        slowest = max(range(len(workers)), key=by_rank.__getitem__)
        other_times = [sighting for rank, sighting in enumerate(by_rank) if rank != slowest]
        others_us = median(other_times) if other_times else 0.0
        stands_out = by_rank[slowest] > SLOW * others_us
        self._channel.send(
            DegradationObserved(
                **self._reporter,
                generation=generation,
                iteration=iteration,
                iteration_us=slow_us,
                usual_us=self._baseline.best_us,
                slowest=workers[slowest] if stands_out else "",
                compute_us=int(by_rank[slowest]) if stands_out else 0,
                others_us=int(others_us) if stands_out else 0,
            )
        )


def _can_audit(context: Context) -> bool:
    """Return whether this worker can compute micro-batches for their bits alone, and these tell anything."""
    return bool(context.launch.spec.lanes) and context.settings.deterministic != "off" and context.replica.can_audit
