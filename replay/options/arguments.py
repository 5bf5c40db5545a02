"""The command line of `unicron-replay`: what its commands have in common, their arguments, the examples of the help."""

from __future__ import annotations

import re

from unicrond.events.cli.command_line import Commands, Epilog, Flag, Parser, add, add_command
from unicrond.events.cli.exit_codes import exit_codes
from unicrond.events.cli.shared_flags import add_login, shared

#: The last seed that may come first: what `--json` prints of the seeds after it still fits 64 bits.
SEED_MAX = 2**63 - 1
#: Where the real trace lies, if `--trace` does not say so.
TRACE_FILE_VARIABLE = "UNICRON_TRACE_FILE"
DEFAULT_POLICIES = "unicron,unicron-stay,megatron-wait,megatron-shrink,hot-spare,oobleck,varuna,bamboo,recycle,ft-hsdp"


def command(commands: Commands, name: str, run: str, summary: str, *flags: Flag, codes: str = exit_codes()) -> None:
    """Add a command that reads a log. `codes`: its exit codes."""
    parser = bare_command(commands, name, run, summary, None, *flags, codes=codes)
    source = parser.add_argument_group("the log (one of the four)")
    add(
        source.add_mutually_exclusive_group(required=True),
        shared("--log"),
        shared("--nats"),
        shared("--state-dir", "whether it runs or not; or a backup"),
        shared("--url", "it keeps secrets back, and gives no heartbeats"),
    )
    add(
        source,
        shared("--token-file", "with --url"),
        shared("--archive", "(default: that of --state-dir, if it has one)"),
    )
    add_login(parser)


def bare_command(
    commands: Commands, name: str, run: str, summary: str, epilog: Epilog, *flags: Flag, codes: str = exit_codes()
) -> Parser:
    """Add a command without a log. `run`: "MODULE:FUNCTION" in replay; it takes the parsed options and returns the exit
    code, or None for 0."""
    parser = add_command(commands, name, summary, epilog or EXAMPLES[name], shared("--json"), *flags, codes=codes)
    parser.set_defaults(run=run)
    return parser


def places_argument(text: str) -> list[int]:
    """Parse places in a list, counted from 0: "0,2,5"; "" is none. Raises ValueError."""
    if not re.fullmatch(r"[0-9]*(,[0-9]*)*", text, re.ASCII):
        raise ValueError(f"{text!r} does not name places; give numbers from 0 with commas: 0,2,5")
    return [int(place) for place in text.split(",") if place]


EXAMPLES = {
    "": """\
examples:
  unicron-replay state --log incident.log --at 1234
  unicron-replay digest --nats nats://127.0.0.1:4222
  unicron-replay export incident.log --state-dir unicron-state
  unicron-replay events --log incident.log --node n1 --since 10m

--at, --since and --until take a sequence number (1234), a time with its zone (2026-11-20T09:30:00Z), or a span
before the log's newest entry (10m; units ms, s, m, h, d).""",
    "state": """\
examples:
  unicron-replay state --nats nats://127.0.0.1:4222
  unicron-replay state --log incident.log --at 1234
  unicron-replay state --log incident.log --at 10m --json | jq .state.plan""",
    "digest": """\
examples:
  unicron-replay digest --nats nats://127.0.0.1:4222
  unicron-replay digest --log incident.log --at 1234 --json

Two logs that agree up to an entry have the same digest there; so have the daemon and its log.""",
    "export": """\
examples:
  unicron-replay export incident.log --nats nats://127.0.0.1:4222
  unicron-replay export first-hour.log --state-dir unicron-state --until 2026-11-20T10:00:00Z

The file holds the tasks' arguments and environment: read it before you pass it on.""",
    "events": """\
examples:
  unicron-replay events --log incident.log --type NodeLost --type PlanAdopted
  unicron-replay events --nats nats://127.0.0.1:4222 --task big --since 10m
  unicron-replay events --log incident.log --since 100 --until 200 --json

--node and --task take every event that names the node or task, also inside a plan or a membership.""",
    "view": """\
examples:
  unicron-replay view spans --log incident.log
  unicron-replay view goodput --state-dir unicron-state --at 10m --json | jq .cluster

A head gives the same of its own log: GET /v1/views/NAME.""",
    "verify": """\
examples:
  unicron-replay verify --state-dir unicron-state
  unicron-replay verify --log incident.log --json

It ends at the first decision that this version, with the recorded inputs, would make differently. Node losses
are derived again from the heartbeats while they are kept (10 minutes in NATS, always in an export).""",
    "import": """\
examples:
  unicron-replay import incident.log --into copy              # segments in a new directory, for --log
  unicron-replay import incident.log --nats nats://127.0.0.1:4333

The server must be a fresh one, started for this (nats-server -js -sd /tmp/nats -p 4333): where a stream of ours
exists, nothing is written. Imported logs are marked, and coordinators refuse them. NATS dates what it stores, so
there the recorded times are those of the import; --into keeps them.""",
    "diff": """\
examples:
  unicron-replay diff 100 200 --log incident.log
  unicron-replay diff -10m -0s --state-dir unicron-state
  unicron-replay diff 500 500 --log here.log --other-log there.log --json""",
    "compare": """\
examples:
  unicron-replay compare big again --state-dir unicron-state
  unicron-replay compare big big --log here.log --other-log there.log --json

Both runs of a task with `numerics: fixed` have the same bits, whatever failed in either:
compared are losses, and checksums of the gradients' sums and of the parameters, of the iterations that both logs
name.""",
    "certify": """\
examples:
  unicron-replay certify big --state-dir unicron-state --dataset-size 81920 --out big.json
  unicron-replay certify big --log incident.log --against big.json
  unicron-replay certify big --nats nats://head:4222 --json

Proven is that every iteration was committed once, by one membership, with the samples that the seed draws for it,
and from the state before it. The last link, kept elsewhere, shows later whether an entry was changed, lost or added.
It does not prove that gradients are the program's.""",
    "story": """\
examples:
  unicron-replay story incident i52 --log incident.log
  unicron-replay story node n1 --state-dir unicron-state
  unicron-replay story task big --url http://head:7470 --token-file token --until 10m
  unicron-replay story plan 7 --log incident.log

NAME is that of a node or task, the id of an incident (i52), or the epoch of a plan.""",
    "timeline": """\
examples:
  unicron-replay timeline --log incident.log
  unicron-replay timeline --log incident.log --html incident.html
  unicron-replay timeline --state-dir unicron-state --plot incident.png      # needs unicrond[plot]""",
    "goodput": """\
examples:
  unicron-replay goodput --log incident.log
  unicron-replay goodput --state-dir unicron-state --since 24h --peak-tflops 989
  unicron-replay goodput --log incident.log --json | jq .cluster

The same numbers as `unicronctl goodput` at the same entry; definitions: docs/operate/goodput.md.""",
    "serve": """\
examples:
  unicron-replay serve --log incident.log
  unicron-replay serve --state-dir unicron-state --port 0

Open the address that it prints in a browser. It listens on loopback alone, and only reads.""",
    "whatif": """\
examples:
  unicron-replay whatif --log incident.log --at 1234 --set tasks.big.weight=3
  unicron-replay whatif --log incident.log --at 10m --set policy.worker_mtbf_s=86400 --lose n1
  unicron-replay whatif --state-dir unicron-state --add-nodes 2 --gpu-type h100-80g

The coordinator's own planner decides afresh from that point, once as it was and once with the changes.""",
    "fuzz": """\
examples:
  unicron-replay fuzz --seeds 10000
  unicron-replay fuzz --first-seed 368 --seeds 1              # play one seed again
  unicron-replay fuzz --first-seed 368 --seeds 1 --faults 0,4 # with two of its faults alone

The coordinator and the agents are the real ones; time, networks, disks and processes are simulated. If
a rule is broken, the first failure is shrunk and printed with the command that repeats it
(docs/design/simulation.md).""",
}
