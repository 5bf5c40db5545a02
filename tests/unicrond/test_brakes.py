"""How much is taken out without a person: the limits, what is held beyond them, and what releases it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.seeds import at_most
from tests.unicrond.cluster import SECOND_US, MiniCluster, members
from tests.unicrond.test_escalation import said
from tests.unicrond.test_hangs import corrupt
from unicrond.core.fold import fold
from unicrond.core.nodes import brakes
from unicrond.core.state.changes import with_task
from unicrond.core.state.holds import StandingHold
from unicrond.core.state.policy import Policy, Settings, brakes_among, settings_of
from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.events import vocabulary as v

QUIET = ("symptom", "exit", "hold")


def cluster_of(nodes: int, *, tasks: int = 1, workers: int = 0, **policy: object) -> MiniCluster:
    """That many nodes of one slot with tasks of `workers` (0: as many as there are nodes), after three iterations."""
    cluster = MiniCluster(5, Policy(**policy), check_s=60.0)  # type: ignore[arg-type]
    for number in range(nodes):
        cluster.add_host(f"n{number}")
    for number in range(tasks):
        cluster.submit(f"t{number}", max_workers=workers or nodes)
    cluster.run()
    for number in range(tasks):
        cluster.train(f"t{number}", 3)
    cluster.run()
    return cluster


def break_gpu(cluster: MiniCluster, node: str) -> None:
    event = v.AcceleratorReported(
        node=node, accelerator="GPU-1", worker="", kind="ecc_error", xid=94, message="XID 94: test", repair_need=""
    )
    cluster.say(cluster.hosts[node], event)
    rest(cluster)


def rest(cluster: MiniCluster) -> None:
    cluster.run(passing=QUIET)


def isolated(cluster: MiniCluster) -> list[str]:
    return [node.name for node in cluster.state.nodes.values() if node.isolation.active]


def held(cluster: MiniCluster) -> list[str]:
    return [hold.node for hold in cluster.state.holds.values() if hold.action == "isolation"]


@pytest.mark.parametrize(("nodes", "most"), [(1, 1), (2, 1), (3, 1), (7, 1), (8, 2), (12, 3)])
def test_share_of_nodes_is_out_and_one_always_may_be(nodes: int, most: int) -> None:
    cluster = cluster_of(nodes)
    for number in range(nodes - 1 or 1):
        break_gpu(cluster, f"n{number}")
    assert isolated(cluster) == [f"n{number}" for number in range(most)]
    assert held(cluster) == [f"n{number}" for number in range(most, nodes - 1)]
    told = said(cluster, v.DecisionHeld)
    assert [(event.node, event.limit) for event in told] == [(node, "isolated_share") for node in held(cluster)], "once"
    if nodes == 8:
        assert told[0].sentence() == (
            "node n2 is not isolated: 2 of 8 nodes are out (policy.isolated_share: 0.25);"
            " the reason: GPU-1: XID 94: test"
        )
    cluster.assert_whole()


def test_lost_nodes_count_as_out_but_one_may_still_be_isolated() -> None:
    cluster = cluster_of(8)
    for name in ("n5", "n6", "n7"):
        cluster.kill_host(cluster.hosts[name])
        cluster.lose(cluster.hosts[name])
    rest(cluster)
    break_gpu(cluster, "n0")
    break_gpu(cluster, "n1")
    assert isolated(cluster) == ["n0"] and held(cluster) == ["n1"]
    assert "4 of 8 nodes are out" in said(cluster, v.DecisionHeld)[0].detail


def test_isolations_within_hour_are_limited_and_hour_releases_them() -> None:
    cluster = cluster_of(8, isolations_per_hour=1, isolated_share=1.0)
    break_gpu(cluster, "n0")
    break_gpu(cluster, "n1")
    (told,) = said(cluster, v.DecisionHeld)
    assert told.limit == "isolations_per_hour" and isolated(cluster) == ["n0"]
    (deadline,) = [name for name in cluster.standing() if name.startswith("brake:")]
    assert cluster.standing()[deadline] == pytest.approx(3_600 * SECOND_US, abs=SECOND_US)
    assert cluster.pass_deadlines("brake:")
    rest(cluster)
    assert isolated(cluster) == ["n0", "n1"] and not cluster.state.holds
    assert not [name for name in cluster.standing() if name.startswith("brake:")]


def test_hour_passes_by_log_time_too() -> None:
    cluster = cluster_of(8, isolations_per_hour=1, isolated_share=1.0)
    break_gpu(cluster, "n0")
    cluster.now_us += brakes.HOUR_US
    break_gpu(cluster, "n1")
    assert isolated(cluster) == ["n0", "n1"] and cluster.state.isolations_us == cluster.state.isolations_us[-1:]


def raise_limit(cluster: MiniCluster) -> None:
    cluster.policy = replace(cluster.policy, isolated_share=1.0)
    cluster.take_over()


@pytest.mark.parametrize(
    "release",
    [lambda cluster: cluster.uncordon("n0"), lambda cluster: cluster.cordon("n0"), raise_limit],
    ids=["other_is_uncordoned", "person_takes_other", "limit_is_raised"],
)
def test_person_releases_brake(release: Callable[[MiniCluster], None]) -> None:
    cluster = cluster_of(4)
    break_gpu(cluster, "n0")
    break_gpu(cluster, "n1")
    assert held(cluster) == ["n1"]
    release(cluster)
    rest(cluster)
    assert "n1" in isolated(cluster) and not cluster.state.holds
    node = cluster.state.nodes["n1"]
    assert node.reason == "GPU-1: XID 94: test"
    assert node.isolation.probation is not None and node.isolation.probation.cause == "hardware"


def test_persons_cordons_neither_count_nor_stop() -> None:
    cluster = cluster_of(4)
    for name in ("n1", "n2", "n3"):
        cluster.cordon(name, drain=True)
    rest(cluster)
    break_gpu(cluster, "n0")
    assert isolated(cluster) == ["n0"] and not cluster.state.holds
    cluster.cordon("n0", drain=True)
    rest(cluster)
    assert cluster.state.nodes["n0"].cordon.draining


def test_held_node_whose_failure_is_expected_goes_only_while_it_can_be_spared() -> None:
    cluster = cluster_of(8, workers=2)
    break_gpu(cluster, "n0")
    break_gpu(cluster, "n1")
    foretold = v.AcceleratorReported(
        node="n7", accelerator="GPU-1", worker="", kind=None, xid=92, message="XID 92: test", predicts_failure=True
    )
    cluster.say(cluster.hosts["n7"], foretold)
    rest(cluster)
    assert held(cluster) == ["n7"]
    needed = v.TaskUpdated(task="t0", min_workers=6, max_workers=6, reason="test")
    cluster.append(needed, "api", cluster.state.term)
    rest(cluster)
    raise_limit(cluster)
    rest(cluster)
    assert isolated(cluster) == ["n0", "n1"] and len(members(cluster, "t0")) == 6, "the task needs it"
    assert not held(cluster)
    cluster.add_host("n8")
    rest(cluster)
    assert "n7" in isolated(cluster) and len(members(cluster, "t0")) == 6


def test_drain_of_held_node_ends_its_hold_and_counts_nowhere() -> None:
    """It is what the alarm tells people to do."""
    cluster = cluster_of(8, isolations_per_hour=2)
    for number in range(3):
        break_gpu(cluster, f"n{number}")
    assert held(cluster) == ["n2"]
    counted = cluster.state.isolations_us
    cluster.cordon("n2", drain=True)
    rest(cluster)
    assert "n2" in isolated(cluster) and not cluster.state.holds and cluster.state.isolations_us == counted
    break_gpu(cluster, "n3")
    assert held(cluster) == ["n3"], "two by itself are as many as before"
    cluster.uncordon("n2")
    rest(cluster)
    assert "n2" not in isolated(cluster) and held(cluster) == ["n3"]


def test_uncordon_of_held_node_answers_for_it() -> None:
    cluster = cluster_of(4)
    break_gpu(cluster, "n0")
    break_gpu(cluster, "n1")
    cluster.uncordon("n1")
    cluster.uncordon("n0")
    rest(cluster)
    assert not isolated(cluster) and not cluster.state.holds


def test_held_node_gets_no_new_work_while_others_are_free() -> None:
    cluster = cluster_of(5, workers=1)
    (first,) = cluster.state.tasks["t0"].workers.values()
    broken = [name for name in cluster.hosts if name != first.node][:2]
    for name in broken:
        break_gpu(cluster, name)
    assert held(cluster) == [broken[1]]
    for number in range(1, 3):
        cluster.submit(f"t{number}", max_workers=1)
        rest(cluster)
    assert not cluster.state.by_node.on(broken[1])
    cluster.submit("t3", max_workers=1)
    rest(cluster)
    assert cluster.state.by_node.on(broken[1]), "nothing else is free"
    cluster.assert_whole()


def test_what_dies_on_held_node_starts_elsewhere_if_there_is_room() -> None:
    cluster = cluster_of(5, workers=3)
    used = [worker.node for worker in cluster.state.tasks["t0"].workers.values()]
    spare = next(name for name in cluster.hosts if name not in used)
    others = [name for name in cluster.hosts if name not in (*used, spare)]
    break_gpu(cluster, others[0])
    break_gpu(cluster, used[0])
    assert held(cluster) == [used[0]] and cluster.hosts[used[0]].processes, "what lives there stays"
    die_on(cluster, used[0])
    rest(cluster)
    assert {worker.node for worker in cluster.state.tasks["t0"].workers.values()} == {*used[1:], spare}
    cluster.assert_whole()


def die_on(cluster: MiniCluster, node: str) -> None:
    host = cluster.hosts[node]
    cluster.kill_worker(host, next(iter(host.processes)))


def test_back_off_doubles_on_held_node() -> None:
    cluster = cluster_of(4)
    break_gpu(cluster, "n0")
    rest(cluster)
    lengths = []
    for _ in range(4):
        die_on(cluster, "n1")
        cluster.run(passing=("symptom", "exit"))
        starts = len(said(cluster, v.StartWorker))
        if held(cluster):
            lengths += [length for name, length in cluster.standing().items() if name.startswith("hold:")]
            assert not cluster.hosts["n1"].processes, "it waits"
        cluster.pass_deadlines("hold:")
        cluster.run(passing=("symptom", "exit"))
        assert len(said(cluster, v.StartWorker)) <= starts + 1
        assert cluster.hosts["n1"].processes, "and is started"
    assert lengths == [2 * SECOND_US, 4 * SECOND_US, 8 * SECOND_US]
    assert len(said(cluster, v.DecisionHeld)) == 1, "told once, though the count in the reason grows"
    cluster.train("t0")
    rest(cluster)
    assert not cluster.state.holds and said(cluster, v.HoldLifted), "a step there clears the node"


def test_blow_that_isolates_nobody_keeps_no_hold() -> None:
    """The node's flaps are over, and the limit is free; that a worker once died there is no reason by itself."""
    cluster = cluster_of(5, workers=3, flaps_max=2, flap_window_s=600.0, strikes_max=3)
    used = [worker.node for worker in cluster.state.tasks["t0"].workers.values()]
    other = next(name for name in cluster.hosts if name not in used)
    break_gpu(cluster, other)
    die_on(cluster, used[-1])
    for _ in range(2):
        cluster.lose(cluster.hosts[used[-1]])
        back = v.NodeReturned(node=used[-1], evidence=v.Evidence(beat_seq=1, beat_at_us=1))
        cluster.append(back, "coordinator", cluster.state.term)
    rest(cluster)
    assert held(cluster) == [used[-1]] and cluster.state.tasks["t0"].troubles.strikes == {used[-1]: 1}
    cluster.now_us += 700 * SECOND_US
    cluster.cordon(other)
    rest(cluster)
    assert not held(cluster) and isolated(cluster) == [other] and said(cluster, v.HoldLifted)


def test_blows_keep_hold_of_mode_observe() -> None:
    """No limit of numbers holds it; it is told once, however often the task restarts."""
    cluster = cluster_of(4)
    hold = StandingHold(action="isolation", limit="observe", reason="test", since_us=1, node="n1")
    troubles = replace(cluster.state.tasks["t0"].troubles, strikes={"n1": 1})
    state = with_task(cluster.state, replace(cluster.state.tasks["t0"], troubles=troubles))
    assert not brakes.stands(state, hold)
    assert brakes.stands(replace(state, mode="observe"), hold)


def hang(cluster: MiniCluster) -> None:
    """The task's second worker stands still in an iteration, the first waits for it."""
    task = cluster.state.tasks["t0"]
    one, culprit = members(cluster, "t0")[:2]
    for worker, waits in ((one, True), (culprit, False)):
        told = v.HangSuspected(
            node=task.workers[worker].node,
            task="t0",
            worker=worker,
            generation=task.generation,
            iteration=task.progress.iteration + 1,
            phase="reduce" if waits else "backward",
            micro_batch=1,
            collectives_entered=9 if waits else 8,
            is_waiting=waits,
            is_stopped=False,
            still_us=900_000,
            limit_us=1_000_000,
            report_number=1,
        )
        cluster.say(cluster.hosts[told.node], told)
    rest(cluster)


def hang_beyond_limit() -> MiniCluster:
    cluster = cluster_of(2, evictions_per_hour=1)
    hang(cluster)
    assert len(cluster.state.tasks["t0"].troubles.evictions_us) == 1 and not said(cluster, v.DecisionHeld)
    cluster.train("t0")
    cluster.now_us += brakes.ROUND_US
    hang(cluster)
    return cluster


def test_evictions_of_task_within_hour_are_limited_and_hour_releases_them() -> None:
    cluster = hang_beyond_limit()
    (told,) = said(cluster, v.DecisionHeld)
    culprit = members(cluster, "t0")[1]
    assert told.worker == culprit and told.limit == "evictions_per_hour" and "hangs in backward" in told.reason
    assert cluster.state.tasks["t0"].workers[culprit].alive and len(cluster.state.incidents) == 1
    hang(cluster)
    assert len(said(cluster, v.DecisionHeld)) == 1
    assert cluster.pass_deadlines("brake:t0")
    rest(cluster)
    assert culprit not in cluster.state.tasks["t0"].workers and not cluster.state.holds
    cluster.assert_whole()


def test_step_refutes_held_suspicion() -> None:
    cluster = hang_beyond_limit()
    cluster.train("t0")
    rest(cluster)
    assert not cluster.state.holds and not cluster.state.incidents and said(cluster, v.HoldLifted)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("mode", ["observe", "heal"])
@pytest.mark.parametrize("kind", ["hang", "corruption"])
def test_group_that_breaks_by_held_suspicion_meets_again(kind: str, mode: v.Mode, is_first: bool) -> None:
    """Nobody is given up for it, so that all have to go on; whichever the head hears of first."""
    cluster = cluster_of(3, evictions_per_hour=0 if mode == "heal" else 20)
    cluster.append(v.ModeRequested(mode=mode, task="", reason="test", requester="test"), "api", cluster.state.term)
    names, generation = members(cluster, "t0"), cluster.state.tasks["t0"].generation

    def break_group() -> None:
        for worker in names:
            cluster.report(worker, "connection_broken", lost=tuple(name for name in names if name != worker))

    if not is_first:
        break_group()
    if kind == "hang":
        hang(cluster)
    else:
        for reporter in (0, 1):
            corrupt(cluster, names[2], "checksum", reporter=reporter, task="t0")
    if is_first:
        rest(cluster)
        assert cluster.state.tasks["t0"].generation == generation, "nobody has left the group yet"
        break_group()
    rest(cluster)
    task = cluster.state.tasks["t0"]
    assert (task.generation, task.confirmed, members(cluster, "t0")) == (generation + 1, True, names)
    cluster.train("t0")
    rest(cluster)
    cluster.assert_whole()
    assert not cluster.state.holds and not said(cluster, v.IncidentEscalated)


def test_limit_of_one_task_holds_no_other() -> None:
    cluster = cluster_of(4, tasks=2, workers=2, evictions_per_hour=0)
    die_on(cluster, next(iter(cluster.state.tasks["t1"].workers.values())).node)
    hang(cluster)
    assert [event.task for event in said(cluster, v.DecisionHeld)] == ["t0"]
    assert len(cluster.state.tasks["t1"].workers) == 2, "a worker that died is replaced"


def test_limits_stand_among_coordinators_numbers() -> None:
    policy = Policy(isolations_per_hour=3, isolated_share=0.5, evictions_per_hour=0)
    numbers = Settings(policy, 1.0).numbers()
    assert settings_of(numbers).policy == policy
    limits = brakes_among(numbers)
    assert (limits.isolations_per_hour, limits.isolated_share, limits.evictions_per_hour) == (3, 0.5, 0)
    assert (
        not {"isolations_per_hour", "isolated_share", "evictions_per_hour"} & Settings(Policy(), 1.0).numbers().keys()
    )
    assert brakes_among({"isolated_share": 7.0}) == brakes_among({}), "the fold raises for nothing"


def out_by_us(state: ClusterState) -> tuple[set[str], set[str], int]:
    present = [node for node in state.nodes.values() if node.status is not NodeStatus.LEFT]
    ours = {node.name for node in present if node.isolation.active and not node.cordon.active}
    lost = {node.name for node in present if node.status is NodeStatus.LOST and not node.cordon.active}
    return ours, ours | lost, len(present)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["gpu", "die", "lose", "return", "uncordon", "cordon", "hour", "rest"]), st.integers(0, 7)
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=at_most(25), deadline=None)
@given(st.integers(2, 8), st.sampled_from([0.0, 0.25, 0.5]), st.integers(1, 4), MOVES)
def test_no_history_takes_more_out_than_brakes_allow(
    nodes: int, share: float, per_hour: int, moves: list[tuple[str, int]]
) -> None:
    cluster = cluster_of(nodes, isolated_share=share, isolations_per_hour=per_hour, stuck_max=1000)
    for move, number in moves:
        node = f"n{number % nodes}"
        host = cluster.hosts[node]
        before = len(cluster.log)
        match move:
            case "gpu" if host.up:
                break_gpu(cluster, node)
            case "die" if host.processes:
                die_on(cluster, node)
            case "lose" if host.up:
                cluster.kill_host(host)
                cluster.lose(host)
            case "return" if not host.up:
                cluster.add_host(node)
            case "uncordon":
                cluster.uncordon(node)
            case "cordon":
                cluster.cordon(node)
            case "hour":
                cluster.now_us += brakes.HOUR_US // 2
                cluster.pass_deadlines("brake:")
            case "rest":
                cluster.pass_deadlines("isolation:")
        rest(cluster)
        assert len(cluster.log) - before < 200, cluster.story()
        cluster.train("t0")
        rest(cluster)
    state, times_us = ClusterState(), []
    for entry in cluster.log:
        state, event = fold(state, entry), entry.envelope.event
        if isinstance(event, v.DeadlineExpired) and event.deadline_id.startswith("brake:#"):
            times_us = [time_us for time_us in times_us if str(time_us) != event.deadline_id.removeprefix("brake:#")]
        if isinstance(event, v.NodeIsolated):
            ours, out, present = out_by_us(state)
            assert len(ours) <= 1 or len(out) <= share * present, entry
            times_us = [time_us for time_us in times_us if time_us > entry.recorded_at_us - brakes.HOUR_US]
            times_us.append(entry.recorded_at_us)
            assert len(times_us) <= per_hour, entry
