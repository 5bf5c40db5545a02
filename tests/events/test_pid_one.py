"""The first process of a container: it keeps its child, passes signals on, reaps, and ends with the child's code."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

KEEP = """
import os, sys
from functools import partial
from unicrond.events.host.init_process import InitProcess
command = [sys.executable, "-c", sys.argv[1], *sys.argv[3:]]
start = partial(os.posix_spawn, sys.executable, command, os.environ)
sys.exit(InitProcess(start, restarts=int(sys.argv[2]), last=(0, 4, 143)).run())
"""
#: Says that it runs, and how often one has; then ends as its place among `codes` says, or waits.
CHILD = """
import os, pathlib, signal, sys, time
runs = pathlib.Path(sys.argv[1])
number = len(runs.read_text().split()) if runs.exists() else 0
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
with runs.open("a") as out:
    print(os.getpid(), file=out)
codes = sys.argv[2:]
if number < len(codes):
    os._exit(int(codes[number]))
time.sleep(60)
"""


def keep(child: str, restarts: int, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", KEEP, child, str(restarts), *arguments])


def pids(runs: Path, count: int) -> list[int]:
    """Once so many have run."""
    ends_s = time.monotonic() + 30
    while time.monotonic() < ends_s:
        found = [int(pid) for pid in runs.read_text().split()] if runs.exists() else []
        if len(found) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{count} have not run")


@pytest.mark.parametrize(
    ("codes", "restarts", "runs", "code"),
    [(("7", "7", "7"), 2, 3, 7), (("7", "0"), 5, 2, 0), (("4",), 5, 1, 4), (("9",), 0, 1, 9)],
)
def test_keeper_restarts_child_within_limit_and_passes_its_code(
    tmp_path: Path, codes: tuple[str, ...], restarts: int, runs: int, code: int
) -> None:
    keeper = keep(CHILD, restarts, str(tmp_path / "runs"), *codes)
    assert keeper.wait(30) == code
    assert len(pids(tmp_path / "runs", 0)) == runs


def test_keeper_restarts_killed_child_and_passes_signal_on(tmp_path: Path) -> None:
    keeper = keep(CHILD, 5, str(tmp_path / "runs"))
    psutil.Process(pids(tmp_path / "runs", 1)[0]).kill()
    pids(tmp_path / "runs", 2)
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(30) == 143
    assert len(pids(tmp_path / "runs", 0)) == 2, "none is started after a signal that asks for the end"


def test_child_that_is_forked_takes_signals_as_a_new_program(tmp_path: Path) -> None:
    """And it has what its keeper has imported: an agent is started, and started again, without a second import."""
    work = "lambda: runs.open('a').write(f'{os.getpid()}\\n') and signal.pause()"
    code = f"""
import os, signal, sys
from functools import partial
from pathlib import Path
from unicrond.events.host.init_process import InitProcess, fork
runs = Path({str(tmp_path / "runs")!r})
sys.exit(InitProcess(partial(fork, {work}), restarts=5).run())
"""
    keeper = subprocess.Popen([sys.executable, "-c", code])
    psutil.Process(pids(tmp_path / "runs", 1)[0]).kill()
    second = pids(tmp_path / "runs", 2)[1]
    assert psutil.Process(second).cmdline() == psutil.Process(keeper.pid).cmdline()
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(30) == 128 + signal.SIGTERM
    failing = code.replace(work, "lambda: 1 / 0").replace("restarts=5", "restarts=0")
    done = subprocess.run([sys.executable, "-c", failing], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_keeper_reaps_orphans(tmp_path: Path) -> None:
    orphan = "import os, time\nif os.fork() == 0:\n    os.fork() or os._exit(0)\n    os._exit(0)\n"
    keeper = keep(orphan + CHILD, 0, str(tmp_path / "runs"))
    (child,) = pids(tmp_path / "runs", 1)
    ends_s = time.monotonic() + 30
    while time.monotonic() < ends_s:
        below = [one for one in psutil.Process(keeper.pid).children() if one.pid != child]
        if not below:
            break
        time.sleep(0.05)
    assert not below
    keeper.terminate()
    assert keeper.wait(30) == 143


def test_first_process_becomes_keeper() -> None:
    """Elsewhere than as process 1 nothing happens."""
    code = "import os, sys; from unicrond.events.host.init_process import step_aside; step_aside()\n"
    code += "print(os.getpid()); sys.exit(5)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 5
    unshare = ["unshare", "-rpf"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces here")
    ran = subprocess.run([*unshare, *command], check=False, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (5, "2\n"), ran.stderr
