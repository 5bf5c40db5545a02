"""The throughput model: its arithmetic against hand-written formulas, its rules, its search against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicrond.throughput.layouts import Layout, ThroughputQuery, job, layers_per_stage, layouts, tensor_degrees
from unicrond.throughput.model import Estimate, Infeasible, best, legal, memory_bytes, parts_s, table, usable_bytes
from unicrond.throughput.presets import GIB, GPUS, MODELS, STACKS, GptModel, gpt3

A100 = GPUS["a100-80g"]
H100 = GPUS["h100-80g"]
#: Small enough to search exhaustively: vocabulary, batch and layers of a toy, widths of a real model.
SMALL = gpt3("small", 12, 2048, 16, batch=48, vocab=1024)

models = st.sampled_from([*MODELS.values(), SMALL])
gpus = st.sampled_from(list(GPUS.values()))
stacks = st.sampled_from(list(STACKS.values()))


def estimate(question: ThroughputQuery, count: int) -> Estimate:
    answer = best(question, count)
    assert isinstance(answer, Estimate), answer
    return answer


# --- presets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    # The published checkpoints' exact counts.
    [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("llama3-405b", 405_853_388_800)],
)
def test_llama_parameters_are_exact(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt3-1.3b", 1.3), ("gpt3-7b", 6.7), ("gpt3-13b", 13), ("gpt3-70b", 71), ("gpt3-175b", 175)]
)
def test_gpt3_parameters_match_names(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("name", ["gpt3-1.3b", "gpt3-175b"])
def test_model_flops_match_paper(name: str) -> None:
    """72 B s l h^2 (1 + s / 6h + V / 12 l h): Korthikanti et al. 2022, equation 8 without recomputation."""
    model = MODELS[name]
    s, layers, h, v = model.seq, model.layers, model.hidden_size, model.vocab
    expected = 72 * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model.flops_per_sequence(s) == pytest.approx(expected, rel=1e-12)


def test_gpu_presets_have_valid_peaks_memory_and_stack() -> None:
    for gpu in GPUS.values():
        assert gpu.stack in STACKS
        assert 0 < usable_bytes(gpu) < gpu.memory_bytes
        assert gpu.nic_bytes_per_s < gpu.nvlink_bytes_per_s < gpu.hbm_bytes_per_s


# --- one layout, by hand -------------------------------------------------------------------------


def test_compute_time_of_one_gpu_matches_formula() -> None:
    """tp = pp = dp = 1, no recomputation, flash attention: everything written out once more."""
    stack = replace(STACKS["megatron-2023"], gemm_efficiency=0.5)
    question = job(SMALL, A100, stack=stack)
    seconds = parts_s(question, Layout(1, 1, 1, 1, "none"), np.array([1]))[:, 0]
    s, h, layers, v = 2048, 2048, 12, 1024
    rate = 312e12 * 0.5 / (1 + 17.5 / h)
    gemms = 24 * s * h * h / rate
    scores = 0.5 * 4 * s * s * h / (rate * 0.8)
    elementwise = s * (22 * h + 16 * h + 16 * h) / (2039e9 * 0.8)
    logits = 6 * s * h * v / rate + 20 * s * v / (2039e9 * 0.8)
    embedding = 18 * s * h / (2039e9 * 0.8)
    expected = 48 * (3 * layers * (gemms + scores + elementwise) + logits + embedding)
    assert seconds[0] == pytest.approx(expected, rel=1e-12)
    assert seconds[1:5].tolist() == [0, 0, 0, 0]
    assert seconds[5] == pytest.approx(SMALL.parameters * 38 / (2039e9 * 0.8), rel=1e-3)


def test_tensor_parallel_time_matches_formula() -> None:
    """Six all-reduces a layer under full recomputation without overlap, one for the embedding, one for logits."""
    question = job(SMALL, A100, stack=STACKS["megatron-2021"])
    waited_s = parts_s(question, Layout(4, 1, 2, 1, "full"), np.array([1]))[1, 0]
    one = 2 * 3 / 4 * (2 * 2048 * 2048 * 2) / (300e9 * 0.75)
    assert waited_s == pytest.approx(24 * (6 * 12 + 2) * one, rel=1e-12)


def test_pipeline_bubble_matches_textbook() -> None:
    """With equal stages the bubble is (pp - 1) / (chunks * micro-batches) of the work."""
    model = gpt3("even", 16, 8192, 64, batch=64, vocab=8)
    question = job(model, A100, stack=STACKS["mcore-2024"])
    for chunks in (1, 2, 4):
        compute_s, tp_s, _, bubble_s, _, _ = parts_s(question, Layout(1, 4, 1, chunks, "none"), np.array([2]))[:, 0]
        assert bubble_s / (compute_s + tp_s) == pytest.approx(3 / (chunks * 32), rel=1e-3)


def test_gradient_reduction_uses_every_adapter_of_ring() -> None:
    """tp 8: one adapter per ring, tp 1: eight (then NVLink is the limit); inside a node: NVLink."""
    stack = replace(STACKS["megatron-2021"], nic_efficiency=0.5)
    question = job(SMALL, A100, stack=stack, batch=512)
    share = 4 * (SMALL.parameters - 2048 * 2048) / 8 + 4 * 2048 * 2048  # 2 x FP16, positions not split
    eight = parts_s(question, Layout(8, 1, 1, 1, "full"), np.array([16]))[4, 0]
    assert eight == pytest.approx(15 / 16 * share / (25e9 * 0.5), rel=1e-3)
    whole = 4 * SMALL.parameters
    one = parts_s(question, Layout(1, 1, 1, 1, "full"), np.array([8, 16]))[4]
    assert one[0] == pytest.approx(7 / 8 * whole / (300e9 * 0.75), rel=1e-3)
    assert one[1] == pytest.approx(15 / 16 * whole / (8 * 25e9 * 0.5), rel=1e-3)


def test_overlap_hides_communication_and_saves_no_more() -> None:
    exposed = replace(STACKS["mcore-2024"], overlap_dp=False, overlap_pp=False, overlap_tp=False)
    model = replace(SMALL, vocab=32768)  # logits enough to make the last stage the slowest in both
    layout, dp = Layout(2, 4, 1, 1, "none"), np.array([8])
    hidden, shown = (
        parts_s(job(model, H100, stack=stack), layout, dp)[:, 0] for stack in (STACKS["mcore-2024"], exposed)
    )
    assert hidden[0] == shown[0]
    assert (hidden[1:5] < shown[1:5]).all()
    assert hidden[5] == shown[5]
    assert hidden[2] == 0
    assert hidden[4] > 0  # the tied embedding's reduction is not overlapped


# --- rules ---------------------------------------------------------------------------------------


def test_llama_405b_stages_count_embedding_and_head() -> None:
    model = MODELS["llama3-405b"]
    assert layers_per_stage(model, STACKS["mcore-2024"], 16) == (7, 8, 7)
    assert model.layers == 7 + 14 * 8 + 7
    assert layers_per_stage(model, STACKS["megatron-2023"], 16) is None


def test_tensor_degree_stays_in_node_and_divides_heads() -> None:
    assert tensor_degrees(MODELS["llama3-8b"], A100) == [1, 2, 4, 8]
    assert tensor_degrees(MODELS["llama3-8b"], replace(A100, per_node=4)) == [1, 2, 4]
    assert tensor_degrees(replace(SMALL, heads=12, kv_heads=12), A100) == [1, 2, 4]


def test_uneven_batch_is_as_slow_as_busiest_replica() -> None:
    question = job(SMALL, A100, tp=1, pp=1, micro_batch=1)
    even, uneven = estimate(question, 12), estimate(question, 13)
    assert (even.uneven, even.micro_batches) == (False, 4)
    assert (uneven.uneven, uneven.micro_batches) == (True, 4)
    assert uneven.parts.compute_s == even.parts.compute_s
    assert isinstance(best(replace(question, uneven=False), 13), Infeasible)
    assert estimate(replace(question, uneven=False), 12) == replace(even, job=replace(question, uneven=False))


def test_interleaving_needs_whole_groups_of_micro_batches() -> None:
    question = job(SMALL, A100)
    layout = Layout(1, 4, 1, 3, "none")
    # 48 micro-batches on dp replicas: 48, 24, 16, 12 (multiples of 4), then 10 uneven, 8, 7 uneven, 6.
    assert legal(question, layout, np.arange(1, 9)).tolist() == [True, True, True, True, False, True, False, False]


def test_replica_needs_micro_batch() -> None:
    question = job(SMALL, A100, tp=1, pp=1)
    assert isinstance(best(question, 48), Estimate)
    answer = best(question, 49)
    assert isinstance(answer, Infeasible)
    assert "batch of 48" in answer.reason


def test_memory_limits_layouts() -> None:
    answer = best(job(MODELS["gpt3-175b"], GPUS["a100-40g"]), 8)
    assert isinstance(answer, Infeasible)
    assert "GiB" in answer.reason
    assert isinstance(best(job(MODELS["gpt3-175b"], GPUS["a100-40g"]), 256), Estimate)
    # 16 bytes per parameter do not fit, sharded optimizer state does.
    plain = replace(STACKS["megatron-2023"], distributed_optimizer=False)
    assert isinstance(best(job(MODELS["gpt3-7b"], A100, stack=plain, tp=1, pp=1), 8), Infeasible)
    assert isinstance(best(job(MODELS["gpt3-7b"], A100, tp=1, pp=1), 8), Estimate)


def test_recomputation_trades_time_for_memory() -> None:
    question = job(MODELS["llama3-8b"], H100)
    modes, dp = [Layout(1, 1, 1, 1, mode) for mode in ("none", "light", "full")], np.array([8])
    memory = [memory_bytes(question, layout, dp)[0] for layout in modes]
    seconds = [parts_s(question, layout, dp).sum() for layout in modes]
    assert memory == sorted(memory, reverse=True)
    assert seconds == sorted(seconds)
    assert len({*memory}) == len({*seconds}) == 3


def test_activation_memory_matches_korthikanti() -> None:
    """s b h (10 + 24 / t + 5 a s / h t) bytes a layer without sequence parallelism, all over t with it."""
    s, h, a, t, layers = 2048, 2048, 16, 4, 12
    for sequence_parallel, whole in ((False, 10), (True, 10 / t)):
        stack = replace(
            STACKS["megatron-2021"], recompute=("none", "full"), sequence_parallel=sequence_parallel, gradient_bytes=0
        )
        one, two = (
            memory_bytes(job(SMALL, A100, stack=stack), Layout(t, 1, micro_batch, 1, "none"), np.array([1]))[0]
            for micro_batch in (1, 2)
        )
        logits = s * 1024 / t * 10
        expected = layers * s * h * (whole + 24 / t + 5 * a * s / h / t) + logits
        assert two - one == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tp": 3}, "tp: 3 does not divide"),
        ({"pp": 5}, "pp: 5 does not divide"),
        ({"micro_batch": 7}, "micro_batch: 7 does not divide batch 48"),
        ({"recompute": "some"}, "recompute: megatron-2023 does not have 'some'"),
        ({"batch": 0}, "batch: must be 1 or more, not 0"),
        ({"seq": -1}, "seq: must be 1 or more, not -1"),
    ],
)
def test_job_refuses_bad_field_by_name(arguments: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        job(SMALL, A100, **arguments)  # type: ignore[arg-type]


# --- search --------------------------------------------------------------------------------------


def brute_force(question: ThroughputQuery, count: int) -> int:
    """T(count) by trying every combination one at a time, without the search's shortcuts."""
    fastest_s = float("inf")
    model = question.model
    for tp, pp, micro_batch, chunks, recompute in product(
        range(1, 9), range(1, count + 1), (1, 2, 4, 8, 16), range(1, 13), question.stack.recompute
    ):
        cut = layers_per_stage(model, question.stack, pp)
        if count % (tp * pp) or question.batch % micro_batch or model.heads % tp or tp & (tp - 1) or cut is None:
            continue
        if cut[1] % chunks or (pp == 1 and chunks > 1):
            continue
        dealt, dp = question.batch // micro_batch, count // tp // pp
        if dp > dealt or (chunks > 1 and (dealt % dp or dealt // dp % pp)):
            continue
        layout = Layout(tp, pp, micro_batch, chunks, recompute)
        if memory_bytes(question, layout, np.array([dp]))[0] <= usable_bytes(question.gpu):
            fastest_s = min(fastest_s, float(parts_s(question, layout, np.array([dp])).sum()))
    return round(question.flops_per_iteration / fastest_s) if fastest_s < float("inf") else 0


@pytest.mark.parametrize("stack", ["megatron-2022", "mcore-2024"])
def test_layout_search_matches_brute_force(stack: str) -> None:
    big = replace(SMALL, hidden_size=8192, heads=64, kv_heads=64, ffn=32768)  # 9.7 B: some layouts do not fit
    question = job(big, A100, stack=STACKS[stack])
    for count in (1, 2, 3, 6, 8, 13, 20, 24, 36):
        answer = best(question, count)
        assert (answer.flops_per_s if isinstance(answer, Estimate) else 0) == brute_force(question, count), count


@pytest.mark.parametrize(("name", "gpu", "most"), [("gpt3-7b", "a800-80g", 64), ("llama3-70b", "h100-80g", 96)])
def test_throughput_table_is_best_for_every_count(name: str, gpu: str, most: int) -> None:
    flops = table(job(MODELS[name], GPUS[gpu]), most)
    question = job(MODELS[name], GPUS[gpu])
    for count in range(1, most + 1):
        answer = best(question, count)
        assert flops.get(count, 0) == (answer.flops_per_s if isinstance(answer, Estimate) else 0), count
    assert all(type(count) is int and type(value) is int for count, value in flops.items())


def test_throughput_table_respects_given_layout() -> None:
    flops = table(job(MODELS["gpt3-7b"], A100, tp=4, pp=2, micro_batch=2), 128)
    assert flops
    assert all(count % 8 == 0 for count in flops)
    free = table(job(MODELS["gpt3-7b"], A100), 128)
    assert all(flops[count] <= free[count] for count in flops)


@given(models, gpus, stacks, st.sampled_from([1, 4, 8, 12, 16, 52, 64, 256, 1000, 1024]))
def test_estimate_is_consistent(model: GptModel, gpu_: object, stack: object, count: int) -> None:
    question = job(model, gpu_, stack=stack)  # type: ignore[arg-type]
    answer = best(question, count)
    if isinstance(answer, Infeasible):
        assert answer.reason
        return
    layout, parts = answer.layout, answer.parts
    assert layout.tp * layout.pp * answer.dp == count
    assert layout in layouts(question)
    assert min(parts.compute_s, parts.tp_s, parts.transfer_s, parts.bubble_s, parts.dp_s, parts.optimizer_s) >= 0
    assert answer.iteration_s == pytest.approx(sum(getattr(parts, name) for name in parts.__slots__), rel=1e-12)
    # Attention aside (causal kernels skip half of what the convention counts), no GEMM beats alpha.
    attention = 12 * question.seq**2 * model.hidden_size * model.layers * question.batch
    rate = count * question.gpu.peak_flops * question.stack.gemm_efficiency
    assert question.flops_per_iteration - attention < rate * answer.iteration_s
    assert 0 < answer.memory_bytes <= usable_bytes(question.gpu)
    dealt = question.batch // layout.micro_batch
    assert answer.micro_batches * answer.dp >= dealt > (answer.micro_batches - 1) * answer.dp
    assert answer.uneven == (answer.micro_batches * answer.dp != dealt)


@given(
    models,
    gpus,
    st.sampled_from([8, 13, 64, 96]),
    st.sampled_from(["peak_flops", "memory_bytes", "hbm_bytes_per_s", "nvlink_bytes_per_s", "nic_bytes_per_s"]),
)
def test_better_gpu_is_never_slower(model: GptModel, gpu_: object, count: int, field: str) -> None:
    better = replace(gpu_, **{field: 2 * getattr(gpu_, field)})  # type: ignore[type-var]
    now, then = (best(job(model, each), count) for each in (gpu_, better))  # type: ignore[arg-type]
    if isinstance(now, Estimate):
        assert isinstance(then, Estimate)
        assert then.flops_per_s >= now.flops_per_s


def test_reserved_memory_is_below_half_of_smallest_gpu() -> None:
    assert usable_bytes(GPUS["a100-40g"]) > 20 * GIB
