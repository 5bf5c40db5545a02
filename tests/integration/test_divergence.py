"""Replicas that differ, in real training: the program's fault stops the task, a replica's costs that replica alone.
First the workers, by a rig's orders; at the end with a real head."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.integration import diverging_models
from tests.integration.live import TASK, live_cluster
from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.events.vocabulary import (
    LANES,
    CheckpointSpec,
    CorruptionSuspected,
    DivergenceObserved,
    ErrorReported,
    TaskSpec,
    divergence_text,
)

ITERATIONS = 14
FLIPPED = 7
#: For the agents of a real cluster: the workers import the models from here.
ROOT = str(Path(__file__).parents[2])


def task(case: str, on_divergence: str = "stop", numerics: str = "exact") -> TaskSpec:
    return TaskSpec(
        name="t",
        entry=diverging_models.__file__,
        args=(case, "1", str(FLIPPED)),
        max_workers=3,
        global_batch=12,
        micro_batch=2,
        iterations=ITERATIONS,
        accumulation=numerics,  # type: ignore[arg-type]
        env={"OMP_NUM_THREADS": "1"} | ({LANES: "3"} if numerics == "exact" else {}),
        checkpoint=CheckpointSpec(interval=0, memory_interval=0),
        on_divergence=on_divergence,  # type: ignore[arg-type]
    )


def names(replicas: int) -> list[str]:
    return [f"t.{number}" for number in range(1, replicas + 1)]


def begin(rig: Rig, workers: list[str]) -> None:
    rig.start(*workers)
    rig.until(lambda: rig.ready(*workers))
    rig.tell(1, workers)


def reports(rig: Rig) -> set[tuple[str, str, int]]:
    return {(worker, m.sign, m.iteration) for worker, m in rig.said if isinstance(m, DivergenceObserved)}


def digests(directory: Path, worker: str) -> dict[int, str]:
    text = (directory / f"{worker}.log").read_text()
    return {int(number): words for number, words in re.findall(r"^iteration (\d+): (\w+)$", text, re.MULTILINE)}


def stop(rig: Rig, workers: list[str]) -> None:
    """The head's order, by which all wait: none has reported an error, and all end as asked."""
    rig.quit(*workers)
    rig.until(lambda: not rig.living())
    assert not rig.of(ErrorReported) and not rig.of(CorruptionSuspected) and not rig.completed
    assert set(rig.exits.values()) == {0}


@pytest.mark.parametrize(("case", "sign"), [("dropout", "unsteady"), ("own-data", "unequal")])
@pytest.mark.parametrize("replicas", [2, 3])
def test_first_micro_batch_shows_program_that_diverges(
    server: ForkServer, tmp_path: Path, case: str, sign: str, replicas: int
) -> None:
    workers = names(replicas)
    with Rig(server, tmp_path, task(case)) as rig:
        begin(rig, workers)
        rig.until(lambda: reports(rig) == {(worker, sign, 1) for worker in workers})
        stop(rig, workers)
    text = divergence_text(1, sign)  # type: ignore[arg-type]
    assert all(text in (tmp_path / f"{worker}.log").read_text() for worker in workers)
    assert not digests(tmp_path, "t.1"), "no step was made"


def test_program_that_is_to_go_on_reports_and_completes(server: ForkServer, tmp_path: Path) -> None:
    with Rig(server, tmp_path, task("dropout", "report")) as rig:
        begin(rig, names(2))
        rig.until(lambda: rig.completed)
        assert reports(rig) == {(worker, "unsteady", 1) for worker in names(2)}


def test_newcomer_with_another_schedule_accuses_nobody(server: ForkServer, tmp_path: Path) -> None:
    workers = names(3)
    with Rig(server, tmp_path, task("schedule")) as rig:
        rig.start(*workers)
        rig.until(lambda: rig.ready(*workers))
        rig.tell(1, workers[:2])
        rig.until(lambda: rig.reached(3))
        rig.tell(2, workers, joiners=workers[2:], urgent=True)
        rig.until(lambda: {worker for worker, _, _ in reports(rig)} == set(workers))
        ((sign, iteration),) = {(sign, iteration) for _, sign, iteration in reports(rig)}
        stop(rig, workers)
    assert sign == "newcomer"
    first, last = digests(tmp_path, "t.1"), digests(tmp_path, "t.3")
    assert max(first) == iteration - 1, "found before the next step"
    assert first[iteration - 1] != last[iteration - 1]


def test_flipped_bit_of_one_of_two_accuses_nobody(server: ForkServer, tmp_path: Path) -> None:
    with Rig(server, tmp_path, task("flip")) as rig:
        begin(rig, names(2))
        rig.until(lambda: reports(rig) == {(worker, "parameters", FLIPPED) for worker in names(2)})
        stop(rig, names(2))


@pytest.mark.parametrize("numerics", ["exact", "float"])
def test_members_that_compute_on_different_things_report_that_and_go_on(
    server: ForkServer, tmp_path: Path, numerics: str
) -> None:
    """They may differ by it: nobody is accused, and the program neither."""
    with Rig(server, tmp_path, task("threads", numerics=numerics)) as rig:
        begin(rig, names(3))
        rig.until(lambda: rig.completed)
        assert reports(rig) == {(worker, "environment", 1) for worker in names(3)}
        assert not rig.of(CorruptionSuspected)
    assert "2 threads" in (tmp_path / "t.1.log").read_text()


def test_task_that_is_to_go_on_makes_every_step_with_a_replica_at_fault(server: ForkServer, tmp_path: Path) -> None:
    """It stays, as its eviction is held: the others accuse it once, and wait for nothing."""
    with Rig(server, tmp_path, task("flip", "report")) as rig:
        begin(rig, names(3))
        rig.until(lambda: rig.completed)
        assert {m.iteration for m in rig.of(CorruptionSuspected)} == {FLIPPED}
        assert len(rig.of(CorruptionSuspected)) == 2 and not reports(rig)
    assert len(digests(tmp_path, "t.2")) == ITERATIONS


@pytest.mark.parametrize("is_evicted", [True, False])
def test_flipped_bit_enters_no_step(server: ForkServer, tmp_path: Path, is_evicted: bool) -> None:
    """Of three, on the lead. The others accuse it before the step; whether it is given up or stays, all have the bits
    of a run without it."""
    workers = names(3)
    (tmp_path / "sound").mkdir()
    with Rig(server, tmp_path / "sound", task("none")) as rig:
        begin(rig, workers)
        rig.until(lambda: rig.completed)
    sound = digests(tmp_path / "sound", "t.2")
    (tmp_path / "flipped").mkdir()
    with Rig(server, tmp_path / "flipped", task("flip")) as rig:
        begin(rig, workers)
        accusations = {(worker, "checksum", "t.1", FLIPPED) for worker in workers[1:]}
        rig.until(
            lambda: (
                {(w, m.sign, m.suspect, m.iteration) for w, m in rig.said if isinstance(m, CorruptionSuspected)}
                == accusations
            )
        )
        if is_evicted:
            rig.signal("t.1", signal.SIGKILL)
        rig.tell(2, workers[1:] if is_evicted else workers, urgent=True)
        rig.until(lambda: rig.completed)
        assert not reports(rig) and len(rig.of(CorruptionSuspected)) == 2
    assert len(sound) == ITERATIONS
    for worker in workers[1:] if is_evicted else workers:
        assert digests(tmp_path / "flipped", worker) == sound, worker


# --- with a real head ------------------------------------------------------------------------------


@pytest.mark.timeout(600)
async def test_head_fails_task_whose_program_diverges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    async with live_cluster(tmp_path, nodes=2, workers=2) as live:
        await live.submit(entry=diverging_models.__file__, args=["dropout", "1", "1"], micro_batch=2)
        state = await live.until("it fails", _has_ended, may_fail=True)
        ending = state.tasks[TASK].ending.reason
        assert ending == f"{divergence_text(1, 'unsteady')} (on_divergence: stop)"
        assert not state.incidents_total and not any(node.isolation.active for node in state.nodes.values())
        assert {event["sign"] for event in live.events("DivergenceObserved")} == {"unsteady"}
        assert not live.events("StepCommitted")


@pytest.mark.timeout(600)
async def test_head_gives_up_replica_with_a_flipped_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead of three: its worker alone is replaced, and the task completes."""
    monkeypatch.setenv("PYTHONPATH", ROOT)
    async with live_cluster(tmp_path, nodes=3, workers=3) as live:
        # Of two, that had begun before the third came, none would be convicted.
        arguments = ["flip", "1", str(FLIPPED)]
        await live.submit(entry=diverging_models.__file__, args=arguments, iterations=40, min_workers=3)
        state = await live.until("it completes", _has_ended)
        assert state.tasks[TASK].status is TaskStatus.COMPLETED, state.tasks[TASK].ending.reason
        assert not live.events("DivergenceObserved")
        accusations = {(event["worker"], event["suspect"]) for event in live.events("CorruptionSuspected")}
        assert accusations == {(f"{TASK}.2", f"{TASK}.1"), (f"{TASK}.3", f"{TASK}.1")}
        incidents = [*state.closed_incidents, *state.incidents.values()]
        assert [(incident.kind, incident.worker) for incident in incidents] == [("corruption", f"{TASK}.1")]
        # Its node goes to the health check, but not while the task needs it.
        checked = {event["node"] for event in live.events("NodeIsolated")}
        assert checked <= {incidents[0].node}


def _has_ended(state: ClusterState) -> bool:
    return TASK in state.tasks and state.tasks[TASK].status in (TaskStatus.FAILED, TaskStatus.COMPLETED)
