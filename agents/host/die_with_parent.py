"""`python -m unicrond.agents.host.die_with_parent AGENT_PID NICENESS COMMAND...`: replaces itself by a command that the
kernel kills when the agent dies."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from unicrond.agents.host.prctl import die_with_parent


def main(arguments: list[str]) -> NoReturn:
    """Run the command in place of this process; exit with code 127 and one line where it cannot be run."""
    parent, niceness, *argv = arguments
    die_with_parent(int(parent))
    os.nice(int(niceness))
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]} cannot be run: {error.strerror}", flush=True)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
