"""Every command and flag of `unicronctl`. What it imports is paid for at each call."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from events import command_line
from events.command_line import EXIT_CODES, Commands, Epilog, Parser, add_command, whole
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
    """All commands; `events decode` alone is found before (ctl.py)."""
    root = Parser(
        prog=PROG,
        description="See and steer a training cluster that unicrond coordinates.",
        epilog=_EPILOG,
        parents=[_common(None)],
        version=VERSION,
    )
    commands = root.commands()
    _add(commands, "status", "the cluster at a glance: coordinator, plan, nodes, tasks, incidents", "status")
    _add(commands, "nodes", "the nodes, and what runs on them", "nodes", "nodes --json")
    _add(commands, "tasks", "the tasks and their progress", "tasks")
    _add_submit_and_cancel(commands)
    _add_reshape(commands)
    _add_node_control(commands)
    _add_inject(commands)
    _add_logs(commands)
    _add_events(commands)
    _add(commands, "watch", "the live view: nodes, tasks, plan, incidents, last events", "watch")
    _add_plan(commands)
    _add_throughput(commands)
    return root


def _common(default: object) -> Parser:
    """Flags that may stand before the command and after it; there they must not undo what stood before."""
    flags = Parser(add_help=False)
    flags.add_argument("--url", default=default, metavar="URL", help="the coordinator's API")
    flags.add_argument("--token-file", type=Path, default=default, metavar="FILE", help="holds the API's bearer token")
    flags.add_argument(
        "--json", action="store_true", default=default or False, help="JSON instead of text (events: JSON lines)"
    )
    return flags


def _add(commands: Commands, name: str, text: str, *shown: str, epilog: Epilog = None) -> Parser:
    epilog = epilog or command_line.examples(*(f"{PROG} {example}" for example in shown))
    return add_command(commands, name, text, epilog, parents=[_common(argparse.SUPPRESS)])


def _add_submit_and_cancel(commands: Commands) -> None:
    submit = _add(
        commands,
        "submit",
        "submit the task that a file describes (docs/use/task-files.md)",
        "submit examples/big.yaml",
        "submit - < task.yaml",
    )
    submit.add_argument("file", metavar="FILE", help="YAML; - reads stdin")
    submit.add_argument("--check", action="store_true", help="check the file only; needs no coordinator")

    cancel = _add(commands, "cancel", "end a task; its checkpoints stay", "cancel big --reason 'wrong data'")
    cancel.add_argument("task", metavar="TASK")
    cancel.add_argument("--reason", default="", help="what the log is to say (default: asked by a person)")


def _add_reshape(commands: Commands) -> None:
    reshape = _add(
        commands,
        "reshape",
        "another layout or size for a running task; it goes on from where it stands (docs/use/reshape.md)",
        "reshape big --tp 2 --pp 1",
        "reshape big --max-workers 4",
    )
    reshape.add_argument("task", metavar="TASK")
    for flag, text in (
        ("--tp", "tensor parallel size (default: as it is)"),
        ("--pp", "pipeline parallel size (default: as it is)"),
        ("--min-workers", "default: the present one, in whole replicas"),
        ("--max-workers", "default: the present one, in whole replicas"),
    ):
        reshape.add_argument(flag, type=whole(1), metavar="N", help=text)
    reshape.add_argument("--reason", default="", help="what the log is to say (default: asked by a person)")


def _add_node_control(commands: Commands) -> None:
    for name, text in (
        ("cordon", "no new workers for a node; those that it has stay"),
        ("drain", "empty a node: its workers move at an iteration boundary, and nothing is lost"),
        ("uncordon", "a cordoned, drained or isolated node may have workers again"),
    ):
        control = _add(commands, name, text, f"{name} node3 --reason 'new fan'")
        control.add_argument("node", metavar="NODE")
        control.add_argument("--reason", default="", help="what the log is to say (default: asked by a person)")


def _add_inject(commands: Commands) -> None:
    inject = _add(
        commands,
        "inject",
        "order a fault, where the coordinator runs with --allow-injection (docs/operate/faults.md)",
        "inject kill --task big --rank 1 --at-iteration 20 --phase reduce",
        "inject slow --task big --rank 0 --seconds 0.5",
        "inject drop-network --node node3 --seconds 10",
    )
    kinds = [kind.replace("_", "-") for kind in get_args(FaultKind)]
    inject.add_argument("kind", metavar="KIND", choices=kinds, help=", ".join(kinds))
    inject.add_argument("--task", metavar="TASK", help="a worker of this task")
    inject.add_argument("--rank", type=whole(), metavar="R", help="its rank (default: 0, or the first on --node)")
    inject.add_argument("--node", metavar="NODE", help="this node, or with --task the worker there")
    inject.add_argument(
        "--at-iteration", type=whole(), default=0, metavar="N", help="in iteration N (default: at once)"
    )
    phases = [phase for phase in get_args(FaultPhase) if phase]
    inject.add_argument("--phase", choices=phases, default="", metavar="P", help=", ".join(phases))
    inject.add_argument("--seconds", type=float, default=0.0, metavar="S", help="how slow; or how long (drop-network)")
    inject.add_argument("--xid", type=whole(), default=0, metavar="CODE", help="the code that an xid fault reports")
    inject.add_argument(
        "--counts", action="store_true", help="hold it against node and task (strikes, as if unordered)"
    )


def _add_logs(commands: Commands) -> None:
    logs = _add(commands, "logs", "what a worker of a task wrote", "logs big", "logs big --rank 1 -f")
    logs.add_argument("task", metavar="TASK")
    logs.add_argument("--rank", type=whole(), metavar="R", help="the worker's rank (default: 0)")
    logs.add_argument(
        "--tail-bytes",
        type=whole(1),
        metavar="N",
        default=8192,
        help="begin so many bytes before the end (8192, at most 65536)",
    )
    logs.add_argument("-f", "--follow", action="store_true", help="go on as more is written, across restarts")


def _add_events(commands: Commands) -> None:
    events = _add(
        commands, "events", "the event log, as sentences", "events --after 100", "events -f --type PlanAdopted"
    )
    events.add_argument("--after", type=whole(), default=0, metavar="SEQ", help="begin after this sequence number (0)")
    events.add_argument("-f", "--follow", action="store_true", help="go on with what is yet to happen")
    events.add_argument(
        "--type", action="append", default=[], metavar="T", help="only this type of event; may be given again"
    )


def _add_plan(commands: Commands) -> None:
    plan = _add(commands, "plan", "the plan: adopted, foreseen, or of another cluster", "plan show", "plan table")
    plans = plan.commands("plan_command")
    _add(plans, "show", "who has what, what it is worth, why, how it was come by, what all has cost", "plan show")
    _add(
        plans,
        "table",
        "what would happen if: the plan for each event that may come next",
        "plan table",
        "plan table --json",
    )
    whatif = _add(
        plans,
        "whatif",
        "the plan that would be adopted, were the cluster otherwise; nothing changes",
        "plan whatif --lose node3",
        "plan whatif --add-nodes 4 --slots 8 --task big:weight=3",
    )
    whatif.add_argument("--lose", action="append", default=[], metavar="NODE", help="without this node; repeatable")
    whatif.add_argument("--add-nodes", type=whole(), default=0, metavar="N", help="with N nodes more")
    whatif.add_argument("--slots", type=whole(), default=0, metavar="N", help="workers on each (default: as most have)")
    whatif.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="NAME:FIELD=N",
        help="a task with another weight, min_workers or max_workers; repeatable",
    )
    solve = _add(plans, "solve", "solve a plan problem exactly, without a coordinator", epilog=_SOLVE_EPILOG)
    solve.add_argument("problem", metavar="PROBLEM.json", help="the problem's file, - for standard input")


def _add_throughput(commands: Commands) -> None:
    what = "the achieved model FLOP/s of a GPT on so many GPUs, in its best 3D-parallel layout"
    throughput = _add(commands, "throughput", what, epilog=_presets)
    throughput.add_argument("--model", help="preset, see below (required)")
    throughput.add_argument("--gpu", help="preset, see below (required)")
    throughput.add_argument(
        "--gpus",
        type=gpu_counts,
        metavar="N|A..B|A..B..STEP",
        help="GPU counts, comma-separated: one, doubling from A to B, or in steps (required)",
    )
    for flag, text in (
        ("--tp", "tensor parallel degree (default: the best)"),
        ("--pp", "pipeline parallel degree (default: the best)"),
        ("--micro-batch", "sequences per micro-batch (default: the best)"),
        ("--batch", "sequences per iteration (default: the model's)"),
        ("--seq", "tokens per sequence (default: the model's)"),
    ):
        throughput.add_argument(flag, type=whole(1, 10**12), metavar="N", help=text)
    throughput.add_argument("--stack", help="software stack it was calibrated on (default: the GPU's usual one)")
    throughput.add_argument("--even", action="store_true", help="refuse batches that do not divide among the replicas")
    throughput.add_argument("--plot", type=Path, metavar="OUT.png", help="draw throughput over GPUs (needs matplotlib)")


def _presets() -> str:
    from unicrond.planning.presets import GPUS, MODELS, STACKS

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
