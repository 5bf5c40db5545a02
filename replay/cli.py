"""`unicron-replay`: look at any moment of a log again. It only reads.

Exit codes: 0 done; 1 the log cannot be reached, is damaged or does not verify; 2 bad usage; 130 interrupted. An
error is one line on stderr that names the field and the fix.
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
    EXIT_CODES,
    Commands,
    Parser,
    add,
    add_login,
    event_type,
    mark_spans,
    option,
    point,
    repeated,
    switch,
    whole,
)
from unicrond.events.host import daemon_log as log_lines
from unicrond.events.log.event_log import LogError
from unicrond.events.nats.url import parse_urls
from unicrond.replay.options.arguments import (
    DEFAULT_POLICIES,
    EXAMPLES,
    SEED_MAX,
    TRACE_FILE_VARIABLE,
    bare_command,
    command,
    name_argument,
    places_argument,
)
from unicrond.replay.reading.opening import PROGRAM


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    log_lines.set_up(logging.WARNING, f"{PROGRAM}: %(message)s")
    logging.getLogger("unicrond.events").setLevel(logging.CRITICAL)  # retries are not news; failures are raised
    return command_line.run(PROGRAM, lambda: _run(sys.argv[1:] if arguments is None else arguments), LogError)


def _run(arguments: Sequence[str]) -> int:
    gc.disable()  # a short life, no cycles: the collector would only walk millions of entries
    options = parser().parse_args(mark_spans(arguments))
    if getattr(options, "bare_file", None) is not None:
        options.file = options.bare_file
    module, _, name = options.run.partition(":")
    run = getattr(import_module(f"unicrond.replay.{module}"), name)  # what only this command needs
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
        epilog=f"{EXAMPLES['']}\n{EXIT_CODES}; damage to the log and a decision that does not verify are failures.",
        version=VERSION,
    )
    commands = root.commands()
    _look(commands)
    _explain(commands)
    _move(commands)
    _simulate(commands)
    return root


_AT = point("--at", "the point to stop at (default: the end)")
_FROM_SNAPSHOT = switch("--from-snapshot", "start from the coordinator's snapshot, fold only later entries")


def _look(commands: Commands) -> None:
    summary = "the cluster's state, as the coordinator believed it"
    command(commands, "state", "views.commands:state_command", summary, _AT, _FROM_SNAPSHOT)
    summary = "the digest of the state, to compare with the daemon's"
    command(commands, "digest", "views.commands:digest_command", summary, _AT, _FROM_SNAPSHOT)
    command(
        commands,
        "diff",
        "views.diff_command:diff_command",
        "what changed in the state between two points, or between two logs",
        point("a", "the first point"),
        point("b", "the second point"),
        option("--other", "PATH", "the second point is of this exported log", type=Path),
    )
    command(
        commands,
        "compare",
        "views.compare_command:compare_command",
        "two runs of a task, bit by bit: the first step that differs, and what happened there",
        option("a", "TASK", "one run", type=name_argument),
        option("b", "TASK", "the other run: another task, or the same in another log", type=name_argument),
        option("--other", "PATH", "the other run is in this exported log", type=Path),
    )
    command(
        commands,
        "events",
        "views.commands:events_command",
        "the events, one line each",
        point("--after", "leave out everything up to and with this point"),
        point("--until", "leave out everything after this point"),
        repeated("--type", "TYPE", "events of this type", type=event_type),
        option("--node", "NODE", "events that name this node", type=name_argument),
        option("--task", "TASK", "events that name this task", type=name_argument),
    )


def _explain(commands: Commands) -> None:
    summary = "what a view of the log has to say, as JSON"
    view = option("name", "NAME", "goodput, spans", type=name_argument)
    command(commands, "view", "views.commands:view_command", summary, view, _AT)
    command(
        commands,
        "story",
        "views.commands:story_command",
        "a causal account of a node, a task, an incident or a plan",
        option("subject", "SUBJECT", "NODE, TASK, INCIDENT or PLAN"),
        _AT,
    )
    command(
        commands,
        "timeline",
        "views.timeline_command:timeline_command",
        "nodes, tasks, incidents and WAF by time",
        option("--html", "FILE", "a self-contained HTML page", type=Path),
        option("--png", "FILE", "a picture (needs matplotlib)", type=Path),
        _AT,
    )
    command(
        commands,
        "goodput",
        "views.commands:goodput_command",
        "goodput and badput by cause, ETTR, MFU, interruptions, lost work, suspect nodes",
        point("--after", "leave out everything up to and with this point"),
        _AT,
        option("--peak-tflops", "N", "of one worker, dense, for MFU", type=whole(0, 10**6), default=0),
    )
    command(
        commands,
        "serve",
        "views.page_server:serve_command",
        "the web page over this log, with a slider for the time",
        option("--port", "PORT", "on loopback; 0: any free one (default: 7480)", type=whole(0, 65535), default=7480),
        takes_file=True,
    )
    summary = "repeat every decision from its recorded inputs, and compare"
    command(commands, "verify", "views.verify_command:verify_command", summary, _AT)
    command(
        commands,
        "whatif",
        "views.whatif_command:whatif_command",
        "decide again from a point, with other inputs",
        point("--at", "the point to fork at (default: the end)"),
        *CHANGES,
    )


def _move(commands: Commands) -> None:
    command(
        commands,
        "export",
        "views.commands:export_command",
        "the log as one file, for --file",
        option("path", "FILE", "the file to write; appears whole or not at all", type=Path),
        switch("--force", "replace FILE if it exists"),
        switch("--masked", "hide secrets, to give the file away; its digests differ, and it verifies"),
        _AT,
    )
    into = bare_command(
        commands,
        "import",
        "views.commands:import_command",
        "an exported log into an empty one",
        None,
        option("path", "FILE", "an exported log, or a directory of segments", type=Path),
    )
    add(
        into.add_mutually_exclusive_group(required=True),
        option("--into", "DIR", "a new or empty directory", type=Path),
        option("--nats", "URL", "a NATS server that has no log yet", type=parse_urls),
    )
    add_login(into)


def _simulate(commands: Commands) -> None:
    bare_command(
        commands,
        "fuzz",
        "simulation.fuzz:fuzz_command",
        "simulate the whole control plane under seeded faults, and check rules",
        None,
        option("--seeds", "N", "default: 1000", type=whole(0, 10_000), default=1000),
        option("--first-seed", "K", "any; default: 0", type=whole(0, SEED_MAX), default=0),
        option("--processes", "P", "default: one per core", type=whole(0, 10_000), default=0),
        option("--faults", "I,J,...", "only these of each seed's faults", type=places_argument),
    )
    bare_command(
        commands,
        "simulate",
        "evaluation.studies.simulate_cli:simulate_command",
        "compare policies on a failure trace in virtual time; unicron's is the coordinator's own core",
        _known_to_simulate,
        option("--cluster", "CLUSTER", "GPU:NODESxGPUS (default: %(default)s)", default="a800-80g:16x8"),
        option("--tasks", "TASKS", "six, six*N, or a YAML file (default: %(default)s)", default="six"),
        option("--trace", "TRACE", f"see below (default: the file that {TRACE_FILE_VARIABLE} names)"),
        option("--policy", "POLICY", "names with commas (default: %(default)s)", default=DEFAULT_POLICIES),
        option("--seeds", "N", "draws of the trace (default: 1)", type=whole(1, 10_000), default=1),
        option("--first-seed", "S", "seeds S, S + 1, ... (default: 1)", type=whole(), default=1),
        option("--processes", "P", "runs at one time (default: 1)", type=whole(1, 1_000), default=1),
        repeated("--set", "NAME=VALUE", "change an assumption"),
        switch("--parameters", "list the assumptions and stop"),
        option("--plot", "OUT.png", "draw the WAF lost over time, first seed (matplotlib)", type=Path),
    )


def _known_to_simulate() -> str:
    from unicrond.replay.evaluation.studies.simulate_cli import epilog

    return epilog()


if __name__ == "__main__":
    sys.exit(main())
