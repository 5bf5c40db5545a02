"""`unicronctl`: what people type. `parser.py` knows every flag, `commands.py` acts; this file finds them.

Rules
-----
* Exit codes: events/cli/exit_codes.py. Failed is also that no coordinator answers; one line says what to check.
* `events decode` is called once per message by the nats CLI: it is found before anything is imported.
* `explain`, `plan solve` and `throughput` need no coordinator.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:2] == ["events", "decode"]:
        from unicrond.events.nats.decode import main as decode

        return decode(arguments[2:])
    from unicrond.ctl.client import ApiError
    from unicrond.events.cli.command_line import run

    return run("unicronctl", lambda: _run(arguments), ApiError)


def _run(arguments: Sequence[str]) -> int:
    from unicrond.ctl.parser import parser
    from unicrond.events.cli.command_line import mark_spans
    from unicrond.events.cli.exit_codes import DONE

    options = parser().parse_args(mark_spans(arguments))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if options.command == "schema":
        from unicrond.ctl.client_options import print_json
        from unicrond.ctl.lists import ROWS, schema

        print_json(list(ROWS) if options.name is None else schema(options.name))
        return DONE
    if options.command == "explain":
        from unicrond.ctl.explain import explain

        return explain(options.name)
    if options.command == "throughput":
        from unicrond.ctl.throughput import run as throughput

        return throughput(options)
    if getattr(options, "plan_command", "") == "solve":
        from unicrond.ctl.solve import run as solve

        solve(options)
        return DONE
    from unicrond.ctl.commands import COMMANDS

    return COMMANDS[options.command](options) or DONE


if __name__ == "__main__":
    sys.exit(main())
