"""`unicrond` as on a machine of its own: `python -m tests.integration.elsewhere MACHINE run ...`.

Heads on one machine know at once that another one has ended (unicrond/service/coordinator/other_processes.py); those of
two hosts wait for the end of the lease.
"""

from __future__ import annotations

import sys

from unicrond.commands.cli import main
from unicrond.service.coordinator import other_processes

if __name__ == "__main__":
    name = sys.argv[1]
    other_processes.machine = lambda: name
    sys.exit(main(sys.argv[2:]))
