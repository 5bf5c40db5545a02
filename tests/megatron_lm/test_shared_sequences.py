"""Context parallelism inside a replica, with a double of the attention that only Transformer Engine has
(`scripts/context_gpt.py`): a replica is killed in mid-iteration, an equal run is not, and Megatron-LM runs the same
flags alone. `make megatron-lm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer
from tests.megatron_lm.fixtures import MODEL, task
from tests.megatron_lm.runs import (
    Outcome,
    broken,
    furthest,
    healed_to_same_bits,
    logged,
    same_bits,
    stock,
    told,
    unbroken,
    validated,
)
from tests.megatron_lm.test_reshape import EIGHT, goes_on, of_memory
from unicrond.events.vocabulary.shape import Shape

pytestmark = [pytest.mark.timeout(900), pytest.mark.megatron_lm]
SCRIPT = str(Path(__file__).parent / "scripts" / "context_gpt.py")
SGD = "--optimizer sgd --sgd-momentum 0 --clip-grad 0 --weight-decay 0"
CP2 = "--context-parallel-size 2"
LAYOUTS = {
    "cp 2": "",
    "cp 2 x pp 2": "--pipeline-model-parallel-size 2",
    "cp 2, averaged by the collective": "--ddp-average-in-collective",
    "cp 2 x tp 2, sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "cp 2, per token": "--calculate-per-token-loss",
    "cp 2, rotary": "--position-embedding-type rope",
}
OPTIMIZERS = {
    "adam": ("", 1e-4),  # which divides noise by noise
    "distributed optimizer": ("--use-distributed-optimizer", 1e-4),
    "distributed optimizer, bf16": ("--use-distributed-optimizer --bf16", 1e-2),
}


def both(server: ForkServer, directory: Path, flags: str) -> Outcome:
    """The task, healed; those that share a sequence have the same parameters."""
    spec = task(f"{CP2} {flags}", script=SCRIPT, replicas=2)
    healed = healed_to_same_bits(server, directory, spec)
    for tp_rank in range(spec.tp):
        assert same_bits(healed.shards[tp_rank : tp_rank + 1], healed.shards[spec.tp + tp_rank : spec.tp + tp_rank + 1])
    return healed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharers_of_sequences_heal_to_bits_of_unbroken_run_and_stock(
    server: ForkServer, tmp_path: Path, layout: str
) -> None:
    flags = f"{SGD} {LAYOUTS[layout]}"
    healed = both(server, tmp_path, flags)
    spec = task(f"{CP2} {flags}", script=SCRIPT)
    alone = stock(
        tmp_path / "stock", f"{MODEL} {CP2} {flags}", spec.replica_workers, tp=spec.tp, pp=spec.pp, cp=2, script=SCRIPT
    )
    apart = furthest(healed.shards, alone)
    told(f"{layout}: SGD, {apart:.2g} from stock in the same layout")
    assert apart <= 1e-7
    lines = logged((tmp_path / "stock" / "log").read_text())
    assert logged(healed.logs[f"t.{spec.replica_workers}"]) == pytest.approx(lines, rel=1e-6)


EVALUATION = "--eval-iters 2 --eval-interval 2 --split 80,20,0"


def test_sharers_of_sequences_evaluate_as_stock(server: ForkServer, tmp_path: Path) -> None:
    """The same values from two replicas and one, and from Megatron-LM alone."""
    flags = f"{CP2} {EVALUATION}"
    spec = task(flags, script=SCRIPT, replicas=2)
    logs = [unbroken(server, tmp_path / f"on{count}", spec, count).logs["t.2"] for count in (1, 2)]
    assert validated(logs[0]) == validated(logs[1])
    stock(tmp_path / "stock", f"{MODEL} {flags}", 2, cp=2, script=SCRIPT)
    assert validated(logs[0]) == pytest.approx(validated((tmp_path / "stock" / "log").read_text()), abs=2e-5)


@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_checkpoint_of_sharers_resumes_in_the_other(server: ForkServer, tmp_path: Path, optimizer: str) -> None:
    """From Megatron-LM alone to a task, and back: each goes on as it would have without a break."""
    model = f"{MODEL} {CP2} {optimizer}".replace("--train-iters 5", "--train-iters 9")
    saves = "--save {} --save-interval 5 --exit-interval 5"
    one, two = (stock(tmp_path / f"on{count}", model, 2 * count, cp=2, script=SCRIPT) for count in (1, 2))
    own = furthest(one, two)
    stock(tmp_path / "saves", f"{model} {saves.format(tmp_path / 'theirs')}", 2, cp=2, script=SCRIPT)
    goes_on = task(model=f"{model} --load {tmp_path / 'theirs'}", script=SCRIPT, replicas=2)
    mine = unbroken(server, tmp_path / "goes_on", goes_on, 2)
    assert list(mine.iterations) == [6, 7, 8, 9]
    spec = task(model=f"{model} {saves.format(tmp_path / 'ours')}", script=SCRIPT, replicas=2)
    healed = broken(server, tmp_path / "healed", spec, "kill@iteration=3", replicas=2, joins=False)
    assert healed.completed.iteration == 5 and not [log for log in healed.logs.values() if "was not saved" in log]
    theirs = stock(tmp_path / "resumed", f"{model} --load {tmp_path / 'ours'}", 4, cp=2, script=SCRIPT)
    unsaved = unbroken(server, tmp_path / "unsaved", task(model=model, script=SCRIPT, replicas=2), 1)
    apart = [furthest(mine.shards, one), furthest(theirs, unsaved.shards)]
    told(f"{optimizer or 'adam'}: {apart} from a run without a break; stock is {own:.2g} from itself on two replicas")
    assert max(apart) <= 2 * own


@pytest.mark.parametrize(
    ("flags", "shape"),
    [(CP2, Shape()), ("", Shape(cp=2)), (f"{CP2} --use-distributed-optimizer", Shape(2))],
    ids=["cp 2 -> 1", "cp 1 -> 2", "cp 2 -> tp 2, distributed"],
)
def test_sharers_of_sequences_continue_in_other_layout(
    server: ForkServer, tmp_path: Path, flags: str, shape: Shape
) -> None:
    """Per token: else Megatron-LM averages over the parts of a sequence, whatever tokens they have."""
    spec = of_memory(task(f"{flags} --calculate-per-token-loss", model=EIGHT, script=SCRIPT))
    goes_on(server, tmp_path, f"{spec.cut} -> {shape}", spec, spec, shape)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sharers_of_sequences_step_alike(server: ForkServer, tmp_path: Path, kind: str) -> None:
    flags, tolerance = OPTIMIZERS[kind]
    healed = both(server, tmp_path, flags)
    alone = stock(tmp_path / "stock", f"{MODEL} {CP2} {flags}", 4, cp=2, script=SCRIPT)
    apart = furthest(healed.shards, alone)
    told(f"{kind}: {apart:.2g} from stock on two replicas")
    assert apart <= tolerance
