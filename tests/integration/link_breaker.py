"""Breaks a node's links from outside: the kernel ends its TCP connections to other hosts, and tells both sides (RST).

    ip netns exec NODE python -m tests.integration.link_breaker RUN_DIR ADDRESS... [--late PID...]

Runs on the node. At the start of every iteration of a worker of RUN_DIR's agent (its phase mark says so) all
connections from here to the addresses are ended, by `ss -K`, which needs CAP_NET_ADMIN here and INET_DIAG_DESTROY in
the kernel. `--late`: agents that stand still (SIGSTOP) for a moment then, so that others tell first. Prints the
iteration of each break.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from pathlib import Path

from unicrond.agents.protocol import marks

_LATE_S = 0.15
_LOOK_S = 0.002


def end_connections(addresses: list[str]) -> None:
    """Of every process of this network namespace to these addresses."""
    to_any = " or ".join(f"dst {address}" for address in addresses)
    subprocess.run(["ss", "-K", "-t", "state", "established", f"( {to_any} )"], check=True, stdout=subprocess.DEVNULL)


def begun(run_dir: Path) -> dict[str, int]:
    """Worker -> the iteration that it is in, of those who compute."""
    found = {path.name: marks.read(path) for path in (run_dir / "marks").glob("*")}
    return {name: mark.iteration for name, mark in found.items() if mark is not None and mark.limit_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("addresses", nargs="+")
    parser.add_argument("--late", type=int, nargs="*", default=[])
    asked = parser.parse_args()
    before = begun(asked.run_dir)
    while True:
        now = begun(asked.run_dir)
        if any(before.get(worker, 0) < iteration for worker, iteration in now.items()):
            for pid in asked.late:
                os.kill(pid, signal.SIGSTOP)
            end_connections(asked.addresses)
            print(max(now.values()), flush=True)
            if asked.late:
                time.sleep(_LATE_S)
            for pid in asked.late:
                os.kill(pid, signal.SIGCONT)
        before = before | now
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
