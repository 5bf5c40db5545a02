"""`unicronctl story`: the account of one thing, or of the cluster's last hours, as the head has it.

The head has what came since it began to read, and a bounded number of lines. Where its account lacks something, and for
a point in the past, the whole log is read through the API, and the same account is made of it here.
"""

from __future__ import annotations

import argparse
from typing import Any

from unicrond.ctl import history
from unicrond.ctl.client import ApiRefused
from unicrond.ctl.client_options import client_of, print_json
from unicrond.events.cli.command_line import UsageError
from unicrond.events.log.point import AtSeq, AtTime

#: HTTP's word for: the head does not have it, the log may.
_GONE = 410


def story(options: argparse.Namespace) -> int:
    """Tell what became of a thing, or what happened in the cluster."""
    require_story_words(options)
    told = None if options.until is not None else _story_of_head(options)
    if told is None:
        return history.run(options)
    if options.json:
        print_json(told, indent=None)
    else:
        print("\n".join(told["lines"]))
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
            told = client.story(options.kind, options.name)
        elif options.since is None:
            told = client.cluster_story()
        elif isinstance(options.since, AtTime):
            told = client.cluster_story(since_us=options.since.time_us)
        else:
            told = client.cluster_story(last_s=max(1, options.since.span_us // 1_000_000))
    except ApiRefused as refusal:
        if refusal.status == _GONE:
            return None
        if options.kind and refusal.status == 404:
            raise UsageError(str(refusal).replace("name: ", "NAME: ", 1)) from None
        raise
    return told if told["is_whole"] else None
