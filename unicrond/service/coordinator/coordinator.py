"""The shell around the core: read the log, fold, decide, append. One task, one order of things.

Rules
-----
* Its one effect on the cluster is to append, an operator's repair command aside. It never calls an agent.
* Hold: after an append, nothing is decided until the own events have been read back; after a start,
  nothing until everything up to the own CoordinatorStarted has been folded.
* Solving is not deciding: a plan problem that was foreseen is looked up (plan_precompute.py), any other is solved in a
  thread; the loop goes on folding meanwhile.
* The operator's repair command runs beside the loop (repairs.py); its outcome is appended like a deadline.
* Deadlines run on the monotonic clock; when one passes, that is appended, and the fold believes it.
* One that stands by (`follow`) folds what comes and decides for practice alone, so that it knows at once what to do
  when it leads; nothing of that is appended. Who leads is for head.py to say.
* A start may begin from a snapshot of the folded state; the log alone gives the same state, only later.
* Fenced means that another coordinator has taken over: `run` ends at once, and may be called again later. Where
  the claim that fenced us does not count (the fold has refused it), none has: claim the next term, and go on.
* What is decided is tried first (own_decisions.py). A decision that is not sound, that has no effect again and again,
  or that cannot be made, is a bug of ours: nothing more is decided (`fault` says why), and everything else goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from unicrond.core.decide import decide, needed_solves
from unicrond.core.deciding.plans import with_provenance
from unicrond.core.nodes.isolation import Repair
from unicrond.core.nodes.liveness import OWN_NAME, OutboxBacklog
from unicrond.core.own_decisions import Breaker, DecidingStopped, batches, require_sound
from unicrond.core.planning.problem import Problem
from unicrond.core.rules.deadlines import deadlines
from unicrond.core.rules.survey import Survey
from unicrond.core.state.alarms import Alarm
from unicrond.core.state.policy import Settings
from unicrond.core.state.state import ClusterState
from unicrond.events.log.event_log import BeatLog, EventLog, Fence, Fenced, LogError
from unicrond.events.vocabulary import AnyEvent, CheckNode, CoordinatorStarted, DeadlineExpired, StepCommitted
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.events.wire.schemas import lowered, since, told_version
from unicrond.page.attention import state_alarms
from unicrond.service.coordinator.alarms import AlarmBoard, clock_alarms, flood_alarms, silence_alarms
from unicrond.service.coordinator.clock import CLOCK, Clock, Timers
from unicrond.service.coordinator.code_identity import code_version
from unicrond.service.coordinator.event_log_health import outbox_backlog_alarms
from unicrond.service.coordinator.follower import Follower
from unicrond.service.coordinator.heartbeat_watch import NodeWatch
from unicrond.service.coordinator.plan_precompute import Foresight
from unicrond.service.coordinator.repairs import RepairOutcome, Repairs
from unicrond.service.coordinator.repairs import command as repair_command
from unicrond.service.coordinator.snapshots import Snapshots
from unicrond.service.coordinator.solutions import Answers
from unicrond.service.coordinator.surroundings import HeadSettings, Surroundings

log = logging.getLogger("unicrond")

#: Up to so many points of curves are computed on the event loop, in some 10 ms; more of them in a thread.
POINTS_ON_LOOP = 10_000
#: A request's answer waits so long for the log to hand back what the request wrote.
_READ_BACK_S = 2.0


class Coordinator(Follower):
    """One coordinator, which leads or stands by. `live`: it decides."""

    def __init__(
        self,
        event_log: EventLog,
        beat_log: BeatLog,
        settings: HeadSettings,
        clock: Clock = CLOCK,
        *,
        snapshots: Snapshots | None = None,
        repair: Callable[[Repair], Awaitable[RepairOutcome]] | None = None,
        around: Surroundings | None = None,
    ) -> None:
        """Take the parts of a coordinator. `repair`: how nodes are repaired, where not by the settings' command."""
        self.around = around = Surroundings() if around is None else around
        super().__init__(event_log, clock, snapshots, settings.skip, around.views)
        silence_s = settings.policy.silence_s
        self._watch = NodeWatch(beat_log, settings.heartbeat_s, clock, self._tell_quarantined, silence_s=silence_s)
        self.liveness = self._watch.liveness
        self.live = around.live
        self._requests = around.requests or event_log
        self._settings = settings
        self._pending: list[AnyEvent] = []
        self.foresight = Foresight(clock.monotonic_us)
        self._answers = Answers(self.foresight)
        self._timers = Timers(lambda name: self._post(DeadlineExpired(deadline_id=name)))
        readmission = settings.readmission
        if repair is None and readmission.repair:
            repair = repair_command(readmission.repair, readmission.repair_timeout_s)
        self._repairs = Repairs(repair, self._post) if repair else None
        self._board = AlarmBoard()
        self._more_alarms: list[Callable[[], list[Alarm]]] = []
        self._gathering = False
        #: By how much the log's clock was ahead of ours at our last decision.
        self._clock_lead_us = 0
        self._fence: Fence | None = None
        self._breaker = Breaker()
        self._survey: Survey | None = None
        self._hold_seq = 0
        self._renews = False
        self._number = 0
        self._group: asyncio.TaskGroup

    async def run(self) -> None:
        """Take over and coordinate until cancelled. Raises Fenced when another coordinator takes over."""
        try:
            await self._rule()
        finally:
            self._stand_down()
            if self._repairs is not None:
                await self._repairs.close()

    async def follow(self) -> None:
        """Fold what comes as a standby, until cancelled."""
        try:
            await self._catch_up()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                group.create_task(self._foresee())
                group.create_task(self._practise())
        finally:
            self._stand_down()

    @property
    def term(self) -> int:
        """The term that it decides in; 0 where it does not."""
        return self._fence.term if self._fence is not None and self.live.is_set() else 0

    @property
    def is_deposed(self) -> bool:
        """Return whether it has folded a newer term than its own."""
        return self._fence is not None and self.state.term > self._fence.term

    def _stand_down(self) -> None:
        """Drop what belongs to the term that ends; it says nothing about the next one."""
        self.live.clear()
        self._fence = None
        self._hold_seq = 0
        self._renews = False
        self._forget_unread()
        self._pending.clear()
        self._timers.arm({})
        self._answers.forget_unsolved()
        self._breaker = Breaker()
        self._gathering = False
        self.liveness.bus_works = True  # who stands by sends no beats, and can miss none

    async def _rule(self) -> None:
        await self._catch_up()
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
        """Return if the claim that fenced this coordinator does not count; else raise `fenced`."""
        self._forget_unread()
        self._answers.forget_unsolved()
        end = await self._event_log.last_seq()
        while end < self.state.seq:  # no claim in a log that has lost entries
            self.log_is_behind(f"the event log ends at entry {end}, and this head has folded {self.state.seq}")
            await self._until_whole()
            end = await self._event_log.last_seq()
        await self._read_up(end)
        assert self._fence is not None
        if self.is_deposed:
            raise fenced
        if self._renews:
            self._renews = False
            self.liveness.grace(self._clock.monotonic_us())  # as `verify` sees a term
            return
        log.warning("a claim that does not count fenced term %d (%s); claiming the next", self.state.term, fenced)

    def renew_term(self) -> None:
        """Begin another term at once if it leads: the claim of this one may then leave the stream (retention.py)."""
        self._renews = self.live.is_set()
        if self._inbox.empty():
            self._inbox.put_nowait(None)

    async def _claim(self) -> None:
        term = self.state.term + 1
        claim = CoordinatorStarted(
            term=term,
            version=told_version(code_version(), self._settings.schema),
            policy=self._decision_settings().numbers(),
            severity=dict(self._settings.severity),
            process=self._settings.process,
            adopted_us=max(self._settings.adopted_us, self.state.log_adopted_us),
            log_began_us=self.around.log_began_us(),
        )
        started = self._wrap(lowered(claim, self._settings.schema) or claim, term)
        self._fence = await self._event_log.claim_term(started)
        self.around.begin()
        self._hold_seq = self._fence.seq
        log.info("term %d: took over at sequence %d", term, self._fence.seq)

    async def _write_skips(self) -> None:
        """Append the skips under the new term: then no coordinator that folded a skipped entry still decides."""
        events = await self.unwritten_skips()
        if events:
            assert self._fence is not None
            seqs = await self._event_log.append([self._wrap(e, self._fence.term) for e in events], fence=self._fence)
            self._hold_seq = max(self._hold_seq, *seqs)

    def _decision_settings(self) -> Settings:
        settings, readmission = self._settings, self._settings.readmission
        if settings.schema < since(CheckNode):
            return Settings(settings.policy, settings.heartbeat_s)
        repair_timeout_s = readmission.repair_timeout_s if self._repairs else 0.0
        return Settings(settings.policy, settings.heartbeat_s, readmission.timeout_s, repair_timeout_s)

    def standing_alarms(self) -> list[Alarm]:
        """Return what a person has to look at now, beside what the state itself tells."""
        outbox_backlog = outbox_backlog_alarms(self.outbox_backlog())
        more = [alarm for alarms in self._more_alarms for alarm in alarms()]
        alarms = [*super().standing_alarms(), *silence_alarms(self.state), *clock_alarms(self._clock_lead_us)]
        alarms += flood_alarms(self.liveness.floods(self._clock.monotonic_us()))
        return [*alarms, *outbox_backlog, *self.around.alarms(), *more]

    def add_alarms(self, alarms: Callable[[], list[Alarm]]) -> None:
        """Take on the alarms of a part that is made after this one."""
        self._more_alarms.append(alarms)

    def now_us(self) -> int:
        """Return the wall clock's time."""
        return self._clock.wall_us()

    def outbox_backlog(self) -> dict[str, OutboxBacklog]:
        """Return for each node that is heard what it cannot append."""
        return self.liveness.backlogs(self._clock.monotonic_us())

    def quiet_us(self) -> int:
        """Return for how long nothing, neither an entry nor an acknowledgement, has come from the log while we
        listened."""
        return self.liveness.attended_us(self._read_us, self._clock.monotonic_us())

    def _delivered(self) -> None:
        super()._delivered()
        self._watch.delivered()

    def _folded(self, before: ClusterState, entry: RecordedEvent) -> None:
        event = entry.envelope.event
        if self._fence is not None and entry.envelope.term == self._fence.term:
            self._breaker.folded(before, self.state, event)
            self._clock_lead_us = entry.recorded_at_us - entry.envelope.observed_at_us
        self._watch.folded(event, live=self.live.is_set())
        if self.live.is_set():
            level = logging.DEBUG if isinstance(event, StepCommitted) else logging.INFO
            log.log(level, "%d %s", entry.seq, event.sentence())

    async def submit(self, envelope: Envelope) -> int:
        """Append an observation that a person made through the API; return its sequence number.

        The caller reads its own write: the observation is part of the state when this returns, or, where the fold takes
        longer than `_READ_BACK_S`, in the log alone. Raises LogError."""
        (seq,) = await self._requests.append([envelope])
        self._delivered()
        with suppress(TimeoutError):
            async with asyncio.timeout(_READ_BACK_S):
                await self.until_folded(seq)
        return seq

    # --- deciding ------------------------------------------------------------------------------

    async def _practise(self) -> None:
        """Decide as if this one led, and append nothing: the next look at the state is then a short one."""
        while True:
            if not self.fault:
                try:
                    survey = await self._look()
                    if not needed_solves(survey) and not decide(survey, self._answers.solutions):
                        self.foresight.look_from(survey)
                except Exception as error:
                    self._stop_deciding(_bug(error))
            await self._take_in()

    async def _coordinate(self) -> None:
        while True:
            await self._take_in()
            assert self._fence is not None
            if self.is_deposed:
                raise Fenced(f"term {self._fence.term} was replaced by term {self.state.term}")
            if self.state.seq >= self._fence.seq and self.state.term < self._fence.term:
                raise Fenced(f"the claim of term {self._fence.term} does not count after term {self.state.term}")
            if self.state.seq >= self._hold_seq:
                if not self.live.is_set():
                    self.liveness.grace(self._clock.monotonic_us())
                    self.live.set()
                    log.info("live at sequence %d", self.state.seq)
                await self._decide()
                if self._renews:
                    raise Fenced("another term was asked for")

    async def _decide(self) -> None:
        if not self.fault:
            try:
                await self._step()
                self._keep_snapshot()
            except DecidingStopped as stop:
                self._stop_deciding(str(stop))
            except LogError:
                raise
            except Exception as error:
                self._stop_deciding(_bug(error))

    def _stop_deciding(self, reason: str) -> None:
        super()._stop_deciding(reason)
        self._pending.clear()
        self._timers.arm({})

    def _keep_snapshot(self) -> None:
        if self._snapshots is not None and self._mark is not None and self._snapshots.is_due(self.state.seq):
            self._group.create_task(
                self._snapshots.save(self.state, self._mark, self._skips, self.views.goodput.totals)
            )

    async def _step(self) -> None:
        """Look at the whole state once. When it returns without appending, the state calls for nothing more."""
        survey = await self._look()
        self._timers.arm(deadlines(survey))
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
            answer = self._answers.answer_of(needed[0]) if needed else None
            await self._append([with_provenance(event, answer) for event in decisions] if answer else decisions)
        elif not needed:
            self.foresight.look_from(survey)

    async def _look(self) -> Survey:
        """Return a survey of the newest state. A plan's curves are computed in a thread if that takes a while."""
        self._survey = survey = Survey(self.state, self._settings.policy, self._survey)
        if not survey.fresh and survey.points_to_make > POINTS_ON_LOOP:
            await asyncio.to_thread(survey.make_curves)
        return survey

    async def _append(self, events: Sequence[AnyEvent]) -> None:
        assert self._fence is not None
        events = [replace(e, argv=self._settings.readmission.check) if isinstance(e, CheckNode) else e for e in events]
        forms = [form for event in events if (form := lowered(event, self._settings.schema)) is not None]
        self._breaker.about_to_append(forms)
        wrapped = [[self._wrap(event, self._fence.term) for event in batch] for batch in batches(forms)]
        require_sound(self.state, [envelope for batch in wrapped for envelope in batch])
        await self.around.prepare(forms)
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

    def _post(self, event: AnyEvent) -> None:
        """Queue an event that was made outside `decide`; the next step appends it."""
        if self.fault:
            return
        self._pending.append(event)
        if self._inbox.empty():
            self._inbox.put_nowait(None)

    async def _judge(self) -> None:
        await self.live.wait()
        self._board.begin()
        while True:
            await self._watch.pause()
            self._end_alarms()
            verdicts = self._watch.verdicts(self.state)
            if self.state.seq < self._hold_seq:
                continue
            if self._gathering and not self._watch.gathers(self.state.nodes) and self._inbox.empty():
                self._inbox.put_nowait(None)
            for verdict in self._watch.news(verdicts):
                self._post(verdict)

    def _end_alarms(self) -> None:
        """Say in the log which alarms that people have handled are over."""
        if self.state.seq >= self._hold_seq:
            for ending in self._board.endings(self.state, self._alarm_keys, self._clock.monotonic_us()):
                self._post(ending)

    def _alarm_keys(self) -> set[str]:
        return {alarm.key for alarm in (*self.standing_alarms(), *state_alarms(self.state))}


def _bug(error: Exception) -> str:
    log.error("a bug in the coordinator", exc_info=error)
    return f"cannot decide: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
