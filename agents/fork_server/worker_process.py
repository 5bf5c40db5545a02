"""The first moments of a forked child: from a copy of the fork server to a worker of its own.

It runs between fork and the worker's own code, so it does nothing that could block or take a lock, and it
never returns: whatever happens ends in `os._exit`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from agents.fork_server.task_secrets import NoSecret, read_secrets
from agents.prctl import die_with_parent
from agents.protocol.messages import Launch

#: Under memory pressure the kernel shall take a worker, not the agent or the fork server (see proc(5)).
OOM_SCORE_ADJUSTMENT = 500
#: What the fork server handles or ignores, and a worker by default does not. Blocked around the fork.
HANDLED_SIGNALS = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})


def detach(parent_pid: int, close_inherited: Callable[[], None]) -> None:
    """Own session and process group, death with the parent, default signals, no descriptor of the parent's.

    Called with HANDLED_SIGNALS blocked; unblocks them.
    """
    os.setsid()
    die_with_parent(parent_pid)
    signal.set_wakeup_fd(-1)
    close_inherited()
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)


def become_worker(
    launch: Launch,
    *,
    output_fd: int,
    gpus: tuple[str, ...],
    slot: int,
    run: Callable[[Launch], object],
) -> NoReturn:
    """Turn this (detached) child into the worker and run it to its end. `output_fd`: its stdout and stderr."""
    code = 1
    try:
        _redirect(output_fd)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJUSTMENT), "ascii")
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[slot]
            # Numbered as NVML does: the accelerator that is watched for the slot is the one it computes on.
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        secrets = read_secrets(launch.spec.secrets)
        os.environ.update(launch.spec.env)
        os.environ.update(secrets)
        if launch.spec.cwd:
            os.chdir(launch.spec.cwd)
        run(launch)
        code = 0
    except SystemExit as end:
        code = _exit_code(end.code)
    except NoSecret as error:
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _redirect(output_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    for fd in (null, output_fd):
        if fd > 2:
            os.close(fd)
    # Line by line, so that the last words of a process that is killed are in its log.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)


def _exit_code(code: object) -> int:
    """As the interpreter does it: None is 0, a number is itself, anything else is printed and 1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
