"""Run a command of the operator's with a time limit, and keep the end of its output.

Rules
-----
* The command runs in a process group of its own. When it ends, or at its limit, SIGKILL ends the whole group.
* It reads nothing. The last 16 KiB of its output are kept, and reported as one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: The text for a command without output.
SILENT = "no output"
_OUTPUT_BYTES = 16 * 1024
_OUTPUT_CHARS = 600


class ProcessResult(NamedTuple):
    """The end of a process. `code`: the exit code, negative for a signal; None: the process did not end in time.
    `output`: the end of its output."""

    code: int | None
    output: str


async def run(argv: Sequence[str], limit_s: float, environment: Mapping[str, str]) -> ProcessResult:
    """Run `argv` until its end, for at most `limit_s` seconds.

    Raises OSError or ValueError where the command cannot be started. Ends the command when cancelled.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
    )
    output = bytearray()
    reading = asyncio.create_task(_keep_last(process.stdout, output), name=f"output of {argv[0]}")
    code = None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                code = await process.wait()
            await asyncio.wait([reading], timeout=1.0)  # a child left in the background may keep the pipe open
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        reading.cancel()
        await process.wait()
    return ProcessResult(code, _last_words(output))


async def _keep_last(stream: asyncio.StreamReader | None, buffer: bytearray) -> None:
    """Read the stream to its end, and keep its last bytes in `buffer`."""
    while stream is not None and (piece := await stream.read(_OUTPUT_BYTES)):
        buffer += piece
        del buffer[:-_OUTPUT_BYTES]


def _last_words(output: bytearray) -> str:
    """Return the end of the output as one printable line."""
    text = "".join(char if char.isprintable() else " " for char in output.decode(errors="replace"))
    return " ".join(text.split())[-_OUTPUT_CHARS:] or SILENT
