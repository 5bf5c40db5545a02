"""Who pays for what a program, a person or a dead agent does: no other task, and no healthy node. On a live cluster.

One cluster of four nodes lives through all of it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests.integration.live import Live, live_cluster, members, nodes_of, seats
from unicrond.agents.trainer.loop import corpus
from unicrond.core.state.state import ClusterState, Severity, TaskStatus
from unicrond.ctl.inject import inject

in_one_loop = pytest.mark.asyncio(loop_scope="module")
matrix = pytest.mark.matrix
pytestmark = pytest.mark.timeout(600)
ENTRY = Path(__file__).with_name("failing_gpt.py")
NODES, FAULTS = 4, 4
#: The task of somebody else.
PROD = "prod"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    directory = tmp_path_factory.mktemp("innocents")
    corpus.build(directory / "stdlib")
    policy = {"stuck_max": FAULTS}
    async with live_cluster(directory, nodes=NODES, workers=2, policy=policy, injection=True) as live:
        await live.until("all nodes are there", lambda s: len(s.nodes) == NODES)
        yield live


async def produce(live: Live) -> dict[str, tuple[str, int]]:
    """The task of somebody else trains on two nodes; its members, with their nodes and processes."""
    state, _ = await live.dev.state()
    if PROD not in state.tasks:
        await live.submit(PROD, min_workers=2, weight=10.0)
    return seats(await live.until("prod trains", lambda s: trains(s, PROD, 2), may_fail=True), PROD)


async def fail(live: Live, name: str, how: str, iteration: int = 0, **fields: Any) -> None:
    """Submit a task whose program fails."""
    await live.submit(
        name, entry=str(ENTRY), args=[str(live.directory), how, str(iteration)], data=str(live.directory / "stdlib"),
        checkpoint={"dir": str(live.directory / name), "interval": 0, "memory_interval": 0}, **fields,
    )  # fmt: skip


def assert_unharmed(live: Live, before: ClusterState, after: ClusterState, was: dict[str, tuple[str, int]]) -> None:
    """No node was isolated, the other task has the same processes, and nothing is learnt of the hardware."""
    assert not live.events("NodeIsolated", after=before.seq)
    assert seats(after, PROD) == was and not [
        e for e in live.events("MembershipDecided", after=before.seq) if e["task"] == PROD
    ]
    assert after.ledger.failures == before.ledger.failures and after.worker_mtbf_us == before.worker_mtbf_us


async def cancel(live: Live, *names: str) -> None:
    for name in names:
        await live.run("unicronctl", "--url", live.dev.url, "cancel", name)
    await live.until("they have ended", lambda s: not any(s.tasks[name].workers for name in names), may_fail=True)


def trains(state: ClusterState, task: str, workers: int) -> bool:
    """Return whether all of so many workers train, and have done so for an iteration."""
    there = task in state.tasks and len(members(state, task)) == workers and state.tasks[task].confirmed
    return there and state.tasks[task].progress.committed_generation == state.tasks[task].generation


@in_one_loop
async def test_start_ordered_from_dead_agent_is_void(live: Live) -> None:
    """Row 11: an agent is killed before it has read an order to start a worker; the next one has its run directory."""
    before, _ = await live.dev.state()
    agent = live.dev.agents["node1"].process
    assert agent is not None
    agent.send_signal(signal.SIGSTOP)
    await live.submit("all", max_workers=NODES, min_workers=NODES)
    ordered = await live.until("it is ordered", lambda s: "all" in s.tasks and "node1" in nodes_of(s, "all"))
    agent.kill()
    killed_s = time.monotonic()
    state = await live.until("all train", lambda s: trains(s, "all", NODES), may_fail=True)
    took_s = time.monotonic() - killed_s
    (void,) = [event for event in live.events("CommandFailed", after=before.seq) if event["node"] == "node1"]
    assert void["reason"].startswith("void: it was for an agent that has ended")
    assert nodes_of(ordered, "all") == nodes_of(state, "all")
    assert took_s < 30.0, took_s
    kinds = {one.kind for one in state.closed_incidents[len(before.closed_incidents) :]}
    assert kinds <= {"node_lost"} and not live.events("NodeIsolated", after=before.seq), "no start has failed"
    troubles = state.tasks["all"].troubles
    assert troubles.crashes is None and not troubles.strikes
    await cancel(live, "all")


@in_one_loop
@pytest.mark.parametrize(
    ("how", "workers", "says"),
    [
        pytest.param(
            "typo", 1, "FileNotFoundError: [Errno 2] No such file or directory: '/data/tokens.txt'", id="typo"
        ),
        pytest.param("nan", 2, "its loss in iteration 3 was no finite number 3 times in a row", id="nan"),
    ],
)
async def test_failing_program_costs_its_task_alone(live: Live, how: str, workers: int, says: str) -> None:
    """Rows 1, 2, 3 and 8: it is crash-looping, and then it fails; another's task goes on beside it."""
    was = await produce(live)
    before, _ = await live.dev.state()
    await fail(live, how, how, 3, max_workers=workers, min_workers=workers)
    state = await live.until(
        "it has failed", lambda s: how in s.tasks and s.tasks[how].status is TaskStatus.FAILED, may_fail=True
    )
    assert says in state.tasks[how].ending.reason
    assert_unharmed(live, before, state, was)
    assert {incident.severity for incident in state.closed_incidents if how in incident.generations} <= {Severity.SEV2}
    starts = [event for event in live.events("StartWorker", after=before.seq) if event["spec"]["name"] == how]
    assert len({event["node"] for event in starts}) == 2, "what has failed on one node is tried once on another"


@in_one_loop
async def test_ps_names_task_and_rank_of_each_worker(live: Live) -> None:
    was = await produce(live)
    assert [psutil.Process(pid).cmdline()[0] for _, pid in was.values()] == [
        f"unicrond: {PROD} rank {rank}" for rank in range(len(was))
    ]


@in_one_loop
async def test_what_one_node_lacks_is_found_elsewhere(live: Live) -> None:
    """A mount is missing on one node: the task trains on another, and the node is told of and works for others."""
    was = await produce(live)
    before, _ = await live.dev.state()
    await fail(live, "mount", "mount", max_workers=1)
    state = await live.until(
        "it is calm", lambda s: "mount" in s.tasks and s.tasks["mount"].troubles.local_faults, may_fail=True
    )
    bad = (live.directory / "mount.node").read_text()
    assert list(state.tasks["mount"].troubles.local_faults) == [bad] and bad not in nodes_of(state, "mount")
    assert_unharmed(live, before, state, was)
    told = await live.run("unicronctl", "--url", live.dev.url, "describe", "node", bad)
    assert "mount fails on" in told and "FileNotFoundError" in told
    await cancel(live, "mount")
    await live.run("unicronctl", "--url", live.dev.url, "uncordon", bad)
    await live.until("it is forgotten", lambda s: not s.tasks["mount"].troubles.local_faults, may_fail=True)


@in_one_loop
async def test_loss_that_others_compute_to_a_number_is_of_node(live: Live) -> None:
    """The other replica computes the same micro-batch, and it is finite: not the program's, and told."""
    was = await produce(live)
    before, _ = await live.dev.state()
    await fail(live, "chip", "chip", 5, max_workers=2)
    state = await live.until(
        "it is known", lambda s: "chip" in s.tasks and s.tasks["chip"].troubles.local_faults, may_fail=True
    )
    bad = (live.directory / "chip.node").read_text().split()[0]
    (fault,) = state.tasks["chip"].troubles.local_faults.items()
    assert fault[0] == bad and fault[1].refuted == 1 and state.tasks["chip"].troubles.crashes is None
    assert_unharmed(live, before, state, was)
    await cancel(live, "chip")


@in_one_loop
async def test_floor_of_production_stands_beside_debug_tasks(live: Live) -> None:
    """Row 4: two tasks of little weight and one worker each; production has the nodes that it needs."""
    await cancel(
        live, *[name for name, task in (await live.dev.state())[0].tasks.items() if task.status is TaskStatus.ACTIVE]
    )
    await live.submit("big", min_workers=NODES - 1, max_workers=NODES, weight=10.0)
    await live.until("all train", lambda s: trains(s, "big", NODES), may_fail=True)
    before, _ = await live.dev.state()
    names = {"debug1", "debug2"}
    for name in sorted(names):
        await live.submit(name, min_workers=1, max_workers=1, weight=0.01)
    state = await live.until("both are planned", lambda s: names <= s.plan.assignments.keys(), may_fail=True)
    assert state.plan.workers["big"] == NODES - 1
    await live.until("one debug task trains", lambda s: any(trains(s, name, 1) for name in names), may_fail=True)
    state = await live.until("the rest trains", lambda s: trains(s, "big", NODES - 1), may_fail=True)
    shares = [share for plan in live.events("PlanAdopted", after=before.seq) for share in plan["assignments"]]
    assert min(share["workers"] for share in shares if share["task"] == "big") == NODES - 1
    decisions = live.events("MembershipDecided", after=before.seq)
    assert not any(decided["urgent"] for decided in decisions if decided["task"] == "big")
    await cancel(live, "big", *sorted(names))


@in_one_loop
async def test_iterations_made_again_are_accounted(live: Live) -> None:
    """Row 10: the only holder of a state is killed; what storage does not hold is trained again, and told."""
    name = "alone"
    checkpoint = {"dir": str(live.directory / name), "interval": 1_000_000, "memory_interval": 0}
    await live.submit(name, max_workers=1, checkpoint=checkpoint)
    await live.until("it trains", lambda s: name in s.tasks and s.tasks[name].progress.iteration > 20, may_fail=True)
    before, _ = await live.dev.state()
    await inject(live.client).kill(task=name, rank=0)
    state = await live.until(
        "it has made them again",
        lambda s: (
            s.incidents_total > before.incidents_total
            and not s.incidents
            and s.tasks[name].progress.iterations_repeated
            and not s.tasks[name].progress.repeats_until
        ),
        may_fail=True,
    )
    incident = state.closed_incidents[-1]
    assert incident.iterations_lost > 20 and incident.state_from == "init", incident
    repeated = state.tasks[name].progress.iterations_repeated
    print(f"{repeated} iterations are made again, the incident says {incident.iterations_lost}")
    assert state.ledger.repeated > before.ledger.repeated
    await cancel(live, name)


@in_one_loop
@matrix
async def test_task_returns_to_all_workers_after_slow_node_has_left(live: Live) -> None:
    """Row 5: what was measured with the slow node is believed no longer than it is there."""
    name, slow = "wide", "node1"
    live.client.cordon("node4", drain=False, reason="test")
    await live.submit(name, max_workers=3)
    state = await live.until("it trains", lambda s: trains(s, name, 3) and s.tasks[name].progress.iteration > 60)
    rank = next(
        rank for rank, member in enumerate(members(state, name)) if state.tasks[name].workers[member].node == slow
    )
    await inject(live.client).slow(0.5, task=name, rank=rank)
    await live.until("it is measured", lambda s: s.tasks[name].pace.iteration_us > 500_000, may_fail=True)
    for iteration in (20, 40):
        await live.until(
            "it goes on",
            lambda s, i=iteration: (
                s.tasks[name].group.formed_after + i < s.tasks[name].progress.iteration or len(members(s, name)) < 3
            ),
            may_fail=True,
        )
    live.client.cordon(slow, drain=True, reason="test")
    live.client.uncordon("node4", "test")
    since_s = time.monotonic()
    state = await live.until(
        "all are back", lambda s: trains(s, name, 3) and slow not in nodes_of(s, name), may_fail=True
    )
    took_s = time.monotonic() - since_s
    print(f"all workers are back {took_s:.1f} s after the healthy node")
    assert took_s < 60.0
    live.client.uncordon(slow, "test")
    await cancel(live, name)
