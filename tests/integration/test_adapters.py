"""Trainers of other libraries with their own loop, healed: the losses of each alone, the bits of an unbroken run."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.events.vocabulary import LANES, CheckpointSpec, TaskSpec
from unicrond.local.dev import free_port

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
#: What Trainer logs of the machine, not of the training.
OF_THE_MACHINE = re.compile("_runtime$|_per_second$")


def task(name: str, directory: Path, iterations: int, global_batch: int, micro_batch: int) -> TaskSpec:
    return TaskSpec(
        name="t",
        entry=str(RECIPES / f"{name}.py"),
        max_workers=3,
        global_batch=global_batch,
        micro_batch=micro_batch,
        iterations=iterations,
        accumulation="exact",
        env={
            LANES: "1",
            "OMP_NUM_THREADS": "1",
            "UNICRON_BUCKET_BYTES": "4096",
            "TRAINER_DIR": str(directory),
            "LIGHTNING_DIR": str(directory),
        },
        checkpoint=CheckpointSpec(interval=0, memory_interval=0),
    )


def heal(server: ForkServer, directory: Path, spec: TaskSpec, first: str, second: int) -> None:
    """The leader dies in the midst of a micro-batch and another joins, which is all that is left when the second dies
    with its sums made."""
    with Rig(server, directory, spec) as rig:
        rig.start("t.1", fault=f"kill@{first}")
        rig.start("t.2", fault=f"kill@iteration={second},at=reduced")
        rig.start("t.3")
        rig.until(lambda: rig.ready("t.1", "t.2", "t.3"))
        rig.tell(1, ["t.1", "t.2"])
        rig.until(lambda: "t.1" in rig.exits)
        rig.tell(2, ["t.2", "t.3"], joiners=["t.3"], urgent=True)
        rig.until(lambda: "t.2" in rig.exits)
        rig.tell(3, ["t.3"], urgent=True)
        rig.until(lambda: rig.completed and "t.3" in rig.exits)
        assert rig.exits["t.3"] == 0


# --- Hugging Face's Trainer -----------------------------------------------------------------------


def run_trainer(program: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_DIR", str(directory))
    torch.set_num_threads(1)
    runpy.run_path(str(program), run_name="__main__")


def history(directory: Path) -> list[dict[str, float]]:
    """What Trainer has logged by its last checkpoint."""
    lines = json.loads((directory / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    return [{name: value for name, value in line.items() if not OF_THE_MACHINE.search(name)} for line in lines]


def weights(directory: Path) -> bytes:
    return (directory / "checkpoint-12" / "model.safetensors").read_bytes()


def test_hugging_face_trainer_heals_to_the_losses_of_trainer_alone(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = RECIPES / "trainer.py"
    ours = "from unicrond import HuggingFaceTrainer as Trainer"
    assert program.read_text().count(ours) == 1
    (tmp_path / "alone.py").write_text(program.read_text().replace(ours, "from transformers import Trainer"))
    run_trainer(tmp_path / "alone.py", tmp_path / "alone", monkeypatch)
    run_trainer(program, tmp_path / "unbroken", monkeypatch)
    heal(server, tmp_path, task("trainer", tmp_path / "healed", 12, 8, 2), "iteration=5,micro_batch=1", 9)
    unbroken, alone = history(tmp_path / "unbroken"), history(tmp_path / "alone")
    assert len(alone) == 16, "twelve losses and four evaluations"
    assert [line.keys() for line in unbroken] == [line.keys() for line in alone]
    for line, line_alone in zip(unbroken, alone, strict=True):
        assert line == pytest.approx(line_alone, rel=1e-5)
    assert history(tmp_path / "healed") == unbroken
    assert weights(tmp_path / "healed") == weights(tmp_path / "unbroken")
    assert not (tmp_path / "healed" / "checkpoint-9").exists(), "the next leader removes what the first has saved"


# --- a script of torch's DistributedDataParallel --------------------------------------------------


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"^loss ([0-9.]+)$", text, re.MULTILINE)]


def run_ranks(program: Path, snapshot: Path, port: int) -> str:
    """What rank 0 of two prints, each as torchrun starts it."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SNAPSHOT": str(snapshot)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, **world, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return texts[0]


def test_ported_ddp_script_heals_to_the_losses_of_two_ranks_of_ddp(server: ForkServer, tmp_path: Path) -> None:
    spec = task("ddp", tmp_path, 18, 32, 16)
    spec.env["SNAPSHOT"] = str(tmp_path / "ours.pt")
    heal(server, tmp_path, spec, "iteration=4,micro_batch=0", 11)
    logs = [losses((tmp_path / f"t.{number}.log").read_text()) for number in (1, 2, 3)]
    ours = [loss for log in logs for loss in log]
    alone = losses(run_ranks(RECIPES.parent / "ddp_loop.py", tmp_path / "alone.pt", free_port()))
    assert len(alone) == 18 and ours == pytest.approx(alone, abs=2e-6)
    snapshot, expected = torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "alone.pt")
    assert snapshot["epoch"] == expected["epoch"] == 2
    torch.testing.assert_close(snapshot["model"], expected["model"], rtol=1e-5, atol=1e-6)


# --- Lightning ------------------------------------------------------------------------------------


def steps(text: str) -> list[tuple[str, float]]:
    return [(name, float(loss)) for name, loss in re.findall(r"^(step \d+: .*) ([0-9.]+)$", text, re.MULTILINE)]


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning_trainer_heals_to_the_losses_of_lightning_alone(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = RECIPES / "lightning_module.py"
    text = program.read_text()
    alone = text.replace("from unicrond import LightningStrategy\n", "").replace("LightningStrategy()", '"auto"')
    assert len(text.splitlines()) == len(alone.splitlines()) + 1
    (tmp_path / "alone.py").write_text(alone)
    printed = {}
    torch.set_num_threads(1)
    for name, path in (("alone", tmp_path / "alone.py"), ("unbroken", program)):
        monkeypatch.setenv("LIGHTNING_DIR", str(tmp_path / name))
        runpy.run_path(str(path), run_name="__main__")
        printed[name] = steps(capsys.readouterr().out)
    heal(server, tmp_path, task("lightning_module", tmp_path / "healed", 12, 8, 2), "iteration=4,micro_batch=1", 9)
    logs = [steps((tmp_path / f"t.{number}.log").read_text()) for number in (1, 2, 3)]
    assert len(printed["alone"]) == 16, "twelve losses and four validations"
    assert [line for log in logs for line in log] == printed["unbroken"]
    for (name, loss), (name_alone, loss_alone) in zip(printed["unbroken"], printed["alone"], strict=True):
        assert name == name_alone and loss == pytest.approx(loss_alone, abs=2e-6)
    (healed,) = (tmp_path / "healed" / "checkpoints").iterdir()
    states = [
        torch.load(path, weights_only=False) for path in (healed, tmp_path / "unbroken/checkpoints" / healed.name)
    ]
    for state in states:
        assert state["global_step"] == 12 and state["epoch"] == 3
    assert all(torch.equal(weight, states[1]["state_dict"][name]) for name, weight in states[0]["state_dict"].items())
