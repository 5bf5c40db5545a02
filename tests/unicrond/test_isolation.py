"""How isolated nodes come back: checks, repairs, people, and what old agents and old logs get instead."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import SECOND_US, MiniCluster
from tests.unicrond.test_escalation import said
from unicrond.core.decide import decide
from unicrond.core.nodes.isolation import BACK_OFF_MAX, IsolationPhase, Repair, phase, repairs_due, waits_for
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy, Readmission, Settings, settings_of
from unicrond.core.state.state import TaskStatus
from unicrond.core.state.task_parts import Troubles
from unicrond.events import vocabulary as v
from unicrond.intake.config import ConfigError, load
from unicrond.service.coordinator.repairs import Repairs, command

NODE = "n0"


def due_now(cluster: MiniCluster) -> list[Repair]:
    return repairs_due(cluster.state, Survey(cluster.state, cluster.policy).nodes.isolated)


def cluster_of(*, check_s: float = 60.0, repair_s: float = 0.0) -> MiniCluster:
    cluster = MiniCluster(1, check_s=check_s, repair_s=repair_s)
    for name in (NODE, "n1", "n2"):
        cluster.add_host(name)
    cluster.submit("big", max_workers=2)
    cluster.run()
    return cluster


def break_gpu(cluster: MiniCluster, kind: v.ErrorKind = "ecc_error", needs: v.RepairNeed = "") -> None:
    event = v.AcceleratorReported(
        node=NODE, accelerator="GPU-1", worker="", kind=kind, xid=79, message="XID 79: test", repair_need=needs
    )
    cluster.say(cluster.hosts[NODE], event)
    cluster.run_but_isolation()


def rest(cluster: MiniCluster) -> None:
    """Its time is over."""
    assert cluster.pass_deadlines(f"isolation:{NODE}")
    cluster.run_but_isolation()


def where(cluster: MiniCluster) -> IsolationPhase:
    return phase(cluster.state, cluster.state.nodes[NODE])


def repaired(cluster: MiniCluster, *, passed: bool) -> None:
    nth = cluster.state.nodes[NODE].isolation.count
    ended = v.RepairEnded(node=NODE, isolation=nth, has_passed=passed, duration_us=1, detail="exit code 0")
    cluster.append(ended, "coordinator", cluster.state.term)
    cluster.run_but_isolation()


def test_isolation_rests_checks_and_readmits_node() -> None:
    cluster = cluster_of()
    break_gpu(cluster)
    assert where(cluster) is IsolationPhase.RESTING and not said(cluster, v.CheckNode)
    rest(cluster)
    (asked,) = said(cluster, v.CheckNode)
    assert asked.node == NODE and "XID 79" in asked.reason and asked.limit_us == 60 * SECOND_US
    (readmitted,) = said(cluster, v.NodeReadmitted)
    assert readmitted.reason == "its health check passed: as the test wants"
    assert cluster.state.nodes[NODE].isolation.probation is None and where(cluster) is IsolationPhase.IN_SERVICE


def test_failed_check_backs_off_and_keeps_log_small() -> None:
    cluster = cluster_of()
    cluster.hosts[NODE].ill = True
    break_gpu(cluster)
    lengths = []
    before = len(cluster.log)
    for _ in range(BACK_OFF_MAX + 3):
        lengths += [length for name, length in cluster.standing().items() if name.startswith("isolation")]
        rest(cluster)
    assert [length // lengths[0] for length in lengths] == [2 ** min(n, BACK_OFF_MAX) for n in range(BACK_OFF_MAX + 3)]
    assert not said(cluster, v.NodeReadmitted)
    assert len(cluster.log) - before == 3 * (BACK_OFF_MAX + 3), "deadline, command, answer"
    told = waits_for(cluster.state, cluster.state.nodes[NODE])
    assert "13 attempts failed" in told and "as the test wants" in told and "then checked" in told
    cluster.hosts[NODE].ill = False
    rest(cluster)
    assert said(cluster, v.NodeReadmitted)


@pytest.mark.parametrize("gone", ["silence", "agent", "lost", "left", "refused"])
def test_endless_check_counts_as_failure(gone: str) -> None:
    cluster = cluster_of()
    host = cluster.hosts[NODE]
    host.ill = None
    break_gpu(cluster)
    rest(cluster)
    assert where(cluster) is IsolationPhase.CHECKING
    (asked,) = said(cluster, v.CheckNode)
    if gone == "silence":
        assert cluster.pass_deadlines(f"check:{NODE}")
    elif gone == "agent":
        cluster.add_host(NODE)
    elif gone == "lost":
        cluster.lose(host)
    elif gone == "left":
        cluster.say(host, v.NodeLeft(node=NODE, reason="test"))
    else:
        cluster.say(host, v.CommandFailed(node=NODE, command_id=asked.command_id, reason="test"))
    cluster.run_but_isolation()
    assert where(cluster) is IsolationPhase.RESTING and cluster.state.nodes[NODE].isolation.probation.attempts == 1  # type: ignore[union-attr]
    cluster.checked(host, asked, passed=True)
    cluster.run_but_isolation()
    assert where(cluster) is IsolationPhase.RESTING, "an answer that comes too late"
    if gone in ("lost", "left"):
        rest(cluster)
        assert where(cluster) is IsolationPhase.AWAY
        cluster.add_host(NODE)
    host.ill = False
    cluster.run()
    assert where(cluster) is IsolationPhase.IN_SERVICE


@pytest.mark.parametrize("needs", ["reboot", "replace", "other"])
def test_isolation_with_manual_repair_waits_for_person(needs: v.RepairNeed) -> None:
    cluster = cluster_of()
    break_gpu(cluster, "gpu_broken", needs)
    rest(cluster)
    assert where(cluster) is IsolationPhase.AWAITS_PERSON and not cluster.standing()
    assert not said(cluster, v.CheckNode) and "unicronctl uncordon" in waits_for(
        cluster.state, cluster.state.nodes[NODE]
    )
    cluster.uncordon(NODE)
    cluster.run()
    (readmitted,) = said(cluster, v.NodeReadmitted)
    assert readmitted.reason == "a person asked for it: test" and not cluster.state.nodes[NODE].health.repair_need


def test_repair_leads_to_check() -> None:
    cluster = cluster_of(repair_s=60.0)
    break_gpu(cluster, "gpu_broken", "reboot")
    assert not due_now(cluster), "it rests first"
    rest(cluster)
    (due,) = due_now(cluster)
    assert (due.node, due.needs, due.nth) == (NODE, "reboot", "n0#1") and "XID 79" in due.reason
    repaired(cluster, passed=False)
    assert where(cluster) is IsolationPhase.RESTING and not due_now(cluster)
    rest(cluster)
    (again,) = due_now(cluster)
    assert again.nth == "n0#1.1", "another run"
    repaired(cluster, passed=True)
    assert len(said(cluster, v.CheckNode)) == 1 and where(cluster) is IsolationPhase.IN_SERVICE


def test_failed_check_after_repair_requests_another_repair() -> None:
    cluster = cluster_of(repair_s=60.0)
    cluster.hosts[NODE].ill = True
    break_gpu(cluster, "gpu_broken", "replace")
    rest(cluster)
    repaired(cluster, passed=True)
    assert where(cluster) is IsolationPhase.RESTING
    rest(cluster)
    assert where(cluster) is IsolationPhase.IN_REPAIR


def test_late_repair_changes_nothing() -> None:
    cluster = cluster_of(repair_s=60.0)
    break_gpu(cluster, "gpu_broken", "reboot")
    cluster.uncordon(NODE)
    cluster.run()
    before = cluster.state.nodes[NODE]
    cluster.append(
        v.RepairEnded(node=NODE, isolation=1, has_passed=True, duration_us=1, detail=""),
        "coordinator",
        cluster.state.term,
    )
    assert cluster.state.nodes[NODE] == before


def test_isolation_records_later_driver_reports() -> None:
    cluster = cluster_of()
    break_gpu(cluster)
    break_gpu(cluster, "gpu_broken", "replace")
    break_gpu(cluster, "ecc_error", "reset")
    rest(cluster)
    assert where(cluster) is IsolationPhase.AWAITS_PERSON and cluster.state.nodes[NODE].health.repair_need == "replace"


def test_strikes_trigger_check_once_task_trains_elsewhere() -> None:
    cluster = MiniCluster(1, check_s=60.0)
    for name in (NODE, "n1"):
        cluster.add_host(name)
    cluster.submit("big", max_workers=1)
    cluster.run()
    (first,) = [worker.node for worker in cluster.state.tasks["big"].workers.values()]
    for _ in range(2):
        cluster.kill_worker(cluster.hosts[first], next(iter(cluster.hosts[first].processes)))
        cluster.run_but_isolation()
    assert not said(cluster, v.NodeIsolated), "it may be the task"
    cluster.train("big")
    cluster.run()
    assert [event.node for event in said(cluster, v.NodeIsolated)] == [first]
    assert [event.node for event in said(cluster, v.CheckNode)] == [first]


def test_task_that_fails_on_two_nodes_isolates_none() -> None:
    cluster = MiniCluster(1, check_s=60.0)
    for name in (NODE, "n1", "n2"):
        cluster.add_host(name)
    cluster.submit("big", max_workers=1)
    cluster.run()
    for _ in range(12):
        busy = [(h, w) for h in cluster.hosts.values() for w in h.processes]
        if not busy:
            break
        cluster.kill_worker(*busy[0])
        cluster.run_but_isolation()
    assert cluster.state.tasks["big"].status == "failed"
    assert not said(cluster, v.NodeIsolated)
    assert not said(cluster, v.CheckNode) and not any(node.isolation.active for node in cluster.state.nodes.values())


def test_failed_task_never_clears_hardware_fault() -> None:
    cluster = cluster_of()
    break_gpu(cluster)
    task = cluster.state.tasks["big"]
    cluster.state = replace(
        cluster.state, tasks={"big": replace(task, status=TaskStatus.FAILED, troubles=Troubles(strikes={NODE: 2}))}
    )
    assert not [e for e in decide(Survey(cluster.state, cluster.policy), {}) if isinstance(e, v.NodeReadmitted)]


def test_coordinator_without_checks_readmits_by_time() -> None:
    cluster = cluster_of(check_s=0.0)
    break_gpu(cluster, "gpu_broken", "reboot")
    assert cluster.state.nodes[NODE].isolation.probation is None
    rest(cluster)
    assert [event.reason for event in said(cluster, v.NodeReadmitted)] == ["its isolation is over"]


def test_settings_survive_log_round_trip() -> None:
    settings = Settings(Policy(), 1.0, 30.0, 900.0)
    assert settings_of(settings.numbers()) == settings
    assert "check_timeout_s" not in Settings(Policy(), 1.0).numbers(), "old logs keep their bytes"


# --- the repair command ---------------------------------------------------------------------------

DUE = Repair("n0#1", NODE, "10.0.0.7", 1, "reboot", "XID 79")


async def test_repair_command_gets_node_and_reason() -> None:
    script = "import os, sys; print(sys.argv[1:], os.environ['UNICRON_ADDRESS'], os.environ['UNICRON_REASON'])"
    passed, said_last = await command((sys.executable, "-c", script, "--now"), 30.0)(DUE)
    assert passed and said_last == "exit code 0: ['--now', 'n0', 'reboot'] 10.0.0.7 XID 79"


async def test_repair_fails_on_error_timeout_or_missing_command() -> None:
    assert await command(("/bin/sh", "-c", "echo no; exit 3"), 30.0)(DUE) == (False, "exit code 3: no")
    passed, why = await command(("/bin/sh", "-c", "sleep 600"), 0.2)(DUE)
    assert not passed and "did not end within 0.2 s" in why
    passed, why = await command(("/no/such/command",), 1.0)(DUE)
    assert not passed and "cannot be run" in why


async def test_due_repair_runs_once_and_reports_outcome() -> None:
    cluster = cluster_of(repair_s=60.0)
    break_gpu(cluster, "gpu_broken", "reboot")
    rest(cluster)
    ran: list[Repair] = []
    told: asyncio.Queue[v.RepairEnded] = asyncio.Queue()

    async def run(repair: Repair) -> tuple[bool, str]:
        ran.append(repair)
        return True, "rebooted"

    repairs = Repairs(run, told.put_nowait)
    for _ in range(3):
        repairs.look(Survey(cluster.state, cluster.policy))
    ended = await asyncio.wait_for(told.get(), 10.0)
    repairs.look(Survey(cluster.state, cluster.policy))  # before its outcome has been read back
    await asyncio.sleep(0)
    assert (ended.node, ended.isolation, ended.has_passed, ended.detail) == (NODE, 1, True, "rebooted")
    assert len(ran) == 1 and told.empty()
    await repairs.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("readmission: {check: dcgmi diag}", "readmission.check"),
        ("readmission: {timeout_s: 0}", "readmission.timeout_s"),
        ("readmission: {repairs: [a]}", "unknown field"),
        ('readmission: {repair: [""]}', "readmission.repair"),
    ],
)
def test_configuration_refuses_bad_readmission_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError, match=says) as raised:
        load(path)
    assert "\n" not in str(raised.value)


def test_configuration_reads_readmission(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("readmission: {check: [/bin/true, -x], timeout_s: 9, repair: [ipmi]}\n")
    asked = Readmission(check=("/bin/true", "-x"), timeout_s=9.0, repair=("ipmi",))
    assert load(path).readmission == asked
