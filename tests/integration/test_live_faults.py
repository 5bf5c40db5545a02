"""Every row of the error table (unicrond/core/faults/severity.py), struck into a live task of real parts.

Each row says the kind that the incident must have and how it is struck; its severity says what must be left of the
task. One task of three workers on four nodes lives through all of it, draining included. In the plain
suite a few rows; `make matrix` strikes all. (Links: test_hosts.py. Each kill at each point: test_kill_matrix.py.)
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.integration.disobedient_gpt import order
from tests.integration.live import TASK, Live, live_cluster, members, nodes_of, seats, told_members
from unicrond.agents.trainer.loop import corpus
from unicrond.core.faults.severity import RESPONSE, SEVERITY
from unicrond.core.nodes.isolation import IsolationPhase, phase
from unicrond.core.replayer import steps
from unicrond.core.state.state import ClusterState, Severity, TaskStatus
from unicrond.ctl.client import ApiRefused
from unicrond.ctl.inject import inject
from unicrond.events.nats.connection import Login
from unicrond.events.vocabulary import LANES
from unicrond.replay.reading.nats_source import open_nats
from unicrond.replay.reading.source import read
from unicrond.views.accounts import Accounts

ENTRY = Path(__file__).with_name("disobedient_gpt.py")
SEV1, SEV2, SEV3 = Severity.SEV1, Severity.SEV2, Severity.SEV3
WORKERS = 3
RANK = 1
in_one_loop = pytest.mark.asyncio(loop_scope="module")
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Row:
    """`how`: an order of disobedient_gpt.py, or the arguments of `unicronctl inject`, for the worker of rank RANK.

    `says`: what the incident's message must hold, `place`: what its place must.
    """

    kind: str
    severity: Severity
    how: tuple[str, ...] | str
    says: str = ""
    place: str = ""
    in_suite: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.how if isinstance(self.how, str) else self.how[0]}"


BROKEN = (
    Row("connection_broken", SEV3, ("reset",), place="reduce", in_suite=True),
    Row("collective_timeout", SEV3, ("silence",), says="all 3 members wait in collective", place="reduce"),
)
ROWS = (
    Row("exception", SEV2, "exception --phase step", says="RuntimeError: injected", place="step", in_suite=True),
    Row("exception", SEV2, ("raise", "shapes (3,) and (4,) do not match"), says="(3,) and (4,)", place="forward"),
    Row("process_exit", SEV2, "kill --phase reduce", says="SIGKILL from outside unicron", in_suite=True),
    Row("process_exit", SEV2, "exit", says="exit code 3"),
    Row("hang", SEV2, "stop", says="its process is stopped", in_suite=True),
    Row("hang", SEV2, "hang --phase backward", says="which it has not entered"),
    Row("out_of_memory", SEV2, "oom", says="MemoryError", place="forward"),
    Row("nan_loss", SEV2, "nan", says="NanLoss"),
    Row("data_error", SEV2, ("data", "Ran out of input"), says="EOFError: Ran out of input", place="data"),
    Row("cuda_error", SEV2, ("raise", "CUDA error: device-side assert triggered"), place="forward"),
    Row("illegal_memory_access", SEV2, ("raise", "CUDA error: an illegal memory access was encountered")),
    Row("nccl_error", SEV2, ("raise", "NCCL error in: p.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO)")),
    # Its own severity is SEV2; here the node can be spared, and goes to its check.
    Row("corruption", SEV1, ("flip",), says="has other parameters than the other replicas"),
    Row("ecc_error", SEV1, ("raise", "CUDA error: uncorrectable ECC error encountered"), "ECC", "forward", True),
    Row("nvlink_error", SEV1, ("raise", "CUDA error: uncorrectable NVLink error detected during the execution")),
    Row("driver_error", SEV1, ("raise", "CUDA error: CUDA driver is shutting down")),
    Row("dma_error", SEV1, ("raise", "DMA mapping of the pinned buffer failed")),
    Row("gpu_fault", SEV2, "xid --xid 94", says="XID 94"),
    Row("gpu_broken", SEV1, "xid --xid 79", says="XID 79", in_suite=True),
    Row("node_lost", SEV1, "kill the node", says="no heartbeat"),
)
#: They need a course of events of their own.
APART = {"start_failed", "store_error", "left_early", "link_fault", "head_deaf", "domain_lost"}


def test_fault_rows_cover_severity_table() -> None:
    assert {row.kind for row in (*BROKEN, *ROWS)} | APART == set(SEVERITY)


def orders(live: Live) -> Path:
    return live.directory / "orders"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    """The task; its second worker is to die before it is ready."""
    directory = tmp_path_factory.mktemp("live")
    # A node that comes back is forgiven, and so are the other ends of its links: not before the ladder is climbed.
    settings = {"policy": {"isolation_s": 8.0}, "readmission": {"check": ["true"]}}
    async with live_cluster(directory, nodes=4, workers=WORKERS, injection=True, **settings) as live:
        orders(live).mkdir()
        corpus.build(live.directory / "stdlib")
        order(orders(live), f"{TASK}.2", "die")
        await submit(live, TASK)
        await live.training(incidents=1)
        yield live


async def submit(live: Live, name: str, env: dict[str, str] | None = None, **fields: object) -> None:
    await live.submit(
        name,
        entry=str(ENTRY),
        args=[str(orders(live))],
        data=str(live.directory / "stdlib"),
        env={"UNICRON_BUCKET_BYTES": "16384", "UNICRON_CHECKSUM_EVERY": "5", **(env or {})},
        **{"optimizer": {"decay_iterations": 1000}, **fields},  # or it would follow from `iterations`
    )


def traced(live: Live, worker: str, what: str) -> list[list[str]]:
    """The lines of a worker's trace that begin so; its last one may have been cut off with it."""
    lines = (orders(live) / f"{worker}.trace").read_text().split("\n")[:-1]
    return [line.split() for line in lines if line.startswith(what)]


def digests(live: Live, worker: str) -> dict[int, str]:
    """Iteration -> the digest of the parameters after it."""
    return {int(words[1]): words[2] for words in traced(live, worker, "stepped")}


# --- start, retry ---------------------------------------------------------------------------------


@in_one_loop
async def test_worker_that_ends_before_ready_is_restarted(live: Live) -> None:
    state, _ = await live.dev.state()
    incident = state.closed_incidents[0]
    assert (incident.kind, incident.worker, incident.severity) == ("start_failed", f"{TASK}.2", SEV2)
    assert "exit code 9" in incident.message and "it was not ready yet" in incident.message
    assert incident.response == "restart the process"
    assert f"{TASK}.2" not in members(state)


@in_one_loop
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=() if row.in_suite else pytest.mark.matrix) for row in BROKEN]
)
async def test_broken_collective_is_reattempted_by_same_processes(live: Live, row: Row) -> None:
    before = await live.training(incidents=live.incidents)
    worker = members(before)[RANK]
    order(orders(live), worker, *row.how)
    after = await live.training(incidents=live.incidents + 1)
    incident = after.closed_incidents[-1]
    assert (incident.kind, incident.severity, incident.response) == (row.kind, SEV3, "reattempt in place")
    assert row.says in incident.message and row.place in incident.place
    assert list(seats(after).items()) == list(seats(before).items()), "the same processes"
    assert after.tasks[TASK].generation == before.tasks[TASK].generation + 1
    assert incident.micro_batches_repeated == 0
    if row.how == ("reset",):
        peers = {event["peer"] for event in live.events("ErrorReported", after=before.seq) if event["worker"] != worker}
        assert worker in peers, "who lost a connection knows whose its other end was"
    obeyed = (orders(live) / f"{worker}.obeyed").read_text().splitlines()
    iteration = int(obeyed[-1].removeprefix(row.how[0]))
    computed = [words[2] for each in members(after) for words in traced(live, each, f"computed {iteration} ")]
    assert sorted(map(int, computed)) == list(range(12)), "the same reduction: nothing is computed again"
    assert not live.events("PlanAdopted", "NodeIsolated", "StartWorker", after=before.seq)
    await check_bits(live, worker, iteration)


async def check_bits(live: Live, worker: str, iteration: int) -> None:
    """The worker's parameters up to there and beyond are those of a task of one worker that nothing happened to."""
    name, last = f"alone{iteration}", iteration + 3
    await submit(live, name, {LANES: str(WORKERS)}, max_workers=1, iterations=last)
    await live.until(
        "the reference is complete", lambda s: name in s.tasks and s.tasks[name].status is TaskStatus.COMPLETED
    )
    expected, found = digests(live, f"{name}.1"), digests(live, worker)
    shared = sorted(expected.keys() & found.keys())
    assert {iteration, last} <= set(shared)
    wrong = [each for each in shared if found[each] != expected[each]]
    assert not wrong, f"other bits from iteration {min(wrong)} on"


# --- drain ----------------------------------------------------------------------------------------


@in_one_loop
async def test_drain_moves_worker_without_loss(live: Live) -> None:
    before = await live.training(incidents=live.incidents, beyond=0)
    node = before.tasks[TASK].workers[members(before)[0]].node
    await live.run("unicronctl", "--url", live.dev.url, "drain", node, "--reason", "new fan")
    await live.until("the node is empty", lambda s: node not in nodes_of(s))
    after = await live.training(incidents=live.incidents)
    assert after.incidents_total == before.incidents_total and node not in nodes_of(after)
    steps = [step for step in live.events("StepCommitted", after=before.seq) if step["task"] == TASK]
    iterations = {iteration for step in steps for iteration in range(step["first"], step["last"] + 1)}
    assert iterations == set(range(min(iterations), max(iterations) + 1)), "no iteration is missing"
    assert sum(step["micro_batches_repeated"] for step in steps) == 0, "nothing was computed again"
    await live.run("unicronctl", "--url", live.dev.url, "uncordon", node)
    await live.until("the node may have workers", lambda s: s.nodes[node].schedulable)


# --- restart, reconfigure -------------------------------------------------------------------------


async def strike(live: Live, row: Row, worker: str, node: str) -> None:
    if row.kind == "node_lost":
        await live.run("unicronctl", "--url", live.dev.url, "inject", "kill", "--node", node)
    elif isinstance(row.how, str):
        target = ("--task", TASK, "--rank", str(RANK))
        await live.run("unicronctl", "--url", live.dev.url, "inject", *row.how.split(), *target)
    else:
        order(orders(live), worker, *row.how)


@in_one_loop
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=() if row.in_suite else pytest.mark.matrix) for row in ROWS]
)
async def test_fault_row_heals_as_documented(live: Live, row: Row) -> None:
    before = await live.training(incidents=live.incidents, beyond=0)
    worker = members(before)[RANK]
    node = before.tasks[TASK].workers[worker].node
    await strike(live, row, worker, node)
    if row.kind == "gpu_broken":
        await live.until("it needs a reboot", lambda s: phase(s, s.nodes[node]) is IsolationPhase.AWAITS_PERSON)
        assert "it needs a reboot" in await live.run("unicronctl", "--url", live.dev.url, "nodes")
        await live.run("unicronctl", "--url", live.dev.url, "uncordon", node)
    after = await live.training(incidents=live.incidents + 1)
    incident = after.closed_incidents[-1]
    assert (incident.kind, incident.severity, incident.response) == (row.kind, row.severity, RESPONSE[row.severity])
    assert incident.node == node and incident.worker == ("" if row.kind == "node_lost" else worker)
    assert row.says in incident.message and row.place in incident.place
    was, now = seats(before), seats(after)
    if row.kind == "hang":
        await check_stacks(
            live, incident.id, worker, set(was), "its process is stopped" if row.how == "stop" else "reduce"
        )
    assert was.keys() - now.keys() == {worker}
    assert all(was[name] == now[name] for name in was if name != worker), "the others went on as they were"
    nodes = {node for node, _ in now.values()}
    plans = live.events("PlanAdopted", after=before.seq)
    isolated = [event["node"] for event in live.events("NodeIsolated", after=before.seq)]
    if row.kind == "exception" and not isinstance(row.how, str) and (free := free_nodes(before)):
        assert nodes == {*free, *(node for node, _ in was.values())} - {node}, "the program is tried on the free node"
        assert len(plans) == 1 and not isolated
    elif row.severity is SEV2:
        assert nodes == {node for node, _ in was.values()}, "a new process on the same node"
        assert not plans and not isolated
    else:
        assert node not in nodes and len(nodes) == WORKERS
        assert node not in str(plans[0]["assignments"]), "a new plan without the node"
        assert isolated == ([] if row.kind == "node_lost" else [node])


def free_nodes(state: ClusterState) -> set[str]:
    """The nodes that the plan leaves free, and on which alone the task's program has not failed (local_faults.py)."""
    seats = {node for share in state.plan.assignments.values() for nodes in share.replicas for node in nodes}
    return state.nodes.keys() - seats - state.tasks[TASK].troubles.local_faults.keys()


async def check_stacks(live: Live, incident: str, culprit: str, ranks: set[str], where: str) -> None:
    """The incident shows where all ranks stood: the others wait for the culprit, and are still alive."""

    def stood(state: ClusterState) -> dict[str, str]:
        known = next(one for one in state.closed_incidents if one.id == incident)
        return {worker: place for place, workers in known.stacks.items() for worker in workers}

    state = await live.until("all stacks are told", lambda s: set(stood(s)) == ranks)
    places = stood(state)
    assert all("waits in collective" in places[name] and ".py:" in places[name] for name in ranks - {culprit}), places
    assert where in places[culprit], places
    page = await live.run("unicronctl", "--url", live.dev.url, "story", "incident", incident)
    assert "Where the workers stood:" in page and "File " in page


@in_one_loop
async def test_impossible_fault_order_is_refused(live: Live) -> None:
    await live.training(incidents=live.incidents, beyond=0)
    with pytest.raises(ApiRefused, match="at_iteration: 1 has passed"):
        await inject(live.client).exception(task=TASK).at_iteration(1)


@in_one_loop
@pytest.mark.matrix
async def test_slow_worker_is_named_and_kept(live: Live) -> None:
    before = await live.training(incidents=live.incidents, beyond=40)
    worker = members(before)[RANK]
    arguments = ("inject", "slow", "--seconds", "0.3", "--task", TASK, "--rank", str(RANK))
    await live.run("unicronctl", "--url", live.dev.url, *arguments)
    named = lambda: {event["slowest"] for event in live.events("DegradationObserved", after=before.seq)}  # noqa: E731
    await live.until("the slow worker is named", lambda _: worker in named())
    state = await live.until("it is a straggler", lambda s: list(s.tasks[TASK].group.stragglers) == [worker])
    shown = await live.run("unicronctl", "--url", live.dev.url, "status")
    assert "straggler" in shown and worker in shown
    assert state.incidents_total == before.incidents_total and members(state) == members(before)
    await inject(live.client).kill(task=TASK, rank=RANK)
    after = await live.training(incidents=live.incidents + 1)
    assert worker not in after.tasks[TASK].group.stragglers


# --- tasks of their own ---------------------------------------------------------------------------


async def end_all(live: Live) -> ClusterState:
    """No task runs any more; what there was of incidents is over."""
    state, _ = await live.dev.state()
    for name, task in state.tasks.items():
        if task.status is TaskStatus.ACTIVE:
            await live.run("unicronctl", "--url", live.dev.url, "cancel", name)
    state = await live.until(
        "all has ended", lambda s: not s.incidents and all(not task.workers for task in s.tasks.values()), may_fail=True
    )
    live.incidents = len(state.closed_incidents)
    return state


@in_one_loop
@pytest.mark.matrix
@pytest.mark.parametrize(("workers", "which"), [(2, 0), (2, 1), (3, 2)])
async def test_escalation_climbs_whole_ladder(live: Live, workers: int, which: int) -> None:
    """A task of two or three; whoever trains on one of its nodes has its connections reset in each reduction. The same
    processes try again; a new process does; then the node is isolated, and the task trains on others. Of two ends that
    make no step the other may be tried first. Of three nobody else is isolated: another may be given up once, where who
    was slow to tell leaves a single link, and then with doubt."""
    await end_all(live)
    name = f"ladder-{workers}-{which}"
    await submit(live, name, max_workers=workers)
    pair = await live.until(
        "all train",
        lambda s: name in s.tasks and s.tasks[name].confirmed and s.tasks[name].progress.iteration > 30,
    )
    was = seats(pair, name)
    assert len(was) == workers
    nodes = [was[worker][0] for worker in sorted(was)]
    guilty = nodes[which]
    order(orders(live), guilty, "reset")
    isolated = lambda: [event["node"] for event in live.events("NodeIsolated", after=pair.seq)]  # noqa: E731
    try:
        await live.until(f"{guilty} is isolated", lambda _: guilty in isolated())
    finally:
        (orders(live) / guilty).unlink()
    others = [node for node in isolated() if node != guilty]
    assert isolated()[-1] == guilty and len(others) <= (workers == 2) and {*others} < {*nodes}
    after = await live.until(
        "all train, not there",
        lambda s: len(members(s, name)) == workers and s.tasks[name].confirmed and not s.incidents,
    )
    told = live.events("MembershipDecided", "IncidentEscalated", "WorkerStarted", "NodeIsolated", after=pair.seq)
    first = told[0]
    assert first["urgent"] and told_members(first) == list(was)
    assert first["reason"] == "the group broke and all members are alive", "first the same processes try again"
    escalated = [event for event in told if event["type"] == "IncidentEscalated"]
    suspect = escalated[0]["worker"]
    assert suspect in was and "reattempts in place: once" in escalated[0]["reason"]
    node_of = {worker: node for worker, (node, _) in was.items()}
    node_of |= {event["worker"]: event["node"] for event in told if event["type"] == "WorkerStarted"}
    innocent = [event["reason"] for event in escalated if node_of[event["worker"]] != guilty]
    assert workers == 2 or (len(innocent) <= 1 and all(", like others" in reason for reason in innocent))
    started = next(event for event in told if event["type"] == "WorkerStarted")
    assert started["node"] == was[suspect][0], "then another takes its place, on the same node"
    assert started["pid"] not in {pid for _, pid in was.values()}
    assert guilty not in {node for node, _ in seats(after, name).values()}, "then the task is elsewhere"
    isolation = next(event for event in told if event["type"] == "NodeIsolated")
    before = escalated[: sum(event["type"] == "IncidentEscalated" for event in told[: told.index(isolation)])]
    times = sum(node_of[event["worker"]] == isolation["node"] for event in before)
    given_up = f"workers evicted {times} times"
    assert isolation["reason"] == f"groups of {name} broke here again and again: {given_up}"
    doubted = sum(", like others" in event["reason"] for event in before)
    assert 2 <= times <= 2 + doubted, "and no earlier, nor later than doubt explains"
    await live.until("all nodes are back", lambda s: not any(node.isolation.active for node in s.nodes.values()))


@in_one_loop
@pytest.mark.matrix
async def test_dead_store_during_regroup_is_store_error(live: Live) -> None:
    """A task of its own: one of its workers stands still before it meets the other, whose store dies meanwhile."""
    await end_all(live)
    fault = {"UNICRON_FAULT": "stop@worker=other.2,at=forming,generation=1"}
    await submit(live, "other", max_workers=2, env=fault)
    state = await live.until(
        "a first group is to form",
        lambda s: len(members(s, "other")) == 2 and stands_still(s.tasks["other"].workers["other.2"].pid),
    )
    membership = state.tasks["other"].membership
    assert membership is not None
    kill_store(live, membership.members[0].node, membership.store.port)
    state = await live.until(
        "that is an incident", lambda s: len(s.closed_incidents) + len(s.incidents) > live.incidents
    )
    os.kill(state.tasks["other"].workers["other.2"].pid, signal.SIGCONT)
    state = await live.until("they train", lambda s: s.tasks["other"].progress.iteration > 10 and not s.incidents)
    incident = state.closed_incidents[-1]
    assert (incident.kind, incident.severity, incident.response) == ("store_error", SEV3, RESPONSE[SEV3])
    assert members(state, "other") == ["other.1", "other.2"] and state.tasks["other"].generation == 2


def stands_still(pid: int) -> bool:
    return bool(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED


def kill_store(live: Live, node: str, port: int) -> None:
    """The process that serves at the port; its fork server, which holds the port as well, is its parent."""

    def listens(process: psutil.Process) -> bool:
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp"))

    listening = [process for process in live.dev.processes_of(node) if listens(process)]
    (store,) = [process for process in listening if process.parent() in listening]
    store.kill()


@in_one_loop
@pytest.mark.matrix
async def test_hang_during_last_save_is_found(live: Live) -> None:
    """All iterations are done; one worker stands still half way through the last checkpoint, the other waits for it."""
    await end_all(live)
    fault = {"UNICRON_FAULT": "hang@worker=last.1,at=saving,iteration=13"}
    checkpoint = {"dir": str(live.directory / "last"), "interval": 5}
    await submit(live, "last", max_workers=2, iterations=12, checkpoint=checkpoint, env=fault)
    state = await is_complete(live, "last")
    (incident,) = [incident for incident in state.closed_incidents if incident.worker.startswith("last.")]
    assert (incident.kind, incident.worker, incident.severity) == ("hang", "last.1", SEV2)
    assert "which it has not entered" in incident.message and state.tasks["last"].progress.iteration == 12


@in_one_loop
@pytest.mark.matrix
async def test_group_that_breaks_before_last_save_regroups(live: Live) -> None:
    await end_all(live)
    checkpoint = {"dir": str(live.directory / "parts"), "interval": 5}
    optimizer = {"decay_iterations": 1000, "distributed": True}
    await submit(live, "parts", max_workers=3, iterations=100, checkpoint=checkpoint, optimizer=optimizer)
    await live.until("they train", lambda s: "parts" in s.tasks and s.tasks["parts"].progress.iteration > 5)
    order(orders(live), "parts.2", "part")
    state = await is_complete(live, "parts")
    (incident,) = [incident for incident in state.closed_incidents if "parts" in incident.generations]
    assert (incident.kind, incident.severity) == ("connection_broken", SEV3) and "checkpoint" in incident.place
    assert not [event for event in live.events("StartWorker") if event["worker"] == "parts.4"], "all live, and write it"


async def is_complete(live: Live, name: str) -> ClusterState:
    return await live.until(
        f"{name} is complete",
        lambda s: name in s.tasks and s.tasks[name].status is TaskStatus.COMPLETED and not s.incidents,
    )


@in_one_loop
@pytest.mark.matrix
async def test_poisoned_task_ends_with_its_place(live: Live) -> None:
    await end_all(live)
    await submit(live, "poisoned", max_workers=2)
    await live.until("it trains", lambda s: "poisoned" in s.tasks and s.tasks["poisoned"].progress.iteration > 5)
    for node in live.dev.node_names:
        order(orders(live), node, "raise", "a poisoned sample")
    state = await live.until(
        "it is given up", lambda s: s.tasks["poisoned"].status is TaskStatus.FAILED and not s.incidents, may_fail=True
    )
    for node in live.dev.node_names:
        (orders(live) / node).unlink()
    reason = state.tasks["poisoned"].ending.reason
    assert "RuntimeError: a poisoned sample" in reason
    # Of two that fail at once in one group the second is told of with the first, and what is left of it is its exit.
    assert re.search(r"exception \(rank \d, iteration \d+, forward\)|process_exit: worker poisoned", reason)
    started = [event for event in live.events("StartWorker") if event["spec"]["name"] == "poisoned"]
    assert len(started) < 20, "nothing restarts for ever"


# --- what is told ---------------------------------------------------------------------------------


@in_one_loop
async def test_incident_has_readable_story(live: Live) -> None:
    await end_all(live)
    accounts = Accounts(lines_max=0)
    async with open_nats([live.dev.nats_url], Login()) as source, aclosing(read(source)) as chunks:
        entries = [entry async for chunk in chunks for entry in chunk.entries]
    for step in steps(entries):
        accounts.feed(step)
    closed = accounts.state.closed_incidents
    assert len(closed) == live.incidents
    for incident in closed:
        page = "\n".join(accounts.story("incident", incident.id).lines)
        if incident.state_from or not incident.resumed_us:
            continue  # of the task that was given up
        assert page.startswith(f"Incident {incident.id}: {incident.kind}, SEV{incident.severity.value}, ")
        assert f"Response: {RESPONSE[incident.severity]}." in page
        assert "training continues" in page
