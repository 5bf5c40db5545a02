"""Every command and flag of `unicronctl` that talks to a coordinator. What it imports is paid for at each call."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import NoReturn, TypeAlias, get_args

from events.vocabulary import FaultKind, FaultPhase
from unicrond import VERSION

PROG = "unicronctl"

_DESCRIPTION = "See and steer a training cluster that unicrond coordinates."

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
"""


class Parser(argparse.ArgumentParser):
    """Bad usage is one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """argparse calls this for everything that it does not accept."""
        print(f"{self.prog}: {_plainer(message)}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def parser() -> Parser:
    """All commands that talk to a coordinator, and the names of those that do not (ctl.py)."""
    root = Parser(
        prog=PROG,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_common(None)],
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=VERSION)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
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
    _add(commands, "throughput", "what the throughput model says", "throughput --model gpt3-7b --gpu a100-80g --gpus 8")
    return root


def _common(default: object) -> Parser:
    """Flags that may stand before the command and after it; there they must not undo what stood before."""
    flags = Parser(add_help=False)
    flags.add_argument("--url", default=default, metavar="URL", help="the coordinator's API")
    flags.add_argument("--token-file", default=default, metavar="FILE", help="file with the API's bearer token")
    flags.add_argument(
        "--json", action="store_true", default=default or False, help="JSON instead of text (events: JSON lines)"
    )
    return flags


def _add(commands: Commands, name: str, text: str, *examples: str) -> Parser:
    shown = "".join(f"\n  {PROG} {example}" for example in examples)
    return commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:{shown}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_common(argparse.SUPPRESS)],
        allow_abbrev=False,
    )


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
        reshape.add_argument(flag, type=_positive, metavar="N", help=text)
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
    inject.add_argument("--rank", type=_count, metavar="R", help="its rank (default: 0, or the first on --node)")
    inject.add_argument("--node", metavar="NODE", help="this node, or with --task the worker there")
    inject.add_argument("--at-iteration", type=_count, default=0, metavar="N", help="in iteration N (default: at once)")
    phases = [phase for phase in get_args(FaultPhase) if phase]
    inject.add_argument("--phase", choices=phases, default="", metavar="P", help=", ".join(phases))
    inject.add_argument("--seconds", type=float, default=0.0, metavar="S", help="how slow; or how long (drop-network)")
    inject.add_argument("--xid", type=_count, default=0, metavar="CODE", help="the code that an xid fault reports")
    inject.add_argument(
        "--counts", action="store_true", help="hold it against node and task (strikes, as if unordered)"
    )


def _add_logs(commands: Commands) -> None:
    logs = _add(commands, "logs", "what a worker of a task wrote", "logs big", "logs big --rank 1 -f")
    logs.add_argument("task", metavar="TASK")
    logs.add_argument("--rank", type=_count, metavar="R", help="the worker's rank (default: 0)")
    logs.add_argument(
        "--tail-bytes",
        type=_positive,
        metavar="N",
        default=8192,
        help="begin so many bytes before the end (8192, at most 65536)",
    )
    logs.add_argument("-f", "--follow", action="store_true", help="go on as more is written, across restarts")


def _add_events(commands: Commands) -> None:
    events = _add(
        commands, "events", "the event log, as sentences", "events --after 100", "events -f --type PlanAdopted"
    )
    events.add_argument("--after", type=_count, default=0, metavar="SEQ", help="begin after this sequence number (0)")
    events.add_argument("-f", "--follow", action="store_true", help="go on with what is yet to happen")
    events.add_argument(
        "--type", action="append", default=[], metavar="T", help="only this type of event; may be given again"
    )


def _add_plan(commands: Commands) -> None:
    plan = _add(commands, "plan", "the plan: adopted, foreseen, or of another cluster", "plan show", "plan table")
    plans = plan.add_subparsers(
        dest="plan_command", required=True, metavar="show|table|whatif|solve", parser_class=Parser
    )
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
    whatif.add_argument("--add-nodes", type=_count, default=0, metavar="N", help="with N nodes more")
    whatif.add_argument("--slots", type=_count, default=0, metavar="N", help="workers on each (default: as most have)")
    whatif.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="NAME:FIELD=N",
        help="a task with another weight, min_workers or max_workers; repeatable",
    )
    _add(plans, "solve", "solve a plan problem exactly, without a coordinator", "plan solve PROBLEM.json --json")


def _plainer(message: str) -> str:
    """argparse's words, with a guess where a command was misspelt."""
    choice = re.match(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)$", message)
    if choice is None:
        return message.removeprefix("argument ")
    known = re.findall(r"[\w-]+", choice[3])
    close = difflib.get_close_matches(choice[2], known, n=1)
    return f"no command {choice[2]!r}; " + (f"did you mean {close[0]}?" if close else f"use {', '.join(known)}")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError("0 is none; give 1 or more")
    return int(text)
