"""`python -m unicrond.agents.fork_server.preloader`: a process for one task that imports the modules which the task
names, and forks its workers.

Rules
-----
* It runs as the task's user, in the task's directory and environment: the fork server never imports a task's modules.
* It is a fresh interpreter: a checkout with another Megatron-core than this node's is imported in its place.
* For each worker it forks twice: the worker's parent ends at once, and the fork server, which adopts orphans, is its
  parent from then on, as of all workers. The worker itself reports that, so that the kernel vouches for its pid
  (SCM_CREDENTIALS), and waits until the fork server knows it.
* It ends with the fork server, or when that closes the socket.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

import msgspec

from unicrond.agents.fork_server.worker_process import ChildSetup, become_worker
from unicrond.agents.host.prctl import die_with_parent
from unicrond.agents.protocol.messages import Launch

#: The messages on the socket, beside orders.
READY, FORKED = b"ready", b"born"
#: A Launch holds a task of 64 KiB at most.
ORDER_BYTES_MAX = 192 * 1024
_GO = b"g"
_ADOPTED_WITHIN_S = 10.0


class ForkOrder(msgspec.Struct, frozen=True):
    """An order to fork a worker. Its descriptors travel beside it: output, go, and those that the worker keeps, in the
    order of `ChildSetup.inherited_fds` (line, mark, and memory where there is one)."""

    launch: Launch
    slot: int
    gpus: tuple[str, ...]


def go(fd: int) -> None:
    """Let the worker at the other end of the pipe begin."""
    os.write(fd, _GO)


def main(arguments: list[str]) -> NoReturn:
    """Import the modules, then fork workers until the socket is closed. `arguments`: see preloaders.py."""
    fd, parent, preload, worker, *modules = arguments
    control = socket.socket(fileno=int(fd))
    die_with_parent(int(parent))
    try:
        importlib.import_module(preload)  # ours, before the path shows any module of the task's
        sys.path.insert(0, str(Path.cwd()))
        for name in modules:
            importlib.import_module(name)
        run = resolve_name(worker)
    except BaseException as error:
        traceback.print_exc()
        control.send(f"{type(error).__name__}: {error}".encode()[:1024])
        sys.exit(1)
    gc.collect()
    gc.freeze()
    control.send(READY)
    while True:
        body, fds, _, _ = socket.recv_fds(control, ORDER_BYTES_MAX, 8)
        if not body:
            sys.exit(0)
        _fork_worker(control, msgspec.msgpack.decode(body, type=ForkOrder), fds, int(parent), run)
        for received_fd in fds:
            os.close(received_fd)


def _fork_worker(
    control: socket.socket, order: ForkOrder, fds: list[int], parent: int, run: Callable[[Launch], object]
) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    try:
        if os.fork():
            os._exit(0)
        deadline_s = time.monotonic() + _ADOPTED_WITHIN_S
        while os.getppid() != parent and time.monotonic() < deadline_s:
            time.sleep(0.0005)
        os.setsid()
        die_with_parent(parent)
        control.send(FORKED)
        output_fd, go_fd, line_fd, mark_fd, *memory = fds
        if os.read(go_fd, 1) != _GO:
            os._exit(1)
        launch = msgspec.structs.replace(
            order.launch,
            line_fd=line_fd,
            mark=f"/proc/self/fd/{mark_fd}",
            memory=f"/proc/self/fd/{memory[0]}" if memory else "",
        )
        setup = ChildSetup(
            launch=launch,
            slot=order.slot,
            gpus=order.gpus,
            output_fd=output_fd,
            inherited_fds=(line_fd, mark_fd, *memory),
            parent_pid=parent,
        )
        become_worker(setup, run)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
