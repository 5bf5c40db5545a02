"""The flags of Megatron-LM in a layout that the task has been given since. No checkout is needed."""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from unicrond.agents.trainer.megatron.flags import (
    FlagsRefused,
    apply_task_layout,
    drop_without_effect,
    require,
    require_experts,
    take_over,
)
from unicrond.events.megatron.command_line import SHARDED, chunks_of
from unicrond.events.vocabulary import TaskSpec


def parsed(**flags: object) -> SimpleNamespace:
    """As Megatron parses a command line, before it looks at it."""
    told = {
        "num_layers": 8,
        "encoder_num_layers": None,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "micro_batch_size": 2,
        "make_vocab_size_divisible_by": 128,
    }
    return SimpleNamespace(**{**told, **flags})


def task(**fields: int) -> TaskSpec:
    return TaskSpec(**{"name": "lm", "tp": 2, "pp": 2, "micro_batch": 2, **fields})  # type: ignore[arg-type]


def inner(args: SimpleNamespace) -> tuple[object, ...]:
    return (
        args.num_layers_per_virtual_pipeline_stage,
        args.num_virtual_stages_per_pipeline_rank,
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size,
    )


def test_matching_layout_leaves_flags_unchanged() -> None:
    for spec in (task(), task(vpp=1, ep=1)):
        args = parsed()
        assert list(apply_task_layout(args, spec)) == [] and args == parsed()
    for flags in ({"num_layers": 8}, {"num_layers": None, "encoder_num_layers": 8}):
        args = parsed(**flags, num_layers_per_virtual_pipeline_stage=2)
        assert list(apply_task_layout(args, task(vpp=2))) == []
    args = parsed(
        num_layers=7, account_for_loss_in_pipeline_split=True, num_layers_per_virtual_pipeline_stage=2
    )  # the loss counts as a layer
    assert list(apply_task_layout(args, task(vpp=2))) == []
    args = parsed(pipeline_model_parallel_layout="E(tt|)*3ttL")
    assert list(apply_task_layout(args, task(vpp=2))) == [] and args.num_virtual_stages_per_pipeline_rank is None


@pytest.mark.parametrize(
    "layout", ["EtL", "Et|ttL", "Et*2|(tt|)*5t|tmL", "Ettt|(tt|)*29,m|L", "t,t(ab|cd|ef)*2,(t|*2)*3L", "|*3(t)*2|t*12"]
)
def test_chunks_are_those_that_megatron_unrolls(layout: str) -> None:
    known = layout.translate(str.maketrans("abcdef", "tttttt"))
    assert chunks_of(layout) == PipelineParallelLayerLayout.get_num_stages_from_str(known)


@pytest.mark.parametrize(
    ("flags", "fields", "found"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 2}, {"vpp": 4}, (None, 4, 1, None)),
        ({"num_virtual_stages_per_pipeline_rank": 2}, {"vpp": 1}, (None, None, 1, None)),
        ({"num_virtual_stages_per_pipeline_rank": 2}, {}, (None, 2, 1, None)),
        ({"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, {"ep": 1}, (None, None, 1, 2)),
        ({"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, {"ep": 2, "tp": 4}, (None, None, 2, 2)),
        ({}, {"ep": 2}, (None, None, 2, 1)),
        ({"expert_tensor_parallel_size": 2}, {"tp": 4}, (None, None, 1, 4)),
        ({}, {"tp": 4}, (None, None, 1, None)),
    ],
)
def test_flags_follow_layout_of_task(flags: dict[str, int], fields: dict[str, int], found: tuple[object, ...]) -> None:
    """The parts of an expert, times the workers that the experts are on, are a tensor-parallel group."""
    args = parsed(**flags)
    list(apply_task_layout(args, task(**fields)))
    assert inner(args) == found


@pytest.mark.parametrize(
    ("flags", "fields", "connections"),
    [
        ({}, {}, None),  # what the flags' own layout needs, a person has set
        ({}, {"tp": 4}, "1"),
        ({}, {"tp": 1}, None),
        ({"tensor_model_parallel_size": 1}, {"tp": 1, "cp": 2}, "1"),
        ({"context_parallel_size": 2}, {"cp": 1}, "1"),  # tp is 2
    ],
)
def test_other_layout_has_connections_that_megatron_asserts(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, int], fields: dict[str, int], connections: str | None
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "of the machine")  # so that it is put back
    monkeypatch.delenv(name)
    list(apply_task_layout(parsed(**flags), task(**fields)))
    assert os.environ.get(name) == connections
    monkeypatch.setenv(name, "8")
    list(apply_task_layout(parsed(**flags), task(**fields)))
    assert os.environ[name] == "8", "a person's value stays"


def test_what_saves_time_alone_is_dropped_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    flags = {
        "num_distributed_optimizer_instances": 2,
        "overlap_param_gather_with_optimizer_step": True,
        "overlap_moe_expert_parallel_comm": True,
        "ep_overlap_early_attn_memory_release": True,
        "fp8_param_gather": True,
    }
    args = parsed(**flags)
    dropped = [line.partition(" is without effect: ")[0] for line in drop_without_effect(args)]
    assert dropped == ["--" + name.replace("_", "-") for name in flags]
    assert [getattr(args, name) for name in flags] == [1, False, False, False, False]
    assert list(drop_without_effect(args)) == list(drop_without_effect(parsed())) == []


@pytest.mark.parametrize(("tp", "connections"), [(2, "1"), (1, "32")])
def test_connections_for_an_overlap_go_with_it(monkeypatch: pytest.MonkeyPatch, tp: int, connections: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    list(drop_without_effect(parsed(overlap_moe_expert_parallel_comm=True, tensor_model_parallel_size=tp)))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == connections


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"fp16": True}, f"args: {SHARDED}: Adam in fp32 or bf16 only; leave it out"),
        ({"ckpt_format": "torch", "save": "/x"}, f"args: --ckpt-format: with {SHARDED} torch_dist only"),
    ],
)
def test_worker_refuses_what_submission_refuses(flags: dict[str, object], line: str) -> None:
    args = parsed(**{"use_distributed_optimizer": True, "optimizer": "adam", **flags})
    with pytest.raises(FlagsRefused) as refused:
        require(args, task(), on_gpu=False)
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("ep", "votes", "refused"), [(2, [True, False], True), (2, [True, True], False), (1, [], False)]
)
def test_replica_votes_that_each_stage_has_experts(ep: int, votes: list[bool], refused: bool) -> None:
    args = parsed(expert_model_parallel_size=ep)
    with pytest.raises(FlagsRefused, match="2 leaves a stage without experts") if refused else nullcontext():
        require_experts(args, True, lambda value: all([value, *votes]))


def test_reduction_inside_replica_sums() -> None:
    """What the gradients are divided by counts all who share a sequence: an average would divide by them again."""
    args = parsed(
        overlap_grad_reduce=True,
        use_distributed_optimizer=False,
        exit_duration_in_mins=None,
        exit_interval=None,
        exit_signal_handler=False,
        accumulate_allreduce_grads_in_fp32=True,
        ddp_average_in_collective=True,
    )
    take_over(args, print)
    assert args.ddp_average_in_collective is False
