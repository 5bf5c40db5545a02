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

from events import command_line, log_lines
from events.command_line import EXIT_CODES, Commands, Parser, add_login, whole
from events.log import LogError
from events.nats_url import parse_urls
from replay.arguments import (
    DEFAULT_POLICIES,
    SEED_MAX,
    TRACE_FILE_VARIABLE,
    add_point,
    bare_command,
    command,
    name_argument,
    places_argument,
    setting_argument,
    type_name,
    with_spans_marked,
)
from replay.examples import EXAMPLES
from replay.opening import PROGRAM
from unicrond import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    log_lines.set_up(logging.WARNING, f"{PROGRAM}: %(message)s")
    logging.getLogger("events").setLevel(logging.CRITICAL)  # what it retries is no news; what fails is raised
    return command_line.run(PROGRAM, lambda: _run(sys.argv[1:] if arguments is None else arguments), LogError)


def _run(given: Sequence[str]) -> int:
    gc.disable()  # a short life, no cycles: the collector would only walk millions of entries
    options = parser().parse_args(with_spans_marked(given))
    module, _, name = options.run.partition(":")
    run = getattr(import_module(f"replay.{module}"), name)  # what only this command needs
    try:
        return asyncio.run(run(options)) or 0
    except BrokenPipeError:
        raise
    except OSError as error:
        return command_line.fail(PROGRAM, f"{error.filename or 'input/output'}: {error.strerror or error}")


def parser() -> Parser:
    """All commands and flags of `unicron-replay`."""
    root = Parser(
        prog=PROGRAM,
        description="Replay an event log to any point, explain it, decide again. Never acts on a cluster.",
        epilog=f"{EXAMPLES['']}\n{EXIT_CODES}; damage to the log and a decision that does not verify are failures.",
        version=VERSION,
    )
    commands = root.commands()
    _look(commands)
    _explain(commands)
    _move(commands)
    _simulate(commands)
    return root


def _look(commands: Commands) -> None:
    state = command(commands, "state", "commands:state_command", "the cluster's state, as the coordinator believed it")
    add_point(state, "--at", "the point to stop at (default: the end)")
    _add_from_snapshot(state)

    digest = command(
        commands, "digest", "commands:digest_command", "the digest of the state, to compare with the daemon's"
    )
    add_point(digest, "--at", "the point to stop at (default: the end)")
    _add_from_snapshot(digest)

    diff = command(
        commands,
        "diff",
        "diff_command:diff_command",
        "what changed in the state between two points, or between two logs",
    )
    add_point(diff, "a", "the first point")
    add_point(diff, "b", "the second point")
    diff.add_argument("--other", metavar="PATH", type=Path, help="the second point is of this exported log")

    events = command(commands, "events", "commands:events_command", "the events, one line each")
    add_point(events, "--after", "leave out everything up to and with this point")
    add_point(events, "--until", "leave out everything after this point")
    events.add_argument("--type", metavar="TYPE", type=type_name, action="append", default=[], help="can be repeated")
    events.add_argument("--node", metavar="NODE", type=name_argument, help="events that name this node")
    events.add_argument("--task", metavar="TASK", type=name_argument, help="events that name this task")


def _add_from_snapshot(parser: Parser) -> None:
    parser.add_argument(
        "--from-snapshot", action="store_true", help="trust the coordinator's snapshot, fold only what came after it"
    )


def _explain(commands: Commands) -> None:
    story = command(
        commands, "story", "story_command:story_command", "a causal account of a node, a task, an incident or a plan"
    )
    story.add_argument("subject", metavar="SUBJECT", help="NODE, TASK, INCIDENT or PLAN")

    timeline = command(
        commands, "timeline", "timeline_command:timeline_command", "nodes, tasks, incidents and WAF by time"
    )
    timeline.add_argument("--html", metavar="FILE", type=Path, help="a page that needs nothing from the network")
    timeline.add_argument("--png", metavar="FILE", type=Path, help="a picture, by matplotlib")
    add_point(timeline, "--at", "the point to stop at (default: the end)")

    command(
        commands,
        "verify",
        "verify_command:verify_command",
        "make every decision again from its recorded inputs, and compare",
    )

    whatif = command(
        commands, "whatif", "whatif_command:whatif_command", "decide afresh from a point, with other inputs"
    )
    add_point(whatif, "--at", "the point to fork at (default: the end)")
    whatif.add_argument(
        "--set",
        metavar="PATH=VALUE",
        type=setting_argument,
        action="append",
        default=[],
        help="tasks.TASK.FIELD=VALUE or policy.FIELD=VALUE; can be repeated",
    )
    whatif.add_argument(
        "--lose", metavar="NODE", type=name_argument, action="append", default=[], help="can be repeated"
    )
    whatif.add_argument("--add-nodes", metavar="K", type=whole(0, 10_000), default=0, help="spare nodes that join")
    whatif.add_argument("--slots", metavar="N", type=whole(0, 10_000), default=0, help="of each (as most have)")


def _move(commands: Commands) -> None:
    export = command(commands, "export", "commands:export_command", "the log as one file, for --file")
    export.add_argument("path", metavar="FILE", type=Path, help="the file to write; appears whole or not at all")
    export.add_argument("--force", action="store_true", help="replace FILE if it exists")
    add_point(export, "--at", "the point to stop at (default: the end)")

    into = bare_command(commands, "import", "import_command:import_command", "an exported log into an empty one")
    into.add_argument("path", metavar="FILE", type=Path, help="an exported log, or a directory of segments")
    target = into.add_mutually_exclusive_group(required=True)
    target.add_argument("--into", metavar="DIR", type=Path, help="a new or empty directory")
    target.add_argument("--nats", metavar="URL", type=parse_urls, help="a NATS server that has no log yet")
    add_login(into)


def _simulate(commands: Commands) -> None:
    fuzz = bare_command(
        commands,
        "fuzz",
        "simulation.fuzz:fuzz_command",
        "simulate the whole control plane under seeded faults, and check rules",
    )
    fuzz.add_argument("--seeds", metavar="N", type=whole(0, 10_000), default=1000, help="default: 1000")
    fuzz.add_argument("--first-seed", metavar="K", type=whole(0, SEED_MAX), default=0, help="any; default: 0")
    fuzz.add_argument("--processes", metavar="P", type=whole(0, 10_000), default=0, help="default: one per core")
    fuzz.add_argument("--faults", metavar="I,J,...", type=places_argument, help="only these of each seed's faults")

    simulate = bare_command(
        commands,
        "simulate",
        "simulate_cli:simulate_command",
        "compare policies on a failure trace in virtual time; unicron's is the coordinator's own core",
        _known_to_simulate,
    )
    simulate.add_argument("--cluster", default="a800-80g:16x8", help="GPU:NODESxGPUS (default: %(default)s)")
    simulate.add_argument("--tasks", default="six", help="six, six*N, or a YAML file (default: %(default)s)")
    simulate.add_argument("--trace", help=f"see below (default: the file that {TRACE_FILE_VARIABLE} names)")
    simulate.add_argument("--policy", default=DEFAULT_POLICIES, help="names with commas (default: %(default)s)")
    simulate.add_argument("--seeds", type=whole(1, 10_000), default=1, metavar="N", help="draws of the trace (1)")
    simulate.add_argument("--first-seed", type=whole(), default=1, metavar="S", help="seeds S, S + 1, ... (default: 1)")
    what = "change an assumption; can be repeated"
    simulate.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=what)
    simulate.add_argument("--parameters", action="store_true", help="list the assumptions and stop")
    what = "draw the WAF lost over time, first seed (matplotlib)"
    simulate.add_argument("--plot", type=Path, metavar="OUT.png", help=what)


def _known_to_simulate() -> str:
    from replay.simulate_cli import epilog

    return epilog()


if __name__ == "__main__":
    sys.exit(main())
