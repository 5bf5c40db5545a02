"""The lead's word that a group has met stands for all members that keep their state."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import SECOND_US, MiniCluster, members, no_leader_confirms, trained
from unicrond.core.state.state import Membership, Severity, Task
from unicrond.core.state.state_bytes import decode, digest, encode
from unicrond.events import vocabulary as v


def decided(made: MiniCluster) -> list[v.MembershipDecided]:
    return [e.envelope.event for e in made.log if isinstance(e.envelope.event, v.MembershipDecided)]


def leader_confirms(made: MiniCluster) -> list[bool]:
    return [event.leader_confirms for event in decided(made)]


def reported(made: MiniCluster, generation: int) -> list[str]:
    events = [e.envelope.event for e in made.log]
    return [e.worker for e in events if isinstance(e, v.WorkerJoinedGroup) and e.generation == generation]


def killed(made: MiniCluster, place: int, task: str = "big") -> str:
    worker = members(made, task)[place]
    made.kill_worker(made.hosts[made.state.tasks[task].workers[worker].node], worker)
    return worker


def until_decided(made: MiniCluster, generation: int) -> Task:
    """Up to the membership, which no worker has heard of yet."""
    while made.state.tasks["big"].generation < generation:
        assert made.decide()
    return made.state.tasks["big"]


def regrouped(made: MiniCluster, worker: str, generation: int, **fields: object) -> None:
    node = made.state.tasks["big"].workers[worker].node
    event = v.WorkerJoinedGroup(
        node=node,
        task="big",
        worker=worker,
        generation=generation,
        iteration=4,
        micro_batches_assigned=0,
        duration_us=1,
        source="own",
    )
    made.say(made.hosts[node], replace(event, **fields))


def membership(made: MiniCluster) -> Membership:
    found = made.state.tasks["big"].membership
    assert found is not None
    return found


# --- which memberships -----------------------------------------------------------------------------


def test_fault_writes_one_report_per_membership_and_newcomer() -> None:
    made = trained(6)
    assert leader_confirms(made) == [False], "who has no state tells for itself"
    victim = killed(made, 3)
    before = [worker for worker in members(made) if worker != victim]
    made.run()
    made.assert_whole()
    assert leader_confirms(made) == [False, True, True]
    (newcomer,) = {*members(made)} - {*before}
    assert reported(made, 2) == before[:1]
    assert sorted(reported(made, 3)) == sorted([before[0], newcomer])
    (incident,) = made.state.closed_incidents
    assert incident.micro_batches_repeated == 5, "what fell to the others counts, too: each says 1"


def test_members_report_individually_after_failed_group() -> None:
    made = trained(4)
    killed(made, 1)
    until_decided(made, 2)
    killed(made, 1)
    until_decided(made, 3)
    assert leader_confirms(made) == [False, True, False]
    made.run()
    made.assert_whole()


# --- what the word means ---------------------------------------------------------------------------


def test_only_leader_of_newest_group_confirms() -> None:
    made = trained(4)
    killed(made, 3)
    lead, second, third = until_decided(made, 2) and members(made)
    regrouped(made, second, 2)
    assert not made.state.tasks["big"].confirmed
    regrouped(made, lead, 1)
    assert not made.state.tasks["big"].confirmed
    regrouped(made, lead, 2)
    task = made.state.tasks["big"]
    assert task.confirmed and task.has_joined(task.workers[third])


def test_leader_report_never_covers_joiner() -> None:
    made = trained(3)
    killed(made, 2)
    while made.state.tasks["big"].generation < 3:
        for move in made.moves():
            move()
    task = made.state.tasks["big"]
    (joiner,) = membership(made).joiners
    regrouped(made, members(made)[0], 3)
    task = made.state.tasks["big"]
    assert task.group.lead_confirmed and not task.confirmed and not task.has_joined(task.workers[joiner])
    regrouped(made, joiner, 3, source="replica")
    assert made.state.tasks["big"].confirmed


def test_leader_report_ends_busy_section_of_members() -> None:
    made = trained(3)
    busy, lead = members(made)[1], members(made)[0]
    node = made.state.tasks["big"].workers[busy].node
    what = v.WorkerBusy(node=node, task="big", worker=busy, section="evaluation", limit_us=9 * SECOND_US)
    made.say(made.hosts[node], what)
    killed(made, 2)
    until_decided(made, 2)
    regrouped(made, lead, 2)
    assert not made.state.tasks["big"].workers[busy].section_limit_us


def test_old_error_of_silent_member_is_stale() -> None:
    made = trained(3)
    killed(made, 2)
    made.run()
    quiet, opened = members(made)[1], made.state.incidents_total
    assert made.state.tasks["big"].workers[quiet].generation == 1
    made.report(quiet, "exception", generation=2)
    assert made.state.incidents_total == opened
    made.report(quiet, "exception", generation=3)
    assert made.state.incidents_total == opened + 1


def test_group_remembers_removed_member() -> None:
    """It still trains in generation 2, whose lead alone has spoken, and hangs on its way out."""
    made = trained(4)
    killed(made, 3)
    made.run()
    made.train("big", 2)
    generation, quiet = made.state.tasks["big"].generation, members(made)[1]
    made.cordon(made.state.tasks["big"].workers[quiet].node, drain=True)
    task = until_decided(made, generation + 1)
    assert not task.is_member(quiet) and task.generation_of(task.workers[quiet]) == generation
    assert task.group.last_membership is not None
    again = decode(encode(made.state))
    assert again == made.state and digest(again) == digest(made.state)
    regrouped(made, members(made)[0], generation + 1)
    task = made.state.tasks["big"]
    assert task.group.last_membership is None and task.generation_of(task.workers[quiet]) == generation


# --- where the word does not come ------------------------------------------------------------------


def pass_meeting(made: MiniCluster) -> None:
    task = made.state.tasks["big"]
    name = f"meet:big#{task.generation}.{task.group.meetings}"
    made.append(v.DeadlineExpired(deadline_id=name), "coordinator", made.state.term)


@pytest.mark.parametrize("silent", [0, 1])
def test_silent_leader_ends_no_member_until_each_is_asked(silent: int) -> None:
    made = trained(4)
    killed(made, 3)
    task = until_decided(made, 2)
    culprit = members(made)[silent]
    pass_meeting(made)
    task = made.state.tasks["big"]
    assert all(task.workers[name].alive for name in members(made))
    (incident,) = [one for one in made.state.incidents.values() if one.kind == "collective_timeout"]
    assert "their lead has not said" in incident.message and incident.severity is Severity.SEV3
    made.pass_deadlines("symptom")
    until_decided(made, 3)
    assert leader_confirms(made) == [False, True, False]
    for name in members(made):
        if name != culprit:
            regrouped(made, name, 3)
    pass_meeting(made)
    task = made.state.tasks["big"]
    assert [name for name in members(made) if not task.workers[name].alive] == [culprit]


def test_open_incident_keeps_silence_deadline() -> None:
    made = trained(4)
    killed(made, 3)
    until_decided(made, 2)
    made.report(members(made)[0], "exception", generation=2)
    pass_meeting(made)
    assert made.state.tasks["big"].group.overdue_generation == 2
    until_decided(made, 3)


# --- hangs -----------------------------------------------------------------------------------------

LIMIT_US = SECOND_US


@pytest.mark.parametrize(("stepped", "found"), [(False, True), (True, False)])
def test_worker_stuck_in_finished_exchange_is_found(stepped: bool, found: bool) -> None:
    """Only until all have made a step: then all are in, and the hanging one's own agent tells of it."""
    made = trained(4)
    killed(made, 3)
    until_decided(made, 2)
    made.obey_all()
    made.group_up("big")
    if stepped:
        made.train("big")
    for worker in members(made)[:2]:
        node = made.state.tasks["big"].workers[worker].node
        made.say(
            made.hosts[node],
            v.HangSuspected(
                node=node, task="big", worker=worker, generation=2, iteration=made.iterations["big"] + 1,
                phase="reduce", micro_batch=0, collectives_entered=1, is_waiting=True, is_stopped=False,
                still_us=4 * LIMIT_US, limit_us=LIMIT_US, report_number=2,
            ),
        )  # fmt: skip
    kinds = [incident.kind for incident in made.state.incidents.values()]
    assert ("collective_timeout" in kinds) is found


def test_deal_to_both_shards_counts_once() -> None:
    made = MiniCluster(3)
    for number in range(4):
        made.add_host(f"n{number}")
    made.submit("big", pp=2, min_workers=2, max_workers=4, global_batch=12)
    made.run()
    made.train("big", 3)
    replica = members(made)[:2]
    assert [made.state.tasks["big"].workers[worker].shard for worker in replica] == [0, 1]
    killed(made, 3)
    with no_leader_confirms():
        generation = until_decided(made, 2).generation
    (incident,) = made.state.incidents
    for worker in replica:
        regrouped(made, worker, generation, micro_batches_assigned=4)
    assert made.state.incidents[incident].micro_batches_repeated == 4
