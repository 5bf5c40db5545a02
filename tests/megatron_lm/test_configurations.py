"""docs/use/configurations.md is what `unicronctl init-megatron` makes of Megatron-LM's own configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_lm import configurations, toys
from unicrond.events.megatron.command_line import CommandLine

PAGE = Path(__file__).parents[2] / "docs" / "use" / "configurations.md"


def test_page_is_what_init_megatron_takes() -> None:
    try:
        page = configurations.page()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert PAGE.read_text() == page, (
        "run: .venv/bin/python -m tests.megatron_lm.configurations > docs/use/configurations.md"
    )


def test_script_assigns_what_configuration_leaves_open() -> None:
    words = [
        "pretrain_t5.py",
        "--encoder-num-layers",
        "2",
        "--save",
        "${CHECKPOINT}",
        "--data-path",
        "$BLEND",
        "--x",
        "a b",
    ]
    assert configurations.script(words).splitlines() == [
        "BLEND=/data/blend",
        "CHECKPOINT=/data/checkpoint",
        'torchrun --nproc-per-node 8 pretrain_t5.py --encoder-num-layers 2 --save "${CHECKPOINT}" --data-path "$BLEND"'
        " --x 'a b'",
    ]


def toy_flags(text: str) -> dict[str, str]:
    toy = toys.toy_of(["pretrain_gpt.py", *text.split()])
    assert toy is not None
    return {flag: " ".join(values) for flag, values in CommandLine.parse([toy.script, *toy.flags]).flags.items()}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--hidden-size 4096 --bf16 --fp8-format hybrid --data-path /d", {"--hidden-size": "64", "--bf16": ""}),
        ("--tensor-model-parallel-size 4 --num-layers 32", {"--tensor-model-parallel-size": "2", "--num-layers": "2"}),
        ("--tensor-model-parallel-size 1 --num-layers 32", {"--num-layers": "2"}),
        (
            "--pipeline-model-parallel-size 4 --num-layers 24 --num-layers-per-virtual-pipeline-stage 2",
            {
                "--pipeline-model-parallel-size": "2",
                "--num-layers": "4",
                "--num-layers-per-virtual-pipeline-stage": "1",
            },
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers 14 --pipeline-model-parallel-layout Et*2|(tt|)*5t|tmL"
            " --moe-layer-freq ([0]*3+[1]*11)",
            {
                "--pipeline-model-parallel-size": "2",
                "--num-layers": "4",
                "--pipeline-model-parallel-layout": "E(t|)*3tmL",
                "--moe-layer-freq": "([0]*1+[1]*3)",
            },
        ),
        ("--moe-token-dispatcher-type flex", {"--moe-token-dispatcher-type": "alltoall"}),
        ("--num-layers 2 --context-parallel-size 4", {"--context-parallel-size": "2"}),
    ],
)  # fmt: skip
def test_toy_keeps_what_is_trained_and_shrinks_sizes(flags: str, expected: dict[str, str]) -> None:
    dropouts = {"--attention-dropout": "0", "--hidden-dropout": "0"}
    assert toy_flags(flags) == {"--num-layers": "2"} | expected | dropouts


def test_toy_needs_a_script_and_layers_that_are_at_hand() -> None:
    assert toys.toy_of(["pretrain_t5.py", "--bf16"]) is None
    assert toys.toy_of(["pretrain_gpt.py", "--spec", "a.mamba", "spec"]) is None
    toy = toys.toy_of(["pretrain_gpt.py", "--context-parallel-size", "2"])
    assert toy is not None and toy.script == "context_gpt.py"


def test_toy_is_equal_but_for_the_norm_of_masters_in_parts() -> None:
    for flags, verdict, is_equal in (
        (("--bf16",), "equal", True),
        (("--bf16",), "equal, but within the tolerance: lm loss", True),
        (("--bf16", "--use-distributed-optimizer"), "different: params norm", True),
        (("--bf16",), "different: params norm", False),
        (("--bf16", "--use-distributed-optimizer"), "different: lm loss, params norm", False),
        ((), "AssertionError: x", False),
    ):
        assert toys.Outcome(toys.Toy(flags, "pretrain_gpt.py"), "2026-11-28", verdict).is_equal is is_equal
