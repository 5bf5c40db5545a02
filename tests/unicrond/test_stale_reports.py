"""What was said before, said again: nothing is done twice, whatever order the repetitions come in."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.seeds import at_most
from tests.unicrond.cluster import MiniCluster, members, trained
from tests.unicrond.test_decide import two_tasks
from unicrond.core.decide import decide
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import WorkerStatus
from unicrond.events import vocabulary as v

#: All that an agent or a clock may repeat. (A NodeJoined is no repetition: it says what is there now.)
REPEATABLE = (
    v.ErrorReported
    | v.WorkerExited
    | v.WorkerReady
    | v.WorkerJoinedGroup
    | v.WorkerPaused
    | v.CommandApplied
    | v.CommandFailed
    | v.DeadlineExpired
    | v.TransitionCompleted
    | v.IncidentEscalated
)
KINDS = ("connection_broken", "collective_timeout", "store_error", "hang", "exception", "nan_loss", "ecc_error")


def troubled(seed: int) -> MiniCluster:
    """A cluster with a past: deaths, reports, a lost node; whole again, and past the last trouble."""
    cluster = two_tasks(seed)
    draw = random.Random(seed)
    for _ in range(6):
        alive = [
            (cluster.hosts[w.node], w.worker)
            for task in cluster.state.tasks.values()
            for w in task.workers.values()
            if w.status is WorkerStatus.MEMBER and w.worker in cluster.hosts[w.node].processes
        ]
        match draw.randrange(4):
            case 0 | 1 if alive:
                cluster.report(draw.choice(alive)[1], draw.choice(KINDS))
            case 2 if alive:
                cluster.kill_worker(*draw.choice(alive))
            case 3:
                host = draw.choice([host for host in cluster.hosts.values() if host.up])
                cluster.kill_host(host)
                cluster.lose(host)
                cluster.add_host(host.name)
        for _ in range(draw.randrange(5)):
            draw.choice(cluster.moves())()
        if draw.random() < 0.5:
            cluster.run()
    cluster.run()
    cluster.assert_whole()
    for task in cluster.state.tasks:
        cluster.train(task)
    cluster.run()
    return cluster


@settings(max_examples=at_most(60), deadline=None)
@given(st.integers(0, 10_000), st.data())
def test_repeated_report_changes_nothing(seed: int, data: st.DataObject) -> None:
    cluster = troubled(seed)
    past = [entry.envelope for entry in cluster.log if isinstance(entry.envelope.event, REPEATABLE)]
    if not past:
        return
    before = cluster.state
    for envelope in data.draw(st.lists(st.sampled_from(past), min_size=1, max_size=20)):
        if envelope.producer == "coordinator":
            cluster.append(envelope.event, "coordinator", cluster.state.term)
        else:
            cluster.say(cluster.hosts[envelope.producer], envelope.event)
        told = f"{envelope.event}\n{cluster.story()}"
        assert decide(Survey(cluster.state, cluster.policy), {}) == [], told
        assert cluster.state.incidents_total == before.incidents_total, told
        assert not cluster.state.incidents, told
    assert {n: t.workers for n, t in cluster.state.tasks.items()} == {n: t.workers for n, t in before.tasks.items()}
    assert [t.troubles.strikes for t in cluster.state.tasks.values()] == [
        t.troubles.strikes for t in before.tasks.values()
    ]
    assert cluster.state.plan == before.plan


@settings(max_examples=at_most(40), deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(KINDS))
def test_report_about_left_group_is_void(seed: int, kind: str) -> None:
    """Late news of an older generation, from a worker that has long gone on: no second reattempt, no restart."""
    cluster = two_tasks(seed)
    membership = cluster.state.tasks["big"].membership
    assert membership is not None
    reporter = membership.members[0].worker
    for member in membership.members:
        cluster.report(member.worker, "connection_broken")
    cluster.run()
    cluster.train("big")
    generation, mark = cluster.state.tasks["big"].generation, cluster.state.incidents_total
    assert generation == membership.generation + 1
    cluster.report(reporter, kind, generation=membership.generation)
    assert cluster.state.incidents_total == mark
    assert decide(Survey(cluster.state, cluster.policy), {}) == [] and not cluster.standing()


@settings(max_examples=at_most(20), deadline=None)
@given(st.integers(0, 10_000))
def test_late_peer_reports_trigger_no_second_answer(seed: int) -> None:
    cluster = two_tasks(seed)
    membership = cluster.state.tasks["big"].membership
    assert membership is not None
    first, *others = [member.worker for member in membership.members]
    cluster.report(first, "connection_broken")
    cluster.pass_deadlines("symptom")
    cluster.decide()
    for worker in others:
        cluster.report(worker, "connection_broken")
    cluster.run()
    cluster.assert_whole()
    assert cluster.state.tasks["big"].generation == membership.generation + 1
    assert cluster.state.incidents_total == 1


@pytest.mark.parametrize("is_expected", [True, False])
@pytest.mark.parametrize("echoes", [False, True])
def test_break_that_an_expected_end_explains_is_no_incident(*, is_expected: bool, echoes: bool) -> None:
    """The agent ends the workers of a node that leaves; under load their peers tell of the break after that, and before
    the next membership. Where groups break, members lose each other, too."""
    cluster = trained(3)
    workers = members(cluster)
    leaver = cluster.state.tasks["big"].workers[workers[2]]
    host = cluster.hosts[leaver.node]
    del host.processes[leaver.worker]
    about = {"node": host.name, "task": "big", "worker": leaver.worker}
    cluster.say(host, v.WorkerExited(**about, exit_code=0, signal=None, is_expected=is_expected))
    before = cluster.state.incidents_total
    for worker, other in (workers[:2], workers[1::-1]):
        lost = (other, leaver.worker) if echoes else (leaver.worker,)
        cluster.report(worker, "connection_broken", iteration=4, peer=lost[0], lost=lost)
    assert cluster.state.incidents_total == before
    assert len(cluster.state.incidents) == (0 if is_expected else 1), "an end that nobody wanted has its own"
    cluster.run()
    cluster.assert_whole()
    assert cluster.state.incidents_total == before and len(members(cluster)) == 3


def test_break_without_a_peer_that_ended_is_an_incident() -> None:
    cluster = trained(3)
    first, second, _ = members(cluster)
    cluster.report(first, "connection_broken", iteration=4, peer=second, lost=(second,))
    assert len(cluster.state.incidents) == 1
