"""Entry points of the four commands: they import the program that is called, and name the extra that it lacks."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from unicrond.events.host import optional_dependencies as extras


def unicrond() -> int:
    """Run `unicrond`; return the exit code."""
    return _run("unicrond", "unicrond.commands.cli")


def unicronctl() -> int:
    """Run `unicronctl`; return the exit code."""
    return _run("unicronctl", "unicrond.ctl.main")


def unicron_agent() -> int:
    """Run `unicron-agent`; return the exit code. A probe runs every few seconds: it loads nothing of the agent."""
    completes = "_UNICRON_COMPLETE" in os.environ  # events/cli/completion.py
    is_probe = not completes and any(word.partition("=")[0] == "--probe" for word in sys.argv[1:])
    return _run("unicron-agent", "unicrond.agents.shell.probe" if is_probe else "unicrond.agents.shell.cli")


def unicron_replay() -> int:
    """Run `unicron-replay`; return the exit code."""
    return _run("unicron-replay", "unicrond.replay.cli")


def _run(program: str, module: str) -> int:
    try:
        return int(import_module(module).main() or 0)
    except extras.MissingExtra as error:
        return _fail(program, error)
    except ModuleNotFoundError as error:
        missing = extras.explain(program, error)
        if missing is None:
            raise
        return _fail(program, missing)


def _fail(program: str, error: Exception) -> int:
    print(f"{program}: {error}", file=sys.stderr)
    return 1
