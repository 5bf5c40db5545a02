"""The names that the adapter replaces, in each release of Megatron-LM: by the files' syntax, nothing is imported."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests.megatron_lm.fixtures import SEAMS as ARCHIVE
from tests.megatron_lm.fixtures import TRAINING, unpacked
from tests.versions.core_seams import lookups_in
from unicrond.agents.trainer.megatron import seams
from unicrond.agents.trainer.megatron.seams import SEAMS, VALIDATE_ARGS, missing
from unicrond.events.megatron.command_line import TESTED


def checkouts(version: str) -> Path:
    if version == "0.16.1":
        return unpacked(TRAINING)
    return next(unpacked(ARCHIVE).glob(f"core_v{version.rpartition('.')[0]}.*"))


@pytest.mark.parametrize("version", TESTED)
def test_seams_exist_and_are_looked_up_on_call(version: str) -> None:
    assert list(missing(lookups_in(checkouts(version)))) == []


@pytest.mark.parametrize("version", TESTED)
def test_positional_parameters_match_every_release(version: str) -> None:
    """Signatures grow at their ends: the first parameters are the same in every release."""
    tree = ast.parse((checkouts(version) / "megatron" / "training" / "training.py").read_text())
    first = {
        node.name: [argument.arg for argument in node.args.args]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    assert first["train"][:4] == ["forward_step_func", "model", "optimizer", "opt_param_scheduler"]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    trained = [call for call in calls if call.func.id == "forward_backward_func"]  # type: ignore[attr-defined]
    given = [{keyword.arg for keyword in call.keywords} for call in trained]
    assert all({"forward_step_func", "model", "num_microbatches", "forward_only"} <= names for names in given)
    assert not any(call.args for call in trained)


def test_seams_exist_in_configured_checkout() -> None:
    if not os.environ.get("MEGATRON_LM"):
        pytest.skip("MEGATRON_LM names no checkout")
    assert list(missing(lookups_in(Path(os.environ["MEGATRON_LM"])))) == []


def test_missing_seam_is_named_in_one_line() -> None:
    whole = {
        module: {"": set[str](), **{user: set[str]() for seam in SEAMS for user in seam.users}}
        for module in ("training", "global_vars", "arguments", "initialize")
    }
    for seam in (*SEAMS, *VALIDATE_ARGS):
        whole[seam.module][""].add(seam.name)
        for user in seam.users:
            whole[seam.module].setdefault(user, set()).add(seam.name)
    assert list(missing(whole.get)) == []
    whole["training"][""].remove("train_step")
    assert list(missing(whole.get)) == [
        "megatron.training.training.train_step is not there (the commit behind the optimizer's step)"
    ]
    whole["training"][""].add("train_step")
    whole["training"]["train"].remove("train_step")
    assert list(missing(whole.get)) == [
        "megatron.training.training.train does not call train_step (the commit behind the optimizer's step)"
    ]
    whole["training"]["train"].add("train_step")
    for module, user in (("arguments", "parse_and_validate_args"), ("initialize", "initialize_megatron")):
        whole[module][user].remove("validate_args")
    assert list(missing(whole.get)) == ["megatron.training.arguments.validate_args is not there or is not called"]


def test_untested_version_warns() -> None:
    assert seams.warning("0.16.1") == seams.warning("0.16.3+local") == ""
    assert seams.warning("0.20.0").startswith("Megatron-LM 0.20.0 is not among the tested versions (0.16.1, 0.17.1")
