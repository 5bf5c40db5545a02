"""Reads what a worker is doing, for `unicronctl stacks`: its threads' stacks, and its flight recorder of collectives.

Rules
-----
* Stacks are read by `py-spy dump`, an extra of its own (`stacks`). py-spy reads another process's memory. Linux lets
  root do that, and a process with the capability SYS_PTRACE; a plain user only where `kernel.yama.ptrace_scope` is 0.
  The process is halted for some milliseconds.
* The flight recorder's content is asked of the worker itself, which answers in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from unicrond.agents.protocol.messages import Flight, Hello, TellFlight
from unicrond.events.host.optional_dependencies import install_command
from unicrond.events.queries.worker_queries import MAX_LOG_BYTES
from unicrond.events.vocabulary import WorkerId

_STACKS_TIMEOUT_S = 5.0
FLIGHT_TIMEOUT_S = 3.0
_PERMISSION = (
    "run the agent as root, give it the capability SYS_PTRACE, or set the sysctl kernel.yama.ptrace_scope to 0"
)


class NoStacks(Exception):
    """The stacks cannot be read; one line that says why, and the fix."""


async def stacks(pid: int) -> bytes:
    """Return the stacks of all threads of the process, at most MAX_LOG_BYTES. Raise NoStacks."""
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        raise NoStacks(f"py-spy is not on this node; {install_command('stacks')}")
    process = await asyncio.create_subprocess_exec(
        program, "dump", "--pid", str(pid), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_STACKS_TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise NoStacks(f"py-spy gave no answer about process {pid} within {_STACKS_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        errors = " ".join(err.decode(errors="replace").split())
        fix = f"; {_PERMISSION}" if "ermission" in errors or "not permitted" in errors else ""
        raise NoStacks(f"py-spy dump of process {pid}: {errors[:400] or f'exit code {process.returncode}'}{fix}")
    return out[:MAX_LOG_BYTES]


class Flights:
    """Asks workers for the content of their flight recorders. `send` puts the question to a worker; the shell calls
    `connected`, `disconnected` and `receive`."""

    def __init__(self, send: Callable[[WorkerId, TellFlight], None]) -> None:
        self._send = send
        self._able: set[WorkerId] = set()
        self._waiting: dict[WorkerId, asyncio.Future[Flight]] = {}

    def connected(self, hello: Hello) -> None:
        """Note that a worker is connected; an older one does not understand the question."""
        (self._able.add if hello.has_flight else self._able.discard)(hello.worker)

    def disconnected(self, worker: WorkerId) -> None:
        """Note that the worker is no longer connected."""
        self._able.discard(worker)

    def receive(self, worker: WorkerId, flight: Flight) -> None:
        """Pass the worker's answer on; one that comes too late is dropped."""
        waiting = self._waiting.get(worker)
        if waiting is not None and not waiting.done():
            waiting.set_result(flight)

    async def ask(self, worker: WorkerId) -> Flight:
        """Return the content of the worker's flight recorder, or why there is none."""
        if worker not in self._able:
            return Flight(trouble=f"worker {worker} does not run here, or is too old to tell")
        waiting = self._waiting.setdefault(worker, asyncio.get_running_loop().create_future())
        self._send(worker, TellFlight())
        try:
            async with asyncio.timeout(FLIGHT_TIMEOUT_S):
                return await asyncio.shield(waiting)
        except TimeoutError:
            return Flight(trouble=f"no answer within {FLIGHT_TIMEOUT_S:g} s: all threads of the worker stand still")
        finally:
            if self._waiting.get(worker) is waiting:  # not that of a later question
                del self._waiting[worker]
