"""`unicronctl verify`, `debug`, the goodput of an interval, and an account that a head has only in part: what
`unicron-replay` shows of a log, for the log that the API gives.

The views are replay's, and are found by name, as programs are (`entry_points.py`): what no command shows
is not imported.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from unicrond.ctl.client import ApiError
from unicrond.ctl.client_options import client_of
from unicrond.events.cli.command_line import UsageError

#: Command -> "module:function" in replay.
COMMANDS = {
    "story": "views.commands:story_command",
    "verify": "views.verify_command:verify_command",
    "debug": "views.debug_command:debug_command",
    "goodput": "views.commands:goodput_command",
}


def run(options: argparse.Namespace) -> int:
    """Run one of replay's views on the log that the API gives; return the exit code. Raises UsageError, ApiError."""
    import asyncio  # `unicronctl` alone pays for it where it waits for something

    from unicrond.events.log.event_log import LogError

    module, _, name = COMMANDS[options.command].partition(":")
    view = getattr(import_module(f"unicrond.replay.{module}"), name)
    other_sources = dict.fromkeys(("file", "nats", "state_dir", "archive"))
    view_options = argparse.Namespace(**{**vars(options), **other_sources, "url": client_of(options).url})
    try:
        return int(asyncio.run(view(view_options)) or 0)
    except LogError as error:
        raise ApiError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename or 'input/output'}: {error.strerror or error}") from None
