"""The shell around the core, over a log in memory: take over, hold, restart, be fenced."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.memory_log import MemoryBeatLog, MemoryLog
from tests.unicrond.coordinators import running
from unicrond.core.own_decisions import batches
from unicrond.core.replayer import replay
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy
from unicrond.core.state.state_bytes import digest
from unicrond.events import vocabulary as v
from unicrond.events.log.event_log import MAX_BATCH, Fenced
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.replay.views.verify import Verifier, bases
from unicrond.service.coordinator import coordinator
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.surroundings import HeadSettings
from unicrond.views.view import feed_all


def observation(event: v.AnyEvent, number: int, producer: str = "n1") -> Envelope:
    return Envelope(producer=producer, boot=1, number=number, observed_at_us=1, event=event)


def joined(node: str = "n1") -> v.NodeJoined:
    store = v.StoreAddress(host="127.0.0.1", port=1)
    return v.NodeJoined(node=node, address="127.0.0.1", slots=1, store=store, agent_boot=1, version="test")


async def entries_until(log: MemoryLog, found: Callable[[v.AnyEvent], bool]) -> list[RecordedEvent]:
    """The whole log, up to the first entry for which `found` holds."""
    read: list[RecordedEvent] = []
    async with asyncio.timeout(30):
        async for entry in log.read():
            assert isinstance(entry, RecordedEvent)
            read.append(entry)
            if found(entry.envelope.event):
                return read
    raise AssertionError("the log ended")


async def test_coordinator_plans_and_starts_workers() -> None:
    log = MemoryLog()
    async with running(log) as coordinator:
        await log.append([observation(joined(), 1)])
        await coordinator.submit(observation(v.TaskSubmitted(spec=v.TaskSpec(name="a")), 1, "api"))
        read = await entries_until(log, lambda e: isinstance(e, v.StartWorker))
        (started,) = [e.envelope for e in read if isinstance(e.envelope.event, v.StartWorker)]
        assert started.term == 1
        state = replay(read)
        assert state.plan.assignments["a"].workers == 1


async def test_request_is_answered_once_it_is_part_of_the_state() -> None:
    """The client that submits a task and then reads the state finds the task there."""
    opens = asyncio.Event()
    opens.set()

    class GatedLog(MemoryLog):
        async def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
            async with aclosing(super().read(after_seq, until_seq=until_seq)) as entries:
                async for entry in entries:
                    await opens.wait()
                    yield entry

    log = GatedLog()
    async with running(log) as coordinator:
        opens.clear()
        before = await log.last_seq()
        request = observation(v.TaskSubmitted(spec=v.TaskSpec(name="a")), 1, "api")
        answer = asyncio.create_task(coordinator.submit(request))
        while await log.last_seq() == before:  # noqa: ASYNC110, the log has no event for it
            await asyncio.sleep(0)
        assert not answer.done() and not coordinator.state.tasks
        opens.set()
        seq = await answer
        assert "a" in coordinator.state.tasks and coordinator.state.seq >= seq


async def test_request_is_answered_though_the_log_hands_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has the request, so its answer is no error, and comes after `_READ_BACK_S`."""
    monkeypatch.setattr(coordinator, "_READ_BACK_S", 0.05)
    idle = Coordinator(MemoryLog(), MemoryBeatLog(), HeadSettings(policy=Policy(), heartbeat_s=1))
    assert await idle.submit(observation(v.TaskSubmitted(spec=v.TaskSpec(name="a")), 1, "api")) == 1
    assert not idle.state.tasks


async def test_successor_repeats_adoption_in_its_claim() -> None:
    """Also by another head, which has not heard it itself."""
    log = MemoryLog()
    for adopted_us, said_us in ((0, 0), (70, 70), (0, 70), (50, 70)):
        async with running(log, adopted_us=adopted_us) as coordinator:
            newest = [e async for e in log.read(0, until_seq=await log.last_seq())]
            claims = [e.envelope.event for e in newest if isinstance(e, RecordedEvent)]
            claim = [claim for claim in claims if isinstance(claim, v.CoordinatorStarted)][-1]
            assert (claim.term, claim.adopted_us) == (coordinator.state.term, said_us)


async def test_restart_folds_log_and_repeats_no_decision() -> None:
    log = MemoryLog()
    async with running(log) as coordinator:
        await log.append([observation(joined(), 1)])
        await coordinator.submit(observation(v.TaskSubmitted(spec=v.TaskSpec(name="a")), 1, "api"))
        await entries_until(log, lambda e: isinstance(e, v.StartWorker))
    length = await log.last_seq()
    async with running(log) as coordinator:
        assert coordinator.state.term == 2
        await log.append([observation(v.WorkerStarted(node="n1", task="a", worker="a.1", pid=1), 2)])
        await log.append([observation(v.WorkerReady(node="n1", task="a", worker="a.1"), 3)])
        read = await entries_until(log, lambda e: isinstance(e, v.MembershipDecided))
    again = [e.envelope.event for e in read[length:] if isinstance(e.envelope.event, v.StartWorker | v.PlanAdopted)]
    assert not again


async def test_coordinator_makes_slow_curves_in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by: list[threading.Thread] = []
    make = Survey.make_curves

    def spied(survey: Survey) -> None:
        made_by.append(threading.current_thread())
        make(survey)

    monkeypatch.setattr(Survey, "make_curves", spied)
    monkeypatch.setattr(coordinator, "POINTS_ON_LOOP", 2)
    log = MemoryLog()
    async with running(log) as leads:
        await log.append([observation(joined(), 1)])
        await leads.submit(observation(v.TaskSubmitted(spec=v.TaskSpec(name="a", max_workers=2)), 1, "api"))
        await entries_until(log, lambda e: isinstance(e, v.StartWorker))
        assert not made_by
        await leads.submit(observation(v.TaskSubmitted(spec=v.TaskSpec(name="b", max_workers=3)), 2, "api"))
        await entries_until(log, lambda e: isinstance(e, v.PlanAdopted) and e.epoch == 3)
    assert made_by and threading.main_thread() not in made_by


async def test_new_coordinator_fences_predecessor() -> None:
    log = MemoryLog()
    old = Coordinator(log, MemoryBeatLog(), HeadSettings(policy=Policy(), heartbeat_s=0.2))
    running_old = asyncio.create_task(old.run())
    await asyncio.wait_for(old.live.wait(), 30)
    async with running(log) as new:
        assert new.state.term == 2
        await log.append([observation(joined(), 1)])
        # Both see the node; only one may decide, the other finds that out when it tries.
        with pytest.raises(Fenced):
            await asyncio.wait_for(running_old, 30)
        await entries_until(log, lambda e: isinstance(e, v.PlanAdopted))
    plans = [e async for e in log.read(until_seq=await log.last_seq())]
    assert sum(isinstance(e.envelope.event, v.PlanAdopted) for e in plans if isinstance(e, RecordedEvent)) == 1


async def test_coordinator_stops_before_deciding_in_newer_term() -> None:
    log = MemoryLog()
    old = Coordinator(log, MemoryBeatLog(), HeadSettings(policy=Policy(), heartbeat_s=0.2))
    running_old = asyncio.create_task(old.run())
    await asyncio.wait_for(old.live.wait(), 30)
    await log.claim_term(
        Envelope(
            producer="coordinator",
            boot=2,
            number=1,
            term=2,
            observed_at_us=1,
            event=v.CoordinatorStarted(term=2, version="test"),
        )
    )
    with pytest.raises(Fenced):
        await asyncio.wait_for(running_old, 30)
    assert await log.last_seq() == 2


async def test_coordinator_declares_silent_node_lost() -> None:
    log, beats = MemoryLog(), MemoryBeatLog()
    async with running(log, beats) as coordinator:
        await log.append([observation(joined(), 1)])
        read = await entries_until(log, lambda e: isinstance(e, v.NodeLost))
        lost = read[-1].envelope.event
        assert isinstance(lost, v.NodeLost) and lost.node == "n1"
        await entries_until(log, lambda e: isinstance(e, v.TransitionCompleted))
        assert coordinator.state.term == 1


async def test_live_state_matches_fold_of_log() -> None:
    log = MemoryLog()
    async with running(log) as coordinator:
        await log.append([observation(joined(), 1)])
        await entries_until(log, lambda e: isinstance(e, v.PlanAdopted))
        async with asyncio.timeout(30):
            while coordinator.state.seq < await log.last_seq():  # noqa: ASYNC110  (its own loop is what we wait for)
                await asyncio.sleep(0)
        state = replay([entry async for entry in log.read(until_seq=coordinator.state.seq)])
        assert digest(state) == digest(coordinator.state)


async def test_successive_node_losses_make_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicrond.core.nodes.liveness.RECONNECT_US", 0)  # or both would be late from the same moment on
    log, beats = MemoryLog(), MemoryBeatLog()
    names = [f"n{number}" for number in range(1, 6)]
    silent: set[str] = set()
    rounds: asyncio.Queue[int] = asyncio.Queue()

    async def beat_on() -> None:
        for number in itertools.count(1):
            for name in names:
                if name not in silent:
                    beat = v.Heartbeat(
                        node=name, agent_boot=1, beat=number, workers=0, load_milli=0, memory_free_bytes=0
                    )
                    await beats.publish(observation(beat, number, name))
            rounds.put_nowait(number)
            await asyncio.sleep(0.1)

    async with running(log, beats) as coordinator, asyncio.TaskGroup() as group:
        for name in names:
            await log.append([observation(joined(name), 1, name)])
        await coordinator.submit(observation(v.TaskSubmitted(spec=v.TaskSpec(name="a", max_workers=5)), 1, "api"))
        beating = group.create_task(beat_on())
        await entries_until(log, lambda e: isinstance(e, v.PlanAdopted) and e.assignments[0].workers == 5)
        silent.add("n1")
        while not rounds.empty():
            rounds.get_nowait()
        for _ in range(2):  # n2's last beat comes later than n1's
            await rounds.get()
        silent.add("n2")
        lost: set[str] = set()
        async with asyncio.timeout(20):
            async for entry in log.read():
                assert isinstance(entry, RecordedEvent)
                event = entry.envelope.event
                if isinstance(event, v.NodeLost):
                    lost.add(event.node)
                if isinstance(event, v.PlanAdopted) and lost:
                    assert lost == {"n1", "n2"}, "one plan for both"
                    assert event.assignments[0].workers == 3
                    break
        beating.cancel()


async def test_log_holds_severities_of_configuration() -> None:
    log = MemoryLog()
    async with running(log, severity={"nan_loss": 1}) as coordinator:
        read = await entries_until(log, lambda e: isinstance(e, v.CoordinatorStarted))
        started = read[0].envelope.event
        assert isinstance(started, v.CoordinatorStarted) and started.severity == {"nan_loss": 1}
        assert coordinator.state.severity == {"nan_loss": 1}


@given(st.lists(st.integers(0, 1200), max_size=6))
def test_batch_holds_decision_and_its_commands(commands: list[int]) -> None:
    events: list[v.AnyEvent] = []
    for task, count in enumerate(commands):
        events.append(v.DeadlineExpired(deadline_id=f"start:{task}"))
        stop = v.StopWorker(command_id=f"1.1.n.{task}", node="n", epoch=1, task="t", worker="t.1", reason="")
        events += [stop] * count
    written = list(batches(events))
    assert [event for batch in written for event in batch] == events
    assert all(0 < len(batch) <= MAX_BATCH for batch in written)
    for batch in written[1:]:
        torn = isinstance(batch[0], v.Command)
        assert not torn or commands[int(batch[0].command_id.rpartition(".")[2])] >= MAX_BATCH


async def test_coordinator_begins_new_term_on_request() -> None:
    log = MemoryLog()
    async with running(log) as coordinator:
        await log.append([observation(joined(), 1)])
        await entries_until(log, lambda e: isinstance(e, v.PlanAdopted))
        coordinator.renew_term()
        await entries_until(log, lambda e: isinstance(e, v.CoordinatorStarted) and e.term == 2)
        await coordinator.submit(observation(v.TaskSubmitted(spec=v.TaskSpec(name="a")), 1, "api"))
        read = await entries_until(log, lambda e: isinstance(e, v.StartWorker))
        assert coordinator.live.is_set() and not coordinator.fault
    assert [e.envelope.term for e in read if isinstance(e.envelope.event, v.StartWorker)] == [2]
    verifier = Verifier(bases(read))
    feed_all(verifier, read)
    assert verifier.finish().decisions >= 3
