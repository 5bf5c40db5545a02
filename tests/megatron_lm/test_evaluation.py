"""Megatron-LM's own evaluation, dealt over the replicas: each sample once, the value of one replica, whoever dies."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer, Rig
from tests.megatron_lm.fixtures import MODEL, task
from tests.megatron_lm.runs import broken, ended, names, stock, told, unbroken, validated

pytestmark = pytest.mark.timeout(900)
SCRIPT = str(Path(__file__).parent / "scripts" / "own.py")
SGD = "--optimizer sgd --sgd-momentum 0 --clip-grad 0 --weight-decay 0"
OWN = f"{SGD} --calculate-per-token-loss --attention-backend auto --own-model bert"


def evaluating(calls: int, every: int, flags: str = "") -> str:
    return f"{MODEL} {flags}".replace(
        "--eval-iters 0 --eval-interval 1000", f"--eval-iters {calls} --eval-interval {every}"
    )


def samples(logs: Mapping[str, str]) -> dict[str, Counter[int]]:
    """How often each worker has evaluated each sample."""
    return {
        worker: Counter(map(int, re.findall(r"^evaluates (\d+)$", log, re.MULTILINE))) for worker, log in logs.items()
    }


def test_each_sample_is_evaluated_once_to_value_of_replica_alone(server: ForkServer, tmp_path: Path) -> None:
    spec = task(OWN, model=evaluating(4, 2), script=SCRIPT)
    alone = unbroken(server, tmp_path / "alone", spec, 1)
    three = unbroken(server, tmp_path / "three", spec, 3)
    # After iterations 2 and 4 and at the end, 4 calls of 6 micro-batches each, one behind the other; then the test's.
    evaluated = Counter(range(72)) + Counter(range(24))
    assert samples(alone.logs)["t.1"] == evaluated
    by_worker = samples(three.logs)
    assert sum(by_worker.values(), Counter()) == evaluated
    assert {worker: counted.total() for worker, counted in by_worker.items()} == {"t.1": 32, "t.2": 32, "t.3": 32}
    assert list(validated(three.logs["t.1"])) == [2, 4, 5]
    assert validated(three.logs["t.1"]) == validated(alone.logs["t.1"])
    assert "validation loss" not in three.logs["t.2"] + three.logs["t.3"]


@pytest.mark.parametrize("victim", ["t.1", "t.2"])
def test_death_in_middle_of_evaluation_changes_no_value(server: ForkServer, tmp_path: Path, victim: str) -> None:
    """The leader's too: another prints the value."""
    spec = task(OWN, model=evaluating(40, 4), script=SCRIPT)
    calm = unbroken(server, tmp_path / "calm", spec, 3)
    with Rig(server, tmp_path, spec) as rig:
        workers = ["t.1", "t.2", "t.3"]
        rig.start(*workers)
        rig.until(lambda: rig.ready(*workers) or rig.exits)
        rig.tell(1, workers)
        log = tmp_path / f"{victim}.log"
        rig.until(lambda: log.read_text().count("evaluates") >= 7)
        rig.signal(victim, signal.SIGKILL)
        rig.until(lambda: victim in rig.exits)
        rig.tell(2, [worker for worker in workers if worker != victim], urgent=True)
        healed = ended(rig, lost=[victim])
    counted = samples(healed.logs)
    assert 0 < counted[victim].total() < 80  # of the first
    assert samples(calm.logs)[victim].total() == 240
    assert set(sum(counted.values(), Counter())) == set(range(480))
    lead = next(worker for worker in workers if worker != victim)
    assert list(validated(healed.logs[lead])) == [4, 5]
    assert validated(healed.logs[lead]) == validated(calm.logs["t.1"])
    assert healed.completed.params_digest == calm.completed.params_digest


def test_stopped_replica_holds_up_no_evaluation(server: ForkServer, tmp_path: Path) -> None:
    """Nobody has told the others: they compute its share once it is late, and wait for it in training."""
    spec = task(OWN, model=evaluating(40, 4), script=SCRIPT)
    with Rig(server, tmp_path, spec) as rig:
        workers = ["t.1", "t.2", "t.3"]
        rig.start(*workers)
        rig.until(lambda: rig.ready(*workers) or rig.exits)
        rig.tell(1, workers)
        stopped, lead = tmp_path / "t.2.log", tmp_path / "t.1.log"
        rig.until(lambda: stopped.read_text().count("evaluates") >= 7)
        rig.signal("t.2", signal.SIGSTOP)
        rig.until(lambda: "validation loss at iteration 4" in lead.read_text())
        rig.signal("t.2", signal.SIGCONT)
        outcome = ended(rig)
    assert list(validated(outcome.logs["t.1"])) == [4, 5]
    assert samples(outcome.logs)["t.2"].total() >= 80


LAYOUTS = {
    "tp2": (2, 1, "--tensor-model-parallel-size 2"),
    "pp2": (1, 2, "--pipeline-model-parallel-size 2"),
    "interleaved": (
        1, 2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4",
    ),
    "workers read": (1, 1, "--num-workers 2"),
    "masked": (1, 1, "--reset-position-ids --reset-attention-mask --eod-mask-loss"),
}  # fmt: skip


@pytest.mark.megatron_lm
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_of_every_layout_is_that_of_stock(server: ForkServer, tmp_path: Path, layout: str) -> None:
    """With a kill between two evaluations and a newcomer, on data of validation and test."""
    tp, pp, flags = LAYOUTS[layout]
    model = evaluating(3, 2, f"{SGD} {flags}").replace("--split 99,1,0", "--split 90,5,5")
    spec = task(model=model)
    fault = "kill@iteration=3,at=backward"
    healed = broken(server, tmp_path / "healed", spec, fault)
    for n in (1, 3):
        stock(tmp_path / f"x{n}", model, n * tp * pp, tp=tp, pp=pp)
    lines = [evaluations(healed.logs[names(spec, range(1))[-1]])]
    lines += [evaluations((tmp_path / f"x{n}" / "log").read_text()) for n in (1, 3)]
    told(layout, *lines)
    assert lines[0] == pytest.approx(lines[1], abs=2e-6) and lines[0] == pytest.approx(lines[2], abs=2e-6)
    assert len(lines[0]) == 4 and "test" in list(lines[0])[-1]


def evaluations(log: str) -> dict[str, float]:
    """The losses that were logged, by the evaluation's name."""
    return {name: float(loss) for name, loss in re.findall(r"validation loss at ([^|]*) \| lm loss value: (\S+) ", log)}
