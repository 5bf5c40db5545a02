"""Checkpoints that were converted, in Megatron-LM alone. `make megatron-lm`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.megatron_lm.fixtures import MODEL
from tests.megatron_lm.runs import furthest, stock
from tests.megatron_lm.test_flag_sets import LLAMA
from unicrond.agents.trainer.converters import convert

pytestmark = [pytest.mark.timeout(900), pytest.mark.megatron_lm]
TEN = MODEL.replace("--train-iters 5", "--train-iters 10")


@pytest.mark.parametrize("flags", ["", LLAMA, "--bf16"], ids=["gpt", "llama", "bf16"])
def test_megatron_lm_goes_on_from_its_own_state_converted_twice(flags: str, tmp_path: Path) -> None:
    """To the portable form and back: it ends with the bits of the way without conversion. As a model alone, by Hugging
    Face's form, it begins anew with these parameters."""
    model = f"{TEN} {flags}"
    saved, portable, back = tmp_path / "saved", tmp_path / "portable", tmp_path / "back"
    stock(tmp_path / "first", f"{model} --save {saved} --save-interval 5 --exit-interval 5", 1)
    for words in (
        (saved, portable, "--to=portable"),
        (portable / "iteration-00000005", back, "--to=torch-dist"),
        (portable / "iteration-00000005", tmp_path / "hf", "--to=hf"),
        (tmp_path / "hf", tmp_path / "release", "--to=torch-dist", "--pad-vocab=128"),
    ):
        assert convert.main(["convert", *map(str, words)]) == 0
    assert json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] == 256
    expected, actual = (stock(tmp_path / f"on-{path.name}", f"{model} --load {path}", 1) for path in (saved, back))
    assert furthest(actual, expected) == 0
    assert "consumed samples:           36" in (tmp_path / "on-back/log").read_text()
    stock(tmp_path / "anew", f"{model} --load {tmp_path / 'release'} --exit-interval 1", 1)
    log = (tmp_path / "anew/log").read_text()
    assert "successfully loaded checkpoint from" in log and "consumed samples:            6" in log
