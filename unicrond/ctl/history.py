"""`unicronctl verify`, `debug`, the goodput of an interval, and an account that a head has only in part: what
`unicron-replay` shows of a log, for the log that the API gives.

The views are replay's, and are found by name, as programs are (`entry_points.py`): what no command shows
is not imported.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from unicrond.ctl.client import ApiError, ApiRefused
from unicrond.ctl.client_options import client_of, print_json
from unicrond.events.cli.command_line import UsageError
from unicrond.events.log.point import AtSeq, AtTime

#: HTTP's word for: the head does not have it, the log may.
_HTTP_GONE = 410
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
    other_sources = dict.fromkeys(("log", "nats", "state_dir", "archive"))
    view_options = argparse.Namespace(**{**vars(options), **other_sources, "url": client_of(options).url})
    try:
        return int(asyncio.run(view(view_options)) or 0)
    except LogError as error:
        raise ApiError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename or 'input/output'}: {error.strerror or error}") from None


def story(options: argparse.Namespace) -> int:
    """Tell what became of a thing, or what happened in the cluster."""
    require_story_words(options)
    account = None if options.until is not None else _story_of_head(options)
    if account is None:
        return run(options)
    if options.json:
        print_json(account, indent=None)
    else:
        print("\n".join(account["lines"]))
    return 0


def require_story_words(options: argparse.Namespace) -> None:
    """Check that the words fit together. Raises UsageError."""
    if options.kind and not options.name:
        raise UsageError(f"NAME: say which {options.kind}; for the whole cluster give neither KIND nor NAME")
    if options.kind and options.since is not None:
        raise UsageError("--since: is of the whole cluster's account; leave KIND and NAME out")
    if isinstance(options.since, AtSeq):
        raise UsageError("--since: give a time or a span before the end (8h), no sequence number")


def _story_of_head(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the head's account; None where it lacks something. Raises UsageError, ApiError."""
    client = client_of(options)
    try:
        if options.kind:
            story = client.story(options.kind, options.name)
        elif options.since is None:
            story = client.cluster_story()
        elif isinstance(options.since, AtTime):
            story = client.cluster_story(since_us=options.since.time_us)
        else:
            story = client.cluster_story(last_s=max(1, options.since.span_us // 1_000_000))
    except ApiRefused as refusal:
        if refusal.status == _HTTP_GONE:
            return None
        if options.kind and refusal.status == 404:
            raise UsageError(str(refusal).replace("name: ", "NAME: ", 1)) from None
        raise
    return story if story["is_whole"] else None
