"""Megatron-LM's checkpoints in every layout, precision and optimizer, resumed by the other: a task's, from a run in
which a replica was killed, by Megatron-LM alone, and Megatron-LM's by a task. `make megatron-lm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer, Rig
from tests.megatron_lm.fixtures import MODEL, task
from tests.megatron_lm.runs import Outcome, broken, ended, furthest, names, stock, told, unbroken
from unicrond.events.vocabulary import StateLoaded

pytestmark = [pytest.mark.timeout(900), pytest.mark.megatron_lm]
TEN = MODEL.replace("--train-iters 5", "--train-iters 10")
KINDS = {
    "tp2": (2, 1, "--tensor-model-parallel-size 2"),
    "pp2": (1, 2, "--pipeline-model-parallel-size 2"),
    "bf16": (1, 1, "--bf16"),
    "fp16": (1, 1, "--fp16 --initial-loss-scale 1024"),
    "distributed optimizer": (1, 1, "--use-distributed-optimizer"),
    "distributed optimizer, bf16": (1, 1, "--use-distributed-optimizer --bf16"),
    "distributed optimizer, tp2": (2, 1, "--use-distributed-optimizer --tensor-model-parallel-size 2"),
    "distributed optimizer, pp2": (1, 2, "--use-distributed-optimizer --pipeline-model-parallel-size 2"),
    "distributed optimizer, reshardable": (1, 1, "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"),
}


def started(server: ForkServer, directory: Path, flags: str, replicas: int) -> Outcome:
    """A task that begins with Megatron-LM's checkpoint of iteration 5."""
    directory.mkdir()
    spec = task(model=f"{TEN} {flags}")
    with Rig(server, directory, spec) as rig:
        workers = names(spec, range(replicas))
        rig.start(*workers)
        rig.until(lambda: rig.ready(*workers) or rig.exits)
        rig.tell(1, workers)
        outcome = ended(rig)
        (taken, *_) = rig.of(StateLoaded)
    assert isinstance(taken, StateLoaded) and (taken.source, taken.iteration) == ("checkpoint", 5)
    assert list(outcome.iterations) == [6, 7, 8, 9, 10]
    return outcome


def of_iteration_5(saved: Path) -> str:
    assert {path.name for path in saved.iterdir() if path.is_dir()} == {"iter_0000005", "iter_0000010"}
    (saved / "latest_checkpointed_iteration.txt").write_text("5")
    return f"--load {saved}"


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_every_kind_convert_both_ways(server: ForkServer, tmp_path: Path, kind: str) -> None:
    tp, pp, flags = KINDS[kind]
    size = tp * pp
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    whole = stock(tmp_path / "one", f"{TEN} {flags}", size, tp=tp, pp=pp)
    saving = f"--save {theirs} --save-interval 5"
    # (Of six micro-batches: two halves add up to the very bits of one sum, three thirds do not.)
    other = stock(tmp_path / "several", f"{TEN} {flags} {saving}", 3 * size, tp=tp, pp=pp)
    own = furthest(whole, other)

    taken = started(server, tmp_path / "taken", f"{flags} {of_iteration_5(theirs)}", 2)
    fault = "kill@iteration=3,at=backward"
    spec = task(model=f"{TEN} {flags} --save {ours} --save-interval 5")
    healed = broken(server, tmp_path / "healed", spec, fault, joins=False)
    assert healed.completed.iteration == 10
    resumed = stock(tmp_path / "resumed", f"{TEN} {flags} {of_iteration_5(ours)}", size, tp=tp, pp=pp)

    for what, parameters in (("stock's in a task", taken.shards), ("a task's in stock", resumed)):
        apart = min(furthest(parameters, whole), furthest(parameters, other))
        told(f"{kind}: {what}: {apart:.2g} from stock without a break, which is {own:.2g} from itself")
        assert apart <= 2 * own


def test_sharded_state_is_saved_without_gloo_groups_of_megatron(server: ForkServer, tmp_path: Path) -> None:
    flags = f"--use-distributed-optimizer --disable-gloo-process-groups --save {tmp_path / 'saved'} --save-interval 5"
    outcome = unbroken(server, tmp_path / "run", task(model=f"{TEN} {flags}"), 1)
    assert not [log for log in outcome.logs.values() if "was not saved" in log]
    of_iteration_5(tmp_path / "saved")
