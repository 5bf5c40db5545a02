"""Programs before nodes: whose fault an end is, what it costs whom, and when the task is given up."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import SECOND_US, MiniCluster, members
from unicrond.core.faults import program_faults
from unicrond.core.faults.program_faults import (
    CLAIM_US,
    FaultVerdict,
    Guilt,
    judge_end,
    judge_report,
    looping_text,
    signature_of,
)
from unicrond.core.folding.incidents import Fact, blame
from unicrond.core.rules.plan_problems import problem_of, situation_of
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import Severity, TaskStatus
from unicrond.core.state.task_parts import Crashes
from unicrond.core.state.workers import Worker, WorkerError, WorkerStatus
from unicrond.display.cluster_tables import tasks_table
from unicrond.events import vocabulary as v
from unicrond.page.attention import attention, state_alarms
from unicrond.views.lemons import count_signals, scores
from unicrond.views.notifications import step_notices

TYPO = """starting
Traceback (most recent call last):
  File "/home/u/train.py", line 3, in <module>
    open("/data/tokens.txt")
FileNotFoundError: [Errno 2] No such file or directory: '/data/tokens.txt'
"""
SEGFAULT = 'Fatal Python error: Segmentation fault\n  File "/home/u/kernel.py", line 9 in launch\n'


def cluster_of(nodes: int) -> MiniCluster:
    cluster = MiniCluster(1)
    for number in range(nodes):
        cluster.add_host(f"n{number}")
    return cluster


def survey_of(cluster: MiniCluster) -> Survey:
    return Survey(cluster.state, cluster.policy)


def said(cluster: MiniCluster, *kinds: type) -> list:
    return [entry.envelope.event for entry in cluster.log if isinstance(entry.envelope.event, kinds)]


def workers(cluster: MiniCluster) -> dict[str, int]:
    return {name: len(members(cluster, name)) if task.membership else 0 for name, task in cluster.state.tasks.items()}


def end(cluster: MiniCluster, task: str, *, code: int | None = 1, number: int | None = None, tail: str = TYPO) -> bool:
    """End one process of the task; whether there was one."""
    for host in cluster.hosts.values():
        for process in [process for process in host.processes.values() if process.task == task]:
            del host.processes[process.worker]
            exited = v.WorkerExited(
                node=host.name, task=task, worker=process.worker, exit_code=code if number is None else None,
                signal=number, is_expected=False, log_tail=tail,
            )  # fmt: skip
            cluster.say(host, exited)
            return True
    return False


def crash_until_over(cluster: MiniCluster, task: str, *, most: int = 40, **how: object) -> int:
    """End the task's processes as often as it is started; how often."""
    for times in range(most):
        if cluster.state.tasks[task].status is not TaskStatus.ACTIVE:
            return times
        if not end(cluster, task, **how):  # type: ignore[arg-type]
            return times
        cluster.run()
    return most


# --- what an end says by itself --------------------------------------------------------------------


def exited(**fields: object) -> v.WorkerExited:
    usual = {"exit_code": None, "signal": None, "log_tail": "", "is_expected": False}
    return v.WorkerExited(node="n0", task="t", worker="t.1", **(usual | fields))  # type: ignore[arg-type]


def worker(kind: str = "", text: str = "") -> Worker:
    error = WorkerError(kind=kind, text=text, iteration=7) if kind else None
    return Worker(worker="t.1", node="n0", replica=0, shard=0, status=WorkerStatus.MEMBER, error=error)


@pytest.mark.parametrize(
    ("reported", "end_of_it", "guilt", "signature"),
    [
        ((), {"exit_code": 1, "log_tail": TYPO}, Guilt.PROGRAM, "FileNotFoundError"),
        ((), {"exit_code": 3}, Guilt.PROGRAM, "exit code 3"),
        ((), {"exit_code": 0}, Guilt.PROGRAM, "exit code 0"),
        ((), {"signal": 9, "cause": "oom_killed"}, Guilt.PROGRAM, "OOM killer"),
        ((), {"signal": 9}, Guilt.UNKNOWN, ""),
        ((), {"signal": 15}, Guilt.UNKNOWN, ""),
        ((), {"signal": 11}, Guilt.UNKNOWN, "SIGSEGV"),
        ((), {"signal": 11, "log_tail": SEGFAULT}, Guilt.UNKNOWN, "SIGSEGV in launch of kernel.py"),
        ((), {"exit_code": 69}, Guilt.UNKNOWN, ""),
        ((), {"exit_code": 137}, Guilt.UNKNOWN, ""),
        (("exception", "KeyError: 'lr'"), {"exit_code": 1}, Guilt.PROGRAM, "KeyError"),
        (("exception", "OSError: [Errno 5] Input/output error"), {"exit_code": 1}, Guilt.UNKNOWN, "OSError"),
        (("nan_loss", "NanLoss: nan"), {"exit_code": 1}, Guilt.PROGRAM, "NanLoss"),
        (("left_early", "LeftEarly: x"), {"exit_code": 0}, Guilt.PROGRAM, "LeftEarly"),
        (("cuda_error", "CUDA error: device-side assert"), {"exit_code": 1, "log_tail": TYPO}, Guilt.UNKNOWN, "CUDA"),
        (("ecc_error", "uncorrectable ECC"), {"exit_code": 1}, Guilt.HARDWARE, ""),
        (("connection_broken", "reset by peer"), {"exit_code": 1}, Guilt.UNKNOWN, ""),
        (("hang", "its process is stopped"), {"signal": 9}, Guilt.UNKNOWN, ""),
    ],
)
def test_judge_end_says_whose_fault(reported: tuple, end_of_it: dict, guilt: Guilt, signature: str) -> None:
    verdict = judge_end(worker(*reported), exited(**end_of_it))
    assert verdict.guilt is guilt and bool(verdict.signature) == bool(signature) and signature in verdict.signature


def test_signature_is_same_on_another_node() -> None:
    here = "IndexError: index 17 of /scratch/node3/run/x.bin at 0x7ffe12"
    there = "IndexError: index 4711 of /scratch/node12/run/x.bin at 0x12ab"
    assert signature_of(here) == signature_of(there) != signature_of("IndexError: index of y.bin")


def test_judge_report_knows_hardware() -> None:
    assert judge_report(WorkerError(kind="gpu_fault", text="XID 94")).guilt is Guilt.HARDWARE
    assert judge_report(WorkerError(kind="corruption", text="other parameters")).guilt is Guilt.HARDWARE


# --- who pays --------------------------------------------------------------------------------------


def test_typo_isolates_no_node_and_fails_task() -> None:
    """Row 1: a script whose first lines raise, where two of four nodes are busy."""
    cluster = cluster_of(4)
    cluster.submit("prod", min_workers=2, max_workers=2)
    cluster.run()
    cluster.train("prod", 20)
    cluster.submit("typo", max_workers=1)
    cluster.run()
    before = members(cluster, "prod")
    assert crash_until_over(cluster, "typo") == cluster.policy.stuck_max
    task = cluster.state.tasks["typo"]
    assert task.status is TaskStatus.FAILED and "/data/tokens.txt" in task.ending.reason
    assert "failed 8 times without a new iteration" in task.ending.reason
    assert not said(cluster, v.NodeIsolated) and members(cluster, "prod") == before
    assert cluster.state.ledger.failures == 0, "it tells nothing of the hardware"
    assert not any(node.isolation.count for node in cluster.state.nodes.values())


def test_typo_counts_for_no_lemon() -> None:
    cluster = cluster_of(2)
    cluster.submit("typo", max_workers=1)
    cluster.run()
    crash_until_over(cluster, "typo")
    signals: dict = {}
    for step in steps_of(cluster):
        signals = count_signals(signals, step)
    assert not scores(signals)


def steps_of(cluster: MiniCluster) -> list:
    from unicrond.core.fold import fold
    from unicrond.core.replayer import LogStep
    from unicrond.core.state.state import ClusterState

    state, steps = ClusterState(), []
    for entry in cluster.log:
        after = fold(state, entry)
        steps.append(LogStep(state, entry, after))
        state = after
    return steps


def test_nan_evicts_no_other_task() -> None:
    """Row 2: the plan gives a failing task nobody else's workers, even when a node is lost meanwhile."""
    cluster = cluster_of(4)
    cluster.submit("slow", min_workers=2, max_workers=2)
    cluster.run()
    cluster.train("slow", 20)
    cluster.submit("nan", min_workers=2, max_workers=2)
    cluster.run()
    for _ in range(2):
        poison(cluster, "nan")
    gone = next(worker.node for worker in cluster.state.tasks["nan"].workers.values())
    cluster.kill_host(cluster.hosts[gone])
    cluster.lose(cluster.hosts[gone])
    cluster.run()
    assert workers(cluster) == {"slow": 2, "nan": 0}
    assert not said(cluster, v.NodeIsolated)


def poison(cluster: MiniCluster, task: str, iteration: int = 1) -> None:
    """One member's loss is no finite number, and its process ends by that."""
    name = members(cluster, task)[0]
    (host,) = [host for host in cluster.hosts.values() if name in host.processes]
    cluster.report(name, "nan_loss", iteration=iteration)
    cluster.kill_worker(host, name)
    cluster.run()


def test_nan_of_one_iteration_fails_task() -> None:
    """Row 3: it comes at the same iteration each time; those before it are repeated, and are no progress."""
    cluster = cluster_of(2)
    cluster.submit("nan", max_workers=2, min_workers=2)
    cluster.run()
    for _ in range(10):
        if cluster.state.tasks["nan"].status is not TaskStatus.ACTIVE:
            break
        cluster.iterations["nan"] = 0  # from storage
        cluster.train("nan", 16)
        poison(cluster, "nan", iteration=17)
    task = cluster.state.tasks["nan"]
    assert task.status is TaskStatus.FAILED and not said(cluster, v.NodeIsolated)
    assert task.ending.reason.startswith("its loss in iteration 17 was no finite number 3 times in a row")


def test_void_order_costs_no_node() -> None:
    """Row 11: the agent dies with a start under way; the next one finds that order void and obeys the newer one."""
    cluster = cluster_of(1)
    cluster.submit("big", max_workers=1)
    cluster.decide()
    cluster.decide()
    host = cluster.hosts["n0"]
    assert [type(entry.envelope.event) for entry in host.commands] == [v.StartWorker]
    cluster.lose(host)
    cluster.add_host("n0")
    cluster.run()
    cluster.assert_whole()
    (answer,) = said(cluster, v.CommandFailed)
    assert answer.reason.startswith("void") and not said(cluster, v.NodeIsolated)
    assert len(said(cluster, v.StartWorker)) == 2 and cluster.state.tasks["big"].troubles.crashes is None
    assert not cluster.state.tasks["big"].troubles.strikes


def test_refused_order_is_no_strike() -> None:
    cluster = cluster_of(2)
    cluster.submit("big", max_workers=1)
    for _ in range(3):
        while not cluster.state.tasks["big"].workers:
            if not cluster.decide():
                assert cluster.pass_deadlines("restart")
        (start,) = cluster.state.tasks["big"].workers.values()
        cluster.hosts[start.node].commands.clear()
        failed = v.CommandFailed(node=start.node, command_id=start.command_id, reason="no free slot")
        cluster.say(cluster.hosts[start.node], failed)
    task = cluster.state.tasks["big"]
    assert not task.troubles.strikes and not said(cluster, v.NodeIsolated)
    cluster.run()
    cluster.assert_whole()
    places = {worker.node for worker in cluster.state.tasks["big"].workers.values()}
    assert places == {"n1"}, "after two refusals it is tried elsewhere"


# --- unknown causes --------------------------------------------------------------------------------


def test_unknown_end_is_tried_elsewhere_before_node_is_suspected() -> None:
    cluster = cluster_of(2)
    cluster.submit("big", max_workers=1)
    cluster.run()
    first = next(iter(cluster.state.tasks["big"].workers.values())).node
    for _ in range(2):
        end(cluster, "big", number=9, tail="")
        cluster.run()
    assert not said(cluster, v.NodeIsolated), "nothing shows yet that it follows the node"
    second = next(iter(cluster.state.tasks["big"].workers.values())).node
    assert second != first
    cluster.train("big", 1)
    cluster.run_but_isolation()
    assert [event.node for event in said(cluster, v.NodeIsolated)] == [first], "it trains elsewhere"
    suspicion = cluster.state.nodes[first].health.suspicion
    assert suspicion is not None and suspicion.count == 1
    cluster.run()
    node = cluster.state.nodes[first]
    assert not node.isolation.active and node.health.suspicion == suspicion, "it keeps the suspicion"
    assert len(said(cluster, v.NodeIsolated)) == 1, "nothing new has happened there"


@pytest.mark.parametrize("strikes_max", [1, 2, 3])
def test_suspected_node_returns_until_something_new_ends_there(strikes_max: int) -> None:
    """It is isolated by one more end, not by the old ones."""
    cluster = MiniCluster(1, Policy(strikes_max=strikes_max))
    for name in ("n0", "n1"):
        cluster.add_host(name)
    cluster.submit("big", max_workers=1)
    cluster.run()
    first = next(iter(cluster.state.tasks["big"].workers.values())).node
    for _ in range(strikes_max):
        end(cluster, "big", number=9, tail="")
        cluster.run()
    cluster.train("big", 1)
    cluster.run()
    assert len(said(cluster, v.NodeIsolated)) == 1 and not cluster.state.nodes[first].isolation.active
    (other,) = {"n0", "n1"} - {first}
    cluster.cordon(other, drain=True)
    cluster.run()
    end(cluster, "big", number=9, tail="")
    cluster.uncordon(other)
    cluster.run()
    cluster.cordon(first, drain=True)
    cluster.run()
    cluster.train("big", 1)
    cluster.run_but_isolation()
    assert [event.node for event in said(cluster, v.NodeIsolated)] == [first, first]


def test_same_signature_on_two_nodes_is_of_program() -> None:
    cluster = cluster_of(3)
    cluster.submit("segv", max_workers=2)
    cluster.run()
    for _ in range(2):
        end(cluster, "segv", number=11, tail=SEGFAULT)
        end(cluster, "segv", number=11, tail=SEGFAULT)
        cluster.run()
    task = cluster.state.tasks["segv"]
    assert not task.troubles.strikes and task.troubles.crashes is not None and task.troubles.crashes.count == 2
    assert crash_until_over(cluster, "segv", number=11, tail=SEGFAULT) < 40
    assert not said(cluster, v.NodeIsolated)


def test_segfault_without_free_node_isolates_none() -> None:
    """Nothing shows that it follows the node; the others train on."""
    cluster = cluster_of(3)
    cluster.submit("prod", min_workers=2, max_workers=2)
    cluster.run()
    cluster.train("prod", 20)
    cluster.submit("segv", max_workers=1)
    cluster.run()
    before = members(cluster, "prod")
    crash_until_over(cluster, "segv", number=11, tail=SEGFAULT)
    assert cluster.state.tasks["segv"].status is TaskStatus.FAILED
    assert not said(cluster, v.NodeIsolated) and members(cluster, "prod") == before


# --- back-off, and what is shown -------------------------------------------------------------------


def test_back_off_grows_to_bound() -> None:
    waits = [program_faults.back_off_us(Crashes(count=count)) // SECOND_US for count in range(1, 12)]
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_back_off_delays_next_start_and_progress_resets_it() -> None:
    cluster = cluster_of(1)
    cluster.submit("typo", max_workers=1)
    cluster.run()
    end(cluster, "typo")
    cluster.run(passing=("symptom", "exit"))
    assert workers(cluster)["typo"] == 1, "the first restart is at once"
    end(cluster, "typo")
    cluster.run(passing=("symptom", "exit"))
    assert not cluster.state.tasks["typo"].workers
    (length_us,) = [us for name, us in cluster.standing().items() if name.startswith("restart:typo#")]
    assert 0 < length_us <= SECOND_US
    assert looping_text(cluster.state.tasks["typo"]).startswith("crash-looping (2 times: FileNotFoundError: ")
    assert any("crash-looping (2 times" in row[-1] for row in tasks_table(cluster.state).rows)
    cluster.run()
    cluster.train("typo", 9)
    assert cluster.state.tasks["typo"].troubles.crashes is not None
    cluster.train("typo", 1)
    assert cluster.state.tasks["typo"].troubles.crashes is None
    cluster.run()
    assert not Survey(cluster.state, cluster.policy).failing
    (incident,) = {incident.severity for incident in cluster.state.closed_incidents}
    assert incident is Severity.SEV2


def test_crash_loop_is_told_once() -> None:
    cluster = cluster_of(1)
    cluster.submit("typo", max_workers=1)
    cluster.run()
    crash_until_over(cluster, "typo", most=5)
    cluster.train("typo", 10)
    notices = [notice for step in steps_of(cluster) for notice in step_notices(step) if notice.rule == "crash_looping"]
    assert [notice.is_over for notice in notices] == [False, True]
    assert notices[0].title == "task typo is crash-looping" and "tokens.txt" in notices[0].text


def test_crash_loop_needs_somebody_until_it_is_calm() -> None:
    """It has workers, and stands among what the page shows first, with what its program said."""
    cluster = cluster_of(1)
    cluster.submit("typo", max_workers=1)
    cluster.run()
    for _ in range(2):
        assert not [alarm for alarm in state_alarms(cluster.state) if alarm.subject == "typo"]
        end(cluster, "typo")
        cluster.run()
    (row,) = [row for row in attention(cluster.state) if row["alarm"] == "task-waiting:typo"]
    assert row["what"].startswith("task typo crash-looping (2 times: FileNotFoundError: ")
    assert row["remedy"] == "unicronctl logs typo" and row["place"] == "tasks"
    cluster.train("typo", 10)
    assert not state_alarms(cluster.state)


def test_failing_task_takes_only_idle_workers() -> None:
    """Ten times as heavy and with a floor: after a second fruitless fault others get what they have a use for."""
    cluster = cluster_of(4)
    cluster.submit("slow", min_workers=1, max_workers=2)
    cluster.submit("typo", weight=10.0, min_workers=2, max_workers=4)
    cluster.run()
    assert workers(cluster)["typo"] == 3
    end(cluster, "typo")
    cluster.run()
    assert workers(cluster)["typo"] == 3, "one fault may be a neighbour's doing"
    end(cluster, "typo")
    cluster.run()
    assert workers(cluster) == {"slow": 2, "typo": 2}, "the floor of slow and its second worker; the rest idles"
    gone = next(worker.node for worker in cluster.state.tasks["slow"].workers.values())
    cluster.kill_host(cluster.hosts[gone])
    cluster.lose(cluster.hosts[gone])
    cluster.run()
    assert workers(cluster) == {"slow": 2, "typo": 0}, "its floor goes before nobody's second worker"
    assert looping_text(cluster.state.tasks["typo"]).startswith("crash-looping (2 times: FileNotFoundError")
    cluster.append(v.TaskUpdated(task="typo", weight=10.0, reason="mended"), "api", cluster.state.term)
    cluster.run()
    assert cluster.state.tasks["typo"].troubles.crashes is None
    assert workers(cluster) == {"slow": 1, "typo": 2}, "a person has given it another chance"


def test_no_plan_is_expected_to_outlast_the_next_claim_of_a_failing_programs_place() -> None:
    """While its user is about to bring it again, mended or not, nobody moves for what pays only later."""
    cluster = cluster_of(4)
    cluster.submit("slow", min_workers=1, max_workers=2)
    cluster.submit("typo", min_workers=2, max_workers=4)
    cluster.run()

    def d_running_us() -> int:
        situation, problem = situation_of(survey_of(cluster)), problem_of(survey_of(cluster))
        assert situation is None or situation.d_running_us(problem.workers) == problem.d_running_us
        return int(problem.d_running_us)

    usual_us = d_running_us()
    assert usual_us > CLAIM_US
    for wanted_us in (usual_us, CLAIM_US):
        end(cluster, "typo")
        cluster.run()
        assert d_running_us() == wanted_us, "one fault may be a neighbour's doing"
    cluster.append(v.TaskCancelled(task="typo", requester="its user", reason="typo"), "api", cluster.state.term)
    cluster.run()
    assert d_running_us() == CLAIM_US, "it comes again under another name"
    cluster.now_us += CLAIM_US
    cluster.submit("later", min_workers=1, max_workers=1)
    cluster.run()
    assert d_running_us() > CLAIM_US


def test_place_of_a_program_that_has_failed_for_long_is_planned_anew() -> None:
    cluster = cluster_of(3)
    cluster.submit("typo", min_workers=1, max_workers=1)
    cluster.submit("slow", min_workers=1, max_workers=2)
    cluster.run()
    for _ in range(2):
        end(cluster, "typo")
        cluster.run()
    before = survey_of(cluster).basis
    assert survey_of(cluster).stands_us == CLAIM_US and survey_of(cluster).fresh
    state = replace(cluster.state, now_us=cluster.state.now_us + CLAIM_US)
    after = Survey(state, cluster.policy, survey_of(cluster))
    assert not after.stands_us and after.basis != before and not after.fresh


def test_hardware_incident_stays_of_hardware_where_program_ends_after_it() -> None:
    """A member that ends by an exit code of its own after a GPU broke takes nothing from the failure rate."""
    cluster = cluster_of(2)
    cluster.submit("task", max_workers=2)
    cluster.run()
    generation = {"task": cluster.state.tasks["task"].generation}
    first, second = members(cluster, "task")
    facts = [
        Fact(kind="ecc_error", node="n0", worker=first, generations=generation, message="XID 48", occurred_us=1),
        Fact(
            kind="exception",
            node="n1",
            worker=second,
            generations=generation,
            message="exit code 1",
            occurred_us=2,
            is_program_fault=True,
        ),
    ]
    state = cluster.state
    for fact in facts:
        state = blame(state, fact)
    (incident,) = state.incidents.values()
    assert incident.kind == "ecc_error" and not incident.is_program_fault


def test_same_signature_after_progress_is_no_proof_against_program() -> None:
    cluster = cluster_of(2)
    cluster.submit("task", max_workers=2)
    cluster.run()
    task, verdict = cluster.state.tasks["task"], FaultVerdict(Guilt.UNKNOWN, "died", "SIGSEGV")
    crashed = Crashes(count=1, signature="SIGSEGV", best=5)
    for best, expected in ((5, True), (6, False)):
        progress = replace(task.progress, best_iteration=best)
        later = replace(task, progress=progress, troubles=replace(task.troubles, crashes=crashed))
        assert program_faults.is_known_of_program(later, "n0", verdict) is expected
