"""`unicrond` as on a machine of its own: `python -m tests.integration.elsewhere MACHINE run ...`.

Heads on one machine know at once that another one has ended (unicrond/service/coordinator/same_machine.py); those of
two hosts wait for the end of the lease.
"""

from __future__ import annotations

import sys

from unicrond.commands.cli import main
from unicrond.service.coordinator import same_machine

if __name__ == "__main__":
    name = sys.argv[1]
    same_machine.machine = lambda: name
    sys.exit(main(sys.argv[2:]))
