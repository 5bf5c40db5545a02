"""Every layout and precision: a replica is killed in mid-iteration, an equal run is not, and stock Megatron-LM
runs the same flags. `make megatron-lm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer
from tests.megatron_lm.fixtures import MODEL, task
from tests.megatron_lm.runs import Outcome, broken, furthest, same_bits, stock, told, unbroken

pytestmark = [pytest.mark.timeout(900), pytest.mark.megatron_lm]
SGD = "--optimizer sgd --sgd-momentum 0 --clip-grad 0 --weight-decay 0"
KILL = "kill@iteration=3,micro_batch=1"
#: A pipeline takes all its micro-batches at once.
KILL_IN_BACKWARD = "kill@iteration=3,at=backward"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    " --moe-token-dispatcher-type allgather --disable-bias-linear"
)
BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-router-bias-update-rate 1e-2"
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4"
LAYOUTS = {
    "tp2": (2, 1, "--tensor-model-parallel-size 2"),
    "tp2, qk-layernorm": (2, 1, "--tensor-model-parallel-size 2 --qk-layernorm"),
    "tp2, sequence parallel": (2, 1, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2, tied embeddings": (1, 2, "--pipeline-model-parallel-size 2"),
    "pp2, untied": (1, 2, "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"),
    "tp2 x pp2": (2, 2, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "interleaved": (1, 2, INTERLEAVED),
    "interleaved, experts with bias and z loss": (1, 2, f"{INTERLEAVED} {MOE} {BIAS} --moe-z-loss-coeff 1e-3"),
    "interleaved, recomputed experts per token": (
        1, 2, f"{INTERLEAVED} {MOE} {BIAS} --recompute-granularity full --recompute-method uniform"
              " --recompute-num-layers 1 --calculate-per-token-loss",
    ),
    "interleaved, multi-token prediction": (
        1, 2, "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-model-parallel-layout E(t|)*3tmL"
              " --mtp-num-layers 1 --position-embedding-type rope",
    ),
    "experts": (1, 1, MOE),
    "experts with bias": (1, 1, f"{MOE} {BIAS}"),
    "experts over tp2": (
        2, 1, f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel"
              " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    ),
    "recomputed": (1, 1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "per token": (1, 1, "--calculate-per-token-loss"),
    "micro-batches of two": (1, 1, "--micro-batch-size 2 --global-batch-size 12"),
    "cyclic": (1, 1, "--dataloader-type cyclic"),
}  # fmt: skip
OTHERS = {
    "bf16": "--bf16",
    "fp16": "--fp16 --initial-loss-scale 1024 --train-iters 25",
    "distributed optimizer": "--use-distributed-optimizer",
    "distributed optimizer, bf16": "--use-distributed-optimizer --bf16",
    "distributed optimizer, spread by flags": (
        "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --overlap-grad-reduce"
        " --overlap-param-gather --overlap-param-gather-with-optimizer-step"
    ),
    "dropout": "--attention-dropout 0.1 --hidden-dropout 0.1",
    "overlap": "--overlap-grad-reduce",
}


def both(server: ForkServer, directory: Path, flags: str) -> tuple[Outcome, Outcome]:
    """The same task, unbroken on two replicas and healed on three; equal to the last bit."""
    spec = task(flags)
    whole = unbroken(server, directory / "whole", spec, 2)
    fault = KILL if spec.pp == 1 else KILL_IN_BACKWARD
    healed = broken(server, directory / "healed", spec, fault, joins=False)
    assert healed.iterations[3].micro_batches_repeated
    assert healed.losses == whole.losses
    assert same_bits(healed.shards, whole.shards)
    assert healed.completed.params_digest == whole.completed.params_digest
    return whole, healed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_heals_to_bits_of_unbroken_run_and_stock(server: ForkServer, tmp_path: Path, layout: str) -> None:
    tp, pp, flags = LAYOUTS[layout]
    _, healed = both(server, tmp_path, f"{SGD} {flags}")
    alone = stock(tmp_path / "stock", f"{MODEL} {SGD} {flags}", tp * pp, tp=tp, pp=pp)
    apart = furthest(healed.shards, alone)
    told(f"{layout}: SGD, {apart:.2g} from stock in the same layout")
    assert apart <= 1e-7


@pytest.mark.parametrize("kind", OTHERS)
def test_precision_and_optimizer_heal_to_bits_of_unbroken_run(server: ForkServer, tmp_path: Path, kind: str) -> None:
    whole, healed = both(server, tmp_path, OTHERS[kind])
    if kind == "fp16":
        assert "number of skipped iterations:   1" not in whole.logs["t.1"]
    told(f"{kind}: last loss {healed.losses[-1]:.6f}")
