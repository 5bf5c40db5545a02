"""`unicron-replay`: look at any moment of a log again. It only reads.

Exit codes: 0 done; 1 the log cannot be reached, is damaged or does not verify; 2 bad usage; 130 interrupted. An
error is one line on stderr that names the field and the fix.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from events import log_lines
from events.log import LogError
from replay.arguments import (
    Parser,
    add_login,
    add_point,
    bare_command,
    command,
    count_argument,
    name_argument,
    nats_urls,
    places_argument,
    seed_argument,
    setting_argument,
    type_name,
    with_spans_marked,
)
from replay.examples import EXAMPLES
from replay.opening import PROGRAM, UsageError
from unicrond import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    log_lines.set_up(logging.WARNING, f"{PROGRAM}: %(message)s")
    logging.getLogger("events").setLevel(logging.CRITICAL)  # what it retries is no news; what fails is raised
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _fail(2, f"{error}")
    except LogError as error:
        return _fail(1, f"{error}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
    except OSError as error:
        return _fail(1, f"{error.filename or 'input/output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        return 130
    return 0


def _run(given: Sequence[str]) -> int:
    if list(given[:1]) == ["simulate"]:  # reads no log: its options are its own
        from replay.simulate_cli import main as simulate

        return simulate(given[1:])
    gc.disable()  # a short life, no cycles: the collector would only walk millions of entries
    options = _parser().parse_args(with_spans_marked(given))
    module, _, name = options.run.partition(":")
    run = getattr(import_module(f"replay.{module}"), name)  # what only this command needs
    return asyncio.run(run(options)) or 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="Replay an event log to any point, explain it, decide again. Never acts on a cluster.",
        epilog=EXAMPLES[""],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _look(commands)
    _explain(commands)
    _move(commands)
    _simulate(commands)
    return parser


def _look(commands: Any) -> None:
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


def _add_from_snapshot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from-snapshot", action="store_true", help="trust the coordinator's snapshot, fold only what came after it"
    )


def _explain(commands: Any) -> None:
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
    whatif.add_argument("--add-nodes", metavar="K", type=count_argument, default=0, help="spare nodes that join")
    whatif.add_argument("--slots", metavar="N", type=count_argument, default=0, help="of each (default: as most have)")


def _move(commands: Any) -> None:
    export = command(commands, "export", "commands:export_command", "the log as one file, for --file")
    export.add_argument("path", metavar="FILE", type=Path, help="the file to write; appears whole or not at all")
    export.add_argument("--force", action="store_true", help="replace FILE if it exists")
    add_point(export, "--at", "the point to stop at (default: the end)")

    into = bare_command(commands, "import", "import_command:import_command", "an exported log into an empty one")
    into.add_argument("path", metavar="FILE", type=Path, help="an exported log, or a directory of segments")
    target = into.add_mutually_exclusive_group(required=True)
    target.add_argument("--into", metavar="DIR", type=Path, help="a new or empty directory")
    target.add_argument("--nats", metavar="URL", type=nats_urls, help="a NATS server that has no log yet")
    add_login(into)


def _simulate(commands: Any) -> None:
    fuzz = bare_command(
        commands,
        "fuzz",
        "simulation.fuzz:fuzz_command",
        "simulate the whole control plane under seeded faults, and check rules",
    )
    commands.add_parser("simulate", help="compare policies on a failure trace in virtual time", add_help=False)
    fuzz.add_argument("--seeds", metavar="N", type=count_argument, default=1000, help="default: 1000")
    fuzz.add_argument("--first-seed", metavar="K", type=seed_argument, default=0, help="any; default: 0")
    fuzz.add_argument("--processes", metavar="P", type=count_argument, default=0, help="default: one per core")
    fuzz.add_argument("--faults", metavar="I,J,...", type=places_argument, help="only these of each seed's faults")


def _fail(code: int, message: str) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
