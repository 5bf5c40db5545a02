"""Configurations of Megatron-LM at toy size: their sizes shrink, data are mock data, and what a CPU cannot obey is left
out. A toy is trained in Megatron-LM alone, under torchrun, and in a task of two replicas one of which is killed.

Configurations that come to the same flags are one toy. `toys.jsonl` has a line for each toy that has been trained.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.integration.regroup_rig import ForkServer
from tests.megatron_lm import compare, runs
from unicrond.events.megatron.command_line import CommandLine, degrees

RESULTS = Path(__file__).with_name("toys.jsonl")
SCRIPT = "pretrain_gpt.py"
#: With context parallelism: its attention stands in for Transformer Engine's.
_CONTEXT_SCRIPT = Path(__file__).parent / "scripts" / "context_gpt.py"
#: In place of a configuration's own size.
_SIZES = {
    "--hidden-size": "64", "--ffn-hidden-size": "128", "--num-attention-heads": "4", "--kv-channels": "16",
    "--num-query-groups": "2", "--seq-length": "64", "--max-position-embeddings": "64", "--micro-batch-size": "1",
    "--global-batch-size": "8", "--num-experts": "4", "--moe-ffn-hidden-size": "32",
    "--moe-shared-expert-intermediate-size": "32", "--moe-router-num-groups": "2", "--moe-router-group-topk": "1",
    "--q-lora-rank": "16", "--kv-lora-rank": "16", "--qk-head-dim": "16", "--qk-pos-emb-head-dim": "8",
    "--v-head-dim": "16", "--eval-interval": "4", "--train-samples": "40", "--lr-decay-samples": "40",
    "--lr-warmup-samples": "8", "--log-interval": "1", "--lr": "1e-3", "--min-lr": "1e-4",
    "--attention-dropout": "0", "--hidden-dropout": "0", "--num-workers": "0", "--recompute-num-layers": "1",
    "--microbatch-group-size-per-virtual-pipeline-stage": "2",
    "--check-weight-hash-across-dp-replicas-interval": "2", "--linear-key-head-dim": "16",
    "--linear-value-head-dim": "16", "--linear-num-key-heads": "2", "--linear-num-value-heads": "4",
}  # fmt: skip
#: They go with `--train-samples`.
_BY_SAMPLES = ("--lr-decay-samples", "--lr-warmup-samples")
#: At most so much.
_MOST = {
    "--tensor-model-parallel-size": 2, "--pipeline-model-parallel-size": 2, "--context-parallel-size": 2,
    "--expert-model-parallel-size": 2, "--expert-tensor-parallel-size": 2, "--moe-router-topk": 2, "--eval-iters": 2,
    "--decoder-first-pipeline-num-layers": 1,
}  # fmt: skip
#: Where data, states and records of others lie: mock data and an empty directory take their place.
_ELSEWHERE = (
    "--data-path", "--data-cache-path", "--vocab-file", "--merge-file", "--tokenizer-type", "--tokenizer-model",
    "--make-vocab-size-divisible-by", "--legacy-tokenizer", "--mock-data", "--split", "--no-mmap-bin-files",
    "--vocab-size", "--load", "--use-checkpoint-args", "--finetune", "--no-load-optim", "--auto-detect-ckpt-format",
    "--use-checkpoint-opt_param-scheduler", "--override-opt_param-scheduler", "--wandb-project", "--wandb-entity",
    "--wandb-exp-name", "--wandb-save-dir", "--train-iters", "--exit-interval", "--exit-duration-in-mins",
    "--distributed-timeout-minutes", "--logging-level", "--seed", "--num-layers", "--dist-ckpt-strictness",
)  # fmt: skip
#: What writes checkpoints and records: these have tests of their own, and change nothing of what is trained. (How many
#: layers the last stage has follows from the first.)
_BESIDE = (
    "--save", "--save-interval", "--save-retain-interval", "--ckpt-format", "--ckpt-fully-parallel-save",
    "--no-ckpt-fully-parallel-save", "--ckpt-fully-parallel-load", "--ckpt-assume-constant-structure",
    "--dist-ckpt-optim-fully-reshardable", "--tensorboard-dir", "--log-timers-to-tensorboard",
    "--log-memory-to-tensorboard", "--log-validation-ppl-to-tensorboard", "--log-throughput", "--timing-log-level",
    "--lr-decay-iters", "--lr-warmup-fraction", "--manual-gc", "--manual-gc-interval", "--init-method-std",
    "--no-gradient-accumulation-fusion", "--use-mcore-models", "--norm-epsilon", "--rotary-base",
    "--rotary-scaling-factor", "--mscale", "--mscale-all-dim", "--adam-beta1", "--adam-beta2", "--adam-eps",
    "--clip-grad", "--weight-decay", "--lr-decay-style", "--no-check-for-nan-in-loss-and-grad",
    "--num-distributed-optimizer-instances", "--decoder-last-pipeline-num-layers",
)  # fmt: skip
#: What needs a GPU.
_LACKS = (
    "--fp8-format", "--fp8-recipe", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-param-gather",
    "--tp-comm-overlap", "--tp-comm-overlap-cfg", "--moe-permute-fusion", "--moe-grouped-gemm", "--use-flash-attn",
    "--attention-backend", "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "--moe-enable-deepep",
    "--moe-flex-dispatcher-backend", "--fine-grained-activation-offloading", "--offload-modules", "--cp-comm-type",
    "--hierarchical-context-parallel-sizes", "--deterministic-mode", "--disable-gloo-process-groups",
    "--overlap-moe-expert-parallel-comm", "--defer-embedding-wgrad-compute", "--wgrad-deferral-limit",
    # A package or files that are not at hand.
    "--async-save", "--use-persistent-ckpt-worker", "--fim-data", "--fim-rate", "--fim-spm-rate",
    "--export-te-mcore-model", "--export-kd-teacher-load", "--export-kd-cfg",
)  # fmt: skip


class Toy(NamedTuple):
    """The flags of a configuration at toy size, and the script's name."""

    flags: tuple[str, ...]
    script: str


class Outcome(msgspec.Struct, frozen=True):
    """What came of a toy: `verdict` is the comparison's, or why there was none; `date`: of the run, as YYYY-MM-DD."""

    toy: Toy
    date: str
    verdict: str
    kill: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether both trained alike; but for the norm of parameters whose masters lie in parts, which is documented
        (docs/use/megatron-lm.md)."""
        of_parts = {"--bf16", "--use-distributed-optimizer"} <= {*self.toy.flags}
        return self.verdict.startswith("equal") or (of_parts and self.verdict == "different: params norm")


def toy_of(words: Sequence[str]) -> Toy | None:
    """Return the toy of a configuration's words, the script first; None where the archives have no such script, or its
    layers need kernels that only a GPU has."""
    if words[0] != SCRIPT or {"--spec", "--multi-latent-attention"} & {*words}:
        return None
    line = CommandLine.parse(words)
    flags: dict[str, tuple[str, ...]] = {}
    for flag, values in line.flags.items():
        if flag in _SIZES:
            flags[flag] = (_SIZES[flag],)
        elif flag in _MOST:
            flags[flag] = (str(min(int(values[0]), _MOST[flag])),)
        elif flag not in (*_ELSEWHERE, *_BESIDE, *_LACKS):
            flags[flag] = values
    flags |= {"--attention-dropout": ("0",), "--hidden-dropout": ("0",)}
    flags |= _layers(line, flags)
    for flag in _BY_SAMPLES if "--train-samples" not in flags else ():
        flags.pop(flag, None)
    if flags.get("--moe-token-dispatcher-type") == ("flex",):
        flags["--moe-token-dispatcher-type"] = ("alltoall",)
    for flag in [flag for flag in _MOST if flag.endswith("-parallel-size") and flags.get(flag) == ("1",)]:
        if flag != "--expert-tensor-parallel-size":  # which is tp's otherwise
            del flags[flag]
    given, _ = compare.for_cpu([word for flag in sorted(flags) for word in (flag, *flags[flag])])
    return Toy(tuple(given), _CONTEXT_SCRIPT.name if "--context-parallel-size" in flags else SCRIPT)


def _layers(line: CommandLine, flags: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the flags of a model with one layer for each chunk of a stage, two at least."""
    stages = int(flags.get("--pipeline-model-parallel-size", ("1",))[0])
    chunks = {
        "--num-layers-per-virtual-pipeline-stage": ("1",),
        "--num-virtual-stages-per-pipeline-rank": ("2",),
    }
    cut = {flag: value for flag, value in chunks.items() if flag in line.flags}
    layers = max(2, stages * (2 if cut else 1))
    if layout := line.text("--pipeline-model-parallel-layout"):
        layers = 2 * stages
        cut["--pipeline-model-parallel-layout"] = (f"E(t|)*{layers - 1}t{'m' if 'm' in layout else ''}L",)
    elif "--decoder-first-pipeline-num-layers" in line.flags:
        layers = 3
    elif "--account-for-embedding-in-pipeline-split" in line.flags:
        layers = 2 * stages * (2 if cut else 1) - 2
    if "--moe-layer-freq" in line.flags:
        cut["--moe-layer-freq"] = (f"([0]*1+[1]*{layers - 1})",)
    return {**cut, "--num-layers": (str(layers),)}


def outcomes() -> dict[Toy, Outcome]:
    """Return what has been trained before."""
    lines = RESULTS.read_text().splitlines() if RESULTS.is_file() else []
    return {outcome.toy: outcome for outcome in (msgspec.json.decode(line, type=Outcome) for line in lines)}


def train(toy: Toy, server: ForkServer, timeout_s: float) -> Outcome:
    """Train the toy both ways, and compare; keep what came of it, but for a run that has not ended in `timeout_s`."""
    flags = compare.with_defaults(toy.flags)
    script = toy.script if toy.script == SCRIPT else str(_CONTEXT_SCRIPT)
    size = degrees(CommandLine.parse([script, *flags])).workers
    request = compare.Request(
        flags=flags, script=script, replicas=2, ranks=(), kill_rank=size, kill_at=3, joins=False, tolerance=1e-6,
        timeout_s=timeout_s,
    )  # fmt: skip
    today = datetime.now(UTC).date().isoformat()
    try:
        with tempfile.TemporaryDirectory(prefix="toy-") as directory:
            comparison = compare.compare(request, Path(directory).resolve(), compare.Progress(is_quiet=True), server)
        outcome = Outcome(toy, today, comparison.verdict, comparison.kill)
    except (compare.NotCompared, runs.RunFailed, TimeoutError) as failure:
        text = failure.reason if isinstance(failure, runs.RunFailed) else str(failure)
        outcome = Outcome(toy, today, text[:300])
        if isinstance(failure, TimeoutError) or isinstance(failure.__context__, subprocess.TimeoutExpired):
            return outcome  # the machine was busy, which says nothing of the toy
    with RESULTS.open("ab") as file:
        file.write(msgspec.json.encode(outcome) + b"\n")
    return outcome
