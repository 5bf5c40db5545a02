"""Decisions about incidents, deadlines and the log itself."""

from __future__ import annotations

from typing import ClassVar

from unicrond.events.vocabulary.base import Decision
from unicrond.events.vocabulary.field_defaults import always
from unicrond.events.vocabulary.field_types import (
    Count,
    ErrorKind,
    FirstSerial,
    Flops,
    Micros,
    Positive,
    Setting,
    SettingName,
    SeverityLevel,
    Text,
    Work,
    WorkerId,
)
from unicrond.events.vocabulary.phrases import count, seconds


class CoordinatorStarted(Decision, frozen=True, kw_only=True):
    """A coordinator takes over. Decisions of lower terms that come after this are ignored.

    `policy`: the numbers that its decisions depend on, so that they can be made again from the log alone.
    `severity`: error kinds whose severity the configuration sets; the fold looks here first.
    `process`: the claimant, as HOST:PID; without it two claims of one term at the same time would look like one.
    `adopted_us`: when a person last had a coordinator adopt whatever log there was, by that one's clock; 0: never.
    Agents take another log than theirs for their own where it is younger than what they know.
    `log_began_us`: when the log's first entry was recorded, for those who cannot look; 0: not known.
    """

    is_noteworthy: ClassVar[bool] = True

    term: FirstSerial
    version: Text
    policy: dict[SettingName, Setting] = always({})
    severity: dict[ErrorKind, SeverityLevel] = always({})
    process: Text = always("")
    adopted_us: Micros = 0
    log_began_us: Micros = 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        where = f" in {self.process}" if self.process else ""
        return f"coordinator started term {self.term}{where}, version {self.version}"


class IncidentEscalated(Decision, frozen=True, kw_only=True):
    """The response to the incident has failed, or is not enough: from now on the incident has `severity`.

    `worker`: the faulty worker, given up by this decision; a new process takes its place.
    """

    incident: Text
    severity: SeverityLevel
    worker: WorkerId
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"incident {self.incident} escalated to SEV{self.severity}, worker {self.worker} evicted: {self.reason}"


class TransitionCompleted(Decision, frozen=True, kw_only=True):
    """An incident is closed, with its measured costs.

    `detection_flop`, `transition_flop`: what the tasks that it affected would have achieved meanwhile.
    `sub_health_flops`: by how much the cluster runs below its healthy WAF from here on, until it is repaired.
    `micro_batches_lost`: finished ones of iterations in progress that were discarded, at least: no whole replica was
    left that could have kept them.
    """

    is_noteworthy: ClassVar[bool] = True

    incident: Text
    response: Text
    detection_us: Micros
    transition_us: Micros
    micro_batches_repeated: Count
    reason: Text
    detection_flop: Work = always(0.0)
    transition_flop: Work = always(0.0)
    sub_health_flops: Flops = always(0)
    micro_batches_lost: Count = 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        discarded = f", {self.micro_batches_lost} finished ones thrown away" if self.micro_batches_lost else ""
        return (
            f"incident {self.incident} closed by {self.response}: detected in {seconds(self.detection_us)},"
            f" transition {seconds(self.transition_us)},"
            f" {count(self.micro_batches_repeated, 'micro-batch', 'micro-batches')} repeated{discarded}"
        )


class DeadlineExpired(Decision, frozen=True, kw_only=True):
    """A deadline has passed by the coordinator's monotonic clock."""

    deadline_id: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"deadline {self.deadline_id} passed"


class EntrySkipped(Decision, frozen=True, kw_only=True):
    """Every reader skips entry `seq` of the log, from the log's beginning on: an operator has started the coordinator
    with `--skip` (events/log/skips.py). It comes before this one, and is neither a claim nor a skip itself.
    """

    seq: Positive
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"entry {self.seq} is skipped: {self.reason}"
