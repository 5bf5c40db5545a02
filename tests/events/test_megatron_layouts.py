"""Layouts that a command line of Megatron-LM allows, where its checkpoints have experts and the sharded optimizer."""

from __future__ import annotations

import pytest

from unicrond.events.megatron.layouts import layout_rules, stage_without_experts
from unicrond.events.vocabulary.shape import Shape

FLAGS = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 256 --num-experts 4"
    " --expert-model-parallel-size 2 --pipeline-model-parallel-size 2"
)
SAVED = f"{FLAGS} --use-distributed-optimizer --save /x"
OWN = Shape(1, 2, ep=2)


def problem(flags: str, frequency: str = "", shape: Shape = OWN) -> str:
    rules = layout_rules([*flags.split(), *(["--moe-layer-freq", frequency] if frequency else [])])
    assert rules is not None
    return rules.problem(shape)


@pytest.mark.parametrize(
    "frequency", ["4", "[0]*2+[1]*2", "([0,0]+[1])+[1]", "(([0])*1+[0]*1)+([1]*2)", "[1,0]+[0] * 2"]
)
def test_stage_without_experts_is_refused_where_megatron_saves(frequency: str) -> None:
    assert problem(SAVED, frequency) == stage_without_experts(2, 2)
    assert problem(SAVED.replace("--save", "--load"), frequency) == stage_without_experts(2, 2)
    assert problem(SAVED.replace(" --save /x", ""), frequency) == "", "unicrond's own states have each stage apart"
    assert problem(SAVED.replace("--use-distributed-optimizer", ""), frequency) == ""
    assert problem(SAVED, frequency, Shape(1, 2)) == "", "with ep 1 they are parameters like others"
    assert problem(SAVED, frequency, Shape(1, 1, ep=2)) == ""


@pytest.mark.parametrize(
    "frequency",
    [
        "",
        "1",
        "2",
        "3",
        "[0]+[1]*3",
        "([0]+[1])*2",
        "[0]*3",
        "0",
        "( 0 *2+ 1 *2)",
        "[0]*2+[2]*2",
        "((((([1]*9999)*9999)",
    ],
)
def test_what_has_experts_or_cannot_be_read_is_taken(frequency: str) -> None:
    """The workers ask each other once they have built the model."""
    assert problem(SAVED, frequency) == ""


def test_interleaved_stage_has_a_layer_of_each_chunk() -> None:
    """Layers 1 and 3 are the first stage's, 2 and 4 the second's."""
    chunks = f"{SAVED} --num-layers-per-virtual-pipeline-stage 1"
    assert problem(chunks, "[0]*2+[1]*2", Shape(1, 2, vpp=2, ep=2)) == ""
    assert problem(chunks, "2", Shape(1, 2, vpp=2, ep=2)) == stage_without_experts(2, 2)


def test_uneven_stages_are_left_to_workers() -> None:
    assert problem(f"{SAVED} --decoder-first-pipeline-num-layers 3", "[0]*2+[1]*2") == ""


def test_stage_without_experts_bars_other_layout() -> None:
    whole = SAVED.replace("--pipeline-model-parallel-size 2", "")
    assert problem(whole, "[0]*2+[1]*2", Shape(1, 1, ep=2)) == ""
    assert problem(whole, "[0]*2+[1]*2") == stage_without_experts(2, 2)
    assert problem(whole, "2", Shape(1, 4, ep=2)) == stage_without_experts(4, 2)
