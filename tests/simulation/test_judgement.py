"""The rules of judgement see what they forbid, and let pass what has a cause of its own."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import SECOND_US, MiniCluster
from unicrond.agents.core.state import ArmTimer
from unicrond.agents.core.worker_budgets import ReportDrops
from unicrond.core.faults.program_faults import LOOPING_MIN
from unicrond.core.state.holds import Outage, StandingHold
from unicrond.core.state.node_parts import Cordon
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, NodeStatus, Severity
from unicrond.core.state.task_parts import Crashes
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.holds import HeldAction
from unicrond.replay.simulation.checks.invariants import honest_workers_are_heard, symptoms_are_no_incidents
from unicrond.replay.simulation.checks.judgement import causes_of, deaf_heads_judge_nobody, programs_move_no_others
from unicrond.replay.simulation.checks.outages import nodes_given_up, other_causes, outages_move_nobody
from unicrond.replay.simulation.checks.people_record import PeopleRecord
from unicrond.replay.simulation.faults.boundary_events import STRANGER

GARBAGE = "garbage"


@pytest.fixture
def cluster() -> MiniCluster:
    """Three nodes; "sound" trains on one of them, a garbage program runs on another."""
    cluster = MiniCluster(3)
    for number in range(3):
        cluster.add_host(f"n{number}")
    for task in ("sound", GARBAGE):
        cluster.submit(task, max_workers=1)
    cluster.run()
    cluster.train("sound", 2)
    return cluster


def moved(state: ClusterState, task: str = "sound") -> v.PlanAdopted:
    """Return a plan that seats the task on the third node, and leaves the rest as it is."""
    seats = {name: share.replicas for name, share in state.plan.assignments.items()}
    used = {node for replicas in seats.values() for nodes in replicas for node in nodes}
    (free,) = set(state.nodes) - used
    seats[task] = ((free,),)
    return plan_of(state, seats)


def plan_of(state: ClusterState, seats: dict[str, tuple[tuple[str, ...], ...]]) -> v.PlanAdopted:
    assignments = tuple(
        v.TaskAssignment(task=name, workers=len(replicas), replicas=replicas, waf=1) for name, replicas in seats.items()
    )
    return v.PlanAdopted(
        epoch=state.plan.epoch + 1, assignments=assignments, waf=1, basis="", trigger="", reason="", healthy={},
        waf_if_healthy=1, transition_flop=0.0,
    )  # fmt: skip


def with_task(state: ClusterState, name: str, **changes: object) -> ClusterState:
    return replace(state, tasks=state.tasks | {name: replace(state.tasks[name], **changes)})


def test_plan_that_moves_a_task_for_a_failing_program_is_a_breach(cluster: MiniCluster) -> None:
    state = cluster.state
    before = causes_of(state)
    assert "moves sound (1 -> 1)" in programs_move_no_others(state, moved(state), {GARBAGE: 1}, before, before)
    assert not programs_move_no_others(state, moved(state), {}, before, before), "no program fails"


def test_plan_has_a_cause_in_what_was_measured_of_a_sound_task_alone(cluster: MiniCluster) -> None:
    state, before = cluster.state, causes_of(cluster.state)
    for name, story in (("sound", ""), (GARBAGE, "moves sound")):
        pace = replace(state.tasks[name].pace, measurements={"1": 7})
        causes = causes_of(with_task(state, name, pace=pace))
        assert story in programs_move_no_others(state, moved(state), {GARBAGE: 1}, before, causes)
        assert bool(programs_move_no_others(state, moved(state), {GARBAGE: 1}, before, causes)) is bool(story)


def test_plan_that_stops_a_task_for_one_that_fails_again_is_a_breach(cluster: MiniCluster) -> None:
    state = cluster.state
    seats = {"sound": (), GARBAGE: state.plan.assignments[GARBAGE].replicas}
    for failures, is_breach in ((1, False), (2, True)):
        story = programs_move_no_others(state, plan_of(state, seats), {GARBAGE: failures}, None, causes_of(state))
        assert ("stops sound for garbage" in story) is is_breach


def test_workers_that_end_together_are_one_failure(cluster: MiniCluster) -> None:
    record = PeopleRecord()
    record.programs = {GARBAGE}
    state = cluster.state
    numbers = replace(state.tasks[GARBAGE].numbers, next_worker=3)
    for worker, next_worker, failures in (("1", 3, 1), ("2", 4, 1), ("3", 4, 2)):
        basis = with_task(state, GARBAGE, numbers=replace(numbers, next_worker=next_worker))
        exited = v.WorkerExited(
            node="n0", task=GARBAGE, worker=f"{GARBAGE}.{worker}", exit_code=1, signal=None, is_expected=False,
        )  # fmt: skip
        record._count_failure(basis, exited)
        assert record._failures == {GARBAGE: failures}


@pytest.mark.parametrize(("joined_s", "is_breach"), [(None, True), (-5, True), (5, False)])
def test_head_that_a_liar_reached_is_not_deaf(cluster: MiniCluster, joined_s: int | None, is_breach: bool) -> None:
    """One that joined before the silence is as silent as the others."""
    beat_at_us = cluster.state.now_us
    state = cluster.state
    if joined_s is not None:
        stranger = replace(state.nodes["n0"], name=STRANGER, joined_us=beat_at_us + joined_s * SECOND_US)
        state = replace(state, nodes=state.nodes | {STRANGER: stranger})
    lost = v.NodeLost(node="n1", reason="silent", evidence=v.Evidence(beat_seq=1, beat_at_us=beat_at_us))
    assert bool(deaf_heads_judge_nobody(state, lost, lambda at_us: at_us == beat_at_us)) is is_breach


def test_head_loses_no_nodes_together_while_it_hears_none(cluster: MiniCluster) -> None:
    names = tuple(cluster.state.nodes)
    for lost, is_breach in ((names, True), (names[:2], False)):
        event = v.NodesLost(nodes=lost, reason="silent")
        assert bool(deaf_heads_judge_nobody(cluster.state, event, lambda _: False)) is is_breach


def test_silence_of_all_explains_no_symptom(cluster: MiniCluster) -> None:
    cluster.kill_worker(cluster.hosts["n0"], next(iter(cluster.hosts["n0"].processes)))
    cluster.decide()
    ((name, incident),) = cluster.state.incidents.items()
    symptom = replace(incident, kind="connection_broken", severity=Severity.SEV3)
    for kind, is_breach in (("process_exit", True), ("head_deaf", False)):
        cause = replace(incident, id="other", kind=kind)
        state = replace(cluster.state, incidents={name: symptom, "other": cause})
        assert bool(symptoms_are_no_incidents(state)) is is_breach


def test_change_of_a_mode_is_a_cause(cluster: MiniCluster) -> None:
    """A task that was observed goes where the plan wants it once it is healed again."""
    state = cluster.state
    before = causes_of(with_task(state, "sound", mode="observe"))
    assert not programs_move_no_others(state, moved(state), {GARBAGE: 1}, before, causes_of(state))
    assert programs_move_no_others(state, moved(state), {GARBAGE: 1}, before, before)


def test_node_that_a_person_forgets_is_a_cause(cluster: MiniCluster) -> None:
    """Until then it was awaited."""
    state = cluster.state
    lost = replace(state.nodes["n0"], status=NodeStatus.LOST)
    before = causes_of(replace(state, nodes=state.nodes | {"n0": lost}))
    sold = replace(lost, departure=replace(lost.departure, removal="sold"))
    causes = causes_of(replace(state, nodes=state.nodes | {"n0": sold}))
    assert programs_move_no_others(state, moved(state), {GARBAGE: 1}, before, before)
    assert not programs_move_no_others(state, moved(state), {GARBAGE: 1}, before, causes)


@pytest.mark.parametrize(
    ("how", "is_breach"),
    [
        ("moved", True),
        ("as it was", False),
        ("its program fails", False),
        ("a member has left", False),
        ("all others are drained", False),
    ],
)
def test_plan_in_an_outage_moves_nobody_without_a_cause(cluster: MiniCluster, how: str, is_breach: bool) -> None:
    state, policy = cluster.state, Policy()
    state = replace(state, outages={"i1": Outage(since_us=1, domain="", away=("n9",), back=("n1",))})
    before = other_causes(state)
    plan = plan_of(state, {n: s.replicas for n, s in state.plan.assignments.items()})
    if how != "as it was":
        plan = moved(state)
    if how == "its program fails":
        crashes = Crashes(count=LOOPING_MIN, fruitless=1)
        state = with_task(state, "sound", troubles=replace(state.tasks["sound"].troubles, crashes=crashes))
        before = other_causes(state)
    if how == "all others are drained":
        drained = replace(state.nodes["n2"], name="n9", cordon=Cordon(active=True, draining=True))
        state = replace(state, nodes=state.nodes | {"n9": drained})
    if how == "a member has left":
        state = replace(state, nodes=state.nodes | {"n1": replace(state.nodes["n1"], status=NodeStatus.LEFT)})
    assert bool(outages_move_nobody(state, plan, before, {"n1"}, policy)) is is_breach


def test_node_whose_outage_is_held_no_longer_is_a_cause_in_another(cluster: MiniCluster) -> None:
    """n2 is back, and waits for the others of its outage, of which the hold is over; then it waits no longer."""
    state = cluster.state
    held = {"i2": Outage(since_us=1, domain="", away=("n9",))}
    gathering = {"i1": Outage(since_us=1, domain="", away=("n8",), back=("n2",), is_over=True)}
    before, basis = replace(state, outages=gathering | held), replace(state, outages=held)
    plan, policy = moved(state), Policy()
    assert nodes_given_up(before) == {"n8", "n2"}
    assert outages_move_nobody(basis, plan, other_causes(basis), set(), policy)
    assert not outages_move_nobody(basis, plan, other_causes(before), set(), policy)


@pytest.mark.parametrize(
    ("accused", "lost", "action", "goer", "is_breach"),
    [
        pytest.param(GARBAGE, GARBAGE, "isolation", GARBAGE, False, id="it starts anew"),
        pytest.param(GARBAGE, GARBAGE, "isolation", "sound", True, id="another task moves"),
        pytest.param(GARBAGE, "sound", "isolation", GARBAGE, True, id="nothing of it is lost"),
        pytest.param("sound", GARBAGE, "isolation", GARBAGE, True, id="its node is not accused"),
        pytest.param(GARBAGE, GARBAGE, "eviction", GARBAGE, True, id="a worker is suspected, and no node"),
    ],
)
def test_accused_node_in_an_outage_excuses_its_own_task_alone(
    cluster: MiniCluster, accused: str, lost: str, action: HeldAction, goer: str, is_breach: bool
) -> None:
    state = cluster.state
    node_of = {name: share.replicas[0][0] for name, share in state.plan.assignments.items()}
    hold = StandingHold(action=action, limit="isolated_share", reason="", since_us=1, node=node_of[accused])
    outages = {"i1": Outage(since_us=1, domain="", away=(node_of[lost],))}
    state = replace(state, outages=outages, holds={"hold": hold})
    plan = moved(state, goer)
    assert bool(outages_move_nobody(state, plan, other_causes(state), {node_of[lost]}, Policy())) is is_breach


def test_seat_that_an_accused_task_leaves_in_an_outage_is_free_and_no_other_is(cluster: MiniCluster) -> None:
    state = cluster.state
    seats = {name: share.replicas for name, share in state.plan.assignments.items()}
    node = seats[GARBAGE][0][0]
    (free,) = set(state.nodes) - {nodes[0][0] for nodes in seats.values()}
    hold = StandingHold(action="isolation", limit="isolated_share", reason="", since_us=1, node=node)
    state = replace(state, outages={"i1": Outage(since_us=1, domain="", away=(node,))}, holds={"hold": hold})
    for seat, is_breach in ((node, False), (free, True)):
        plan = plan_of(state, {GARBAGE: (), "sound": (*seats["sound"], (seat,))})
        assert bool(outages_move_nobody(state, plan, other_causes(state), {node}, Policy())) is is_breach


@pytest.mark.parametrize(("kind", "is_breach"), [("CheckpointSaved", False), ("ErrorReported", True)])
def test_saves_in_quick_succession_may_wait(kind: str, is_breach: bool) -> None:
    waits = ArmTimer(name="budget", key=f"big.1/{kind}", after_s=1.0)
    drops = ReportDrops(worker="big.1", counts={kind: 3})
    for action in (waits, drops):
        assert bool(honest_workers_are_heard("n1", [action])) is is_breach
