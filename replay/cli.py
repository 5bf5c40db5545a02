"""`unicron-replay`: look at any moment of a log again. It only reads.

Exit codes: events/cli/exit_codes.py. Failed is that the log cannot be reached, is damaged or does not verify. An error
is one line on stderr that names the field and the fix.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from unicrond import VERSION
from unicrond.ctl.parsing import CHANGES
from unicrond.events.cli import command_line
from unicrond.events.cli.command_line import (
    KINDS,
    Commands,
    Parser,
    add,
    kind_among,
    mark_spans,
    name,
    option,
    point_argument,
    repeated,
    switch,
    whole,
)
from unicrond.events.cli.exit_codes import exit_codes
from unicrond.events.cli.shared_flags import add_login, shared
from unicrond.events.host import daemon_log as log_lines
from unicrond.events.host import optional_dependencies
from unicrond.events.log.event_log import LogError
from unicrond.replay.options.arguments import (
    DEFAULT_POLICIES,
    EXAMPLES,
    SEED_MAX,
    TRACE_FILE_VARIABLE,
    bare_command,
    command,
    places_argument,
)
from unicrond.replay.reading.opening import PROGRAM

#: The rooms of unicrond-lab, another distribution: only `_run` and a help text open them, by name.
_LABORATORY = ("simulation.", "evaluation.")
_FAILURES = (LogError, optional_dependencies.MissingExtra)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    log_lines.set_up(logging.WARNING, f"{PROGRAM}: %(message)s")
    logging.getLogger("unicrond.events").setLevel(logging.CRITICAL)  # retries are not news; failures are raised
    return command_line.run(PROGRAM, lambda: _run(sys.argv[1:] if arguments is None else arguments), *_FAILURES)


def _run(arguments: Sequence[str]) -> int:
    gc.disable()  # a short life, no cycles: the collector would only walk millions of entries
    options = parser().parse_args(mark_spans(arguments))
    module, _, function = options.run.partition(":")
    if module.startswith(_LABORATORY):
        _require_laboratory(options.command, f"unicrond.replay.{module}")
    run = getattr(import_module(f"unicrond.replay.{module}"), function)  # what only this command needs
    try:
        return asyncio.run(run(options)) or 0
    except BrokenPipeError:
        raise
    except OSError as error:
        return command_line.fail(PROGRAM, f"{error.filename or 'input/output'}: {error.strerror or error}")


def parser() -> Parser:
    """Build the parser with all commands and flags of `unicron-replay`."""
    root = Parser(
        prog=PROGRAM,
        description="Replay an event log to any point, explain it, repeat its decisions. Never acts on a cluster.",
        epilog=f"{EXAMPLES['']}\n{exit_codes(failed='also a damaged log, and a decision that does not verify')}",
        version=VERSION,
    )
    commands = root.commands()
    _look(commands)
    _explain(commands)
    _move(commands)
    _simulate(commands)
    return root


_AT = shared("--at", "(default: the end)")
_SINCE = shared("--since", "(default: the beginning)")
_UNTIL = shared("--until", "(default: the end)")
_FROM_SNAPSHOT = shared("--from-snapshot")


def _look(commands: Commands) -> None:
    summary = "show the cluster's state, as the coordinator believed it"
    command(commands, "state", "views.commands:state_command", summary, _AT, _FROM_SNAPSHOT)
    summary = "show the digest of the state, to compare with the daemon's"
    command(commands, "digest", "views.commands:digest_command", summary, _AT, _FROM_SNAPSHOT)
    command(
        commands,
        "diff",
        "views.diff_command:diff_command",
        "show what changed in the state between two points, or between two logs",
        option("a", "SEQ|TIME", "the first point", type=point_argument),
        option("b", "SEQ|TIME", "the second point", type=point_argument),
        shared("--other-log", "the second point is of it"),
    )
    command(
        commands,
        "compare",
        "views.compare_command:compare_command",
        "compare two runs of a task, bit by bit: the first step that differs, and what happened there",
        option("a", "TASK", "one run", type=name),
        option("b", "TASK", "the other run: another task, or the same in another log", type=name),
        shared("--other-log", "the other run is in it"),
        codes=exit_codes(failed="the runs differ"),
    )
    command(
        commands,
        "certify",
        "views.certify_command:certify_command",
        "check what the log proves of a task's training: samples, memberships, states; and whether it was changed",
        option("task", "TASK", "the task; of several runs the last", type=name),
        option(
            "--dataset-size", "N", "samples in its data set, 0: an endless stream; check the samples", type=whole(0)
        ),
        shared("--out", "the certificate, to be kept elsewhere"),
        option("--against", "FILE", "check that the log continues that of this certificate", type=Path),
        codes=exit_codes(failed="something is not proven"),
    )
    command(
        commands,
        "events",
        "views.commands:events_command",
        "show the events, one line each",
        _SINCE,
        _UNTIL,
        shared("--limit"),
        shared("--type"),
        shared("--node", "show events that name it"),
        shared("--task", "show events that name it"),
    )


def _explain(commands: Commands) -> None:
    summary = "print the value of a view of the log, as JSON"
    view = option("name", "NAME", "goodput, spans", type=name)
    command(commands, "view", "views.commands:view_command", summary, view, _AT)
    command(
        commands,
        "story",
        "views.commands:story_command",
        "tell what became of a node, a task, an incident or a plan, and why; without KIND, of the cluster",
        option("kind", "KIND", "node, task, incident or plan", type=kind_among(KINDS), nargs="?"),
        option("name", "NAME", "its name, the incident's id, or the plan's epoch", nargs="?"),
        shared("--since", "8h: before the end (8h); of the cluster's"),
        _UNTIL,
    )
    command(
        commands,
        "timeline",
        "views.timeline_command:timeline_command",
        "show nodes, tasks, incidents and WAF by time",
        option("--html", "FILE", "write a self-contained HTML page to this file", type=Path),
        shared("--plot"),
        _UNTIL,
    )
    command(
        commands,
        "goodput",
        "views.commands:goodput_command",
        "show goodput and badput by cause, ETTR, MFU, interruptions, lost work, suspect nodes",
        _SINCE,
        _UNTIL,
        shared("--peak-tflops", default=0),
    )
    command(
        commands,
        "serve",
        "views.page_server:serve_command",
        "serve the web page over this log, with a slider for the time",
        shared("--port", "(default: 7480)", default=7480),
    )
    summary = "repeat every decision from its recorded inputs, and compare"
    failed = exit_codes(failed="this version would decide differently")
    command(commands, "verify", "views.verify_command:verify_command", summary, _UNTIL, codes=failed)
    command(
        commands,
        "whatif",
        "views.whatif_command:whatif_command",
        "decide again from a point, with other inputs",
        _AT,
        *CHANGES,
    )


def _move(commands: Commands) -> None:
    command(
        commands,
        "export",
        "views.commands:export_command",
        "write the log as one file, for --log",
        option("path", "FILE", "the file to write; appears whole or not at all", type=Path),
        switch("--force", "replace FILE if it exists"),
        switch("--masked", "hide secrets, to give the file away; its digests differ, and it verifies"),
        _UNTIL,
    )
    into = bare_command(
        commands,
        "import",
        "views.commands:import_command",
        "copy an exported log into an empty one",
        None,
        option("path", "FILE", "an exported log, or a directory of segments", type=Path),
    )
    add(
        into.add_mutually_exclusive_group(required=True),
        option("--into", "DIR", "write to this new or empty directory", type=Path),
        shared("--nats", "it has no log yet"),
    )
    add_login(into)


def _simulate(commands: Commands) -> None:
    bare_command(
        commands,
        "fuzz",
        "simulation.fuzz:fuzz_command",
        "simulate the whole control plane under seeded faults, and check rules",
        None,
        shared("--seeds", "(default: 1000)", default=1000),
        shared("--first-seed", "(default: 0)", type=whole(0, SEED_MAX), default=0),
        shared("--processes", "(default: one per core)", default=0),
        option("--faults", "I,J,...", "take only these of each seed's faults", type=places_argument),
        codes=exit_codes(failed="a rule was broken"),
    )
    bare_command(
        commands,
        "simulate",
        "evaluation.studies.simulate_cli:simulate_command",
        "compare policies on a failure trace in virtual time; unicron's is the coordinator's own core",
        _known_to_simulate,
        option(
            "--cluster",
            "CLUSTER",
            "simulate this cluster, GPU:NODESxGPUS (default: %(default)s)",
            default="a800-80g:16x8",
        ),
        option(
            "--tasks", "TASKS", "train these tasks: six, six*N, or a YAML file (default: %(default)s)", default="six"
        ),
        option(
            "--trace",
            "TRACE",
            f"take the failures of this trace, see below (default: the file that {TRACE_FILE_VARIABLE} names)",
        ),
        option("--policy", "POLICY", "compare these, with commas (default: %(default)s)", default=DEFAULT_POLICIES),
        shared("--seeds", "draws of the trace (default: 1)", type=whole(1, 10_000), default=1),
        shared("--first-seed", "(default: 1)", default=1),
        shared("--processes", "(default: 1)", type=whole(1, 1_000), default=1),
        repeated("--assume", "NAME=VALUE", "change an assumption"),
        switch("--list-assumptions", "list the assumptions, and end"),
        shared("--plot", "the WAF lost over time, first seed"),
    )


def _known_to_simulate() -> str:
    """Return examples, traces, policies and assumptions; where unicrond-lab is missing, how to install it."""
    module = "unicrond.replay.evaluation.studies.simulate_cli"
    try:
        _require_laboratory("simulate", module)
    except optional_dependencies.MissingExtra as error:
        return str(error)
    return str(import_module(module).epilog())


def _require_laboratory(name: str, module: str) -> None:
    """Raise MissingExtra where unicrond-lab, which this command and module are of, is missing or of another version."""
    optional_dependencies.require_laboratory(f"{PROGRAM} {name}", module, VERSION)


if __name__ == "__main__":
    sys.exit(main())
