"""What a worker's statistics tell of real training: who is slow, whose numbers are odd, whose parameters differ."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_regroup import stopped
from unicrond.agents.protocol import marks
from unicrond.events.vocabulary import (
    CheckpointSpec,
    CorruptionSuspected,
    DegradationObserved,
    ErrorReported,
    ModelSpec,
    StragglerObserved,
    TaskSpec,
)

ODD = str(Path(__file__).with_name("odd_gpt.py"))
THREE = ("t.1", "t.2", "t.3")


def odd_task(data: Path, what: str, worker: int, iteration: int, **env: str) -> TaskSpec:
    return TaskSpec(
        name="t",
        entry=ODD,
        args=(what, str(worker), str(iteration)),
        env=env,
        model=ModelSpec(layers=1, hidden=32, heads=2, seq=16),
        data=str(data),
        global_batch=6,
        iterations=10**6,
        checkpoint=CheckpointSpec(dir="(the rig says)", interval=0),
    )


def trained(server: ForkServer, directory: Path, spec: TaskSpec, done: Callable[[Rig], object]) -> Rig:
    """Three workers train until `done`; then they are ended."""
    with Rig(server, directory, spec) as rig:
        rig.start(*THREE)
        rig.until(lambda: rig.ready(*THREE))
        rig.tell(1, THREE)
        rig.until(lambda: done(rig), 60)
        rig.quit(*THREE)
        rig.until(lambda: not rig.living())
    return rig


def test_slow_worker_is_named_by_compute_time(server: ForkServer, data: Path, tmp_path: Path) -> None:
    def blames(rig: Rig) -> list[tuple[str, DegradationObserved]]:
        return [(worker, m) for worker, m in rig.said if isinstance(m, DegradationObserved) and is_due(m)]

    def is_due(told: DegradationObserved) -> bool:  # a busy machine may slow anybody down before
        return told.slowest == "t.2" and told.compute_us > told.others_us + 50_000

    rig = trained(server, tmp_path, odd_task(data, "slow", 2, 45), blames)
    worker, told = blames(rig)[0]
    assert worker == "t.1", "the lead tells"
    assert told.iteration_us > 1.1 * told.usual_us
    assert told.iteration >= 45


def test_worker_slow_from_start_is_reported(server: ForkServer, data: Path, tmp_path: Path) -> None:
    def tellers(rig: Rig) -> list[tuple[str, StragglerObserved]]:
        return [(worker, m) for worker, m in rig.said if isinstance(m, StragglerObserved)]

    rig = trained(server, tmp_path, odd_task(data, "straggle", 2, 1), tellers)
    worker, told = tellers(rig)[0]
    assert worker == "t.1", "the lead tells"
    assert (told.straggler, told.rank) == ("t.2", 1)
    assert told.iteration <= 50 and told.since_iteration <= 10
    assert told.factor > 2 and told.compute_us > told.others_us + 40_000


@pytest.mark.parametrize(("what", "sign"), [("spike", "loss"), ("gradient", "gradient_norm")])
def test_worker_with_odd_numbers_is_named(server: ForkServer, data: Path, tmp_path: Path, what: str, sign: str) -> None:
    rig = trained(server, tmp_path, odd_task(data, what, 3, 30), lambda rig: rig.of(CorruptionSuspected))
    (told,) = (m for m in rig.of(CorruptionSuspected) if isinstance(m, CorruptionSuspected) and m.iteration <= 31)
    assert (told.sign, told.suspect, told.iteration) == (sign, "t.3", 30)
    assert told.value > 2 * told.usual > 0


def test_flipped_bit_is_found_by_majority_of_checksums(server: ForkServer, data: Path, tmp_path: Path) -> None:
    rig = trained(
        server,
        tmp_path,
        odd_task(data, "flip", 1, 7),
        lambda rig: {worker for worker, m in rig.said if isinstance(m, CorruptionSuspected)} == {"t.2", "t.3"},
    )
    accusers = {
        (worker, m.sign, m.suspect) for worker, m in rig.said if isinstance(m, CorruptionSuspected) and m.iteration == 7
    }
    expected = {(worker, "checksum", "t.1") for worker in ("t.2", "t.3")}
    assert accusers == expected, "the lead itself is odd: each of the others says so"


def test_exception_report_carries_class_and_place(server: ForkServer, data: Path, tmp_path: Path) -> None:
    rig = trained(server, tmp_path, odd_task(data, "wrap", 2, 4), lambda rig: rig.of(ErrorReported, "t.2"))
    told = next(m for worker, m in rig.said if isinstance(m, ErrorReported) and worker == "t.2")
    assert (told.kind, told.iteration, told.phase, told.message) == (
        "ecc_error",
        4,
        "forward",
        "RuntimeError: the step failed",
    )
    assert "uncorrectable ECC" in told.detail


def test_marks_of_healthy_task_agree(server: ForkServer, data: Path, tmp_path: Path) -> None:
    spec = odd_task(data, "none", 9, 1)
    with Rig(server, tmp_path, spec) as rig:
        rig.start(*THREE)
        rig.until(lambda: rig.ready(*THREE))
        rig.tell(1, THREE)
        rig.until(lambda: rig.reached(20))
        for worker in THREE:
            rig.signal(worker, signal.SIGSTOP)
        rig.until(lambda: all(stopped(rig.pids[worker]) for worker in THREE))
        read = [marks.read(marks.path_of(rig.socket_path, worker)) for worker in THREE]
        for worker in THREE:
            rig.signal(worker, signal.SIGCONT)
        rig.quit(*THREE)
        rig.until(lambda: not rig.living())
    found = [mark for mark in read if mark is not None]
    assert len(found) == 3
    assert all(mark.generation == 1 and mark.iteration >= 20 for mark in found)
    assert all(1_000_000 <= mark.limit_us < 60_000_000 for mark in found), "all know the usual time"
    entered = [mark.collectives_entered for mark in found]
    assert max(entered) - min(entered) <= 2, "all count the same collectives"
