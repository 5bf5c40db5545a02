"""What was measured stands with its circumstances: a slow node costs a task no worker once it is gone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import SECOND_US, MiniCluster
from tests.unicrond.test_plan_problems import told
from unicrond.core.rules.estimates import CALM_US
from unicrond.core.rules.plan_problems import problem_of
from unicrond.core.rules.survey import Survey
from unicrond.core.state.task_parts import UNPLAIN_MAX
from unicrond.core.state.work import iteration_flop
from unicrond.core.worth.costs import settle
from unicrond.core.worth.evidence import HALF_LIFE_US
from unicrond.core.worth.waf import throughput
from unicrond.events import vocabulary as v

#: Of one worker of healthy nodes; an iteration of three takes two seconds.
STEP_US = 6 * SECOND_US


def nodes_of(cluster: MiniCluster, task: str = "t") -> list[str]:
    """The nodes that train the task."""
    membership = cluster.state.tasks[task].membership
    return sorted({member.node for member in membership.members}) if membership else []


def healthy_us(nodes: Sequence[str]) -> int:
    """An iteration's time where each node counts alike."""
    return STEP_US // len(nodes)


def train_for(
    cluster: MiniCluster,
    seconds: float,
    step_us: Callable[[Sequence[str]], int],
    task: str = "t",
    *,
    is_saving: bool = False,
) -> None:
    """Train in log time, an iteration in as much time as the group's nodes need. `is_saving`: a checkpoint is under
    way."""
    until_us = cluster.now_us + int(seconds * SECOND_US)
    while cluster.now_us < until_us:
        cluster.run()
        membership, nodes = cluster.state.tasks[task].membership, nodes_of(cluster, task)
        assert membership is not None and nodes, "nobody trains"
        took_us = step_us(nodes)
        cluster.now_us += took_us
        lead = membership.members[0]
        at = cluster.iterations[task] = cluster.iterations.get(task, 0) + 1
        step = v.StepCommitted(
            node=lead.node, task=task, worker=lead.worker, generation=membership.generation, first=at, last=at,
            samples=8, samples_digest=0, loss=1.0, duration_us=took_us, micro_batches_by_rank=(1,),
            not_plain=int(is_saving), not_plain_us=took_us * is_saving,
        )  # fmt: skip
        cluster.say(cluster.hosts[lead.node], step)
    cluster.run()


def small_cluster(*names: str, max_workers: int = 4) -> MiniCluster:
    """One task on a few nodes of one slot."""
    cluster = MiniCluster(1)
    for name in names:
        cluster.add_host(name)
    cluster.submit("t", max_workers=max_workers)
    cluster.run()
    return cluster


def slow_n2(nodes: Sequence[str]) -> int:
    """An iteration's time where n2 is four times slower, and all wait for it."""
    return healthy_us(nodes) * (4 if "n2" in nodes else 1)


def by_speed(nodes: Sequence[str]) -> int:
    """The same where n2 is dealt as its speed is."""
    return STEP_US * 4 // (4 * len(nodes) - 3 * ("n2" in nodes))


@pytest.mark.parametrize("from_birth", [False, True])
@pytest.mark.parametrize("joins", [1, 2])
@pytest.mark.parametrize("apart_s", [0, 5, 120])
def test_drained_slow_node_costs_no_worker(from_birth: bool, joins: int, apart_s: float) -> None:
    """A node four times slower, then drained, and healthy ones join: all workers are back within one minute."""
    cluster = small_cluster("n1", "n2", "n3")
    train_for(cluster, 60, slow_n2 if from_birth else healthy_us)
    train_for(cluster, CALM_US / SECOND_US + 60, slow_n2)
    flops = iteration_flop(cluster.state.tasks["t"].spec) * SECOND_US // slow_n2(["n1", "n2", "n3"])
    assert cluster.state.tasks["t"].pace.measurements["3"] == flops, "the slow node was measured"
    cluster.cordon("n2", drain=True)
    cluster.run()
    train_for(cluster, apart_s, slow_n2)
    assert nodes_of(cluster) == ["n1", "n3"]
    for number in range(joins):
        cluster.add_host(f"n{4 + number}")
    began_us = cluster.now_us
    wanted = sorted(["n1", "n3", *(f"n{4 + number}" for number in range(joins))])
    while nodes_of(cluster) != wanted:
        assert cluster.now_us - began_us < 60 * SECOND_US, f"on {nodes_of(cluster)} after a minute"
        train_for(cluster, 1, slow_n2)
    train_for(cluster, 600, slow_n2)
    assert nodes_of(cluster) == wanted, "and stay"


def worse_with_three(nodes: Sequence[str]) -> int:
    """An iteration's time of a task that a third worker slows down, whichever node it is on."""
    return STEP_US // 2 if len(nodes) < 3 else STEP_US


def memberships(cluster: MiniCluster) -> int:
    """How many planned groups there have been."""
    return sum(not event.urgent for event in told(cluster, v.MembershipDecided))


def test_worker_that_adds_nothing_is_tried_ever_more_rarely() -> None:
    """Each try costs a move there and one back: two hours after the first, then twice as long, at most one in days."""
    cluster = small_cluster("n1", "n2")
    train_for(cluster, 60, worse_with_three)
    cluster.add_host("n3")
    train_for(cluster, 120, worse_with_three)
    assert len(nodes_of(cluster)) == 2, "tried, and given back"
    before, tries = memberships(cluster), []
    for hour in range(72):
        cluster.now_us += HALF_LIFE_US - 300 * SECOND_US
        train_for(cluster, 240, worse_with_three)
        if len(nodes_of(cluster)) == 3:
            train_for(cluster, 120, worse_with_three)
        assert len(nodes_of(cluster)) == 2, "each is over within minutes"
        if memberships(cluster) != before:
            tries.append(hour)
            before = memberships(cluster)
    pauses = [after - first for first, after in pairwise(tries)]
    assert 2 <= len(tries) <= 5 and pauses == sorted(pauses), tries


def test_slowdown_in_place_moves_no_worker() -> None:
    """A group that becomes slow where it stands keeps its workers: nobody knows which of them to do without."""
    cluster = small_cluster("n1", "n3")
    train_for(cluster, 60, healthy_us)
    cluster.add_host("n2")
    train_for(cluster, 60, healthy_us)
    epoch = cluster.state.plan.epoch
    train_for(cluster, 1500, slow_n2)
    train_for(cluster, 1500, healthy_us)
    assert cluster.state.plan.epoch == epoch and len(nodes_of(cluster)) == 3


def test_what_dealing_by_speed_brings_is_learnt() -> None:
    """All waited for n2; then it is dealt less, and three nodes are worth what they do; and again when it recovers."""
    cluster = small_cluster("n1", "n2", "n3")
    train_for(cluster, 60, healthy_us)
    train_for(cluster, 50, slow_n2)
    train_for(cluster, CALM_US / SECOND_US + 120, by_speed)
    task = cluster.state.tasks["t"]
    assert len(nodes_of(cluster)) == 3
    flops = iteration_flop(task.spec) * SECOND_US // by_speed(["n1", "n2", "n3"])
    assert task.pace.measurements["3"] == pytest.approx(flops, rel=0.1)
    train_for(cluster, CALM_US / SECOND_US + 120, healthy_us)
    healthy = iteration_flop(task.spec) * SECOND_US // healthy_us(nodes_of(cluster))
    assert cluster.state.tasks["t"].pace.measurements["3"] == pytest.approx(healthy, rel=0.1), "it has recovered"


def test_returned_node_is_tried() -> None:
    """Throttled for a while, then lost: T(3) was learnt from it. When it is back, the task has it again."""
    cluster = small_cluster("n1", "n2", "n3")
    train_for(cluster, 60, healthy_us)
    train_for(cluster, CALM_US / SECOND_US + 60, slow_n2)
    cluster.kill_host(cluster.hosts["n2"])
    cluster.lose(cluster.hosts["n2"])
    cluster.run()
    train_for(cluster, 120, healthy_us)
    assert nodes_of(cluster) == ["n1", "n3"]
    cluster.add_host("n2")
    train_for(cluster, 50, healthy_us)
    assert nodes_of(cluster) == ["n1", "n2", "n3"]


def test_idle_node_is_tried_after_half_life() -> None:
    """A measurement whose nodes all stand fades: a healthy node does not idle for ever."""
    cluster = small_cluster("n1", "n2", "n3")
    train_for(cluster, 60, healthy_us)
    train_for(cluster, CALM_US / SECOND_US + 60, slow_n2)
    cluster.cordon("n2")
    victim = next(member for member in cluster.state.tasks["t"].membership.members if member.node == "n2")  # type: ignore[union-attr]
    cluster.kill_worker(cluster.hosts["n2"], victim.worker)
    cluster.run()
    train_for(cluster, 40, healthy_us)
    pace = cluster.state.tasks["t"].pace
    assert "3" not in pace.measurements, "a node that may have no worker is as good as gone"
    cluster.uncordon("n2")
    train_for(cluster, 40, healthy_us)
    assert nodes_of(cluster) == ["n1", "n2", "n3"]


def noisy_day(seed: int, *, hours: int = 24) -> MiniCluster:
    """A task on a machine whose speed wanders: by 30 % over minutes, by 10 % from one iteration to the next."""
    draw, cluster = random.Random(seed), small_cluster("n1", "n2", "n3", max_workers=3)
    level, until_us = 1.0, 0

    def step_us(nodes: Sequence[str]) -> int:
        nonlocal level, until_us
        if cluster.now_us >= until_us:
            level, until_us = draw.uniform(0.85, 1.15), cluster.now_us + draw.randrange(30, 300) * SECOND_US
        return int(2 * healthy_us(nodes) * level * draw.uniform(0.95, 1.05))

    train_for(cluster, 3600 * hours, step_us)
    return cluster


@pytest.mark.parametrize("seed", range(2))
def test_noisy_machine_corrects_once_in_ten_minutes(seed: int) -> None:
    cluster = noisy_day(seed, hours=4)
    corrected = [e.recorded_at_us for e in cluster.log if isinstance(e.envelope.event, v.ThroughputCorrected)]
    assert 5 < len(corrected) <= 25
    assert all(after - before >= CALM_US for before, after in pairwise(corrected))
    assert len(corrected) < 0.01 * len(cluster.log)


@pytest.mark.parametrize("seed", range(12))
def test_clean_measurements_hold_and_slow_nodes_leave_no_trace(seed: int) -> None:
    """Random scaling, random slow nodes that are drained, random newcomers: what healthy nodes achieve is believed
    within noise, and a slow node that has gone never lowers a plan."""
    draw = random.Random(seed)
    cluster = small_cluster("n1", "n2", "n3", max_workers=6)
    exponent = draw.uniform(0.5, 1.0)  # more workers never achieve less
    slowness: dict[str, float] = {}

    def step_us(nodes: Sequence[str]) -> int:
        return int(STEP_US / len(nodes) ** exponent * max(slowness.get(node, 1.0) for node in nodes))

    for number in range(4, 4 + draw.randrange(3, 6)):
        train_for(cluster, draw.choice((10, 60, CALM_US / SECOND_US + 60)), step_us)
        slow = draw.choice(nodes_of(cluster))
        slowness[slow] = draw.choice((1.0, 1.5, 4.0))
        train_for(cluster, draw.choice((10, 60, CALM_US / SECOND_US + 60)), step_us)
        cluster.cordon(slow, drain=True)
        cluster.run()
        train_for(cluster, draw.choice((0, 10, 120)), step_us)
        cluster.add_host(f"n{number}")
        if draw.random() < 0.5:
            cluster.add_host(f"n{number + 100}")
        train_for(cluster, 60, step_us)
        usable = [node.name for node in cluster.state.nodes.values() if node.schedulable]
        wanted = min(6, len(usable))
        assert len(nodes_of(cluster)) == wanted, (number, cluster.state.tasks["t"].pace.measurements)
        train_for(cluster, CALM_US / SECOND_US + 60, step_us)
        task = cluster.state.tasks["t"]
        flops = iteration_flop(task.spec) * SECOND_US / step_us(nodes_of(cluster))
        assert throughput(task)(wanted) == pytest.approx(flops, rel=0.06)
        assert len(nodes_of(cluster)) == wanted


@pytest.mark.parametrize("is_saving", [True, False])
def test_iterations_during_a_checkpoint_say_nothing_of_the_nodes(*, is_saving: bool) -> None:
    """A write of a minute beside the iterations made them slow, and that stood as what the nodes achieve."""
    cluster = small_cluster("n1", "n2", "n3", max_workers=3)
    train_for(cluster, CALM_US / SECOND_US + 60, healthy_us)
    healthy = cluster.state.tasks["t"].pace.measurements["3"]
    train_for(cluster, CALM_US / SECOND_US + 60, healthy_us)
    train_for(cluster, 15 * 3 * STEP_US / 3 / SECOND_US, lambda nodes: 3 * healthy_us(nodes), is_saving=is_saving)
    assert (cluster.state.tasks["t"].pace.measurements["3"] == healthy) is is_saving


def test_task_that_always_saves_is_as_fast_as_it_is_then() -> None:
    cluster = small_cluster("n1", "n2", max_workers=2)
    train_for(cluster, 2 * UNPLAIN_MAX * STEP_US / 2 / SECOND_US, healthy_us, is_saving=True)
    pace = cluster.state.tasks["t"].pace
    assert set(pace.timings) == {STEP_US // 2} and "2" in pace.measurements


def test_report_of_several_iterations_counts_the_plain_ones() -> None:
    cluster = small_cluster("n1", "n2", max_workers=2)
    train_for(cluster, 5 * STEP_US / SECOND_US, healthy_us)
    membership, task = cluster.state.tasks["t"].membership, cluster.state.tasks["t"]
    assert membership is not None
    lead, first = membership.members[0], task.progress.iteration + 1
    step = v.StepCommitted(
        node=lead.node, task="t", worker=lead.worker, generation=membership.generation, first=first, last=first + 2,
        samples=8, samples_digest=0, loss=1.0, duration_us=2 * 70 + 1000, micro_batches_by_rank=(1,),
        not_plain=1, not_plain_us=1000,
    )  # fmt: skip
    cluster.say(cluster.hosts[lead.node], step)
    assert cluster.state.tasks["t"].pace.timings[-1] == 70
    cluster.say(
        cluster.hosts[lead.node], replace(step, first=first + 3, last=first + 3, not_plain=9, not_plain_us=10**9)
    )
    assert cluster.state.tasks["t"].pace.timings[-1] == 70, "whatever a report says, nothing is divided by it"


# --- what a failure counts -----------------------------------------------------------------------


def test_failures_of_programs_enter_no_rate() -> None:
    """Thirteen exceptions in two minutes say nothing of how long a plan will stand; a killed process does."""
    cluster = small_cluster("n1", "n2", "n3")
    for _ in range(3):
        train_for(cluster, 60, healthy_us)
        worker = cluster.state.tasks["t"].membership.members[0].worker  # type: ignore[union-attr]
        cluster.report(worker, "exception")
        cluster.run()
        for host in [host for host in cluster.hosts.values() if worker in host.processes]:
            cluster.kill_worker(host, worker)
        cluster.run()
    assert any(
        incident.kind == "exception" and incident.is_program_fault for incident in cluster.state.closed_incidents
    )
    assert cluster.state.ledger.failures == cluster.state.ledger.recent_failures == 0


def test_newer_failures_weigh_more() -> None:
    cluster = small_cluster("n1", "n2", "n3")
    train_for(cluster, 60, healthy_us)
    victim = cluster.state.tasks["t"].membership.members[1]  # type: ignore[union-attr]
    cluster.kill_worker(cluster.hosts[victim.node], victim.worker)
    cluster.run()
    train_for(cluster, 60, healthy_us)
    ledger = cluster.state.ledger
    assert (ledger.failures, ledger.recent_failures) == (1, 1_000_000)
    week_us = 7 * 86_400 * SECOND_US
    later = settle(ledger, cluster.now_us + week_us)
    assert later.recent_failures == pytest.approx(500_000, rel=1e-4) and later.failures == 1
    assert later.recent_exposed_us < later.exposed_us
    by_hours = ledger
    for hour in range(7 * 24):
        by_hours = settle(by_hours, cluster.now_us + (hour + 1) * 3600 * SECOND_US)
    assert by_hours == later, "the same however often it is asked"
    assert settle(ledger, cluster.now_us + 100 * week_us).recent_failures == 0


# --- what a stop costs ---------------------------------------------------------------------------


def test_stop_is_priced_by_last_start() -> None:
    cluster = MiniCluster(1)
    cluster.add_host("n1")
    cluster.submit("t", max_workers=1)
    while cluster.decide():
        pass
    cluster.now_us += 300 * SECOND_US  # the model is loaded
    cluster.run()
    start_us = cluster.state.tasks["t"].pace.start_us
    assert 300 * SECOND_US <= start_us < 301 * SECOND_US
    (task,) = problem_of(Survey(cluster.state, cluster.policy)).tasks
    assert task.prices.restart_us == start_us
    problem = problem_of(Survey(cluster.state, cluster.policy))
    assert problem.price(task, 0, 0) == start_us, "and not that of a regroup"
    victim = cluster.state.tasks["t"].membership.members[0]  # type: ignore[union-attr]
    cluster.kill_worker(cluster.hosts["n1"], victim.worker)
    while cluster.decide():
        pass
    cluster.now_us += 60 * SECOND_US
    cluster.run()
    assert cluster.state.tasks["t"].pace.start_us < 61 * SECOND_US, "the last one counts"
