"""Who hangs: the verdict on phase marks, and what the cluster makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.seeds import at_most
from tests.unicrond.cluster import SECOND_US, MiniCluster, members, no_leader_confirms, trained
from unicrond.core.faults import hangs
from unicrond.core.faults.hangs import judge, judge_all
from unicrond.core.rules.deadlines import deadlines
from unicrond.core.rules.survey import Survey
from unicrond.core.state.hang_tally import Lateness
from unicrond.core.state.ordered_map import OrderedMap, put, without
from unicrond.core.state.state import Membership, Severity, Task, TaskStatus, Worker, WorkerStatus
from unicrond.core.state.task_parts import GroupHealth, TaskProgress
from unicrond.events import vocabulary as v

LIMIT_US = 1_000_000


@pytest.fixture
def cluster() -> MiniCluster:
    """One task of three workers that has trained three iterations."""
    return trained(3)


def suspicion(cluster: MiniCluster, member: str, **changes: object) -> v.HangSuspected:
    """A victim's, unless changed: it waits in collective 9 of iteration 4."""
    told = v.HangSuspected(
        node=cluster.state.tasks["big"].workers[member].node,
        task="big",
        worker=member,
        generation=cluster.state.tasks["big"].generation,
        iteration=4,
        phase="reduce",
        micro_batch=4,
        collectives_entered=9,
        is_waiting=True,
        is_stopped=False,
        still_us=LIMIT_US - 100_000,
        limit_us=LIMIT_US,
    )
    return replace(told, **changes)


def suspect(cluster: MiniCluster, member: str, **changes: object) -> None:
    told = suspicion(cluster, member, **changes)
    cluster.say(cluster.hosts[told.node], told)


def test_verdict_replaces_worker_absent_from_collective(cluster: MiniCluster) -> None:
    one, culprit, other = members(cluster)
    suspect(cluster, one)
    suspect(cluster, other)
    cluster.run()
    assert not cluster.state.incidents_total, "two victims alone say nothing"
    suspect(cluster, culprit, phase="backward", collectives_entered=8, is_waiting=False, still_us=800_000)
    before = cluster.state.tasks["big"].generation
    cluster.run()
    cluster.assert_whole()
    (incident,) = cluster.state.closed_incidents
    assert (incident.kind, incident.severity, incident.worker) == ("hang", Severity.SEV2, culprit)
    assert incident.detected_us - incident.occurred_us == pytest.approx(800_000, abs=2000)
    assert "backward of iteration 4" in incident.message and "2 others wait in collective 9" in incident.message
    assert culprit not in members(cluster) and {one, other} < set(members(cluster))
    assert cluster.state.tasks["big"].generation > before
    stops = [e.envelope.event for e in cluster.log if isinstance(e.envelope.event, v.StopWorker)]
    assert [(stop.worker, stop.kill) for stop in stops] == [(culprit, True)], "a victim was stopped, or not by force"


def test_worker_that_moves_behind_others_is_slow(cluster: MiniCluster) -> None:
    one, slow, other = members(cluster)
    suspect(cluster, one)
    suspect(cluster, other)
    suspect(cluster, slow, phase="forward", collectives_entered=8, is_waiting=False, still_us=20_000)
    assert not cluster.state.incidents
    suspect(cluster, slow, phase="forward", collectives_entered=8, is_waiting=False, still_us=1_900_000)
    assert [incident.worker for incident in cluster.state.incidents.values()] == [slow]


def test_verdict_blames_stopped_process_in_collective(cluster: MiniCluster) -> None:
    one, stopped, _ = members(cluster)
    suspect(cluster, one)
    suspect(cluster, stopped, is_stopped=True)
    assert [incident.worker for incident in cluster.state.incidents.values()] == [stopped]


def test_group_retries_in_place_if_all_wait(cluster: MiniCluster) -> None:
    before = members(cluster)
    for worker in before:
        suspect(cluster, worker)
    cluster.run()
    cluster.assert_whole()
    (incident,) = cluster.state.closed_incidents
    assert (incident.kind, incident.severity) == ("collective_timeout", Severity.SEV3)
    assert members(cluster) == before


def test_hang_without_waiters_has_longer_limit(cluster: MiniCluster) -> None:
    for worker in members(cluster):
        suspect(cluster, worker, phase="data", collectives_entered=8, is_waiting=False)
    assert not cluster.state.incidents
    for worker in members(cluster):
        suspect(cluster, worker, phase="data", collectives_entered=8, is_waiting=False, still_us=3 * LIMIT_US)
    cluster.run()
    cluster.assert_whole()
    assert {incident.kind for incident in cluster.state.closed_incidents} == {"hang"}


def test_worker_missing_from_group_triggers_regroup(cluster: MiniCluster) -> None:
    """Its connections are gone, and it does not know; it has no limit yet, so its agent tells nothing of it."""
    victim, one, _ = members(cluster)
    cluster.kill_worker(cluster.hosts[cluster.state.tasks["big"].workers[victim].node], victim)
    while len(members(cluster)) != 3 or victim in members(cluster):
        for move in cluster.moves():
            move()
    task = cluster.state.tasks["big"]
    (late,) = set(members(cluster)) - {one, victim} - {name for name, w in task.workers.items() if w.generation}
    assert not task.confirmed and task.workers[late].generation < task.generation
    others = [name for name in members(cluster) if name != late]
    for name in others:
        worker = task.workers[name]
        regrouped = v.WorkerJoinedGroup(
            node=worker.node, task="big", worker=name, generation=task.generation, iteration=4,
            micro_batches_assigned=0, duration_us=1, source="own",
        )  # fmt: skip
        cluster.say(cluster.hosts[worker.node], regrouped)
        cluster.hosts[worker.node].processes[name].generation = task.generation
    for limits in (1, 2, 4):
        before = cluster.state.incidents_total
        for name in others:
            suspect(cluster, name, still_us=limits * LIMIT_US - 10_000)
        assert (cluster.state.incidents_total > before) == (limits == 4)
    assert [incident.kind for incident in cluster.state.incidents.values()][-1] == "collective_timeout"
    assert late in list(cluster.state.incidents.values())[-1].message
    cluster.run()
    cluster.assert_whole()
    assert late in members(cluster), "the same processes"


def test_hang_before_first_step_after_rollback_is_found(cluster: MiniCluster) -> None:
    """Nobody had state: it trains iterations that the log has seen committed, by a group that is gone."""
    cluster.train("big", 97)
    cluster.kill_worker(cluster.hosts["n0"], next(iter(cluster.hosts["n0"].processes)))
    cluster.run()
    cluster.iterations["big"] = 3  # from an old checkpoint
    assert cluster.state.tasks["big"].progress.iteration == 100
    for member in members(cluster):
        suspect(cluster, member)
    assert [incident.kind for incident in cluster.state.incidents.values()] == ["collective_timeout"]


def test_step_voids_suspicions(cluster: MiniCluster) -> None:
    one, culprit, other = members(cluster)
    suspect(cluster, one)
    suspect(cluster, other)
    cluster.train("big")
    assert not cluster.state.tasks["big"].group.suspicions
    suspect(cluster, culprit, collectives_entered=8, is_waiting=False)
    assert not cluster.state.incidents and not cluster.state.tasks["big"].group.suspicions


@pytest.mark.parametrize("changes", [{"generation": 99}, {"generation": 0}, {"iteration": 2}, {"worker": "big.99"}])
def test_fold_ignores_stale_suspicions(cluster: MiniCluster, changes: dict[str, object]) -> None:
    one, *_ = members(cluster)
    suspect(cluster, one, is_stopped=True, **changes)
    assert not cluster.state.incidents and not cluster.state.tasks["big"].group.suspicions


def test_verdict_blames_worker_stopped_after_agreement(cluster: MiniCluster) -> None:
    """The others have committed iteration 3, and it is in it for ever."""
    stopped = members(cluster)[1]
    suspect(cluster, stopped, iteration=3, is_stopped=True)
    assert [incident.worker for incident in cluster.state.incidents.values()] == [stopped]


def test_verdict_blames_worker_that_hangs_after_agreement(cluster: MiniCluster) -> None:
    one, culprit, other = members(cluster)
    suspect(cluster, one)
    suspect(cluster, other)
    suspect(cluster, culprit, iteration=3, collectives_entered=7)
    assert not cluster.state.incidents, "it may be a report that is late"
    suspect(cluster, culprit, iteration=3, collectives_entered=7, still_us=4 * LIMIT_US)
    assert [incident.worker for incident in cluster.state.incidents.values()] == [culprit]


def test_death_between_suspicions_opens_only_exit_incident(cluster: MiniCluster) -> None:
    one, two, three = members(cluster)
    suspect(cluster, one)
    cluster.kill_worker(cluster.hosts[cluster.state.tasks["big"].workers[one].node], one)
    assert judge(cluster.state.tasks["big"]) is None
    suspect(cluster, two)
    suspect(cluster, three)
    cluster.run()
    cluster.assert_whole()
    assert [incident.kind for incident in cluster.state.closed_incidents] == ["process_exit"]


def corrupt(
    cluster: MiniCluster,
    suspect: str,
    sign: v.CorruptionSign,
    *,
    reporter: int = 0,
    iteration: int = 4,
    task: str = "big",
) -> None:
    worker = members(cluster, task)[reporter]
    node, generation = cluster.state.tasks[task].workers[worker].node, cluster.state.tasks[task].generation
    event = v.CorruptionSuspected(
        node=node, task=task, worker=worker, generation=generation, iteration=iteration,
        sign=sign, suspect=suspect, value=9.0, usual=1.0,
    )  # fmt: skip
    cluster.say(cluster.hosts[node], event)


def test_replica_with_deviating_parameters_is_replaced(cluster: MiniCluster) -> None:
    culprit = members(cluster)[2]
    corrupt(cluster, culprit, "checksum")
    corrupt(cluster, culprit, "checksum", reporter=1)
    cluster.run()
    cluster.assert_whole()
    (incident,) = cluster.state.closed_incidents
    assert (incident.kind, incident.worker, incident.severity) == ("corruption", culprit, Severity.SEV2)
    assert culprit not in members(cluster)


def test_one_member_convicts_nobody(cluster: MiniCluster) -> None:
    before = members(cluster)
    for iteration in (4, 5, 6):
        corrupt(cluster, before[2], "checksum", iteration=iteration)
    corrupt(cluster, before[2], "checksum", reporter=2, iteration=6)  # the suspect itself is no witness
    corrupt(cluster, before[2], "checksum", reporter=1, iteration=7)  # nor is a word about another iteration
    cluster.run()
    assert members(cluster) == before and not cluster.state.incidents_total


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 12), st.data())
def test_innocent_is_convicted_only_where_most_replicas_lie(replicas: int, data: st.DataObject) -> None:
    """Whoever lies, of whomever and in which order: no more than half never convict; and the honest ones alone, where
    they are most, convict the odd one."""
    cluster = MiniCluster(1)
    for number in range(replicas):
        cluster.add_host(f"n{number}")
    cluster.submit("big", min_workers=1, max_workers=replicas)
    cluster.run()
    names = range(len(members(cluster)))
    assert len(names) == replicas
    liars = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=replicas // 2))
    pairs = st.tuples(st.sampled_from(liars or names), st.sampled_from(names))
    lies = data.draw(st.lists(pairs, max_size=40 if liars else 0))
    before = members(cluster)
    for liar, suspect in lies:
        corrupt(cluster, before[suspect], "checksum", reporter=liar)
    assert not cluster.state.incidents_total
    honest = [number for number in names if number not in liars]
    if liars and 2 * len(honest) > replicas:
        for number in honest:
            corrupt(cluster, before[liars[0]], "checksum", reporter=number)
        assert [incident.worker for incident in cluster.state.incidents.values()] == [before[liars[0]]]


def test_three_liars_among_a_thousand_convict_nobody() -> None:
    cluster = MiniCluster(1)
    for number in range(10):
        cluster.add_host(f"n{number}", 100)
    cluster.submit("big", min_workers=1, max_workers=1000)
    cluster.run()
    before = members(cluster)
    assert len(before) == 1000
    for liar in (0, 1, 2):
        corrupt(cluster, before[999], "checksum", reporter=liar)
    assert not cluster.state.incidents_total


def test_replica_of_two_workers_has_one_vote() -> None:
    cluster = MiniCluster(3)
    for number in range(3):
        cluster.add_host(f"n{number}", 2)
    cluster.submit("big", tp=2, min_workers=2, max_workers=6)
    cluster.run()
    cluster.train("big", 3)
    cluster.run()
    before = members(cluster)
    for reporter in (0, 1):
        corrupt(cluster, before[4], "checksum", reporter=reporter)
    cluster.run()
    assert members(cluster) == before and not cluster.state.incidents_total
    corrupt(cluster, before[4], "checksum", reporter=2)
    cluster.run()
    assert before[4] not in members(cluster)


@pytest.mark.parametrize(("sign", "known"), [("loss", True), ("gradient_norm", True), ("checksum", False)])
def test_single_corruption_suspicion_changes_nothing(cluster: MiniCluster, sign: v.CorruptionSign, known: bool) -> None:
    before = members(cluster)
    corrupt(cluster, before[2] if known else "", sign)
    cluster.run()
    assert members(cluster) == before and not cluster.state.incidents_total


def test_fold_takes_degradation_of_unknown_task() -> None:
    cluster = MiniCluster(1)
    cluster.add_host("n0")
    told = v.DegradationObserved(
        node="n0", task="none", worker="none.1", generation=1, iteration=1, iteration_us=2 * SECOND_US,
        usual_us=SECOND_US, slowest="", compute_us=0, others_us=0,
    )  # fmt: skip
    cluster.say(cluster.hosts["n0"], told)
    assert cluster.state.seq == len(cluster.log)


# --- sections ---------------------------------------------------------------------------------------


def slow(cluster: MiniCluster, member: str, limits: float, section: str = "data") -> None:
    """It has not moved in the section for so many of its limits; the iteration may last a hundred."""
    suspect(
        cluster, member, phase="data", collectives_entered=8, is_waiting=False, report_number=1, slow_section=section,
        slow_limit_us=LIMIT_US, still_us=int(limits * LIMIT_US), limit_us=100 * LIMIT_US,
    )  # fmt: skip


def test_hang_in_a_section_is_judged_by_that_sections_limit(cluster: MiniCluster) -> None:
    culprit, *others = members(cluster)
    slow(cluster, culprit, 1.1)
    assert not cluster.state.incidents, "it may be slow alone"
    slow(cluster, culprit, 2.1)
    cluster.run()
    cluster.assert_whole()
    (incident,) = cluster.state.closed_incidents
    assert (incident.kind, incident.worker) == ("hang", culprit)
    assert "it has not moved in data for 2.100 s (limit 1.000 s, by what it took before)" in incident.message
    assert set(others) < set(members(cluster))


def test_members_that_are_slow_alike_are_not_accused(cluster: MiniCluster) -> None:
    """What they read from stands still; one that hangs in another section does so by itself."""
    one, other, third = members(cluster)
    for limits in (1.1, 2.1, 4.1):
        for member in (one, other):
            slow(cluster, member, limits)
    assert not cluster.state.incidents
    slow(cluster, third, 2.1, "step")
    assert [incident.worker for incident in cluster.state.incidents.values()] == [third]


def test_only_replica_is_judged_by_its_iteration_alone() -> None:
    cluster = trained(1)
    for limits in (1.1, 2.1, 4.1):
        slow(cluster, members(cluster)[0], limits)
    assert not cluster.state.incidents


def test_worker_of_a_replica_of_two_is_accused_beside_its_peers_report_alone() -> None:
    """They wait for each other unseen: the one that has stood still for longer hangs."""
    cluster = MiniCluster(3)
    for number in range(3):
        cluster.add_host(f"n{number}", 2)
    cluster.submit("big", tp=2, min_workers=2, max_workers=6)
    cluster.run()
    cluster.train("big", 3)
    cluster.run()
    culprit, victim, *_ = members(cluster)
    slow(cluster, victim, 2.1, "forward")
    assert not cluster.state.incidents
    slow(cluster, culprit, 2.2)
    assert [incident.worker for incident in cluster.state.incidents.values()] == [culprit]


# --- by the reports that are there ----------------------------------------------------------------


def test_verdict_blames_worker_late_by_own_mark(cluster: MiniCluster) -> None:
    """The third has joined a moment ago, and its limit may be longer; or its agent is away."""
    one, culprit, _ = members(cluster)
    suspect(cluster, one, report_number=1)
    assert not cluster.state.incidents
    suspect(
        cluster, culprit, phase="backward", collectives_entered=8, is_waiting=False, still_us=800_000, report_number=1
    )
    assert [incident.worker for incident in cluster.state.incidents.values()] == [culprit]


def test_victims_alone_never_blame_silent_worker(cluster: MiniCluster) -> None:
    one, other, _ = members(cluster)
    for times in (1, 2, 3, 4):
        suspect(cluster, one, report_number=times, still_us=LIMIT_US * 2**times)
        suspect(cluster, other, report_number=times, still_us=LIMIT_US * 2**times)
    assert not cluster.state.incidents


def test_worker_in_earlier_collective_is_victim(cluster: MiniCluster) -> None:
    one, other, third = members(cluster)
    suspect(cluster, one, report_number=1)
    suspect(cluster, other, report_number=1, collectives_entered=8)
    suspect(cluster, third, report_number=1)
    assert [incident.kind for incident in cluster.state.incidents.values()] == ["collective_timeout"]


def test_busy_overrun_is_hang_with_section_name(cluster: MiniCluster) -> None:
    culprit = members(cluster)[1]
    suspect(cluster, culprit, phase="busy", section="evaluation", iteration=3, is_waiting=False, report_number=1)
    (incident,) = cluster.state.incidents.values()
    assert (incident.kind, incident.worker) == ("hang", culprit)
    assert "busy with evaluation for longer than it has declared" in incident.message


# --- a group that does not meet -------------------------------------------------------------------


def regroup_without_an_answer(cluster: MiniCluster) -> tuple[str, list[str]]:
    """An urgent membership that one of its members, the first named, does not follow; each tells for itself (where the
    lead tells: test_leader_confirms.py)."""
    victim, silent, other = members(cluster)
    cluster.kill_worker(cluster.hosts[cluster.state.tasks["big"].workers[victim].node], victim)
    with no_leader_confirms():
        while members(cluster) != [silent, other]:
            for move in cluster.moves():
                move()
    return silent, [other]


def pass_meeting(cluster: MiniCluster) -> None:
    task = cluster.state.tasks["big"]
    name = f"meet:big#{task.generation}.{task.group.meetings}"
    cluster.append(v.DeadlineExpired(deadline_id=name), "coordinator", cluster.state.term)


def wait_for_others(cluster: MiniCluster, worker: str) -> None:
    task = cluster.state.tasks["big"]
    node = task.workers[worker].node
    waits = v.WorkerWaiting(node=node, task="big", worker=worker, generation=task.generation)
    cluster.say(cluster.hosts[node], waits)


def test_regroup_deadline_stops_only_silent_worker(cluster: MiniCluster) -> None:
    silent, others = regroup_without_an_answer(cluster)
    task = cluster.state.tasks["big"]
    assert not task.confirmed and task.generation == 2
    for worker in others:
        wait_for_others(cluster, worker)
    pass_meeting(cluster)
    workers = cluster.state.tasks["big"].workers
    assert not workers[silent].alive and all(workers[name].alive for name in others)


def test_regroup_waits_for_busy_worker(cluster: MiniCluster) -> None:
    silent, others = regroup_without_an_answer(cluster)
    node = cluster.state.tasks["big"].workers[silent].node
    busy = v.WorkerBusy(node=node, task="big", worker=silent, section="evaluation", limit_us=600 * SECOND_US)
    cluster.say(cluster.hosts[node], busy)
    for worker in others:
        wait_for_others(cluster, worker)
    assert deadlines(Survey(cluster.state, cluster.policy))["meet:big#2.0"] == 600 * SECOND_US
    pass_meeting(cluster)
    task = cluster.state.tasks["big"]
    assert all(task.workers[name].alive for name in (silent, *others)) and task.group.meetings == 1
    cluster.say(cluster.hosts[node], replace(busy, section="", limit_us=0))
    pass_meeting(cluster)
    assert not cluster.state.tasks["big"].workers[silent].alive


def test_regroup_repeats_if_all_answer(cluster: MiniCluster) -> None:
    silent, others = regroup_without_an_answer(cluster)
    for worker in (silent, *others):
        wait_for_others(cluster, worker)
    pass_meeting(cluster)
    task = cluster.state.tasks["big"]
    assert all(task.workers[name].alive for name in (silent, *others))
    assert "collective_timeout" in {incident.kind for incident in cluster.state.incidents.values()}
    cluster.run()
    cluster.assert_whole()
    assert {silent, *others} < set(members(cluster))


def test_regroup_replaces_all_if_none_answers(cluster: MiniCluster) -> None:
    silent, others = regroup_without_an_answer(cluster)
    pass_meeting(cluster)
    assert not [name for name in (silent, *others) if cluster.state.tasks["big"].workers[name].alive]


def test_hang_during_handover_is_found(cluster: MiniCluster) -> None:
    """Their newest membership has no members, and the group that is to reach its boundary is still at work."""
    order = v.ReshapeRequested(task="big", tp=1, pp=2, min_workers=2, max_workers=2, reason="test")
    cluster.append(order, "api", cluster.state.term)
    culprit, *others = members(cluster)
    cluster.decide()
    membership = cluster.state.tasks["big"].membership
    assert membership is not None and not membership.members
    for victim in others:
        suspect(cluster, victim, generation=1, report_number=1)
    suspect(
        cluster,
        culprit,
        generation=1,
        report_number=1,
        phase="forward",
        collectives_entered=8,
        is_waiting=False,
        still_us=800_000,
    )
    assert [incident.worker for incident in cluster.state.incidents.values()] == [culprit]


# --- at the cost of what changes ------------------------------------------------------------------


@settings(max_examples=at_most(60), deadline=None)
@given(st.data())
def test_tally_hides_no_verdict(data: st.DataObject) -> None:
    """Reports and ends in any order, of a task in maps of several chunks: a plain look at all finds no more."""
    worker = Worker(worker="", node="n", replica=0, shard=0, status=WorkerStatus.MEMBER, generation=2)
    names = [f"a.{number}" for number in range(6)]
    seats = tuple(v.Member(worker=name, node="n", replica=n, shard=0) for n, name in enumerate(names))
    membership = Membership(
        generation=2, members=seats, joiners=(), urgent=True, store=v.StoreAddress(host="h", port=1), decided_us=1,
        leader_confirms=data.draw(st.booleans()),
    )  # fmt: skip
    own = data.draw(st.sets(st.sampled_from(names)))
    workers = {
        name: replace(worker, worker=name, replica=n, generation=2 if name in own else 1)
        for n, name in enumerate(names)
    }
    task = Task(
        spec=v.TaskSpec(name="a", max_workers=6), status=TaskStatus.ACTIVE, submitted_seq=1, submitted_us=1,
        workers=OrderedMap(workers.items()), membership=membership,
        group=GroupHealth(lead_confirmed=data.draw(st.booleans())),
        progress=TaskProgress(committed_generation=data.draw(st.sampled_from([1, 2]))),
    )  # fmt: skip
    for _ in range(data.draw(st.integers(1, 14))):
        name = data.draw(st.sampled_from(names))
        if data.draw(st.integers(0, 9)) == 0:
            task = replace(task, workers=without(task.workers, [name]))
        told = v.HangSuspected(
            node="n", task="a", worker=name, generation=data.draw(st.sampled_from([2, 2, 2, 1])), iteration=4,
            phase="reduce", micro_batch=0, collectives_entered=data.draw(st.integers(7, 9)),
            is_waiting=data.draw(st.booleans()), is_stopped=data.draw(st.integers(0, 12)) == 0,
            still_us=data.draw(st.sampled_from([0, 300, 400, 2999, 3000])), limit_us=1000,
            section="x" if data.draw(st.integers(0, 12)) == 0 else "",
            report_number=data.draw(st.sampled_from([1, 1, 1, 1, 1, 0])),
        )  # fmt: skip
        task = replace(task, group=replace(task.group, suspicions=put(task.group.suspicions, name, told)))
        assert task.lateness.counts == Lateness(task.group.suspicions, task.workers, 2, None).counts
        assert judge(task) == judge_all(task, 2)


def test_unchanged_report_skips_full_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trained(5)
    looks: list[str] = []
    monkeypatch.setattr(hangs, "judge_all", lambda task, _: looks.append(task.name))
    for worker in members(made)[:4]:
        suspect(made, worker, report_number=1)
    assert not looks
    suspect(made, members(made)[4], report_number=1)
    assert looks == ["big"], "all wait"
