"""The shell around the core: read the log, fold, decide, append. One task, one order of things.

Rules
-----
* Its one effect on the cluster is to append, an operator's repair command aside. It never calls an agent.
* Hold: after an append, nothing is decided until the own events have been read back; after a start,
  nothing until everything up to the own CoordinatorStarted has been folded.
* Solving is not deciding: a plan problem that was foreseen is looked up (foresight.py), any other is solved in a
  thread; the loop goes on folding meanwhile.
* The operator's repair command runs beside the loop (repairs.py); its outcome is appended like a deadline.
* Deadlines run on the monotonic clock; when one passes, that is appended, and the fold believes it.
* A start may begin from a snapshot of the folded state; the log alone gives the same state, only later.
* Fenced means that another coordinator has taken over: stop at once. Where the claim that fenced us does not count (the
  fold has refused it), none has: claim the next term, and go on.
* What is decided is tried first (own_decisions.py). A decision that is not sound, that has no effect again and again,
  or that cannot be made, is a bug of ours: nothing more is decided (`fault` says why), and everything else goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from events.envelope import Entry, Envelope, Quarantined
from events.log import BeatLog, EventLog, Fence, Fenced, LogDamaged, LogError
from events.prose import summary
from events.schemas import SCHEMA, lowered, since, told_version
from events.skips import passed_over
from events.subjects import subject
from events.vocabulary import (
    AnyEvent,
    CheckNode,
    CoordinatorStarted,
    DeadlinePassed,
    EntrySkipped,
    ErrorKind,
    SeverityLevel,
    StepCommitted,
)
from unicrond.core.deadlines import deadlines
from unicrond.core.decide import decide, needed_solves
from unicrond.core.fold import fold
from unicrond.core.invariants import InvariantError, check
from unicrond.core.isolation import Repair
from unicrond.core.liveness import OWN_NAME, KeptBack
from unicrond.core.own_decisions import Breaker, Stopped, batches, require_sound
from unicrond.core.planning.problem import Problem
from unicrond.core.policy import Policy, Settings
from unicrond.core.provenance import stamped
from unicrond.core.skipping import Needed
from unicrond.core.state import ClusterState
from unicrond.core.survey import Survey
from unicrond.intake.readmission import Readmission
from unicrond.service.alarms import Alarms
from unicrond.service.answers import Answers
from unicrond.service.clock import CLOCK, Clock
from unicrond.service.code_identity import code_version
from unicrond.service.foresight import Foresight
from unicrond.service.log_keeper import kept_back_lines
from unicrond.service.repairs import Outcome, Repairs
from unicrond.service.repairs import command as repair_command
from unicrond.service.snapshots import Mark, Snapshots, mark_of
from unicrond.service.surroundings import Surroundings
from unicrond.service.watch import Watch

log = logging.getLogger("unicrond")

_INBOX = 20_000
_READMISSION = Readmission()


class Coordinator:
    """One term of one coordinator. `state` is always the fold of everything up to `state.seq`."""

    def __init__(
        self,
        event_log: EventLog,
        beat_log: BeatLog,
        policy: Policy,
        heartbeat_s: float,
        clock: Clock = CLOCK,
        severity: Mapping[ErrorKind, SeverityLevel] | None = None,
        snapshots: Snapshots | None = None,
        process: str = "",
        schema: int = SCHEMA,
        skip: Sequence[int] = (),
        readmission: Readmission = _READMISSION,
        repair: Callable[[Repair], Awaitable[Outcome]] | None = None,
    ) -> None:
        """`severity`: what the configuration sets beside severity.py's table. `process`: HOST:PID, for the claim.
        `schema`: the newest that is written (events/schemas.py). `skip`: entries of the log to pass over from now on
        (events/skips.py). `repair`: how nodes are repaired, where not by the command of `readmission`."""
        self.state = ClusterState()
        self._clock = clock
        self._watch = Watch(beat_log, heartbeat_s, clock, self._tell_quarantined)
        self.liveness = self._watch.liveness
        self.live = asyncio.Event()
        self.alarms = Alarms()
        self._event_log = event_log
        self.around = Surroundings(requests=event_log)
        self._policy = policy
        self._heartbeat_s = heartbeat_s
        self._inbox: asyncio.Queue[Entry | None] = asyncio.Queue(maxsize=_INBOX)
        self._pending: list[AnyEvent] = []
        self.foresight = Foresight(clock.monotonic_us)
        self._answers = Answers(self.foresight)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._severity = dict(severity or {})
        self._process = process
        self._schema = schema
        self._readmission = readmission
        if repair is None and readmission.repair:
            repair = repair_command(readmission.repair, readmission.repair_timeout_s)
        self._repairs = Repairs(repair, self._post) if repair else None
        self._read_us = clock.monotonic_us()
        self._gathering = False
        self._snapshots = snapshots
        self._mark: Mark | None = None
        self._fence: Fence | None = None
        #: Why nothing more is decided, in one line; empty as long as all is well.
        self.fault = ""
        self._breaker = Breaker()
        self._survey: Survey | None = None
        #: The last state that was held against the rules.
        self._sound: ClusterState | None = None
        self._skip = tuple(skip)
        self._skips: dict[int, str] = {}
        self._hold_seq = 0
        self._number = 0
        self._group: asyncio.TaskGroup
        self._cause = ""

    async def run(self) -> None:
        """Take over and coordinate until cancelled. Raises Fenced when another coordinator takes over."""
        try:
            await self._rule()
        finally:
            if self._repairs is not None:
                await self._repairs.close()

    async def _rule(self) -> None:
        await self._catch_up(await self._event_log.last_seq())
        while True:
            await self._claim()
            await self._write_skips()
            assert self._fence is not None
            try:
                async with asyncio.TaskGroup() as group:
                    self._group = group
                    group.create_task(self._read())
                    group.create_task(self._watch.beat(self._fence.term))
                    group.create_task(self._watch.listen())
                    group.create_task(self._judge())
                    group.create_task(self._foresee())
                    group.create_task(self._coordinate())
            except* Fenced as fenced:
                await self._require_ours(fenced.exceptions[0])

    async def _require_ours(self, fenced: BaseException) -> None:
        """What fenced us was no claim that counts; else raises `fenced`."""
        self._inbox = asyncio.Queue(maxsize=_INBOX)
        self._answers.forget_the_unsolved()
        await self._read_up(await self._event_log.last_seq())
        assert self._fence is not None
        if self.state.term > self._fence.term:
            raise fenced
        log.warning("a claim that does not count fenced term %d (%s); claiming the next", self.state.term, fenced)

    async def _claim(self) -> None:
        term = self.state.term + 1
        started = self._wrap(
            CoordinatorStarted(
                term=term,
                version=told_version(code_version(), self._schema),
                policy=self._settings().numbers(),
                severity=self._severity,
                process=self._process,
            ),
            term,
        )
        self._fence = await self._event_log.claim_term(started)
        self._hold_seq = self._fence.seq
        log.info("term %d: took over at sequence %d", term, self._fence.seq)

    def _settings(self) -> Settings:
        if self._schema < since(CheckNode):
            return Settings(self._policy, self._heartbeat_s)
        asked = self._readmission
        repair_timeout_s = asked.repair_timeout_s if self._repairs else 0.0
        return Settings(self._policy, self._heartbeat_s, asked.timeout_s, repair_timeout_s)

    def standing_alarms(self) -> list[str]:
        """What a person has to look at now, a line each."""
        return self.alarms.standing(self._clock.wall_us()) + kept_back_lines(self.kept_back()) + self.around.alarms()

    def kept_back(self) -> dict[str, KeptBack]:
        """Per node that is heard, what it cannot append."""
        return self.liveness.kept_back(self._clock.monotonic_us())

    def quiet_us(self) -> int:
        """For how long nothing has come from the log, neither an entry nor an acknowledgement, though we listened."""
        return self.liveness.attended_us(self._read_us, self._clock.monotonic_us())

    async def submit(self, envelope: Envelope) -> int:
        """Append an observation that a person made (API); its sequence number."""
        (seq,) = await self.around.requests.append([envelope])
        self._delivered()
        return seq

    # --- reading -------------------------------------------------------------------------------

    async def _catch_up(self, until_seq: int) -> None:
        self._skips = await self._event_log.skips()
        fresh = {seq: "ordered by --skip" for seq in self._skip if seq not in self._skips}
        needed = Needed(fresh, until_seq)
        self._skips |= fresh
        if until_seq == 0:
            return
        started = time.monotonic()
        usable = self._snapshots is not None and not fresh
        restored = await self._snapshots.restore(self._event_log, self._skips) if usable and self._snapshots else None
        if restored is not None:
            self.state, self._mark = restored
            self._cause = self._mark.event_id
        first_seq = self.state.seq + 1
        await self._read_up(until_seq, needed)
        if fresh:
            needed.require(self.state)
        self._require_sound_state()
        log.info("folded entries %d to %d in %.2f s", first_seq, until_seq, time.monotonic() - started)

    async def _write_skips(self) -> None:
        """Under the new term, so that no coordinator that has folded the skipped entry still decides."""
        written = await self._event_log.skips()
        events = [EntrySkipped(seq=seq, reason=why) for seq, why in self._skips.items() if seq not in written]
        if events:
            assert self._fence is not None
            seqs = await self._event_log.append([self._wrap(e, self._fence.term) for e in events], fence=self._fence)
            self._hold_seq = max(self._hold_seq, *seqs)

    async def _read_up(self, until_seq: int, needed: Needed | None = None) -> None:
        if until_seq <= self.state.seq:
            return
        async with aclosing(self._event_log.read(self.state.seq, until_seq=until_seq)) as entries:
            async for entry in entries:
                if needed is not None:
                    needed.see(entry)
                self._fold(entry)

    async def _read(self) -> None:
        async with aclosing(self._event_log.read(self.state.seq)) as entries:
            async for entry in entries:
                self._delivered()
                await self._inbox.put(entry)
        raise RuntimeError("the event log ended, which must not happen")

    def _delivered(self) -> None:
        self._read_us = self._clock.monotonic_us()
        self._watch.delivered()

    def _fold(self, entry: Entry) -> None:
        before = self.state
        self._mark = mark_of(entry)
        entry = passed_over(entry, self._skips)
        self.state = fold(before, entry)
        if isinstance(entry, Quarantined):
            self._tell_quarantined(entry)
        else:
            if self.state.refused is not before.refused:
                reason, on_subject = self.state.refused[-1].reason, subject(entry.envelope)
                self._tell_quarantined(Quarantined(entry.seq, entry.recorded_at_us, on_subject, reason, 0))
            self._cause = entry.envelope.event_id
            event = entry.envelope.event
            if isinstance(event, EntrySkipped) and event.seq < entry.seq and event.seq not in self._skips:
                raise LogDamaged(
                    f"entry {event.seq} was skipped after this coordinator folded it; restart the coordinator"
                )
            if self._fence is not None and entry.envelope.term == self._fence.term:
                self._breaker.folded(before, self.state, entry.envelope.event)
            self._watch.folded(event, live=self.live.is_set())
            if self.live.is_set():
                level = logging.DEBUG if isinstance(entry.envelope.event, StepCommitted) else logging.INFO
                log.log(level, "%d %s", entry.seq, summary(entry.envelope.event))

    def _tell_quarantined(self, entry: Quarantined) -> None:
        log.warning("quarantined sequence %d on %s: %s", entry.seq, entry.subject, entry.reason)
        if (alarm := self.alarms.quarantined(entry, self.state)) and alarm in self.standing_alarms():
            log.error("ALARM: %s", alarm)

    # --- deciding ------------------------------------------------------------------------------

    async def _coordinate(self) -> None:
        while True:
            entry = await self._inbox.get()
            while True:
                if entry is not None:
                    self._fold(entry)
                if self._inbox.empty():
                    break
                entry = self._inbox.get_nowait()
            self._require_sound_state()
            assert self._fence is not None
            if self.state.term > self._fence.term:
                raise Fenced(f"term {self._fence.term} was replaced by term {self.state.term}")
            if self.state.seq >= self._fence.seq and self.state.term < self._fence.term:
                raise Fenced(f"the claim of term {self._fence.term} does not count after term {self.state.term}")
            if self.state.seq >= self._hold_seq:
                if not self.live.is_set():
                    self.liveness.grace(self._clock.monotonic_us())
                    self.live.set()
                    log.info("live at sequence %d", self.state.seq)
                await self._decide()

    async def _decide(self) -> None:
        if not self.fault:
            try:
                await self._step()
                self._keep_snapshot()
            except Stopped as stopped:
                self._stop_deciding(str(stopped))
            except LogError:
                raise
            except Exception as error:
                self._stop_deciding(_bug(error))

    def _require_sound_state(self) -> None:
        if not self.fault:
            try:
                check(self.state, self._sound)
                self._sound = self.state
            except InvariantError as error:
                self._stop_deciding(str(error))

    def _stop_deciding(self, why: str) -> None:
        self.fault = why
        self._pending.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        log.error(
            "DECIDING HAS STOPPED: %s; training continues, faults are not healed (docs/operate/recovery.md)",
            why,
        )

    def _keep_snapshot(self) -> None:
        if self._snapshots is not None and self._mark is not None and self._snapshots.due(self.state.seq):
            self._group.create_task(self._snapshots.save(self.state, self._mark, self._skips))

    async def _step(self) -> None:
        """One look at the whole state; the state asks for nothing more when it returns without appending."""
        self._survey = survey = Survey(self.state, self._policy, self._survey)
        self._arm_deadlines(survey)
        if self._repairs is not None:
            self._repairs.look(survey)
        if self._pending:
            pending = tuple(self._pending)
            await self._append(pending)
            del self._pending[: len(pending)]  # after the append: what a false claim has fenced goes with our next term
            return
        needed = needed_solves(survey)
        for problem in self._answers.ask(needed):
            self._group.create_task(self._solve(problem))
        self._gathering = self._watch.gathers(self.state.nodes)
        decisions = decide(survey, self._answers.solutions, gathering=self._gathering)
        if decisions:
            how = self._answers.how(needed[0]) if needed else None
            await self._append([stamped(event, how) for event in decisions] if how else decisions)
        elif not needed:
            self.foresight.look_from(survey)

    async def _append(self, events: Sequence[AnyEvent]) -> None:
        assert self._fence is not None
        events = [replace(e, argv=self._readmission.check) if isinstance(e, CheckNode) else e for e in events]
        told = [form for event in events if (form := lowered(event, self._schema)) is not None]
        self._breaker.about_to_append(told)
        wrapped = [[self._wrap(event, self._fence.term) for event in batch] for batch in batches(told)]
        require_sound(self.state, [envelope for batch in wrapped for envelope in batch])
        await self.around.prepare(told)
        for batch in wrapped:
            seqs = await self._event_log.append(batch, fence=self._fence)
            self._delivered()
            self._hold_seq = max(self._hold_seq, *seqs)

    def _wrap(self, event: AnyEvent, term: int) -> Envelope:
        self._number += 1
        return Envelope(
            producer=OWN_NAME,
            boot=term,
            number=self._number,
            term=term,
            caused_by=self._cause,
            based_on=self.state.seq,
            observed_at_us=self._clock.wall_us(),
            event=event,
        )

    async def _solve(self, problem: Problem) -> None:
        try:
            await self._answers.solve(problem)
        except Exception as error:
            self._stop_deciding(_bug(error))
        await self._inbox.put(None)

    async def _foresee(self) -> None:
        try:
            await self.foresight.run()
        except Exception as error:
            self._stop_deciding(_bug(error))

    def _arm_deadlines(self, survey: Survey) -> None:
        standing = deadlines(survey)
        for name in [name for name in self._timers if name not in standing]:
            self._timers.pop(name).cancel()
        loop = asyncio.get_running_loop()
        for name, length_us in standing.items():
            if name not in self._timers:
                self._timers[name] = loop.call_later(length_us / 1e6, self._pass_deadline, name)

    def _pass_deadline(self, name: str) -> None:
        self._post(DeadlinePassed(deadline_id=name))

    def _post(self, event: AnyEvent) -> None:
        """A decision made outside `decide`; appended with the next step."""
        if self.fault:
            return
        self._pending.append(event)
        if self._inbox.empty():
            self._inbox.put_nowait(None)

    async def _judge(self) -> None:
        await self.live.wait()
        while True:
            await self._watch.pause()
            verdicts = self._watch.verdicts(self.state.nodes)
            if self.state.seq < self._hold_seq:
                continue
            if self._gathering and not self._watch.gathers(self.state.nodes) and self._inbox.empty():
                self._inbox.put_nowait(None)
            for verdict in self._watch.news(verdicts):
                self._post(verdict)


def _bug(error: Exception) -> str:
    log.error("a bug in the coordinator", exc_info=error)
    return f"cannot decide: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
