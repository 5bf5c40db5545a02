"""Every command and flag of `unicronctl`. What it imports is paid for at each call."""

from __future__ import annotations

from typing import get_args

from unicrond import VERSION
from unicrond.ctl.node_parser import add_alarms, add_node_control
from unicrond.ctl.parsing import AT, CHANGES, PROG, SINCE, TASK, UNTIL, add_to, common, live_names
from unicrond.ctl.task_parser import add_tasks_control
from unicrond.events.cli import command_line
from unicrond.events.cli.command_line import (
    Commands,
    Parser,
    add,
    kind_among,
    name,
    number,
    option,
    repeated,
    switch,
    whole,
)
from unicrond.events.cli.exit_codes import TIMEOUT, exit_codes
from unicrond.events.cli.shared_flags import add_login, shared
from unicrond.events.vocabulary import ErrorKind, FaultKind, FaultPhase

#: More than any cluster this is for, and small enough to answer at once.
GPUS_MAX = 131072
COUNTS_MAX = 4096
#: Of what `schema` has one (lists.py).
SCHEMA_NAMES = (
    *("nodes", "tasks", "workers", "incidents", "alarms", "events", "doctor", "maintain"),
    *("cordon", "uncordon", "forget", "drain", "wait"),
)
#: What `wait` waits for (waiting.py): what a task is, or one of `training` and `ended`.
WAIT_FOR = ("training", "ended", "completed", "failed", "cancelled")

_EPILOG = f"""\
without a coordinator:
  {PROG} explain node_lost            what it means, and what to do
  {PROG} plan solve PROBLEM.json      solve a plan problem exactly
  {PROG} throughput --model ...       what the throughput model says
  {PROG} events decode                one event from stdin as a line, for `nats --translate`

examples:
  {PROG} status
  {PROG} submit examples/big.yaml
  {PROG} logs big --rank 0 --follow
  {PROG} --url http://head:7470 --token-file token tasks --json

The coordinator is at --url, else $UNICRON_URL, else http://127.0.0.1:7470. Of several heads give all, with
commas between: the one that leads is asked.
The token is in the file --token-file, else in $UNICRON_TOKEN_FILE.
The CA of an https API is in the file --tls-ca, else in $UNICRON_TLS_CA, else one that this machine knows.
{exit_codes(TIMEOUT)}
"""

_SOLVE_EPILOG = """The file holds {"n": workers after the event, "D_run": number, "D_trans": number, "tasks": [
{"weight": w, "x": workers before, "faulty": bool, "min": int, "floor": int?, "cap": int?, "T": [T(0), T(1), ...] or
{"8": T(8), ...}}]}; entries of T that are missing are 0. Further, if wanted: "churn" beside "D_trans"
(what moving a healthy task costs on top), "nodes": [slots, ...] (each tensor-parallel group then finds room on one),
and per task "name", "unit" (workers come in multiples of it), "tp" (so many of a unit need one node), "turn",
"priority" and "preemptible" (whose floor is met first), "D_trans", "D_move", "D_reshape", "D_restart", and "layouts"
that it may get: [{"tp", "pp", "vpp", "ep", "cp", "etp", "micro_batch", "cap", "T": as above}]. The answer then has
"layouts" too. With several types of GPU: "types": {"h100": [slots, ...], ...} instead of "nodes", and "type" of each
task (its T is for that one) and of layouts on another. The answer then has "types", "proven" and "gap_ppm".

example:
  $ cat problem.json
  {"n": 3, "D_run": 1000, "D_trans": 10, "tasks": [
    {"weight": 2, "x": 2, "faulty": true, "min": 1, "floor": 1, "cap": 3, "T": [0, 10, 19, 27]},
    {"weight": 1, "x": 2, "faulty": false, "min": 1, "floor": 1, "T": {"1": 10, "2": 20}}]}
  $ unicronctl plan solve problem.json --json
  {"objective": 47420.0, "plan": [2, 1], "reason": "3 of 3 workers in use: ..."}
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
        "show goodput, badput by cause, ETTR, MFU, interruptions, lost work, suspect nodes (docs/operate/goodput.md)",
        ("goodput", "goodput --since 24h", "goodput --peak-tflops 989 --json"),
        SINCE,
        UNTIL,
        shared("--peak-tflops", default=0),
    )
    add_tasks_control(commands)
    add_node_control(commands)
    add_alarms(commands)
    _add_inject(commands)
    _add_reading(commands)
    _add_history(commands)
    _add_plan(commands)
    _add_throughput(commands)
    _add_nats(commands)
    _add_schema(commands)
    root.live_names = live_names
    return root


def _add_looking(commands: Commands) -> None:
    summary = "show the cluster at a glance: coordinator, plan, nodes, tasks, incidents"
    add_to(commands, "status", summary, ("status", "status --at 10m"), AT)
    add_to(commands, "nodes", "list the nodes, and what runs on them", ("nodes", "nodes --json"), AT)
    add_to(commands, "tasks", "list the tasks and their progress", ("tasks", "tasks --at 1234"), AT)
    add_to(
        commands,
        "workers",
        "list the workers: rank, node, process id, status",
        ("workers", "workers big --json"),
        option("task", "TASK", "of this task alone", type=name, nargs="?"),
        AT,
    )
    add_to(
        commands,
        "incidents",
        "list the incidents by cause and by what their programs said: hardware, unknown, program; open and closed ones",
        ("incidents", "incidents --each", "incidents --json", "incidents --at 8h"),
        switch("--each", "show a row for each incident"),
        AT,
    )
    add_to(
        commands,
        "describe",
        "show everything about one task, node or incident, and its last events",
        ("describe task big", "describe node gpu07", "describe incident i52", "describe task big --at 10m"),
        option("kind", "KIND", "task, node or incident", type=kind_among(("task", "node", "incident"))),
        option("name", "NAME", "its name, or the incident's id"),
        AT,
    )
    epilog = command_line.examples(f"{PROG} doctor", f"{PROG} doctor --quick", f"{PROG} doctor --library nccl")
    add_to(
        commands,
        "doctor",
        "check the cluster for common problems, each with its fix: versions, clocks, keys, GPUs, disks, links, storage",
        f"{epilog}\n\nThe agents look at their nodes, connect to each other, sum 4 MiB two by two, and look for a file"
        "\nthat one of them writes to each task's checkpoint directory. That takes up to a minute, and one niced"
        "\nprocess on the CPU of each node (nccl: a GPU whose slot is free). It needs a token with the scope operate.",
        switch("--quick", "judge what the coordinator knows, and have no agent look"),
        option(
            "--library",
            "NAME",
            "sum by gloo, or by nccl, which no test has run on GPUs (gloo)",
            choices=("gloo", "nccl"),
            default="gloo",
        ),
        shared("--timeout-s", "for the sums (60); busy nodes need more", type=number(5, 600, "seconds")),
        codes=exit_codes(failed="a problem was found, or no coordinator answers"),
    )
    add_to(commands, "watch", "show the live view: nodes, tasks, plan, incidents, last events", ("watch",))
    add_to(
        commands,
        "top",
        "show the live table of tasks and workers; once, where the output is no terminal",
        ("top", "top --once"),
        shared("--once"),
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
        epilog,
        option(
            "--for",
            "STATUS",
            f"wait for this: {', '.join(WAIT_FOR)} (completed)",
            choices=WAIT_FOR,
            default="completed",
            dest="until",
        ),
        shared("--timeout-s", "(default: for ever)"),
        codes=exit_codes(TIMEOUT, failed="a task ended otherwise"),
    )
    target = wait.add_mutually_exclusive_group(required=True)
    add(target, option("task", "TASK", "its name", type=name, nargs="?"), switch("--all", "wait for every task"))


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
        option("kind", "FAULT", ", ".join(kinds), choices=kinds),
        shared("--task", "break a worker of it"),
        shared("--rank", "(default: 0, or the first on --node)"),
        shared("--node", "break this one, or with --task the worker there"),
        option("--at-iteration", "N", "wait for this iteration (default: at once)", type=whole(), default=0),
        option("--phase", "PHASE", f"wait for this phase: {', '.join(phases)}", choices=phases, default=""),
        option(
            "--seconds",
            "S",
            "delay by so much (slow), or last so long (drop-network)",
            type=number(0, 86_400, "seconds"),
            default=0.0,
        ),
        option("--xid", "CODE", "report this code (xid)", type=whole(), default=0),
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
        shared("--follow", "across restarts"),
    )
    add(
        logs.add_mutually_exclusive_group(),
        shared("--rank", "(default: 0)"),
        option("--worker", "WORKER", "take this worker, by its name in `unicronctl workers` or an event"),
    )
    kinds, severities = get_args(ErrorKind), ("SEV1", "SEV2", "SEV3")
    add_to(
        commands,
        "events",
        "show the event log, or the part of it that all flags want, as sentences",
        (
            "events --limit 20",
            "events --since 10m --task big",
            "events --since 2026-11-20T09:30:00Z --severity SEV1 --severity SEV2",
            "events -f --type PlanAdopted",
        ),
        SINCE,
        UNTIL,
        shared("--limit"),
        shared("--follow"),
        shared("--type"),
        shared("--task", "show events that name it"),
        shared("--node", "show events that name it"),
        repeated("--severity", "SEV", "take only errors of this severity: SEV1, SEV2, SEV3", choices=severities),
        repeated("--kind", "ERROR", "take only errors of this kind (docs/operate/runbook.md)", choices=kinds),
    )
    add_to(
        commands,
        "stacks",
        "show what a task's workers do: threads (py-spy on the nodes, extra `stacks`), last collectives, marks",
        ("stacks big", "stacks big --rank 1"),
        TASK,
        shared("--rank", "(default: all)"),
    )


def _add_history(commands: Commands) -> None:
    add_to(
        commands,
        "story",
        "tell what became of a node, a task, an incident or a plan, and why; without KIND, of the cluster",
        ("story incident i52", "story node gpu07", "story plan 7 --until 1234", "story --since 8h"),
        option("kind", "KIND", "node, task, incident or plan", type=kind_among(command_line.KINDS), nargs="?"),
        option("name", "NAME", "its name, the incident's id, or the plan's epoch", nargs="?"),
        shared("--since", "of the cluster's account alone; a time or a span before the end (8h)"),
        UNTIL,
    )
    add_to(
        commands,
        "verify",
        "repeat every decision in the log from its recorded inputs, and compare",
        f"example:\n  {PROG} verify\n\nLosses of nodes are derived again from their heartbeats, which the API does not "
        "give: for these, unicron-replay\nverify --state-dir DIR on the head.",
        UNTIL,
        codes=exit_codes(failed="this version would decide differently"),
    )
    add_to(
        commands,
        "debug",
        "write one file for a report: the log, the state, the metrics, the ends of the workers' logs, without secrets",
        ("debug", "debug --out incident.zip"),
        shared("--out", "(default: unicron-debug-TIME.zip)"),
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
        option("--context", "NAME", "give the context this name (unicron)", default="unicron"),
        shared("--json", "the context file's content"),
    )
    add(
        nats.add_mutually_exclusive_group(required=True),
        shared("--state-dir", "on the head"),
        shared("--nats"),
    )
    add_login(nats)


def _add_schema(commands: Commands) -> None:
    command_line.add_command(
        commands,
        "schema",
        "print the JSON Schema of what a command prints with --json; without a name, list them; needs no coordinator",
        command_line.examples(f"{PROG} schema nodes", f"{PROG} schema"),
        option("name", "COMMAND", "one of: " + ", ".join(SCHEMA_NAMES), choices=SCHEMA_NAMES, nargs="?"),
    )


def _add_plan(commands: Commands) -> None:
    plan = add_to(
        commands, "plan", "show the plan: adopted, foreseen, or of another cluster", ("plan show", "plan table")
    )
    plans = plan.commands("plan_command")
    summary = "show each task's slots, WAF and gradients, the reason, the method, the costs so far"
    add_to(plans, "show", summary, ("plan show",), AT)
    epilog = ("plan table", "plan table --json", "plan table --at 10m")
    add_to(plans, "table", "show the plan for each event that may come next", epilog, AT)
    add_to(
        plans,
        "whatif",
        "show the plan for a changed cluster; change nothing",
        ("plan whatif --lose node3", "plan whatif --add-nodes 4 --slots 8 --set tasks.big.weight=3 --at 10m"),
        *CHANGES,
        AT,
    )
    add_to(
        plans,
        "spares",
        "show how many nodes to keep back as warm spares, given how often nodes fail and how long a repair takes",
        ("plan spares --repair-s 86400", "plan spares --repair-s 3600 --mtbf-s 30000000 --json"),
        option(
            "--repair-s", "S", "assume that a failed node is away so long (86400)", type=whole(1, 10**9), default=86_400
        ),
        option(
            "--mtbf-s", "S", "assume that a worker fails once in so long (as learnt)", type=whole(1, 10**12), default=0
        ),
        AT,
    )
    add_to(
        plans,
        "solve",
        "solve a plan problem exactly, without a coordinator",
        _SOLVE_EPILOG,
        option("problem", "FILE", "the problem, JSON; - reads stdin"),
    )


def _add_throughput(commands: Commands) -> None:
    count = whole(1, 10**12)
    add_to(
        commands,
        "throughput",
        "predict the achieved model FLOP/s of a GPT on numbers of GPUs, each in its best 3D-parallel layout",
        _presets,
        option("--model", "MODEL", "take this preset, see below (required)"),
        shared("--gpu-type", "a preset, see below (required)"),
        option(
            "--gpus",
            "N|A..B|A..B..STEP",
            "predict for these counts, with commas: one, doubling from A to B, or in steps (required)",
            type=gpu_counts,
        ),
        *(shared(flag, "(default: the best)", type=count) for flag in ("--tp", "--pp", "--micro-batch")),
        option("--batch", "N", "set the sequences per iteration (default: the model's)", type=count),
        option("--seq", "N", "set the tokens per sequence (default: the model's)", type=count),
        option("--stack", "STACK", "take the software stack that it was calibrated on (default: the GPU's usual one)"),
        switch("--even", "refuse batches that do not divide among the replicas"),
        shared("--plot", "throughput over GPUs"),
    )


def _presets() -> str:
    from unicrond.throughput.presets import GPUS, MODELS, STACKS

    epilog = command_line.examples(
        f"{PROG} throughput --model gpt3-7b --gpu-type a100-80g --gpus 8..512",
        f"{PROG} throughput --model llama3-70b --gpu-type h100-80g --gpus 64..128..8 --tp 8 --json",
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
