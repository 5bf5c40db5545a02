"""The commands of `unicronctl` that begin, change and end tasks."""

from __future__ import annotations

from pathlib import Path

from unicrond.ctl.parsing import REASON, TASK, add_to
from unicrond.events.cli.command_line import Commands, number, option, switch, whole

_LAYOUT = {
    "tp": "tensor parallel size (default: unchanged)",
    "pp": "pipeline parallel size (default: unchanged)",
    "vpp": "chunks of the model in each pipeline stage (default: unchanged, or fewer)",
    "ep": "over how many of tp's workers the experts are (default: unchanged, or fewer)",
    "micro-batch": "samples in a micro-batch (default: unchanged)",
}


def add_tasks_control(commands: Commands) -> None:
    """Add the commands for tasks to the parser of `unicronctl`."""
    add_to(
        commands,
        "submit",
        "submit the task that a file describes (docs/use/task-files.md)",
        ("submit examples/big.yaml", "submit - < task.yaml"),
        option("file", "FILE", "YAML; - reads stdin"),
        switch("--check", "only check the file; needs no coordinator"),
    )
    add_to(
        commands,
        "init-megatron",
        "write a task file for Megatron-LM (docs/use/megatron-lm.md) to stdout; needs no coordinator",
        (
            "init-megatron -- torchrun --nproc-per-node 8 /opt/Megatron-LM/pretrain_gpt.py ... > lm.yaml",
            "init-megatron --script train.sbatch > lm.yaml",
        ),
        option("--script", "FILE", "a batch or shell script that starts the training", type=Path),
        option("--name", "NAME", "of the task (default: the script's)", default=""),
        option("words", "WORD", "behind --: the command line", nargs="*"),
    )
    add_to(commands, "cancel", "end a task; its checkpoints stay", ("cancel big --reason 'wrong data'",), TASK, REASON)
    add_to(
        commands,
        "reshape",
        "change the layout or size of a running task; it continues from its present iteration (docs/use/reshape.md)",
        ("reshape big --tp 2 --pp 1", "reshape big --pp 4 --vpp 2", "reshape big --max-workers 4"),
        TASK,
        *(option(f"--{name}", "N", meaning, type=whole(1)) for name, meaning in _LAYOUT.items()),
        option("--min-workers", "N", "default: the present one, in whole replicas", type=whole(1)),
        option("--max-workers", "N", "default: the present one, in whole replicas", type=whole(1)),
        REASON,
    )
    add_to(
        commands,
        "checkpoint",
        "take a checkpoint out of its layout, or into another task; needs no coordinator (docs/design/sources.md)",
        (
            "checkpoint export /ckpt/big/iteration-00000120 /exported",
            "checkpoint import /exported/iteration-00000120 /ckpt/other --task other",
        ),
        option("what", "WHAT", "export or import", choices=("export", "import")),
        option("source", "CHECKPOINT", "a directory iteration-N", type=Path),
        option("directory", "DIR", "where to write it; for import the task's checkpoint.dir", type=Path),
        option("--task", "NAME", "import: the task that is to begin from it", default=""),
    )
    add_to(
        commands,
        "set",
        "train on with another learning rate, or to another iteration (docs/use/reshape.md)",
        ("set big --iterations 2000", "set big --lr 1e-4 --reason 'it spikes'"),
        TASK,
        option("--iterations", "N", "train up to this iteration", type=whole(1)),
        option("--lr", "RATE", "the highest learning rate of its schedule", type=number(0, 1e6, "the rate")),
        REASON,
    )
