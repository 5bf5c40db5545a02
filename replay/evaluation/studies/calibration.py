"""Published runs of Megatron, the errors of the throughput model on them, and the fit of its efficiencies.

One parameter set per software stack: the GEMM efficiency, and where the stack's rows scale far enough to
tell it from noise, the efficiency of the network adapters (elsewhere 0.8). The fit minimises the sum of
squared log ratios of predicted and measured iteration time, by golden section; it is deterministic and
takes a second or two. What it finds is written down in `presets.STACKS`; a test fits again and compares.

Leave-one-out: each row is predicted by parameters fitted to the stack's other rows alone. That is the
honest error: the in-sample one flatters a stack with few rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from unicrond.throughput.layouts import ThroughputQuery
from unicrond.throughput.layouts import job as make_job
from unicrond.throughput.model import Estimate, best
from unicrond.throughput.presets import GPUS, MODELS, STACKS, GptModel, gpt3

#: What a source reports: seconds per iteration, or FLOP/s per GPU counting recomputation as work
#: ("hardware") or not ("model").
Measure = Literal["iteration_s", "hardware_flops", "model_flops"]


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One published run. Unset tp, pp, micro_batch, chunks were not published: the model chooses."""

    label: str
    stack: str
    model: GptModel
    gpu: str
    gpus: int
    batch: int
    measure: Measure
    value: float
    tp: int | None = None
    pp: int | None = None
    micro_batch: int | None = None
    chunks: int | None = None
    recompute: str | None = None

    @property
    def job(self) -> ThroughputQuery:
        """Return this run as a query to the throughput model."""
        return make_job(
            self.model,
            GPUS[self.gpu],
            stack=STACKS[self.stack],
            uneven=False,
            **{name: getattr(self, name) for name in ("batch", "tp", "pp", "micro_batch", "chunks", "recompute")},
        )

    @property
    def measured_s(self) -> float:
        """Return the seconds per iteration as published, or as they follow from the published FLOP/s."""
        if self.measure == "iteration_s":
            return self.value
        flops = self.batch * self.model.flops_per_sequence(self.model.seq)
        if self.measure == "hardware_flops":
            flops += self.batch * _recomputed_flops(self.model)
        return flops / (self.gpus * self.value)


def _recomputed_flops(model: GptModel) -> int:
    """Return the FLOP per sequence of running all layers forward a second time (full recomputation)."""
    logits = 3 * 2 * model.seq * model.hidden_size * model.vocab
    return (model.flops_per_sequence(model.seq) - logits) // 3


def _narayanan_2021() -> list[PublishedRun]:
    """Return the runs of Narayanan et al. 2021 (arXiv 2104.04473, SC '21), table 1: DGX A100 80 GB, full recomputation.

    TFLOP/s per GPU by the paper's formula, which counts the recomputation. Micro-batch and interleaving are not in the
    table.
    """
    table = [  # billion parameters, GPUs, tp, pp, batch, layers, hidden, heads, TFLOP/s per GPU
        (1.7, 32, 1, 1, 512, 24, 2304, 24, 137),
        (3.6, 64, 2, 1, 512, 30, 3072, 32, 138),
        (7.5, 128, 4, 1, 512, 36, 4096, 32, 142),
        (18.4, 256, 8, 1, 1024, 40, 6144, 48, 135),
        (39.1, 512, 8, 2, 1536, 48, 8192, 64, 138),
        (76.1, 1024, 8, 4, 1792, 60, 10240, 80, 140),
        (145.6, 1536, 8, 8, 2304, 80, 12288, 96, 148),
        (310.1, 1920, 8, 16, 2160, 96, 16384, 128, 155),
        (529.6, 2520, 8, 35, 2520, 105, 20480, 128, 163),
        (1008.0, 3072, 8, 64, 3072, 128, 25600, 160, 163),
    ]
    return [
        PublishedRun(
            f"{billions:g}B",
            "megatron-2021",
            gpt3(f"gpt-{billions:g}b", layers, hidden_size, heads, batch=batch),
            "a100-80g",
            gpus,
            batch,
            "hardware_flops",
            tflops * 1e12,
            tp=tp,
            pp=pp,
        )
        for billions, gpus, tp, pp, batch, layers, hidden_size, heads, tflops in table
    ]


def _korthikanti_2022() -> list[PublishedRun]:
    """Return the runs of Korthikanti et al. 2022 (arXiv 2205.05198, MLSys '23), tables 3 and 5: A100 80 GB.

    Seconds per iteration with full recomputation and with sequence parallelism and selective recomputation ("present
    work"). Recalled, not re-read; the utilisations that follow from the times are the published ones. 530B on 2,240
    GPUs is from the abstract (MFU 54.2 %).
    """
    table = [  # billion parameters, GPUs, pp, batch, micro-batch, chunks, layers, hidden, heads, s full, s selective
        (22, 8, 1, 4, 4, 1, 48, 6144, 64, 1.42, 1.10),
        (175, 64, 8, 64, 1, 3, 96, 12288, 96, 18.13, 13.75),
        (530, 280, 35, 280, 1, 3, 105, 20480, 128, 49.05, 37.83),
        (1000, 512, 64, 512, 1, 1, 128, 25600, 160, 94.42, 71.49),
    ]
    rows = []
    for billions, gpus, pp, batch, micro, chunks, layers, hidden_size, heads, full_s, selective_s in table:
        model = gpt3(f"gpt-{billions}b", layers, hidden_size, heads, batch=batch)
        for stack, recompute, seconds in (
            ("megatron-2021", "full", full_s),
            ("megatron-2022", "selective", selective_s),
        ):
            rows.append(
                PublishedRun(
                    f"{billions}B {recompute}",
                    stack,
                    model,
                    "a100-80g",
                    gpus,
                    batch,
                    "iteration_s",
                    seconds,
                    tp=8,
                    pp=pp,
                    micro_batch=micro,
                    chunks=chunks,
                    recompute=recompute,
                )
            )
    model = gpt3("gpt-530b", 105, 20480, 128, batch=2240)
    rows.append(
        PublishedRun(
            "530B dp 8",
            "megatron-2022",
            model,
            "a100-80g",
            2240,
            2240,
            "model_flops",
            0.542 * 312e12,
            tp=8,
            pp=35,
            micro_batch=1,
            chunks=3,
            recompute="selective",
        )
    )
    return rows


def _smith_2022() -> list[PublishedRun]:
    """Return the runs of Smith et al. 2022 (arXiv 2201.11990), section 2.4: MT-NLG 530B, DeepSpeed + Megatron, batch
    1,920."""
    model = gpt3("mt-nlg-530b", 105, 20480, 128, batch=1920)
    return [
        PublishedRun(
            f"530B {gpus} GPUs",
            "mt-nlg-2021",
            model,
            "a100-80g",
            gpus,
            1920,
            "iteration_s",
            seconds,
            tp=8,
            pp=35,
            micro_batch=1,
            chunks=1,
        )
        for gpus, seconds in ((2240, 60.1), (2800, 50.2), (3360, 44.4))
    ]


def _jiang_2024() -> list[PublishedRun]:
    """Return the runs of Jiang et al. 2024 (MegaScale, arXiv 2402.15627, NSDI '24), tables 1 and 2: the Megatron-LM
    baseline.

    175B, strong scaling on "Ampere" GPUs (the utilisations are those of an A100), 200 Gb/s per GPU, vocabulary 64,000,
    six chunks.
    """
    table = [(256, 768, 40.0), (512, 768, 21.2), (768, 768, 15.2), (1024, 768, 11.9)]
    table += [(3072, 6144, 29.02), (6144, 6144, 14.78), (8192, 6144, 12.24), (12288, 6144, 8.57)]
    return [
        PublishedRun(
            f"175B {gpus} GPUs",
            "megatron-2023",
            gpt3("gpt-175b", 96, 12288, 128, batch=batch, vocab=64000),
            "a100-80g",
            gpus,
            batch,
            "iteration_s",
            seconds,
            tp=8,
            pp=8,
            micro_batch=1,
            chunks=6,
        )
        for gpus, batch, seconds in table
    ]


def _megatron_core_2024() -> list[PublishedRun]:
    """Return the runs of Megatron-LM's README of mid 2024 ("Training Speed and Scalability"): 175B on H100, BF16.

    Strong scaling at batch 1,152, 4,096 tokens, vocabulary 131,072: utilisation falls from 47 % on 96 GPUs to 42 % on
    4,608. The layouts are not in the text: the model chooses.
    """
    model = gpt3("gpt-175b", 96, 12288, 96, batch=1152, seq=4096, vocab=131072)
    return [
        PublishedRun(f"175B {gpus} GPUs", "mcore-2024", model, "h100-80g", gpus, 1152, "model_flops", mfu * 989.5e12)
        for gpus, mfu in ((96, 0.47), (4608, 0.42))
    ]


def _llama_2024() -> list[PublishedRun]:
    """Return the runs of Grattafiori et al. 2024 (Llama 3, arXiv 2407.21783), table 4: 405B on H100, Meta's own
    trainer.

    The third row of the table (131,072 tokens, context parallel 16) is outside this model.
    """
    return [
        PublishedRun(
            f"405B {gpus} GPUs",
            "llama3-2024",
            MODELS["llama3-405b"],
            "h100-80g",
            gpus,
            2048,
            "model_flops",
            tflops * 1e12,
            tp=8,
            pp=16,
            micro_batch=1,
        )
        for gpus, tflops in ((8192, 430), (16384, 400))
    ]


ROWS: tuple[PublishedRun, ...] = tuple(
    _narayanan_2021() + _korthikanti_2022() + _smith_2022() + _jiang_2024() + _megatron_core_2024() + _llama_2024()
)

#: Stacks whose rows scale strongly enough to tell the network's efficiency from the GEMMs'.
NETWORK_FITTED = frozenset({"megatron-2023"})
NIC_EFFICIENCY = 0.8
GEMM_RANGE, NIC_RANGE = (0.3, 1.0), (0.1, 1.0)
TOLERANCE = 5e-4


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """The fit of a stack: shares of peak FLOP/s and of the adapter's line rate."""

    gemm: float
    nic: float


def rows_of(stack: str) -> list[PublishedRun]:
    """Return the published runs of one software stack."""
    return [row for row in ROWS if row.stack == stack]


def _with_efficiencies(job: ThroughputQuery, efficiencies: Efficiencies) -> ThroughputQuery:
    """Return the same query under other efficiencies of the stack."""
    stack = replace(job.stack, gemm_efficiency=efficiencies.gemm, nic_efficiency=efficiencies.nic)
    return replace(job, stack=stack)


def predict(row: PublishedRun, efficiencies: Efficiencies) -> Estimate:
    """Return the model's answer to a run. Raises ValueError if it holds the published run impossible."""
    answer = best(_with_efficiencies(row.job, efficiencies), row.gpus)
    if not isinstance(answer, Estimate):
        raise ValueError(f"{row.stack} {row.label}: {answer.reason}")
    return answer


def error(row: PublishedRun, efficiencies: Efficiencies) -> float:
    """Return predicted over measured throughput, minus one: +0.05 is 5 % too fast."""
    return row.measured_s / predict(row, efficiencies).iteration_s - 1


def fit(stack: str, rows: Sequence[PublishedRun]) -> Efficiencies:
    """Return the efficiencies that minimise the squared log ratios of predicted and measured time over `rows`."""

    def loss(efficiencies: Efficiencies) -> float:
        """Sum the squared log ratios."""
        return sum(math.log1p(error(row, efficiencies)) ** 2 for row in rows)

    def best_gemm(nic: float) -> Efficiencies:
        """Return the best efficiencies with this share of the adapter's rate."""
        return Efficiencies(_minimise(lambda gemm: loss(Efficiencies(gemm, nic)), *GEMM_RANGE), nic)

    if stack not in NETWORK_FITTED:
        return best_gemm(NIC_EFFICIENCY)
    return best_gemm(_minimise(lambda nic: loss(best_gemm(nic)), *NIC_RANGE))


def leave_one_out(stack: str) -> dict[str, float]:
    """Return each row's error under the parameters fitted to the stack's other rows."""
    rows = rows_of(stack)
    return {row.label: error(row, fit(stack, [run for run in rows if run is not row])) for row in rows}


def _minimise(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the argument of a unimodal function's minimum, within TOLERANCE, by golden section."""
    shrink = (math.sqrt(5) - 1) / 2
    lower, upper = high - shrink * (high - low), low + shrink * (high - low)
    lower_value, upper_value = function(lower), function(upper)
    while high - low > TOLERANCE:
        if lower_value <= upper_value:
            high, upper, upper_value = upper, lower, lower_value
            lower = high - shrink * (high - low)
            lower_value = function(lower)
        else:
            low, lower, lower_value = lower, upper, upper_value
            upper = low + shrink * (high - low)
            upper_value = function(upper)
    return (low + high) / 2


def report() -> str:
    """Return the calibration as a Markdown table: docs/results/calibration.md holds it, and a test compares."""
    lines = [
        "| stack | run | GPUs | measured s | model s | error % | left out % |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, stack in STACKS.items():
        fitted = Efficiencies(stack.gemm_efficiency, stack.nic_efficiency)
        left_out = leave_one_out(name)
        lines.extend(_report_line(row, fitted, left_out[row.label]) for row in rows_of(name))
    return "\n".join(lines)


def _report_line(row: PublishedRun, fitted: Efficiencies, left_out: float) -> str:
    predicted_s = predict(row, fitted).iteration_s
    return (
        f"| {row.stack} | {row.label} | {row.gpus:,} | {row.measured_s:.2f} | {predicted_s:.2f} "
        f"| {100 * error(row, fitted):+.1f} | {100 * left_out:+.1f} |"
    )


if __name__ == "__main__":
    print(report())
