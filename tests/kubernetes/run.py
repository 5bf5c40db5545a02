"""`make kubernetes`: the tests of this directory in namespaces of their own, then the table of what they have shown.

python -m tests.kubernetes.run [PYTEST ARGUMENTS]    the rows of these tests alone; the others stay as they were
python -m tests.kubernetes.run --hold OVERLAY        a cluster with an overlay and a task, until Ctrl-C

Ctrl-C ends all of it: processes, mounts and networks are in namespaces that end with the first process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import NoReturn

from tests.containers.image import bootstrap
from tests.containers.rows import BUILD as IMAGES
from tests.containers.run import ALONE
from tests.integration.installation import ROOT
from tests.kubernetes import machine
from tests.kubernetes.rows import BUILD, EVENTS, ROWS, events_table, kept_events, write

#: How long tests may take to end in order.
_END_S = 60


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("make kubernetes: another one runs from this checkout, with the same files and cgroups; end it first")
            return 1
        if why := _missing():
            print(f"make kubernetes: {why}")
            return 1
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    shutil.rmtree(BUILD / "machine", ignore_errors=True)
    if arguments[:1] == ["--hold"]:
        words = ["tests.kubernetes.cluster", *(arguments[1:] or ["daemonset"])]
    else:
        if not arguments:
            ROWS.unlink(missing_ok=True)
            EVENTS.unlink(missing_ok=True)
        words = ["pytest", "-v", "-s", "-m", "kubernetes", *(arguments or ["tests/kubernetes"])]
    signal.signal(signal.SIGTERM, _exit)
    process = subprocess.Popen([*ALONE, sys.executable, "-m", *words], cwd=ROOT)
    try:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the tests have got it too, and end in order
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            code = 128 + signal.SIGINT
    finally:
        process.kill()  # its namespace, and all in it, ends with it
        process.wait()
        clean_up()
    if EVENTS.exists() and not code:
        print(events_table(kept_events().values()))
    if not code and arguments[:1] != ["--hold"]:
        write()
    return code


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _missing() -> str:
    if os.getuid() != 0:
        return "needs root: it makes namespaces, mounts and cgroups"
    return machine.missing() or bootstrap(IMAGES)


def clean_up() -> None:
    """Remove what does not end with the namespaces: cgroups, and all files but the logs."""
    for _ in range(50):
        with contextlib.suppress(OSError):
            machine.remove_cgroups()
            break
        time.sleep(0.2)
    shutil.rmtree(BUILD / "log", ignore_errors=True)
    if (BUILD / "machine" / "log").exists():
        (BUILD / "machine" / "log").rename(BUILD / "log")
    shutil.rmtree(BUILD / "machine", ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
