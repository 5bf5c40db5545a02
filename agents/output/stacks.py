"""Reads what a worker is doing: its threads' stacks, and its flight recorder of collectives.

Rules
-----
* Stacks are asked of the worker itself, which answers from a thread beside the main one, or read by `py-spy dump`, an
  extra of its own (`stacks`), which shows processes that are stopped or keep the interpreter's lock, too. py-spy reads
  another process's memory. Linux lets root do that, and a process with the capability SYS_PTRACE; a plain user only
  where `kernel.yama.ptrace_scope` is 0. The process is halted for some milliseconds.
* The flight recorder's content is asked of the worker itself.
* An answer belongs to the question whose number it repeats: one that comes too late answers no later question. Workers
  of an older agent's time repeat none.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from unicrond.agents.protocol.messages import Flight, Hello, Stacks, TellFlight, TellStacks
from unicrond.events.host.optional_dependencies import install_command
from unicrond.events.queries.worker_queries import MAX_LOG_BYTES
from unicrond.events.vocabulary import WorkerId

_STACKS_TIMEOUT_S = 5.0
FLIGHT_TIMEOUT_S = 3.0
#: Questions of a kind to one worker that may be open.
WAITING_MAX = 64
_PERMISSION = (
    "run the agent as root, give it the capability SYS_PTRACE, or set the sysctl kernel.yama.ptrace_scope to 0"
)


class NoStacks(Exception):
    """The stacks cannot be read; one line that says why, and the fix."""


async def stacks(pid: int, timeout_s: float = _STACKS_TIMEOUT_S) -> bytes:
    """Return the stacks of all threads of the process as py-spy shows them, at most MAX_LOG_BYTES. Raise NoStacks."""
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        raise NoStacks(f"py-spy is not on this node; {install_command('stacks')}")
    try:
        process = await asyncio.create_subprocess_exec(
            program, "dump", "--pid", str(pid), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:  # no memory, no descriptor, not for this machine
        raise NoStacks(f"{program} cannot be run: {error}") from None
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    except TimeoutError:
        raise NoStacks(f"py-spy gave no answer about process {pid} within {timeout_s:g} s") from None
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


def kernel_place(pid: int, proc: Path = Path("/proc")) -> str:
    """Return in which function of the kernel the process's main thread waits, "" where the kernel does not say."""
    try:
        place = (proc / str(pid) / "wchan").read_text()
    except OSError:
        return ""
    return place if place != "0" else ""


class Questions:
    """Asks workers for the content of their flight recorders, and for their stacks. `send` puts a question to a worker;
    the shell calls `connected`, `disconnected` and `receive`."""

    def __init__(self, send: Callable[[WorkerId, TellFlight | TellStacks], None]) -> None:
        self._send = send
        self._able: dict[WorkerId, set[type[Flight | Stacks]]] = {}
        self._waiting: dict[tuple[WorkerId, type[Flight | Stacks], int], asyncio.Future[Flight | Stacks]] = {}
        self._numbered: set[WorkerId] = set()
        self._last = 0

    def connected(self, hello: Hello) -> None:
        """Note that a worker is connected; an older one does not understand every question."""
        able = self._able[hello.worker] = set()
        if hello.has_flight:
            able.add(Flight)
        if hello.has_stacks:
            able.add(Stacks)
        if hello.repeats_numbers:
            self._numbered.add(hello.worker)

    def disconnected(self, worker: WorkerId) -> None:
        """Note that the worker is no longer connected."""
        self._able.pop(worker, None)
        self._numbered.discard(worker)
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if key[0] != worker}

    def receive(self, worker: WorkerId, answer: Flight | Stacks) -> None:
        """Pass the worker's answer on; one that comes too late is dropped."""
        waiting = self._waiting.pop((worker, type(answer), answer.question), None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def send(self, worker: WorkerId, question: TellFlight | TellStacks) -> asyncio.Future[Flight | Stacks] | None:
        """Send the question now, before whatever is sent later; return where the answer comes, None where none can."""
        kind: type[Flight | Stacks] = Flight if isinstance(question, TellFlight) else Stacks
        if kind not in self._able.get(worker, ()):
            return None
        self._last += 1
        number = self._last if worker in self._numbered else 0
        waiting = self._waiting.get((worker, kind, number))
        if waiting is None or waiting.done():
            waiting = self._waiting[worker, kind, number] = asyncio.get_running_loop().create_future()
        for old in sorted(key for key in self._waiting if key[:2] == (worker, kind))[:-WAITING_MAX]:
            del self._waiting[old]  # nobody waits for so long
        self._send(worker, replace(question, number=number))
        return waiting

    async def flight(self, worker: WorkerId, timeout_s: float = FLIGHT_TIMEOUT_S) -> Flight:
        """Return the content of the worker's flight recorder, or why there is none."""
        answer = await self._answer(self.send(worker, TellFlight()), timeout_s)
        return answer if isinstance(answer, Flight) else Flight(trouble=f"worker {worker}: {answer}")

    async def stacks(self, worker: WorkerId, timeout_s: float = FLIGHT_TIMEOUT_S) -> str:
        """Return the stacks as the worker itself tells them. Raise NoStacks."""
        answer = await self._answer(self.send(worker, TellStacks()), timeout_s)
        if isinstance(answer, Stacks):
            return answer.text
        raise NoStacks(f"worker {worker}: {answer}")

    async def _answer(self, waiting: asyncio.Future[Flight | Stacks] | None, timeout_s: float) -> Flight | Stacks | str:
        if waiting is None:
            return "it does not run here, or is too old to tell"
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(waiting)
        except TimeoutError:
            return f"no answer within {timeout_s:g} s: all its threads stand still"
