"""Reads the stacks of a worker's threads: `py-spy dump`, an extra of its own (`stacks`).

py-spy reads another process's memory. Linux lets root do that, and a process with the capability SYS_PTRACE; a plain
user only where `kernel.yama.ptrace_scope` is 0. The process is halted for some milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from pathlib import Path

from unicrond.events.host.optional_dependencies import install_command
from unicrond.events.queries.worker_queries import MAX_LOG_BYTES

TIMEOUT_S = 5.0
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
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise NoStacks(f"py-spy gave no answer about process {pid} within {TIMEOUT_S:g} s") from None
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
