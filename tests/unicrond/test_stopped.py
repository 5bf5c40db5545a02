"""A coordinator whose own decisions are wrong stops deciding, and nothing else; a forged claim stops nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from tests.contracts.memory_log import MemoryLog
from tests.unicrond.coordinators import running
from tests.unicrond.test_coordinator import entries_until, joined, observation
from unicrond.core.fold import fold
from unicrond.core.own_decisions import IDLE_MAX, Breaker, DecidingStopped
from unicrond.core.rules.survey import Survey
from unicrond.core.state.alarms import AlarmHandling
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary import AnyEvent
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.service.api.metrics import exposition
from unicrond.service.coordinator import coordinator as shell


def sentenced(events: Sequence[AnyEvent]) -> Callable[..., list[AnyEvent]]:
    """A decide() that asks for these as soon as there is a node."""
    return lambda survey, _solutions, **_: list(events) if survey.state.nodes else []


async def until_stopped(coordinator: shell.Coordinator) -> None:
    async with asyncio.timeout(30):
        while not coordinator.fault:  # noqa: ASYNC110  (its own loop is what we wait for)
            await asyncio.sleep(0)


UNSOUND = v.PlanAdopted(
    epoch=1,
    assignments=(v.TaskAssignment(task="a", workers=1, replicas=(("nowhere",),), waf=1),),
    waf=1,
    basis="",
    trigger="",
    reason="",
)
NOT_TO_BE_ENCODED = v.TaskFailed(task="a", reason="x" * 40_000)


@pytest.mark.parametrize(
    ("decided", "why"), [(UNSOUND, "uses unknown node nowhere"), (NOT_TO_BE_ENCODED, "cannot decide: BadEvent")]
)
async def test_unsound_decision_is_never_written(decided: AnyEvent, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "decide", sentenced([decided]))
    log = MemoryLog()
    async with running(log) as coordinator:
        await log.append([observation(joined(), 1)])
        await until_stopped(coordinator)
        assert why in coordinator.fault
        assert (
            "unicron_deciding 0.0" in exposition(lambda: coordinator.state, fault=lambda: coordinator.fault)().decode()
        )
        # It reads on, and stays in office; the state is what it was.
        await log.append([observation(joined("n2"), 1, "n2")])
        async with asyncio.timeout(30):
            while "n2" not in coordinator.state.nodes:  # noqa: ASYNC110  (its own loop is what we wait for)
                await asyncio.sleep(0)
        assert await log.last_seq() == 3
    monkeypatch.undo()
    async with running(log) as coordinator:
        await coordinator.submit(observation(v.TaskSubmitted(spec=v.TaskSpec(name="a")), 1, "api"))
        await entries_until(log, lambda e: isinstance(e, v.StartWorker))
        assert not coordinator.fault, "the next one decides again"


async def test_failing_code_stops_only_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(survey: Survey, *_: object, **__: object) -> list[AnyEvent]:
        return [][1] if survey.state.nodes else []

    monkeypatch.setattr(shell, "decide", fails)
    log = MemoryLog()
    async with running(log) as coordinator:
        await log.append([observation(joined(), 1)])
        await until_stopped(coordinator)
        assert coordinator.fault == "cannot decide: IndexError: list index out of range"


async def test_decisions_without_effect_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = v.TaskFailed(task="unknown", reason="again and again")
    monkeypatch.setattr(shell, "decide", sentenced([nothing]))
    log = MemoryLog()
    async with running(log) as coordinator:
        await log.append([observation(joined(), 1)])
        await until_stopped(coordinator)
        assert "had no effect" in coordinator.fault
        assert await log.last_seq() == 2 + IDLE_MAX


def test_breaker_detects_alternating_decisions_without_effect() -> None:
    breaker, state = Breaker(4), ClusterState()
    with pytest.raises(DecidingStopped, match="4 batches"):
        for number in range(6):
            event = v.TaskFailed(task=f"t{number % 2}", reason="")
            breaker.about_to_append([event])
            breaker.folded(state, state, event)


def test_ends_of_alarms_silences_and_hours_are_effects() -> None:
    """A calm head may have nothing else to say for days."""
    breaker, state = Breaker(4), ClusterState(term=1)
    handled = {f"node-lost:n{number}": AlarmHandling(reason="seen") for number in range(6)}
    state = replace(state, alarms=handled, isolations_us=tuple(range(1, 7)))
    ends: list[v.AnyEvent] = [v.AlarmEnded(alarm=alarm) for alarm in handled]
    ends += [v.DeadlineExpired(deadline_id=f"brake:#{time_us}") for time_us in state.isolations_us]
    for number, event in enumerate(ends, 1):
        breaker.about_to_append([event])
        envelope = Envelope(producer="coordinator", boot=1, number=number, term=1, observed_at_us=1, event=event)
        after = fold(state, RecordedEvent(number, 1, envelope))
        breaker.folded(state, after, event)
        state = after
    assert not state.alarms and not state.isolations_us


def test_end_of_one_alarm_is_news_each_time() -> None:
    breaker, event = Breaker(4), v.AlarmEnded(alarm="outbox-backlog:n1")
    for _ in range(9):
        breaker.about_to_append([event])
        breaker.folded(ClusterState(alarms={event.alarm: AlarmHandling()}), ClusterState(), event)


async def test_forged_claim_stops_no_coordinator() -> None:
    """Neither the coordinator in office nor the next one; and the numbers of terms go on as they were."""
    log = MemoryLog()
    forged = [
        Envelope(
            producer="coordinator",
            boot=boot,
            number=2**53 - 1,
            term=term,
            observed_at_us=1,
            event=v.CoordinatorStarted(term=term, version="forged"),
        )
        for term, boot in ((10**9 - 1, 10**9 - 1), (10**9 - 2, 2**52 - 1))
    ]
    async with running(log) as coordinator:
        log._write([forged[0]])  # past claim_term
        await log.append([observation(joined(), 1)])
        await coordinator.submit(observation(v.TaskSubmitted(spec=v.TaskSpec(name="a")), 1, "api"))
        read = await entries_until(log, lambda e: isinstance(e, v.StartWorker))
        assert read[-1].envelope.term == 2, "it has claimed the next term, and decides"
        assert not coordinator.fault
    log._write([forged[1]])
    async with running(log) as coordinator:
        assert coordinator.state.term == 3
        assert [refusal.reason.split(":")[0] for refusal in coordinator.state.refusals] == ["$.event.term"] * 2


async def test_fenced_timer_event_is_rewritten_in_next_term() -> None:
    """A deadline passes once and a repair ends once: a timer that has fired is not set again."""
    log = MemoryLog()
    forged = Envelope(
        producer="coordinator",
        boot=7,
        number=2**53 - 1,
        term=10**9 - 1,
        observed_at_us=1,
        event=v.CoordinatorStarted(term=10**9 - 1, version="forged"),
    )
    async with running(log) as coordinator:
        await log.append([observation(joined(), 1)])
        await entries_until(log, lambda e: isinstance(e, v.PlanAdopted))
        unread = RecordedEvent(log._last_seq + 1, 1, forged)
        log._store([unread])
        log._take_in(unread)  # readers are not woken
        coordinator._post(v.RepairEnded(node="n1", isolation=1, has_passed=True, duration_us=1, detail=""))
        read = await entries_until(log, lambda e: isinstance(e, v.RepairEnded))
        assert read[-1].envelope.term == 2
