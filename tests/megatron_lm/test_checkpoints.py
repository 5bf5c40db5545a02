"""Megatron-LM's own checkpoints, both ways, and what happens when they cannot be written. `make megatron-lm`."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.integration.regroup_rig import ForkServer, Rig
from tests.megatron_lm.fixtures import MODEL, task
from tests.megatron_lm.runs import Parameters, broken, ended, furthest, names, stock, told, unbroken, validated
from unicrond.events.vocabulary import ErrorReported, StateLoaded, StopRequested, TaskStart, WorkerBusy

pytestmark = [pytest.mark.timeout(900), pytest.mark.megatron_lm]
#: With Adam: of SGD stock writes states that it cannot load itself.
TEN = MODEL.replace("--train-iters 5", "--train-iters 10")


@dataclass(frozen=True)
class Whole:
    """Megatron-LM alone, without a break, on one rank; how far its parameters are from its own on three."""

    parameters: list[Parameters]
    own: float

    def is_met_by(self, parameters: Sequence[Parameters], what: str) -> bool:
        apart = furthest(parameters, self.parameters)
        told(f"{what}: {apart:.2g} from stock without a break, which is {self.own:.2g} from itself between DP1 and DP3")
        return apart <= 2 * self.own


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    one, three = (stock(tmp_path_factory.mktemp(f"whole{ranks}"), TEN, ranks) for ranks in (1, 3))
    return Whole(one, furthest(one, three))


def test_stock_checkpoint_starts_task(server: ForkServer, tmp_path: Path, whole: Whole) -> None:
    saved = f"--save {tmp_path / 'saved'} --save-interval 5"
    stock(tmp_path / "stock", f"{TEN} {saved} --exit-interval 5", 1)
    spec = task(model=f"{TEN} --load {tmp_path / 'saved'}")
    with Rig(server, tmp_path, spec) as rig:
        workers = names(spec, range(3))
        rig.start(*workers)
        rig.until(lambda: rig.ready(*workers) or rig.exits)
        rig.tell(1, workers)
        outcome = ended(rig)
        (taken, *_) = rig.of(StateLoaded)
    assert isinstance(taken, StateLoaded) and (taken.source, taken.iteration) == ("checkpoint", 5)
    assert list(outcome.iterations) == [6, 7, 8, 9, 10]
    assert "consumed samples:           36" in outcome.logs["t.1"]
    assert whole.is_met_by(outcome.shards, "a stock checkpoint in a task")


def test_task_checkpoint_resumes_in_stock(server: ForkServer, tmp_path: Path, whole: Whole) -> None:
    saved = f"--save {tmp_path / 'saved'} --save-interval 4"
    healed = broken(server, tmp_path, task(model=f"{TEN} {saved} --exit-interval 5"), "kill@iteration=3", joins=False)
    assert healed.completed.iteration == 5
    assert {path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()} == {"iter_0000004", "iter_0000005"}
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "5"
    resumed = stock(tmp_path / "stock", f"{TEN} --load {tmp_path / 'saved'}", 1)
    assert whole.is_met_by(resumed, "a task's checkpoint in stock")


def test_checkpoint_of_other_batch_size_goes_on_as_stock(server: ForkServer, tmp_path: Path) -> None:
    """Its samples are behind, however many iterations of today's size that is; evaluation begins behind its own."""
    model = TEN.replace("--eval-iters 0 --eval-interval 1000", "--eval-iters 2 --eval-interval 2")
    smaller = model.replace("--global-batch-size 6", "--global-batch-size 4")
    stock(tmp_path / "saved", f"{smaller} --save {tmp_path / 'saved'} --save-interval 4 --exit-interval 4", 1)
    goes_on = f"{model} --load {tmp_path / 'saved'} --override-opt_param-scheduler"
    one, three = (stock(tmp_path / f"dp{ranks}", goes_on, ranks) for ranks in (1, 3))
    healed = broken(server, tmp_path / "healed", task(model=goes_on), "kill@iteration=7")
    log, alone = healed.logs["t.1"], (tmp_path / "dp1" / "log").read_text()
    assert consumed(log) == consumed(alone) == {iteration: 16 + 6 * (iteration - 4) for iteration in range(5, 11)}
    assert validated(log) == pytest.approx(validated(alone), abs=2e-5)
    assert furthest(healed.shards, one) <= 2 * furthest(one, three)


def consumed(log: str) -> dict[int, int]:
    """Return the consumed samples that Megatron-LM has logged, by iteration."""
    pairs = re.findall(r" iteration +(\d+)/.* consumed samples: +(\d+) ", log)
    return {int(iteration): int(samples) for iteration, samples in pairs}


def test_failed_save_ends_nothing(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("no directory")
    outcome = unbroken(server, tmp_path, task(f"--save {tmp_path / 'saved'} --save-interval 2"), 2)
    assert outcome.completed.iteration == 5
    assert outcome.logs["t.1"].count("Megatron's checkpoint was not saved: ") == 3
    assert "was not saved" not in outcome.logs["t.2"]


def test_async_checkpoint_resumes_in_stock(server: ForkServer, tmp_path: Path, whole: Whole) -> None:
    saved = f"--save {tmp_path / 'saved'} --save-interval 5 --async-save"
    ended_early = unbroken(server, tmp_path, task(model=f"{TEN} {saved} --exit-interval 7"), 2)
    assert ended_early.completed.iteration == 7
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "7"
    for iteration in (5, 7):
        (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        resumed = stock(tmp_path / f"from{iteration}", f"{TEN} --load {tmp_path / 'saved'}", 1)
        assert whole.is_met_by(resumed, f"a checkpoint of iteration {iteration}, saved while training went on")


@pytest.mark.parametrize("what", ["evaluation", "checkpoint"])
def test_death_during_save_or_evaluation_heals(server: ForkServer, tmp_path: Path, what: str) -> None:
    """The lead, at that: another replica's saves and evaluations go on from there."""
    model = MODEL.replace("--eval-iters 0 --eval-interval 1000", "--eval-iters 8 --eval-interval 2")
    flags = f"--save {tmp_path / 'saved'} --save-interval 2"
    calm = unbroken(
        server, tmp_path / "calm", task(f"--save {tmp_path / 'calm-saved'} --save-interval 2", model=model), 3
    )
    with Rig(server, tmp_path, task(flags, model=model)) as rig:
        workers = ["t.1", "t.2", "t.3"]
        rig.start(*workers)
        rig.until(lambda: rig.ready(*workers) or rig.exits)
        rig.tell(1, workers)
        rig.until(lambda: any(isinstance(one, WorkerBusy) and one.section == what for one in rig.of(WorkerBusy, "t.1")))
        rig.signal("t.1", signal.SIGKILL)
        rig.until(lambda: "t.1" in rig.exits)
        rig.tell(2, workers[1:], urgent=True)
        healed = ended(rig, lost=["t.1"])
    assert healed.completed.params_digest == calm.completed.params_digest
    assert "validation loss at iteration 4" in healed.logs["t.2"]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "5"


@pytest.mark.parametrize("flag", ["--exit-duration-in-mins 1", "--exit-signal-handler"])
def test_exit_flag_ends_all_replicas_together(server: ForkServer, tmp_path: Path, flag: str) -> None:
    with Rig(server, tmp_path, task(flag, model=MODEL.replace("--train-iters 5", "--train-iters 20000"))) as rig:
        workers = ["t.1", "t.2", "t.3"]
        rig.start(*workers)
        rig.until(lambda: rig.ready(*workers) or rig.exits)
        rig.tell(1, workers)
        rig.until(lambda: rig.reached(5))
        if "signal" in flag:
            rig.signal("t.2", signal.SIGTERM)
        outcome = ended(rig)
        (stop, *_) = rig.of(StopRequested)
    assert 5 <= outcome.completed.iteration < 20000
    assert isinstance(stop, StopRequested) and stop.reason.startswith(flag)


def test_name_submitted_again_with_other_rate_is_refused(server: ForkServer, tmp_path: Path) -> None:
    with Rig(server, tmp_path, replace(task(), start=TaskStart(run_id="first"))) as rig:
        other = replace(task(model=TEN.replace("--lr 1e-3", "--lr 2e-3")), start=TaskStart(run_id="second"))
        for number, spec in ((1, None), (2, other)):
            worker = f"t.{number}"
            rig.start(worker, spec=spec)
            rig.until(lambda worker=worker: rig.ready(worker) or rig.exits.get(worker))  # type: ignore[misc]
            rig.tell(number, [worker])
            rig.until(lambda worker=worker: worker in rig.exits)  # type: ignore[misc]
        (error,) = rig.of(ErrorReported, "t.2")
        assert rig.exits["t.1"] == 0 != rig.exits["t.2"]
    assert isinstance(error, ErrorReported)
    assert "--lr: 1e-3 before, 2e-3 now" in error.message and "--restart" in error.message, error.message
