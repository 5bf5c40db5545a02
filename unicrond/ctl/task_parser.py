"""The commands of `unicronctl` that begin, change and end tasks."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from unicrond.ctl.parsing import REASON, TASK, add_to
from unicrond.events.cli.command_line import Commands, add, existing_file, name, number, option, switch, whole
from unicrond.events.cli.shared_flags import shared
from unicrond.events.vocabulary import Mode

MODES = get_args(Mode)
#: Of checkpoints, to convert to.
FORMATS = ("hf", "torch-dist", "portable")


def add_tasks_control(commands: Commands) -> None:
    """Add the commands for tasks to the parser of `unicronctl`."""
    submit = add_to(
        commands,
        "submit",
        "submit the task that a file describes (docs/use/task-files.md)",
        (
            "submit examples/big.yaml",
            "submit - < task.yaml",
            "submit big.yaml --resume      # other settings, from the states that task big has saved",
            "submit big.yaml --restart     # from the seed; those states are kept in before-*/",
            "submit big.yaml --prove       # and kill one of its workers, once it trains, to see that it heals",
            "submit big.yaml --fork big-2  # task big-2, from the newest state of task big",
        ),
        option("file", "FILE", "YAML; - reads stdin"),
        shared("--check", "needs no coordinator"),
        switch("--prove", "have it prove in its first minutes that it heals, as `prove` does"),
    )
    add(
        submit.add_mutually_exclusive_group(),
        switch("--resume", "go on from the states that the name has, though its settings were others"),
        switch("--restart", "begin from the seed, or what the program loads; keep the states that the name has"),
        option("--fork", "NAME", "begin a task of this name from the states of the file's", type=name),
    )
    add_to(
        commands,
        "init-megatron",
        "write a task file for Megatron-LM (docs/use/megatron-lm.md) to stdout; needs no coordinator",
        (
            "init-megatron -- torchrun --nproc-per-node 8 /opt/Megatron-LM/pretrain_gpt.py ... > lm.yaml",
            "init-megatron --script train.sbatch > lm.yaml",
        ),
        option("--script", "FILE", "read the batch or shell script that starts the training", type=Path),
        shared("--task", "of the file's task (default: the script's)"),
        option("words", "WORD", "behind --: the command line", nargs="*"),
    )
    add_to(commands, "cancel", "end a task; its checkpoints stay", ("cancel big --reason 'wrong data'",), TASK, REASON)
    add_to(
        commands,
        "prove",
        "prove that a running task heals: kill a worker and watch; `tasks` says how it stands (docs/use/task-files.md)",
        ("prove big",),
        TASK,
    )
    add_to(
        commands,
        "reshape",
        "change the layout or size of a running task; it continues from its present iteration (docs/use/reshape.md)",
        ("reshape big --tp 2 --pp 1", "reshape big --pp 4 --vpp 2", "reshape big --max-workers 4"),
        TASK,
        *(shared(flag, "(default: unchanged)") for flag in ("--tp", "--pp", "--micro-batch")),
        option("--vpp", "N", "set the chunks of the model in each pipeline stage (unchanged, or fewer)", type=whole(1)),
        option("--ep", "N", "set over how many workers the experts are (unchanged, or fewer)", type=whole(1)),
        option("--etp", "N", "set in how many parts each expert is cut (default: tp / ep)", type=whole(1)),
        option("--cp", "N", "set over how many workers a sequence is (default: unchanged)", type=whole(1)),
        shared("--min-workers", "(default: unchanged, in whole replicas)"),
        shared("--max-workers", "(default: unchanged, in whole replicas)"),
        REASON,
    )
    _add_settings(commands)


def _add_settings(commands: Commands) -> None:
    add_to(
        commands,
        "checkpoint",
        "give a checkpoint another task, format or layout; needs no coordinator (docs/use/checkpoints.md)",
        (
            "checkpoint export /ckpt/big/iteration-00000120 /exported",
            "checkpoint import /exported/iteration-00000120 /ckpt/other --task other",
            "checkpoint convert /ckpt/big/iteration-00000120 /models/big --to hf",
            "checkpoint convert /models/llama /ckpt/other --to portable --task other",
            "checkpoint convert /exported/iteration-00000120 /megatron/big --to torch-dist",
        ),
        option("what", "WHAT", "export, import or convert", choices=("export", "import", "convert")),
        option("source", "CHECKPOINT", "a directory iteration-N, or its URL; convert: of another format, too"),
        option("directory", "DIR", "where to write it; for import the task's checkpoint.dir"),
        shared("--task", "import, convert: the one that is to begin from it"),
        option("--to", "FORMAT", "convert: hf (Hugging Face), torch-dist (Megatron) or portable", choices=FORMATS),
        option(
            "--hf-config", "FILE", "convert to hf: a config.json, for what the state does not say", type=existing_file
        ),
        option("--vocab-size", "N", "convert to hf: cut the vocabulary to N words", type=whole(1)),
        option("--pad-vocab", "N", "convert from hf: pad the vocabulary to a multiple of N", type=whole(1)),
        switch("--model-only", "convert: leave the optimizer's state out"),
    )
    add_to(
        commands,
        "mode",
        "change whether decisions that take out or move workers are carried out, or only told (docs/operate/brakes.md)",
        ("mode observe --reason 'first week'", "mode observe --task big", "mode heal"),
        option("mode", "MODE", "heal, or observe: what died is restarted, all else is told", choices=MODES),
        shared("--task", "of this task alone"),
        REASON,
    )
    add_to(
        commands,
        "set",
        "change what a running task is worth, how many workers it may have, how far and how fast it learns",
        (
            "set big --priority 10 --reason 'deadline on Friday'",
            "set debug --weight 0.01 --preemptible yes",
            "set big --min-workers 2 --max-workers 6",
            "set big --iterations 2000 --lr 1e-4",
        ),
        TASK,
        option("--weight", "N", "set what its FLOP/s count for beside other tasks'", type=number(0, 1e6, "the weight")),
        option("--priority", "N", "set whose min_workers are met first: the higher (above 0: scope operate)", type=int),
        option("--preemptible", "YES|NO", "let it run on what other tasks leave", choices=("yes", "no")),
        shared("--min-workers"),
        shared("--max-workers"),
        shared("--iterations"),
        option("--lr", "RATE", "set the highest learning rate of its schedule", type=number(0, 1e6, "the rate")),
        REASON,
    )
