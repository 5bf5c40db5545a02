"""The proof that a task heals: when one worker is killed, what is watched, what people are told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster, members
from tests.unicrond.serving import serving
from tests.unicrond.test_divergence import blameless, report
from tests.unicrond.test_escalation import said
from unicrond.core.rules.healing_proofs import missing, proof_text
from unicrond.core.state.changes import with_node, with_task
from unicrond.core.state.holds import StandingHold
from unicrond.core.state.state import TaskStatus
from unicrond.core.state.task_parts import ProgramDivergence
from unicrond.ctl import commands
from unicrond.display.cluster_tables import tasks_table
from unicrond.display.describe import describe_object
from unicrond.events import vocabulary as v


def training(workers: int = 3, *, steps: int = 3, prove: bool = True, **spec: Any) -> MiniCluster:
    """A task that trains, on as many nodes as it has workers."""
    cluster = MiniCluster(1)
    for number in range(workers):
        cluster.add_host(f"n{number}")
    start = v.TaskStart(run_id="r", prove=prove)
    cluster.submit("big", max_workers=workers, start=start, **{"accumulation": "exact", **spec})
    cluster.run()
    train(cluster, steps)
    return cluster


def train(cluster: MiniCluster, steps: int = 1) -> None:
    cluster.train("big", steps)
    cluster.run()


def faults(cluster: MiniCluster) -> list[v.InjectFault]:
    return said(cluster, v.InjectFault)


def text(cluster: MiniCluster) -> str:
    return proof_text(cluster.state, cluster.state.tasks["big"])


def ask(cluster: MiniCluster) -> None:
    cluster.append(v.ProofRequested(task="big"), "api", cluster.state.term)


def obey(cluster: MiniCluster) -> str:
    """Kill the worker, as its agent does; return its id."""
    worker = faults(cluster)[-1].fault.worker
    cluster.kill_worker(next(host for host in cluster.hosts.values() if worker in host.processes), worker)
    cluster.run_but_isolation()
    return worker


def test_task_is_armed_when_all_its_workers_have_computed_and_compared_again() -> None:
    cluster = training()
    last = members(cluster)[-1]
    (order,) = faults(cluster)
    assert order.fault == v.Fault(kind="kill", worker=last, excluded_from_blame=True)
    assert text(cluster) == f"to be armed: SIGKILL of rank 2 is ordered, and {last} has not ended by it"
    assert obey(cluster) == last
    assert text(cluster) == "to be armed: SIGKILL of rank 2 at iteration 4, no iteration is committed since"
    train(cluster)
    assert text(cluster).endswith("resumed; all its workers have not computed since")
    train(cluster)
    assert text(cluster) == "armed: SIGKILL of rank 2 at iteration 4, same bits"
    assert [order.fault.worker for order in faults(cluster)] == [last], "once"
    task = cluster.state.tasks["big"]
    assert not task.troubles.strikes and not task.troubles.stuck and not said(cluster, v.NodeIsolated)
    assert cluster.state.incidents_total == 1, "it is an incident all the same"


def test_group_of_survivors_arms_no_task() -> None:
    """What comes back is part of what is proved."""
    cluster = training()
    worker = faults(cluster)[0].fault.worker
    cluster.kill_worker(next(host for host in cluster.hosts.values() if worker in host.processes), worker)
    survivors = 0
    for _ in range(50):
        for move in cluster.moves():
            move()
            task = cluster.state.tasks["big"]
            if len(members(cluster)) == 2 and task.confirmed:
                cluster.train("big", 2)
                survivors += 1
                assert not text(cluster).startswith("armed")
    assert survivors > 1


def test_iteration_that_is_trained_again_arms_no_task() -> None:
    """What all workers have computed was lost since."""
    cluster = training()
    obey(cluster)
    train(cluster)
    cluster.iterations["big"] -= 1
    train(cluster)
    assert text(cluster).startswith("to be armed")
    train(cluster)
    assert text(cluster).startswith("armed")


def test_worker_that_ended_otherwise_proves_nothing() -> None:
    cluster = training()
    worker = faults(cluster)[0].fault.worker
    (host,) = [host for host in cluster.hosts.values() if worker in host.processes]
    host.processes.pop(worker)
    about: dict[str, Any] = {"node": host.name, "task": "big", "worker": worker}
    cluster.say(host, v.WorkerExited(**about, exit_code=1, signal=None, is_expected=False))
    cluster.run_but_isolation()
    for _ in range(3):
        train(cluster)
    assert text(cluster).endswith(f"{worker} has not ended by it")
    ask(cluster)
    cluster.run()
    assert len(faults(cluster)) == 2, "asked again, another worker is killed"
    obey(cluster)
    train(cluster)
    train(cluster)
    assert text(cluster).startswith("armed")


def test_running_task_is_proved_on_request_and_once_for_each() -> None:
    cluster = training(prove=False)
    assert text(cluster) == "" and not faults(cluster)
    ask(cluster)
    ask(cluster)
    cluster.run()
    obey(cluster)
    ask(cluster)
    cluster.run()
    assert len(faults(cluster)) == 1, "it goes on"
    for _ in range(5):
        train(cluster)
    assert text(cluster).startswith("armed")
    ask(cluster)
    cluster.run()
    assert len(faults(cluster)) == 2


def test_request_is_kept_across_heads_and_of_no_task_changes_nothing() -> None:
    cluster = training(steps=1)
    cluster.take_over()
    train(cluster, 2)
    assert len(faults(cluster)) == 1
    before = cluster.state.tasks
    cluster.append(v.ProofRequested(task="small"), "api", cluster.state.term)
    assert cluster.state.tasks == before


@pytest.mark.parametrize("task", ["", "big"])
def test_nobody_is_killed_in_mode_observe(task: str) -> None:
    cluster = training(steps=1)
    cluster.append(v.ModeRequested(mode="observe", reason="test", task=task), "api", cluster.state.term)
    train(cluster, 5)
    assert not faults(cluster) and "observe" in text(cluster)
    cluster.append(v.ModeRequested(mode="heal", reason="test", task=task), "api", cluster.state.term)
    cluster.run()
    assert len(faults(cluster)) == 1


def test_fault_waits_until_task_can_bear_it() -> None:
    cluster = training(prove=False)
    state, task = cluster.state, cluster.state.tasks["big"]
    assert missing(state, task) == ""
    progress, troubles = task.progress, task.troubles
    assert task.membership is not None
    last = state.nodes[task.membership.members[-1].node]
    over = replace(troubles, evictions_us=(state.now_us - 60_000_000,) * 20)
    diverging = replace(troubles, divergence=ProgramDivergence(since_iteration=2, sign="parameters", at_us=1))
    draining = with_node(state, replace(last, cordon=replace(last.cordon, active=True, draining=True)))
    assert missing(state, replace(task, membership=None)) == "its workers are not all in one group"
    two = replace(task.membership, members=task.membership.members[:2])
    assert missing(state, replace(task, membership=two)) == "its workers are not all in one group"
    request = v.ReshapeRequested(task="big", tp=1, pp=1, min_workers=1, max_workers=2, reason="test")
    assert "reshaped" in missing(state, replace(task, reshaping=replace(task.reshaping, reshape=request)))
    incident = {"generations": {"big": 1}}
    assert "open" in missing(replace(state, incidents={"i": SimpleNamespace(**incident)}), task)
    hold = StandingHold(action="eviction", limit="observe", reason="", since_us=1, worker=members(cluster)[0])
    assert "held" in missing(replace(state, holds={"h": hold}), task)
    assert "policy.evictions_per_hour" in missing(state, replace(task, troubles=over))
    assert missing(state, replace(task, troubles=diverging)) == "its program diverges"
    assert "fewer than 3" in missing(state, replace(task, progress=replace(progress, iteration=2)))
    assert "are left" in missing(state, replace(task, spec=replace(task.spec, iterations=12)))
    assert f"its last rank, {last.name}," in missing(draining, task)


def test_one_replica_is_killed_only_once_its_state_is_saved() -> None:
    cluster = training(1)
    assert not faults(cluster) and text(cluster).endswith("no state of it is saved yet")
    worker = cluster.state.tasks["big"].workers[members(cluster)[0]]
    about: dict[str, Any] = {"node": worker.node, "task": "big", "worker": worker.worker}
    saved = v.CheckpointSaved(**about, iteration=3, path="/c", size_bytes=1, duration_us=1)
    cluster.say(cluster.hosts[worker.node], saved)
    cluster.run()
    obey(cluster)
    train(cluster)
    train(cluster)
    assert text(cluster) == "armed: SIGKILL of rank 0 at iteration 4, bits not compared (it has one replica)"


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ({"accumulation": "float"}, "all replicas agree"),
        ({"env": {"UNICRON_CHECKSUM_EVERY": "0"}}, "bits not compared (UNICRON_CHECKSUM_EVERY is 0)"),
    ],
)
def test_bits_are_said_as_far_as_they_are_compared(spec: dict[str, Any], bits: str) -> None:
    cluster = training(**spec)
    obey(cluster)
    train(cluster)
    train(cluster)
    assert text(cluster) == f"armed: SIGKILL of rank 2 at iteration 4, {bits}"


def test_replicas_that_compute_on_different_things_arm_a_task_of_other_bits() -> None:
    cluster = training(steps=1)
    for reporter in range(3):
        report(cluster, reporter, iteration=2, sign="environment")
    train(cluster, 2)
    obey(cluster)
    train(cluster)
    train(cluster)
    assert text(cluster).startswith("armed") and text(cluster).endswith("(its replicas compute on different things)")


@pytest.mark.parametrize("commits", [0, 2])
def test_other_bits_arm_no_task(commits: int) -> None:
    """Also where they are reported after the iteration in which they were seen."""
    cluster = training(on_divergence="report")
    obey(cluster)
    for _ in range(commits):
        train(cluster)
    for reporter in range(3):
        report(cluster, reporter, iteration=5)
    train(cluster)
    assert text(cluster).startswith("not armed: SIGKILL of rank 2 at iteration 4; diverged since iteration 5")


def test_task_that_ends_before_is_not_armed() -> None:
    cluster = training(steps=1)
    cluster.append(v.TaskCancelled(task="big", reason="test"), "api", cluster.state.term)
    cluster.run()
    assert cluster.state.tasks["big"].status is TaskStatus.CANCELLED and not faults(cluster)
    assert text(cluster) == "not armed: the task ended before it was proved"
    assert blameless(cluster)


def test_people_see_how_the_proof_stands() -> None:
    cluster = training()
    state, task = cluster.state, cluster.state.tasks["big"]
    assert text(cluster) in str(tasks_table(state)) and text(cluster) in str(describe_object(state, "task", "big"))
    without = with_task(state, replace(task, troubles=replace(task.troubles, proof=None)))
    assert "armed" not in str(tasks_table(without))
    request = v.ProofRequested(task="big", requester="anna")
    assert request.sentence() == "task big is to prove that it heals: one of its workers will be killed (asked by anna)"
    (submitted,) = said(cluster, v.TaskSubmitted)
    assert submitted.sentence().endswith(", --prove")


async def test_api_takes_the_request(tmp_path: Path) -> None:
    cluster = training(prove=False)
    async with serving(tmp_path, cluster.log) as served, aiohttp.ClientSession(served.url) as http:
        async with http.post("/v1/tasks/big/prove", json={}) as response:
            assert response.status == 202, await response.text()
        await served.until(v.InjectFault)
        async with http.post("/v1/tasks/small/prove", json={}) as response:
            assert response.status == 404


def test_status_tells_of_active_tasks_alone() -> None:
    cluster = training()
    assert commands._proofs(cluster.state) == {"healing 1": f"big: {text(cluster)}"}
    cluster.append(v.TaskCancelled(task="big", reason="done"), "api", cluster.state.term)
    assert text(cluster).startswith("not armed") and commands._proofs(cluster.state) == {}
