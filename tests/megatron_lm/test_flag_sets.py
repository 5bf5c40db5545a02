"""Sets of flags that people train with, each under a SIGKILL beside Megatron-LM alone: all that it logs, and the final
parameters. (Layouts, precisions, checkpoints and evaluation have files of their own.) `make megatron-lm`."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.integration.regroup_rig import ForkServer
from tests.megatron_lm import compare, runs
from tests.megatron_lm.compare import Progress

pytestmark = [pytest.mark.timeout(900), pytest.mark.megatron_lm]
SGD = "--optimizer sgd --sgd-momentum 0 --weight-decay 0"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather --disable-bias-linear"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2"
    " --untie-embeddings-and-output-weights --disable-bias-linear"
)
#: {data} is a file of tokens.
FLAG_SETS = {
    "llama-like": f"{SGD} {LLAMA}",
    "llama-like, tp 2, sequence parallel, distributed optimizer": (
        f"{LLAMA} {TP2} --sequence-parallel --use-distributed-optimizer"
    ),
    "pp 2 x vpp 2": f"{SGD} {PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
    "uneven pipeline": f"{SGD} {PP2} --num-layers 3 --decoder-first-pipeline-num-layers 1",
    "given pipeline layout": f"{SGD} {PP2} --num-layers 3 --pipeline-model-parallel-layout Et|ttL",
    "given interleaved layout": f"{SGD} {PP2} --num-layers 4 --pipeline-model-parallel-layout E(t|)*3tL",
    "experts, bias without auxiliary loss": (
        f"{SGD} {MOE} --moe-router-load-balancing-type none --moe-router-enable-expert-bias"
        " --moe-router-score-function sigmoid --moe-router-bias-update-rate 1e-2"
    ),
    "experts, sinkhorn": (
        f"{SGD} {MOE.replace('--moe-router-topk 2', '--moe-router-topk 1')} --moe-router-load-balancing-type sinkhorn"
    ),
    "experts, capacity": f"{SGD} {MOE} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "experts, tp 2 x ep 2": (
        f"{SGD} {MOE} {TP2} --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    ),
    "experts, shared": f"{SGD} {MOE} --moe-shared-expert-intermediate-size 32",
    "experts, groups": f"{SGD} {MOE} --moe-router-num-groups 2 --moe-router-group-topk 1",
    "experts, auxiliary and z loss": (
        f"{SGD} {MOE} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
    ),
    "experts, interleaved": (
        f"{SGD} {MOE} {PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
        " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    ),
    "multi-token prediction, interleaved": (
        f"{SGD} {PP2} --num-layers 4 --pipeline-model-parallel-layout E(t|)*3tmL --mtp-num-layers 1"
        " --position-embedding-type rope"
    ),
    "multi-token prediction": f"{SGD} --mtp-num-layers 1 --position-embedding-type rope",
    "recomputed in full": f"{SGD} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "recomputed selectively": f"{SGD} --recompute-granularity selective",
    "WSD by samples": (
        f"{SGD} --train-samples 36 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-samples 12"
        " --lr-warmup-samples 6 --lr-decay-samples 36"
    ),
    "real data, per token": (
        f"{SGD} --data-path {{data}} --tokenizer-type NullTokenizer --vocab-size 255 --split 90,10,0"
        " --calculate-per-token-loss --eod-mask-loss"
    ),
    "exit by interval": f"{SGD} --exit-interval 4",
    "momentum, decay, clipped": "--optimizer sgd --sgd-momentum 0.9 --weight-decay 0.1 --clip-grad 0.1",
    "squared relu, layernorm 1p, untied": f"{SGD} --squared-relu --untie-embeddings-and-output-weights",
    "norms and zeros": f"{SGD} --log-params-norm --log-num-zeros-in-grad",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of different lengths, as `preprocess_data.py` writes them."""
    place = tmp_path_factory.mktemp("data") / "tokens"
    builder = IndexedDatasetBuilder(f"{place}.bin", dtype=numpy.int32)
    drawn = numpy.random.default_rng(7)
    for length in drawn.integers(20, 200, size=120):
        builder.add_document([*drawn.integers(0, 255, size=int(length)).tolist(), 255], [int(length) + 1])
    builder.finalize(f"{place}.idx")
    return place


def differences(server: ForkServer, directory: Path, flags: str, options: str = "") -> dict[str, str]:
    """The metrics that are not those of Megatron-LM alone, on as many ranks; all rows are printed."""
    size = 2 if TP2 in flags or PP2 in flags else 1
    # Of a z loss Megatron-LM logs the last rank's alone: on one rank it is that of the whole batch, as here. Of the
    # gradient's zeros there are none or one, by the order of its sums: Megatron-LM differs from itself by that.
    ranks = "3 1" if "z-loss" in flags or "zeros" in flags else f"{3 * size}"
    request, *_ = compare.request_of([*f"--ranks {ranks} --no-join {options} --".split(), *flags.split()])
    compared = compare.compare(request, directory, Progress(is_quiet=True), server)
    runs.told(compared.text())
    return {row.metric: row.verdict for row in compared.rows if row.verdict == "different"}


@pytest.mark.parametrize("name", FLAG_SETS)
def test_healed_run_logs_and_ends_as_stock(server: ForkServer, tmp_path: Path, data: Path, name: str) -> None:
    tolerance = "--tolerance 1e-4" if "distributed" in name else "--tolerance 1e-6"  # Adam divides noise by noise
    assert differences(server, tmp_path, FLAG_SETS[name].replace("{data}", str(data)), tolerance) == {}


@pytest.mark.parametrize(
    "flags",
    [
        "--finetune",
        "--use-checkpoint-args --override-opt_param-scheduler",
        "--override-opt_param-scheduler --lr 5e-4",
        "--no-load-optim --no-load-rng",
    ],
)
def test_loaded_checkpoint_goes_on_as_stock(server: ForkServer, tmp_path: Path, flags: str) -> None:
    """Of Adam's: SGD's own states Megatron-LM cannot load."""
    saving, *_ = compare.request_of(["--", "--save", str(tmp_path / "saved"), "--save-interval", "4"])
    runs.stock(tmp_path / "first", saving.flags, 1)
    goes_on = f"--load {tmp_path / 'saved'} --train-iters 10 {flags}"
    kill_at = 3 if "finetune" in flags else 8
    assert differences(server, tmp_path, goes_on, f"--tolerance 1e-4 --kill-at {kill_at}") == {}
