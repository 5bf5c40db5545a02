"""`make containers`: the tests of this directory in namespaces of their own, then the table of what they have shown.

python -m tests.containers.run [PYTEST ARGUMENTS]     with arguments the table is left as it is
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.containers.image import bootstrap
from tests.containers.rows import BUILD, ROWS, missing, write
from tests.integration.installation import ROOT

#: Network, mounts and processes are the test's own; they end with it.
ALONE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def main(arguments: list[str]) -> int:
    if why := missing() or bootstrap(BUILD):
        print(f"make containers: {why}")
        return 1
    if not arguments:
        ROWS.unlink(missing_ok=True)
    tests = [sys.executable, "-m", "pytest", "-m", "containers", *(arguments or ["tests/containers"])]
    done = subprocess.run([*ALONE, *tests], cwd=ROOT, env=os.environ, check=False)
    if not done.returncode and not arguments:
        write()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
