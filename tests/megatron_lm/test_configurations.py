"""docs/use/configurations.md is what `unicronctl init-megatron` makes of Megatron-LM's own configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_lm import configurations

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
