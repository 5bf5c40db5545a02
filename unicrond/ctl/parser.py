"""Every command and flag of `unicronctl`. What it imports is paid for at each call."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from events import command_line
from events.command_line import (
    EXIT_CODES,
    Commands,
    Epilog,
    Flag,
    Parser,
    add,
    add_command,
    number,
    option,
    repeated,
    switch,
    whole,
)
from events.vocabulary import FaultKind, FaultPhase
from unicrond import VERSION

PROG = "unicronctl"
#: More than any cluster this is for, and small enough to answer at once.
GPUS_MAX = 131072
COUNTS_MAX = 4096

_EPILOG = f"""\
without a coordinator:
  {PROG} plan solve PROBLEM.json      solve a plan problem exactly
  {PROG} throughput --model ...       what the throughput model says
  {PROG} events decode                one event from stdin as a line, for `nats --translate`

examples:
  {PROG} status
  {PROG} submit examples/big.yaml
  {PROG} logs big --rank 0 -f
  {PROG} --url http://head:7470 --token-file token tasks --json

The coordinator is at --url, else $UNICRON_URL, else http://127.0.0.1:7470.
The token is in the file --token-file, else in $UNICRON_TOKEN_FILE.
{EXIT_CODES}
"""

_SOLVE_EPILOG = """The file holds {"n": workers after the event, "D_run": number, "D_trans": number, "tasks": [
{"weight": w, "x": workers before, "faulty": bool, "min": int, "floor": int?, "cap": int?, "T": [T(0), T(1), ...] or
{"8": T(8), ...}}]}; entries of T that are missing are 0. Further, if wanted: "churn" beside "D_trans"
(what moving a healthy task costs on top), "unit" (workers come in multiples of it) and "name" per task.

example:
  $ cat problem.json
  {"n": 3, "D_run": 1000, "D_trans": 10, "tasks": [
    {"weight": 2, "x": 2, "faulty": true, "min": 1, "floor": 1, "cap": 3, "T": [0, 10, 19, 27]},
    {"weight": 1, "x": 2, "faulty": false, "min": 1, "floor": 1, "T": {"1": 10, "2": 20}}]}
  $ unicronctl plan solve problem.json --json
  {"objective": 47420.0, "plan": [2, 1], "reason": "3 of 3 workers in use, WAF 48 FLOP/s: ..."}
"""


def parser() -> Parser:
    """All commands; `events decode` alone is handled before this (main.py)."""
    root = Parser(
        prog=PROG,
        description="See and control a training cluster that unicrond coordinates.",
        epilog=_EPILOG,
        parents=[_common(None)],
        version=VERSION,
    )
    commands = root.commands()
    _add(commands, "status", "the cluster at a glance: coordinator, plan, nodes, tasks, incidents", ("status",))
    _add(commands, "nodes", "the nodes, and what runs on them", ("nodes", "nodes --json"))
    _add(commands, "tasks", "the tasks and their progress", ("tasks",))
    _add_tasks_control(commands)
    _add_node_control(commands)
    _add_inject(commands)
    _add_reading(commands)
    _add(commands, "watch", "the live view: nodes, tasks, plan, incidents, last events", ("watch",))
    _add_plan(commands)
    _add_throughput(commands)
    return root


def _common(default: object) -> Parser:
    """Flags that may stand before the command and after it; there they must not undo what stood before."""
    flags = Parser(add_help=False)
    add(
        flags,
        option("--url", "URL", "the coordinator's API", default=default),
        option("--token-file", "FILE", "file with the API's bearer token", type=Path, default=default),
    )
    what = "JSON instead of text (events: JSON lines)"
    flags.add_argument("--json", action="store_true", default=default or False, help=what)
    return flags


def _add(commands: Commands, name: str, text: str, shown: tuple[str, ...] | Epilog, *flags: Flag) -> Parser:
    """`shown`: examples without the name of the program, or a whole epilog."""
    epilog = command_line.examples(*(f"{PROG} {line}" for line in shown)) if isinstance(shown, tuple) else shown
    return add_command(commands, name, text, epilog, *flags, parents=[_common(argparse.SUPPRESS)])


_TASK = option("task", "TASK", "its name")
_REASON = option("--reason", "TEXT", "reason for the log (default: requested by an operator)", default="")


def _add_tasks_control(commands: Commands) -> None:
    _add(
        commands,
        "submit",
        "submit the task that a file describes (docs/use/task-files.md)",
        ("submit examples/big.yaml", "submit - < task.yaml"),
        option("file", "FILE", "YAML; - reads stdin"),
        switch("--check", "only check the file; needs no coordinator"),
    )
    _add(commands, "cancel", "end a task; its checkpoints stay", ("cancel big --reason 'wrong data'",), _TASK, _REASON)
    _add(
        commands,
        "reshape",
        "change the layout or size of a running task; it continues from its present iteration (docs/use/reshape.md)",
        ("reshape big --tp 2 --pp 1", "reshape big --max-workers 4"),
        _TASK,
        option("--tp", "N", "tensor parallel size (default: unchanged)", type=whole(1)),
        option("--pp", "N", "pipeline parallel size (default: unchanged)", type=whole(1)),
        option("--min-workers", "N", "default: the present one, in whole replicas", type=whole(1)),
        option("--max-workers", "N", "default: the present one, in whole replicas", type=whole(1)),
        _REASON,
    )


def _add_node_control(commands: Commands) -> None:
    for name, text in (
        ("cordon", "give a node no new workers; those that it has stay"),
        ("drain", "empty a node: its workers move at an iteration boundary, and nothing is lost"),
        ("uncordon", "give a cordoned, drained or isolated node workers again"),
    ):
        _add(commands, name, text, (f"{name} node3 --reason 'new fan'",), option("node", "NODE", "its name"), _REASON)


def _add_inject(commands: Commands) -> None:
    kinds = [kind.replace("_", "-") for kind in get_args(FaultKind)]
    phases = [phase for phase in get_args(FaultPhase) if phase]
    _add(
        commands,
        "inject",
        "order a fault, if the coordinator runs with --allow-injection (docs/operate/faults.md)",
        (
            "inject kill --task big --rank 1 --at-iteration 20 --phase reduce",
            "inject slow --task big --rank 0 --seconds 0.5",
            "inject drop-network --node node3 --seconds 10",
        ),
        option("kind", "KIND", ", ".join(kinds), choices=kinds),
        option("--task", "TASK", "a worker of this task"),
        option("--rank", "R", "its rank (default: 0, or the first on --node)", type=whole()),
        option("--node", "NODE", "this node, or with --task the worker there"),
        option("--at-iteration", "N", "in iteration N (default: at once)", type=whole(), default=0),
        option("--phase", "P", ", ".join(phases), choices=phases, default=""),
        option(
            "--seconds", "S", "how slow; or how long (drop-network)", type=number(0, 86_400, "seconds"), default=0.0
        ),
        option("--xid", "CODE", "the code that an xid fault reports", type=whole(), default=0),
        switch("--counts", "count it against node and task, like an unordered fault"),
    )


def _add_reading(commands: Commands) -> None:
    _add(
        commands,
        "logs",
        "show the output of a task's worker",
        ("logs big", "logs big --rank 1 -f"),
        _TASK,
        option("--rank", "R", "the worker's rank (default: 0)", type=whole()),
        option(
            "--tail-bytes",
            "N",
            "begin this many bytes before the end (8192, at most 65536)",
            type=whole(1),
            default=8192,
        ),
        switch("-f", "--follow", "follow the output, across restarts"),
    )
    _add(
        commands,
        "events",
        "show the event log, as sentences",
        ("events --after 100", "events -f --type PlanAdopted"),
        option("--after", "SEQ", "begin after this sequence number (0)", type=whole(), default=0),
        switch("-f", "--follow", "follow new events"),
        repeated("--type", "T", "only this type of event"),
    )


def _add_plan(commands: Commands) -> None:
    plan = _add(commands, "plan", "the plan: adopted, foreseen, or of another cluster", ("plan show", "plan table"))
    plans = plan.commands("plan_command")
    _add(plans, "show", "each task's slots and WAF, the reason, the method, the costs so far", ("plan show",))
    _add(
        plans,
        "table",
        "the plan for each event that may come next",
        ("plan table", "plan table --json"),
    )
    _add(
        plans,
        "whatif",
        "the plan for a changed cluster; changes nothing",
        ("plan whatif --lose node3", "plan whatif --add-nodes 4 --slots 8 --task big:weight=3"),
        repeated("--lose", "NODE", "without this node"),
        option("--add-nodes", "N", "with N more nodes", type=whole(), default=0),
        option("--slots", "N", "workers on each (default: as most nodes have)", type=whole(), default=0),
        repeated("--task", "NAME:FIELD=N", "a task with another weight, min_workers or max_workers"),
    )
    _add(
        plans,
        "solve",
        "solve a plan problem exactly, without a coordinator",
        _SOLVE_EPILOG,
        option("problem", "PROBLEM.json", "the problem's file, - for standard input"),
    )


def _add_throughput(commands: Commands) -> None:
    count = whole(1, 10**12)
    _add(
        commands,
        "throughput",
        "the achieved model FLOP/s of a GPT on these numbers of GPUs, in its best 3D-parallel layout",
        _presets,
        option("--model", "MODEL", "preset, see below (required)"),
        option("--gpu", "GPU", "preset, see below (required)"),
        option(
            "--gpus",
            "N|A..B|A..B..STEP",
            "GPU counts, comma-separated: one, doubling from A to B, or in steps (required)",
            type=gpu_counts,
        ),
        option("--tp", "N", "tensor parallel degree (default: the best)", type=count),
        option("--pp", "N", "pipeline parallel degree (default: the best)", type=count),
        option("--micro-batch", "N", "sequences per micro-batch (default: the best)", type=count),
        option("--batch", "N", "sequences per iteration (default: the model's)", type=count),
        option("--seq", "N", "tokens per sequence (default: the model's)", type=count),
        option("--stack", "STACK", "software stack it was calibrated on (default: the GPU's usual one)"),
        switch("--even", "refuse batches that do not divide among the replicas"),
        option("--plot", "OUT.png", "draw throughput over GPUs (needs matplotlib)", type=Path),
    )


def _presets() -> str:
    from unicrond.throughput.presets import GPUS, MODELS, STACKS

    shown = command_line.examples(
        f"{PROG} throughput --model gpt3-7b --gpu a100-80g --gpus 8..512",
        f"{PROG} throughput --model llama3-70b --gpu h100-80g --gpus 64..128..8 --tp 8 --json",
    )
    return f"{shown}\n\nmodels:  {', '.join(MODELS)}\nGPUs:    {', '.join(GPUS)}\nstacks:  {', '.join(STACKS)}"


def gpu_counts(text: str) -> list[int]:
    """`8`, `8..512` (doubling, 512 included) or `8..512..8` (steps), comma-separated; ascending, no repeats.

    Raises ValueError, which names the fix.
    """
    counts: set[int] = set()
    for part in text.split(","):
        numbers = [whole(1, 10**12)(count) for count in part.split("..")]
        if len(numbers) > 3:
            raise ValueError(f"{part!r} is not N, A..B or A..B..STEP; for example 8..512")
        low, high = numbers[0], numbers[1] if len(numbers) > 1 else numbers[0]
        if high < low:
            raise ValueError(f"{part!r} runs downwards; write {high}..{low}")
        if high > GPUS_MAX:
            raise ValueError(f"{high} is more than {GPUS_MAX}; ask for fewer GPUs")
        if len(numbers) == 3:
            counts.update(range(low, high + 1, numbers[2]))
        else:
            counts.update({high, *(low << doubled for doubled in range(high.bit_length()) if low << doubled < high)})
    if len(counts) > COUNTS_MAX:
        raise ValueError(f"{len(counts)} counts are more than {COUNTS_MAX}; use a larger step")
    return sorted(counts)
