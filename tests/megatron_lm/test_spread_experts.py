"""Experts over more workers than tp and cp come to: a replica has data-parallel ranks of its own. A worker of one is
killed in mid-iteration, an equal run loses none, and Megatron-LM runs the same flags alone. `make megatron-lm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer
from tests.megatron_lm.fixtures import MODEL, task
from tests.megatron_lm.runs import (
    RunFailed,
    furthest,
    healed_to_same_bits,
    logged,
    same_bits,
    stock,
    told,
    unbroken,
    validated,
)
from tests.megatron_lm.test_layouts import BIAS
from tests.megatron_lm.test_shared_sequences import CP2, EVALUATION, SCRIPT, SGD
from unicrond.events.megatron.layouts import stage_without_experts

pytestmark = [pytest.mark.timeout(900), pytest.mark.megatron_lm]
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    " --disable-bias-linear --global-batch-size 16"
)
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
TO_ALL, GATHERED = "--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type allgather"
WHOLE, TP4 = "--expert-tensor-parallel-size 1", "--tensor-model-parallel-size 4 --sequence-parallel"
TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
#: Workers of a replica, data-parallel ranks among them, flags.
LAYOUTS = {
    "ep 2": (2, 2, f"{EP2} {TO_ALL}"),
    "ep 2, all gathered": (2, 2, f"{EP2} {GATHERED}"),
    "ep 4": (4, 4, f"{EP4} {TO_ALL}"),
    "ep 2, experts' bias": (2, 2, f"{EP2} {TO_ALL} {BIAS}"),
    "ep 2 x pp 2": (4, 2, f"{EP2} {TO_ALL} {PP2}"),
    "ep 2 x pp 2, interleaved": (
        4, 2, f"{EP2} {TO_ALL} {PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "ep 2 x tp 2, each cut in 2": (4, 2, f"{EP2} {GATHERED} {TP2}"),  # gloo gathers no uneven parts
    "ep 2 x cp 2": (2, 1, f"{EP2} {TO_ALL} {CP2}"),
    "ep 4 x cp 2": (4, 2, f"{EP4} {TO_ALL} {CP2}"),
}  # fmt: skip
SHARDED = {
    "ep 2, distributed optimizer": f"{EP2} {TO_ALL}",
    "ep 2 x cp 2, distributed optimizer": f"{EP2} {TO_ALL} {CP2}",
    # Two workers hold the same experts, though a replica has one data-parallel rank.
    "ep 2 x tp 4, each whole, distributed optimizer": f"{EP2} {WHOLE} {TO_ALL} {TP4}",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spread_experts_heal_to_bits_of_unbroken_run_and_stock(server: ForkServer, tmp_path: Path, layout: str) -> None:
    workers, data, layout_flags = LAYOUTS[layout]
    flags = f"{SGD} {MOE} {layout_flags}"
    spec = task(flags, script=SCRIPT, replicas=2)
    assert (spec.replica_workers, spec.cut.data) == (workers, data)
    healed = healed_to_same_bits(server, tmp_path, spec)
    degrees = {"tp": spec.tp, "pp": spec.pp, "cp": spec.cp, "data": data}
    alone = stock(tmp_path / "stock", f"{MODEL} {flags}", workers, script=SCRIPT, **degrees)
    apart = furthest(healed.shards, alone)
    told(f"{layout}: SGD, {apart:.2g} from stock in the same layout")
    assert apart <= 1e-7
    log = (tmp_path / "stock" / "log").read_text()
    assert logged(healed.logs[f"t.{workers}"]) == pytest.approx(logged(log), rel=1e-6)


@pytest.mark.parametrize("layout", SHARDED)
def test_spread_experts_step_as_stock_with_sharded_state(server: ForkServer, tmp_path: Path, layout: str) -> None:
    flags = f"{MOE} --use-distributed-optimizer {SHARDED[layout]}"
    spec = task(flags, script=SCRIPT, replicas=2)
    healed = healed_to_same_bits(server, tmp_path, spec)
    unsharded = task(flags.replace("--use-distributed-optimizer", ""), script=SCRIPT, replicas=2)
    plain = unbroken(server, tmp_path / "plain", unsharded, 1)
    assert same_bits(healed.shards, plain.shards)
    degrees = {"tp": spec.tp, "cp": spec.cp, "data": spec.cut.data}
    alone = stock(tmp_path / "stock", f"{MODEL} {flags}", spec.replica_workers, script=SCRIPT, **degrees)
    apart = furthest(healed.shards, alone)
    told(f"{layout}: Adam, {apart:.2g} from stock in the same layout")
    assert apart <= 1e-4  # it divides noise by noise


def test_spread_experts_evaluate_as_stock(server: ForkServer, tmp_path: Path) -> None:
    flags = f"{MOE} {EP2} {TO_ALL} {EVALUATION}"
    spec = task(flags, replicas=2)
    logs = [unbroken(server, tmp_path / f"on{count}", spec, count).logs["t.2"] for count in (1, 2)]
    assert validated(logs[0]) == validated(logs[1])
    stock(tmp_path / "stock", f"{MODEL} {flags}", 2, data=2)
    assert validated(logs[0]) == pytest.approx(validated((tmp_path / "stock" / "log").read_text()), abs=2e-5)


@pytest.mark.parametrize("optimizer", ["--use-distributed-optimizer"])
def test_checkpoint_of_spread_experts_resumes_in_the_other(server: ForkServer, tmp_path: Path, optimizer: str) -> None:
    """From Megatron-LM alone to a task, and back; of spread experts it reads generators on as many ranks alone."""
    model = f"{MODEL} {MOE} {EP2} {TO_ALL} {optimizer}".replace("--train-iters 5", "--train-iters 9")
    saves = "--save {} --save-interval 5 --exit-interval 5"
    one, two = (stock(tmp_path / f"on{count}", model, 2 * count, data=2) for count in (1, 2))
    own = furthest(one, two)
    stock(tmp_path / "saves", f"{model} {saves.format(tmp_path / 'theirs')}", 2, data=2)
    mine = unbroken(server, tmp_path / "goes_on", task(model=f"{model} --load {tmp_path / 'theirs'}", replicas=2), 2)
    assert list(mine.iterations) == [6, 7, 8, 9]
    spec = task(model=f"{model} {saves.format(tmp_path / 'ours')}", replicas=2)
    saved = unbroken(server, tmp_path / "saved", spec, 2)
    assert saved.completed.iteration == 5 and not [log for log in saved.logs.values() if "was not saved" in log]
    theirs = stock(tmp_path / "resumed", f"{model} --load {tmp_path / 'ours'}", 2, data=2)
    apart = [furthest(parameters, one) for parameters in (mine.shards, theirs)]
    told(f"{optimizer or 'adam'}: {apart} from stock without a break, which is {own:.2g} from itself on two replicas")
    assert max(apart) <= 2 * own


def test_stage_without_experts_is_refused_where_megatron_cannot_save(server: ForkServer, tmp_path: Path) -> None:
    """Stages that are cut by hand: the workers ask each other for what they have. Megatron-LM's own save fails."""
    model = MODEL.replace("--num-layers 2", "--num-layers 4")
    flags = f"{MOE} {EP2} {TO_ALL} {PP2} --pipeline-model-parallel-layout Ett|ttL --moe-layer-freq [0]*2+[1]*2"
    flags += f" --use-distributed-optimizer --save {tmp_path / 'saved'} --save-interval 5"
    with pytest.raises(RunFailed) as refused:
        unbroken(server, tmp_path / "run", task(model=f"{model} {flags}"), 1)
    assert refused.value.reason == f"args: {stage_without_experts(2, 2)}"
    with pytest.raises(RunFailed):
        stock(tmp_path / "stock", f"{model} {flags}", 4, pp=2, data=2)
