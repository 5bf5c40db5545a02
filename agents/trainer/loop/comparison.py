"""Compares the parameters and gradients of a group's replicas; reports what is wrong, and acts on it.

Rules
-----
* `detection/divergence.py` judges a difference from rows that all members have. So all members act alike.
* All others accuse a replica at fault, and no member makes the step: all sums hold what that replica has computed. The
  iteration begins again in the group without it. If it stays, it receives the state anew first.
* If the program is at fault, every member reports that and waits to be ended. It makes no step and saves nothing more.
* With `on_divergence: report` members make every step. They still accuse a replica at fault, which leaves at the next
  change of membership. Once a member has reported that the program diverges, it accuses no replica.
* Members that compute on different things (`process/determinism.py`) report that, as they may differ by it. They do so
  in ENVIRONMENT_REPORTS_MAX groups, for each report is an entry of the log. A difference then counts against no replica
  and not against the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unicrond.agents.trainer.detection.audits import AuditDoubt, judge, judge_again
from unicrond.agents.trainer.detection.divergence import ReplicaDifference, judge_gradients
from unicrond.agents.trainer.detection.observing import Detection
from unicrond.agents.trainer.groups.shard_group import Rendezvous
from unicrond.agents.trainer.lifecycle import MemberState
from unicrond.agents.trainer.lifecycle.results import ReplicaDiffers
from unicrond.agents.trainer.process import determinism
from unicrond.agents.trainer.process.context import Context
from unicrond.events.vocabulary import CorruptionSign, DivergenceObserved, DivergenceSign, divergence_text

#: Of an audit's row before a second look: a number, and how often the replica has passed.
_FIRST = 2
#: Of so many replicas the one at fault accuses itself, too: one word is no majority.
_TWO = 2
_DOUBTS: dict[AuditDoubt, str] = {
    "unsteady": "a micro-batch has other bits each time; use deterministic kernels",
    "unequal": "two replicas have steady bits that differ, and nobody can say whose are right; check both nodes",
    "deviating": "a replica that joined has other bits than the others: other hardware or software",
}
#: In how many groups a worker reports what they compute on: the head needs the word of most members of one group, and a
#: group may be too short for that.
ENVIRONMENT_REPORTS_MAX = 3
#: How long members wait for the membership without a replica that they have accused.
_EVICTION_S = 5.0
#: How long those of a program that diverges wait for the order to end.
_STOP_S = 20.0


@dataclass(slots=True)
class ReplicaComparison:
    """Compares the replicas of one worker's present group."""

    member: MemberState
    context: Context
    rendezvous: Rendezvous
    detection: Detection
    _diverges: bool = False
    #: In which generation each sign was sent last.
    _sent_generations: dict[DivergenceSign, int] = field(default_factory=dict)
    _environment_reports: int = 0

    @property
    def _rank(self) -> int:
        group = self.rendezvous.group
        assert group is not None
        return group.rank

    def compare_environments(self, iteration: int) -> None:
        """Report where members compute on other hardware or software than the first. `iteration`: the newest that a
        member works on. Raises NotDeterministic."""
        policy, ranks = self.context.settings.deterministic, self._deviating_ranks()
        if not ranks or policy == "off":
            return
        message = determinism.describe_deviation(ranks, self._rank, determinism.environment())
        if policy == "require" and self._rank in ranks and self.context.launch.spec.lanes:
            raise determinism.NotDeterministic(f"deterministic: require: {message}")
        self._send("environment", max(1, iteration), f"; {message}")

    def _deviating_ranks(self) -> tuple[int, ...]:
        return determinism.deviating_ranks(self.rendezvous.environments)

    def _warn_of_bits(self, reason: str) -> None:
        worker = self.context.launch.worker
        print(f"{worker}: results will not be bit-identical after a change of replicas: {reason}", flush=True)

    def compare_gradients(self, rows: Sequence[Sequence[int]]) -> None:
        """Compare the numbers of one micro-batch's gradients, which each replica has computed twice. Raises
        NotDeterministic, Diverged, and MembershipSuperseded where a replica has been given up for it."""
        difference = self._own_difference(judge_gradients(rows), self.member.ledger.iteration)
        words = determinism.compare_checksums(rows)
        if difference.sign is not None:
            self._report(difference.sign, self.member.ledger.iteration)
        elif difference.odd:
            self._accuse(difference.odd, "micro_batch", self.member.ledger.iteration)
            if self.context.replica.size == 1:
                self._await_eviction()
                self.rendezvous.look()
                self.detection.start_iteration(self.member.ledger.iteration)
        self.detection.audits.bits_differ = bool(words) or bool(self._deviating_ranks())
        if words and self.context.settings.deterministic == "require":
            raise determinism.NotDeterministic(f"deterministic: require: {words}")
        if words:
            self._warn_of_bits(words)

    def compare_audit(self, rows: Sequence[Sequence[int]]) -> bool:
        """Compare the numbers of an audited micro-batch, and how often each replica has had the others' bits; return
        whether all are to compute it once more. Raises MembershipSuperseded where a replica has been given up for
        it."""
        iteration, generation, replica = self.member.ledger.iteration, self.rendezvous.generation, self.context.replica
        verdict = judge(rows) if len(rows[0]) == _FIRST else judge_again(rows)
        (is_open,) = replica.highest(int(verdict.is_open))
        if is_open:
            return True
        self.detection.audits.end(verdict, generation)
        if verdict.doubt:
            print(f"{self.context.launch.worker}: no more audits: {_DOUBTS[verdict.doubt]}", flush=True)
        if verdict.odd:
            self._accuse(verdict.odd, "micro_batch", iteration, by_all=len(rows) == _TWO)
        if not replica.all_true(not verdict.odd):
            self._await_eviction()
            self.rendezvous.look()
            self.detection.start_iteration(iteration)
        return False

    def compare_parameters(self, iteration: int) -> None:
        """Compare the parameters that all replicas began the iteration with, before its step. Raises Diverged, and
        ReplicaDiffers where a replica is at fault."""
        difference = self._own_difference(self.detection.compare_parameters(self._rank), iteration)
        if difference.sign is not None:
            self._report(difference.sign, iteration)
        elif difference.odd:
            self._accuse(difference.odd, "checksum", iteration)
            # The other shards of a replica know nothing of it.
            if self.context.replica.size == 1 and self.context.launch.spec.on_divergence == "stop":
                self._await_eviction()
                odd = ", ".join(self.member.peers[rank].worker for rank in difference.odd)
                message = f"{odd}: other parameters than the majority before iteration {iteration}"
                raise ReplicaDiffers(message, is_own=self._rank in difference.odd)

    def _own_difference(self, difference: ReplicaDifference, iteration: int) -> ReplicaDifference:
        """Return the difference; none where it may come from what the members compute on, which is reported then."""
        if difference == ReplicaDifference() or difference.sign == "unsteady" or not self._deviating_ranks():
            return difference
        self._send("environment", iteration)
        return ReplicaDifference()

    def _accuse(self, odd: Sequence[int], sign: CorruptionSign, iteration: int, *, by_all: bool = False) -> None:
        if (by_all or self._rank not in odd) and not self._diverges:
            workers = [peer.worker for peer in self.member.peers]
            self.detection.accuse(odd, sign, iteration, self.rendezvous.generation, workers)

    def _await_eviction(self) -> None:
        """Wait a moment for the membership without the accused."""
        generation, channel = self.rendezvous.generation, self.context.channel
        self.context.mark.idle()
        channel.wait(lambda: channel.newest(generation, urgent_only=True) is not None, _EVICTION_S)

    def _report(self, sign: DivergenceSign, iteration: int) -> None:
        """Report that the program diverges. Then wait to be ended, unless the task is to go on. Raises Diverged where
        no order comes."""
        context = self.context
        self._diverges = True
        self._send(sign, iteration)
        if context.launch.spec.on_divergence == "report":
            return
        context.mark.idle()
        context.channel.wait(lambda: False, _STOP_S)
        raise determinism.Diverged(divergence_text(iteration, sign))

    def _send(self, sign: DivergenceSign, iteration: int, detail: str = "") -> None:
        """Say by what sign replicas differ, once in each group."""
        generation, context = self.rendezvous.generation, self.context
        if self._sent_generations.get(sign) == generation:
            return
        if sign == "environment":
            if self._environment_reports == ENVIRONMENT_REPORTS_MAX:
                return
            self._environment_reports += 1
        self._sent_generations[sign] = generation
        print(f"{context.launch.worker}: {divergence_text(iteration, sign)}{detail}", flush=True)
        context.channel.send(
            DivergenceObserved(**context.launch.reporter, generation=generation, iteration=iteration, sign=sign)
        )
