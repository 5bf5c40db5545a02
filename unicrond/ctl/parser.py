"""Every command and flag of `unicronctl`. What it imports is paid for at each call."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from unicrond import VERSION
from unicrond.ctl.future_time import MOMENT_SYNTAX, moment, span_s
from unicrond.ctl.parsing import AT, PROG, REASON, TASK, add_to, common
from unicrond.ctl.task_parser import add_tasks_control
from unicrond.events.cli import command_line
from unicrond.events.cli.command_line import (
    EXIT_CODES,
    Commands,
    Flag,
    Parser,
    add,
    add_login,
    event_type,
    number,
    option,
    point,
    repeated,
    switch,
    whole,
)
from unicrond.events.vocabulary import ErrorKind, FaultKind, FaultPhase

#: More than any cluster this is for, and small enough to answer at once.
GPUS_MAX = 131072
COUNTS_MAX = 4096
#: What `wait` waits for (waiting.py): what a task is, or one of `training` and `ended`.
WAIT_FOR = ("training", "ended", "completed", "failed", "cancelled")

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

The coordinator is at --url, else $UNICRON_URL, else http://127.0.0.1:7470. Of several heads give all, with
commas between: the one that leads is asked.
The token is in the file --token-file, else in $UNICRON_TOKEN_FILE.
The CA of an https API is in the file --tls-ca, else in $UNICRON_TLS_CA, else one that this machine knows.
{EXIT_CODES}
"""

_SOLVE_EPILOG = """The file holds {"n": workers after the event, "D_run": number, "D_trans": number, "tasks": [
{"weight": w, "x": workers before, "faulty": bool, "min": int, "floor": int?, "cap": int?, "T": [T(0), T(1), ...] or
{"8": T(8), ...}}]}; entries of T that are missing are 0. Further, if wanted: "churn" beside "D_trans"
(what moving a healthy task costs on top), "nodes": [slots, ...] (each tensor-parallel group then finds room on one),
and per task "name", "unit" (workers come in multiples of it), "tp" (so many of a unit need one node), "turn",
"priority" and "preemptible" (whose floor is met first), "D_trans", "D_move", "D_reshape", "D_restart", and "layouts"
that it may get: [{"tp", "pp", "vpp", "ep", "micro_batch", "cap", "T": as above}]. The answer then has "layouts" too.

example:
  $ cat problem.json
  {"n": 3, "D_run": 1000, "D_trans": 10, "tasks": [
    {"weight": 2, "x": 2, "faulty": true, "min": 1, "floor": 1, "cap": 3, "T": [0, 10, 19, 27]},
    {"weight": 1, "x": 2, "faulty": false, "min": 1, "floor": 1, "T": {"1": 10, "2": 20}}]}
  $ unicronctl plan solve problem.json --json
  {"objective": 47420.0, "plan": [2, 1], "reason": "3 of 3 workers in use, WAF 48 FLOP/s: ..."}
"""


def parser() -> Parser:
    """Build the parser of all commands; `events decode` alone is handled before this (main.py)."""
    root = Parser(
        prog=PROG,
        description="See and control a training cluster that unicrond coordinates.",
        epilog=_EPILOG,
        parents=[common(None)],
        version=VERSION,
    )
    commands = root.commands()
    _add_looking(commands)
    add_to(
        commands,
        "goodput",
        "goodput and badput by cause, ETTR, MFU, interruptions, lost work, suspect nodes (docs/operate/goodput.md)",
        ("goodput", "goodput --after 24h", "goodput --peak-tflops 989 --json"),
        point("--after", "leave out everything up to and with this point; 24h: before the end"),
        AT,
        option("--peak-tflops", "N", "of one worker, dense, for MFU", type=whole(0, 10**6), default=0),
    )
    add_tasks_control(commands)
    _add_node_control(commands)
    _add_inject(commands)
    _add_reading(commands)
    _add_history(commands)
    _add_plan(commands)
    _add_throughput(commands)
    _add_nats(commands)
    return root


def _add_looking(commands: Commands) -> None:
    summary = "the cluster at a glance: coordinator, plan, nodes, tasks, incidents"
    add_to(commands, "status", summary, ("status", "status --at 10m"), AT)
    add_to(commands, "nodes", "the nodes, and what runs on them", ("nodes", "nodes --json"), AT)
    add_to(commands, "tasks", "the tasks and their progress", ("tasks", "tasks --at 1234"), AT)
    add_to(
        commands,
        "workers",
        "the workers: rank, node, process id, status",
        ("workers", "workers big --json"),
        option("task", "TASK", "of this task alone", nargs="?"),
        AT,
    )
    add_to(
        commands,
        "describe",
        "everything about one task, node or incident, and its last events",
        ("describe task big", "describe node gpu07", "describe incident i52", "describe task big --at 10m"),
        option("kind", "KIND", "task, node or incident", choices=("task", "node", "incident")),
        option("name", "NAME", "its name, or the incident's id"),
        AT,
    )
    epilog = command_line.examples(f"{PROG} doctor", f"{PROG} doctor --quick", f"{PROG} doctor --library nccl")
    add_to(
        commands,
        "doctor",
        "what is likely to go wrong, each with its fix: versions, clocks, keys, GPUs, disks, links, shared storage",
        f"{epilog}\n\nThe agents look at their nodes, connect to each other, sum 4 MiB two by two, and look for a file"
        "\nthat one of them writes to each task's checkpoint directory. That takes up to a minute, and one niced"
        "\nprocess on the CPU of each node (nccl: a GPU whose slot is free). It needs a token with the scope operate."
        "\n\nexit codes: 0 nothing found, 1 something found, or no coordinator",
        switch("--quick", "judge what the coordinator knows, and have no agent look"),
        option("--library", "NAME", "gloo, or nccl, which no test has run on GPUs (gloo)",
               choices=("gloo", "nccl"), default="gloo"),
        option("--limit-s", "S", "how long the sums may take (60); busy nodes need more",
               type=number(5, 600, "seconds")),
    )  # fmt: skip
    add_to(commands, "watch", "the live view: nodes, tasks, plan, incidents, last events", ("watch",))
    add_to(
        commands,
        "top",
        "the live table of tasks and workers; once, where the output is no terminal",
        ("top", "top --once"),
        switch("--once", "print it once"),
    )
    _add_wait(commands)


def _add_wait(commands: Commands) -> None:
    epilog = command_line.examples(
        f"{PROG} wait big", f"{PROG} wait big --for training --timeout-s 300 && echo it trains", f"{PROG} wait --all"
    )
    wait = add_to(
        commands,
        "wait",
        "wait until a task has come to a status",
        f"{epilog}\n\nexit codes: 0 reached, 1 a task ended otherwise, 2 bad usage, 3 the time is over,"
        " 130 interrupted",
        option(
            "--for", "STATUS", f"{', '.join(WAIT_FOR)} (completed)", choices=WAIT_FOR, default="completed", dest="until"
        ),
        option("--timeout-s", "S", "give up after so many seconds", type=number(0, 1e9, "seconds")),
    )
    target = wait.add_mutually_exclusive_group(required=True)
    add(target, option("task", "TASK", "its name", nargs="?"), switch("--all", "every task"))


def _add_node_control(commands: Commands) -> None:
    nodes = option("nodes", "NODE", "its name; several are taken together", nargs="+")
    wait = option("--wait-s", "S", "wait until it is empty, at most so long", type=number(0, 1e6, "seconds"))
    by = option("--by", "TIME", f"empty at that time, and until then as useful as can be: {MOMENT_SYNTAX}", type=moment)
    until = switch("--until-return", "until the node has come back with a new agent: a restart or a reboot")
    boot = option("--boot", "BOOT", "only if the node's agent is this one (`unicronctl describe node`)", type=whole())
    address = option("--address", "IP", "only if the node's agent is at this address")
    leave = switch("--leave", "a node that is up leaves for good first: it is drained, and its agent ends with 0")
    ends = "\n\nexit codes: 0 done, 1 refused, 2 bad usage, 3 not empty when --wait-s is over, 130 interrupted"
    for name, text, *more in (
        ("cordon", "give a node no new workers; those that it has stay"),
        ("drain", "empty a node: its workers move at an iteration boundary, and nothing is lost", wait, by, until),
        ("uncordon", "give a cordoned, drained or isolated node workers again"),
    ):
        lines = [f"{PROG} {name} node3 --reason 'new fan'"]
        lines += [f"{PROG} drain node3 node4 --wait-s 120", f"{PROG} drain node3 --by 2h"] if more else []
        lines += [f"{PROG} drain node3 --until-return"] if more else []
        lines += [f"{PROG} {name} node3 --address $POD_IP"]
        epilog = command_line.examples(*lines) + (ends if more else "")
        add_to(commands, name, text, epilog, nodes, REASON, boot, address, *more)
    summary = "forget a node that has left or is lost; its name is free for another machine"
    lines = [f"{PROG} forget node3", f"{PROG} forget node3 --leave --reason 'the machine goes back'"]
    add_to(commands, "forget", summary, command_line.examples(*lines), nodes, REASON, boot, address, leave)
    add_to(
        commands,
        "maintain",
        "plan a maintenance window: its nodes are empty while it lasts; without nodes: what is planned",
        (
            "maintain node3,node4 --from 2026-12-01T08:00:00+01:00 --for 4h --reason 'new cables'",
            "maintain node3 --from 90m --for 30m",
            "maintain",
            "maintain --cancel w1234",
        ),
        option("nodes", "NODE[,NODE]", "the nodes", nargs="*"),
        option("--from", "TIME", f"when it begins: {MOMENT_SYNTAX}", type=moment, dest="begins"),
        option("--for", "DURATION", "how long it lasts (30m, 4h)", type=span_s, dest="for_s"),
        option("--cancel", "ID", "end this window, or have it not begin"),
        REASON,
    )
    add_to(
        commands,
        "slurm-sync",
        "tell drains and isolations both ways between Slurm and this cluster, until interrupted",
        ("slurm-sync --every-s 5", "slurm-sync --once"),
        option("--every-s", "S", "ask both so often (5)", type=number(0.2, 3600, "seconds"), default=5.0),
        switch("--once", "once"),
        switch("--ends", "the cluster ends: give back to Slurm what only rests here, and needs no repair"),
        switch("--no-holds", "do not drain in Slurm what is isolated here (that needs an operator of Slurm)"),
    )


def _add_inject(commands: Commands) -> None:
    kinds = [kind.replace("_", "-") for kind in get_args(FaultKind)]
    phases = [phase for phase in get_args(FaultPhase) if phase]
    add_to(
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
    logs = add_to(
        commands,
        "logs",
        "show the output of a task's worker, also of one that has ended or never trained",
        ("logs big", "logs big --rank 1 -f", "logs big --worker big.3"),
        TASK,
        option(
            "--tail-bytes",
            "N",
            "begin this many bytes before the end (8192, at most 65536)",
            type=whole(1),
            default=8192,
        ),
        switch("-f", "--follow", "follow the output, across restarts"),
    )
    add(
        logs.add_mutually_exclusive_group(),
        option("--rank", "R", "the worker's rank (default: 0)", type=whole()),
        option("--worker", "W", "this worker, by its name in `unicronctl workers` or an event"),
    )
    kinds, severities = get_args(ErrorKind), ("SEV1", "SEV2", "SEV3")
    add_to(
        commands,
        "events",
        "show the event log, or the part of it that all flags want, as sentences",
        (
            "events -n 20",
            "events --since 10m --task big",
            "events --since 2026-11-20T09:30:00Z --severity SEV1 --severity SEV2",
            "events -f --type PlanAdopted",
        ),
        option("--after", "SEQ", "begin after this sequence number (0)", type=whole(), default=0),
        point("--since", "leave out everything up to and with this point; 10m: before the end"),
        point("--until", "leave out everything after this point"),
        Flag(("-n", "--last"), {"metavar": "N", "help": "only the last N of them", "type": whole(1, 1_000_000)}),
        switch("-f", "--follow", "follow new events"),
        repeated("--type", "T", "only this type of event", type=event_type),
        option("--task", "TASK", "only events that name this task"),
        option("--node", "NODE", "only events that name this node"),
        repeated("--severity", "SEV", "only errors of this severity: SEV1, SEV2, SEV3", choices=severities),
        repeated("--kind", "KIND", "only errors of this kind (docs/operate/runbook.md)", choices=kinds),
    )
    add_to(
        commands,
        "stacks",
        "show what a task's workers do: threads (py-spy on the nodes, extra `stacks`), last collectives, marks",
        ("stacks big", "stacks big --rank 1"),
        TASK,
        option("--rank", "R", "only the worker of this rank", type=whole()),
    )


def _add_history(commands: Commands) -> None:
    add_to(
        commands,
        "story",
        "tell what became of a node, a task, an incident or a plan, and why",
        ("story i52", "story node:gpu07", "story plan:7 --at 1234"),
        option("subject", "SUBJECT", "NODE, TASK, INCIDENT or PLAN"),
        AT,
    )
    add_to(
        commands,
        "verify",
        "repeat every decision in the log from its recorded inputs, and compare",
        f"example:\n  {PROG} verify\n\nexit code 1 at the first decision that this version would make differently. "
        "Losses of nodes are derived again\nfrom their heartbeats, which the API does not give: for these, "
        "unicron-replay verify --state-dir DIR on the head.",
        AT,
    )
    add_to(
        commands,
        "debug",
        "write one file for a report: the log, the state, the metrics, the ends of the workers' logs, without secrets",
        ("debug", "debug --out incident.zip"),
        option("--out", "FILE", "default: unicron-debug-TIME.zip", type=Path),
        switch("--no-logs", "leave the workers' output out"),
    )


def _add_nats(commands: Commands) -> None:
    epilog = command_line.examples(
        f"{PROG} nats-context --state-dir /var/lib/unicron",
        f"{PROG} nats-context --nats tls://head:4222 --key operator.key --tls-ca ca.pem --write",
    )
    summary = "print or write what NATS's own client, `nats`, needs to look at the log (docs/operate/nats.md)"
    nats = command_line.add_command(
        commands,
        "nats-context",
        summary,
        epilog,
        switch("--write", "write a context file for `nats --context NAME`"),
        option("--name", "NAME", "of the context (unicron)", default="unicron"),
        switch("--json", "the context file's content"),
    )
    add(
        nats.add_mutually_exclusive_group(required=True),
        option("--state-dir", "DIR", "the coordinator's directory, on the head", type=Path),
        option("--nats", "URL", "a NATS server"),
    )
    add_login(nats)


def _add_plan(commands: Commands) -> None:
    plan = add_to(commands, "plan", "the plan: adopted, foreseen, or of another cluster", ("plan show", "plan table"))
    plans = plan.commands("plan_command")
    summary = "each task's slots, WAF and gradients, the reason, the method, the costs so far"
    add_to(plans, "show", summary, ("plan show",), AT)
    epilog = ("plan table", "plan table --json", "plan table --at 10m")
    add_to(plans, "table", "the plan for each event that may come next", epilog, AT)
    add_to(
        plans,
        "whatif",
        "the plan for a changed cluster; changes nothing",
        ("plan whatif --lose node3", "plan whatif --add-nodes 4 --slots 8 --task big:weight=3 --at 10m"),
        repeated("--lose", "NODE", "without this node"),
        option("--add-nodes", "N", "with N more nodes", type=whole(), default=0),
        option("--slots", "N", "workers on each (default: as most nodes have)", type=whole(), default=0),
        option("--gpu", "TYPE", "the type of their GPUs (default: as most nodes have)", default=""),
        repeated("--task", "NAME:FIELD=N", "a task with another weight, min_workers or max_workers"),
        AT,
    )
    add_to(
        plans,
        "spares",
        "how many nodes to keep back as warm spares, given how often nodes fail and how long a repair takes",
        ("plan spares --repair-s 86400", "plan spares --repair-s 3600 --mtbf-s 30000000 --json"),
        option("--repair-s", "S", "how long a failed node is away (86400)", type=whole(1, 10**9), default=86_400),
        option("--mtbf-s", "S", "mean time between failures of a worker (as learnt)", type=whole(1, 10**12), default=0),
        AT,
    )
    add_to(
        plans,
        "solve",
        "solve a plan problem exactly, without a coordinator",
        _SOLVE_EPILOG,
        option("problem", "PROBLEM.json", "the problem's file, - for standard input"),
    )


def _add_throughput(commands: Commands) -> None:
    count = whole(1, 10**12)
    add_to(
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

    epilog = command_line.examples(
        f"{PROG} throughput --model gpt3-7b --gpu a100-80g --gpus 8..512",
        f"{PROG} throughput --model llama3-70b --gpu h100-80g --gpus 64..128..8 --tp 8 --json",
    )
    return f"{epilog}\n\nmodels:  {', '.join(MODELS)}\nGPUs:    {', '.join(GPUS)}\nstacks:  {', '.join(STACKS)}"


def gpu_counts(text: str) -> list[int]:
    """Parse `8`, `8..512` (doubling, 512 included) or `8..512..8` (steps), comma-separated; ascending, no repeats.

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
