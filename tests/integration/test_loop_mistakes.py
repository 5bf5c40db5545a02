"""The documented loops with a line left out or misplaced: refused or reported in a sentence, or trained to the bits of
the same program alone, whoever dies. Nothing third (docs/use/hook.md)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.events.vocabulary import (
    LANES,
    CheckpointSpec,
    CorruptionSuspected,
    DivergenceObserved,
    ErrorReported,
    TaskSpec,
)

ITERATIONS = 14
BEGIN = """
import torch
from unicrond import Hook
from tests.integration.own_models import CLASSES, SAMPLES, WIDTH, data, digest

torch.set_num_threads(1)
torch.manual_seed(1)
rows, classes = data()
model = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(WIDTH, CLASSES)
)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, sample):
        return rows[sample], classes[sample]


def forward_backward(model, sample):
    places = [sample, -sample]  # two tokens
    loss = torch.nn.functional.cross_entropy(model(rows[places]), classes[places], reduction="sum")
    loss.backward()
    return loss.item(), 2


"""
SUMS = """
hook = Hook.attach(model, optimizer, scheduler, dataset_size=SAMPLES)
for step in hook.steps():
    for micro_batch in step:
        step.seed(micro_batch)
        for sample in step.samples(micro_batch):
            loss_sum, tokens = forward_backward(model, sample)
            step.add(loss_sum, tokens)
    optimizer.step()
    scheduler.step()
    print(f"iteration {step.iteration}: {step.loss!r} {digest(model, [optimizer])}", flush=True)
"""
LOADER = """
hook = Hook.attach(model, optimizer, scheduler)
loader = hook.loader(Dataset(), num_workers=1)
for step in hook.steps():
    for batch, labels in loader(step):
        step.backward(torch.nn.functional.cross_entropy(model(batch), labels))
    optimizer.step()
    scheduler.step()
    print(f"iteration {step.iteration}: {step.loss!r} {digest(model, [optimizer])}", flush=True)
"""


SEED = "        step.seed(micro_batch)\n"
SAMPLE = "            loss_sum, tokens = forward_backward(model, sample)\n"
ADD = "            step.add(loss_sum, tokens)\n"
STEP = "    optimizer.step()\n"
SCHEDULE = "    scheduler.step()\n"
LOSS = "torch.nn.functional.cross_entropy(model(batch), labels)"
TORCH_LOADER = "loader = torch.utils.data.DataLoader(Dataset(), 4, shuffle=True)"

IDLE = "10 iterations have changed no parameter"
LEFT = "the loop left a step before all its micro-batches were computed"
NO_TOKENS = "no tokens were added; call step.add(loss_sum, tokens)"
SAME = "the bits of the program alone"

#: The loop, what is replaced in it and by what, and what comes of it: SAME, a sentence, or a sign of divergence.
MISTAKES = {
    "none": (SUMS, "", "", SAME),
    "no-attach": (SUMS, "hook = Hook.attach(model, optimizer, scheduler, dataset_size=SAMPLES)", "", "NameError"),
    "one-step": (
        SUMS,
        "for step in hook.steps():",
        "if step := next(hook.steps()):",
        "let hook.steps() run to its end",
    ),
    "one-micro-batch": (SUMS, "for micro_batch in step:", "if micro_batch := 1:", LEFT),
    "break": (SUMS, ADD, ADD + "        break\n", LEFT),
    "no-seed": (SUMS, SEED, "", "unsteady"),
    "late-seed": (SUMS, SEED + "        for", "        for", "unsteady"),
    "no-samples": (SUMS, "step.samples(micro_batch)", "range(4)", SAME),
    "own-samples": (SUMS, "step.samples(micro_batch)", "torch.randperm(SAMPLES)[:4].tolist()", SAME),
    "no-dataset-size": (SUMS, "micro_batch):", "micro_batch):\n            sample %= SAMPLES", SAME),
    "no-forward": (SUMS, SAMPLE, "            loss_sum, tokens = 1.0, 2\n", IDLE),
    "no-backward": (SUMS, "forward_backward(model, sample)", "1.0 * model(rows[[sample]]).sum().item(), 2", IDLE),
    "no-add": (SUMS, ADD, "", NO_TOKENS),
    "no-step": (SUMS, STEP, "", IDLE),
    "step-in-micro-batch": (SUMS, STEP, "    " + STEP, IDLE),
    "step-in-sample": (SUMS, STEP, "        " + STEP, IDLE),
    "zero-grad-before-sample": (SUMS, SAMPLE, "            optimizer.zero_grad()\n" + SAMPLE, SAME),
    "zero-grad-before-step": (SUMS, STEP, "    optimizer.zero_grad()\n" + STEP, IDLE),
    "zero-grad-after-step": (SUMS, STEP, STEP + "    optimizer.zero_grad()\n", SAME),
    "two-steps": (SUMS, STEP, STEP + STEP, SAME),
    "no-schedule": (SUMS, SCHEDULE, "", SAME),
    "schedule-not-attached": (SUMS, "optimizer, scheduler, d", "optimizer, d", "newcomer"),
    "loader": (LOADER, "", "", SAME),
    "no-loader": (LOADER, "loader = hook.loader(Dataset(), num_workers=1)", "", "NameError"),
    "late-loader": (
        LOADER,
        "loader(step):",
        "hook.loader(Dataset())(step):",
        "hook.loader(...): make it before the first",
    ),
    "torch-loader": (LOADER, "loader = hook.loader(Dataset(), num_workers=1)", TORCH_LOADER, "not callable"),
    "loader-no-backward": (LOADER, f"step.backward({LOSS})", LOSS, NO_TOKENS),
    "loader-own-backward": (LOADER, f"step.backward({LOSS})", f"{LOSS}.backward()", NO_TOKENS),
    "loader-break": (LOADER, STEP, "        break\n" + STEP, LEFT),
    "loader-no-step": (LOADER, STEP, "", IDLE),
}
#: The others run in `make matrix`.
EACH_TIME = ("none", "no-seed", "no-step", "schedule-not-attached", "break")


def task(program: Path) -> TaskSpec:
    return TaskSpec(
        name="t",
        entry=str(program),
        max_workers=3,
        global_batch=16,
        micro_batch=4,
        iterations=ITERATIONS,
        accumulation="exact",
        env={LANES: "3", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        checkpoint=CheckpointSpec(interval=0, memory_interval=0),
    )


def lines(path: Path) -> dict[int, str]:
    """The lines that a worker has printed, by iteration."""
    return {int(number): words for number, words in re.findall(r"^iteration (\d+): (.*)$", path.read_text(), re.M)}


def is_over(rig: Rig) -> bool:
    """All have ended, one was refused, or a report was made that the head would act on."""
    refused = [worker for worker, status in rig.exits.items() if status and not os.WIFSIGNALED(status)]
    reports = [*rig.of(DivergenceObserved), *rig.of(CorruptionSuspected)]
    return bool(refused or reports or (rig.completed and not rig.living()))


def outcome(rig: Rig) -> str:
    """What a person is told, in one text; SAME where the task completed without a word."""
    signs = {message.sign for message in rig.of(DivergenceObserved)}  # type: ignore[union-attr]
    errors = {message.message for message in rig.of(ErrorReported)}  # type: ignore[union-attr]
    return SAME if rig.completed and not signs else "\n".join([*signs, *errors])


def train_alone(server: ForkServer, directory: Path, spec: TaskSpec) -> dict[int, str]:
    directory.mkdir()
    with Rig(server, directory, spec) as rig:
        rig.start("t.9")
        rig.tell(1, ["t.9"])
        rig.until(lambda: is_over(rig))
    return lines(directory / "t.9.log")


def heal(server: ForkServer, directory: Path, spec: TaskSpec) -> str:
    """Have one of three die in a micro-batch, and another join; return what came of it."""
    with Rig(server, directory, spec) as rig:
        rig.start("t.1", fault="kill@iteration=4,micro_batch=1")
        rig.start("t.2", "t.3")
        rig.until(lambda: rig.ready("t.1", "t.2", "t.3") or is_over(rig))
        rig.tell(1, ["t.1", "t.2", "t.3"])
        rig.until(lambda: "t.1" in rig.exits or is_over(rig))
        if not is_over(rig):
            rig.start("t.4")
            rig.until(lambda: rig.ready("t.4"))
            rig.tell(2, ["t.2", "t.3", "t.4"], joiners=["t.4"], urgent=True)
            rig.until(lambda: is_over(rig))
        return outcome(rig)


@pytest.mark.parametrize(
    "mistake", [name if name in EACH_TIME else pytest.param(name, marks=pytest.mark.matrix) for name in MISTAKES]
)
def test_loop_with_a_mistake_is_refused_or_trains_as_alone(server: ForkServer, tmp_path: Path, mistake: str) -> None:
    loop, line, replacement, expected = MISTAKES[mistake]
    assert line in loop
    program = tmp_path / "loop.py"
    program.write_text(BEGIN + (loop.replace(line, replacement, 1) if line else loop))
    assert expected in heal(server, tmp_path, task(program))
    if expected == SAME:
        alone = train_alone(server, tmp_path / "alone", task(program))
        assert len({words.split()[1] for words in alone.values()}) == ITERATIONS, "each iteration trains"
        for worker in ("t.1", "t.2", "t.3", "t.4"):
            healed = lines(tmp_path / f"{worker}.log")
            assert healed == {iteration: alone[iteration] for iteration in healed}, worker
