"""TensorBoard under Megatron-LM: written once, by the lead's replica, whichever that is. `make megatron-lm`."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.regroup_rig import ForkServer, Rig
from tests.megatron_lm import compare
from tests.megatron_lm.fixtures import task
from tests.megatron_lm.runs import ended, told

pytestmark = [pytest.mark.timeout(900), pytest.mark.megatron_lm]


def test_curves_continue_when_leader_is_lost(server: ForkServer, tmp_path: Path) -> None:
    spec = task(f"--tensorboard-dir {tmp_path / 'curves'} --log-throughput")
    with Rig(server, tmp_path, spec) as rig:
        workers = ["t.1", "t.2", "t.3"]
        rig.start("t.1", fault="stop@iteration=4,micro_batch=1")
        rig.start("t.2", "t.3")
        rig.until(lambda: rig.ready(*workers) or rig.exits)
        rig.tell(1, workers)
        # It logs an iteration behind its commit: stopped in the next one, it has.
        rig.until(lambda: psutil.Process(rig.pids["t.1"]).status() == psutil.STATUS_STOPPED)
        rig.signal("t.1", signal.SIGKILL)
        rig.until(lambda: "t.1" in rig.exits)
        rig.tell(2, workers[1:], urgent=True)
        outcome = ended(rig, lost=["t.1"])
    assert len(list((tmp_path / "curves").glob("events*"))) == 2
    written = EventAccumulator(str(tmp_path / "curves")).Reload().Scalars("lm loss")
    assert [scalar.step for scalar in written] == [1, 2, 3, 4, 5]
    assert [scalar.value for scalar in written] == pytest.approx(outcome.losses, rel=1e-5)


def test_tags_and_norms_are_those_of_stock(server: ForkServer, tmp_path: Path) -> None:
    """Timers, throughput, memory, zeros; with the distributed optimizer in bf16, whose masters are spread over the
    replicas: the norm is that of the bf16 parameters."""
    flags = (
        "--tensorboard-dir - --log-timers-to-tensorboard --timing-log-level 2 --log-throughput --log-params-norm"
        " --log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard --log-memory-to-tensorboard"
        " --log-num-zeros-in-grad --bf16 --use-distributed-optimizer --eval-iters 2 --eval-interval 2"
    )
    request, *_ = compare.request_of([*["--ranks", "3", "1", "--no-join", "--tolerance", "2e-3", "--"], *flags.split()])
    compared = compare.compare(request, tmp_path, compare.Progress(is_quiet=True), server)
    told(compared.text())
    assert not compared.is_different
    written, alone = (
        EventAccumulator(str(tmp_path / run / "tensorboard-dir")).Reload().Tags()["scalars"]
        for run in ("unicrond", "stock-3")
    )
    assert set(written) == set(alone) and {"throughput", "forward-backward-time", "num-zeros"} <= set(written)
