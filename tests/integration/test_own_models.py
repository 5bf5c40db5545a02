"""Models and optimizers of a program's own, healed: the same bits as alone, whoever dies and whoever joins."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.integration import own_models
from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.events.vocabulary import LANES, CheckpointSpec, ErrorReported, TaskSpec

ITERATIONS, BATCH, MICRO_BATCH = 14, 16, 4
PROGRAM = own_models.__file__


def lines(text: str) -> dict[int, str]:
    """The lines that a worker has printed, by iteration."""
    found: dict[int, str] = {}
    for number, words in re.findall(r"^iteration (\d+): (.*)$", text, re.MULTILINE):
        assert found.setdefault(int(number), words) == words
    return found


def task(case: str, lanes: str = "1", iterations: int = ITERATIONS, micro_batch: int = MICRO_BATCH) -> TaskSpec:
    return TaskSpec(
        name="t",
        entry=PROGRAM,
        args=(case, "{iterations}", "{global_batch}", "{micro_batch}"),
        max_workers=3,
        global_batch=BATCH,
        micro_batch=micro_batch,
        iterations=iterations,
        accumulation="exact",
        env={LANES: lanes, "OMP_NUM_THREADS": "1", "UNICRON_BUCKET_BYTES": "256"},
        checkpoint=CheckpointSpec(interval=0, memory_interval=0),
    )


def unbroken(server: ForkServer, directory: Path, spec: TaskSpec) -> dict[int, str]:
    directory.mkdir()
    with Rig(server, directory, spec) as rig:
        rig.start("t.9")
        rig.tell(1, ["t.9"])
        rig.until(lambda: rig.completed and "t.9" in rig.exits)
        assert rig.exits["t.9"] == 0
    return lines((directory / "t.9.log").read_text())


def healed(server: ForkServer, directory: Path, spec: TaskSpec) -> dict[str, dict[int, str]]:
    """The leader dies in the midst of a micro-batch, another joins, and a second dies behind its sums."""
    with Rig(server, directory, spec) as rig:
        rig.start("t.1", fault="kill@iteration=4,micro_batch=1")
        rig.start("t.2")
        rig.start("t.3", fault="kill@iteration=10,at=reduced")
        rig.until(lambda: rig.ready("t.1", "t.2", "t.3"))
        rig.tell(1, ["t.1", "t.2", "t.3"])
        rig.until(lambda: "t.1" in rig.exits)
        rig.start("t.4")
        rig.until(lambda: rig.ready("t.4"))
        rig.tell(2, ["t.2", "t.3", "t.4"], joiners=["t.4"], urgent=True)
        rig.until(lambda: "t.3" in rig.exits)
        rig.tell(3, ["t.2", "t.4"], urgent=True)
        rig.until(lambda: rig.completed and {"t.2", "t.4"} <= rig.exits.keys())
        assert rig.exits["t.2"] == rig.exits["t.4"] == 0
    return {worker: lines((directory / f"{worker}.log").read_text()) for worker in ("t.1", "t.2", "t.3", "t.4")}


CASES = (
    "bf16",
    "fp16",
    "scaled",
    "two",
    "two-schedulers",
    "batchnorm",
    "centre",
    "bf16norm",
    "frozen",
    "tied",
    "eager",
    "compiled",
    "loaded",
    "stream",
    "placed-stream",
)


@pytest.mark.parametrize("case", CASES)
def test_healed_bits_are_those_of_the_program_alone(
    server: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    own_models.main(case, ITERATIONS, BATCH, MICRO_BATCH)
    alone = lines(capsys.readouterr().out)
    steps = len({words.split()[1] for words in alone.values()})
    assert steps == ITERATIONS or (case == "scaled" and 4 < steps < ITERATIONS - 1), "each iteration trains"
    for worker, found in healed(server, tmp_path, task(case)).items():
        assert found == {iteration: alone[iteration] for iteration in found}, worker
        assert found or worker == "t.4"


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("left-out", "last.weight, last.bias: requires gradients and stands in no attached optimizer"),
        ("unported", "AdamW has stepped 10 times before Hook.attach: each worker trains alone"),
        ("ranks", "LOCAL_RANK is not in the environment: torchrun sets it, and here replicas come and go"),
        ("world", "init_process_group: the default process group is there already"),
        ("other-world", "the program has replaced torch.distributed's default process group"),
    ],
)
def test_refused_program_ends_with_the_sentence(server: ForkServer, tmp_path: Path, case: str, sentence: str) -> None:
    with Rig(server, tmp_path, task(case)) as rig:
        rig.start("t.1")
        rig.until(lambda: "t.1" in rig.exits)
        assert os.waitstatus_to_exitcode(rig.exits["t.1"]) == 1
        (error,) = rig.of(ErrorReported)
    assert isinstance(error, ErrorReported) and sentence in error.message


def test_bf16_bits_of_several_lanes_are_those_of_one_unbroken_replica(server: ForkServer, tmp_path: Path) -> None:
    """Batch norm of bfloat16, three lanes: sums that are passed on, received and added up take the buffers along."""
    spec = task("bf16norm", lanes="3", micro_batch=2)
    expected = unbroken(server, tmp_path / "unbroken", spec)
    for worker, found in healed(server, tmp_path, spec).items():
        assert found == {iteration: expected[iteration] for iteration in found}, worker
