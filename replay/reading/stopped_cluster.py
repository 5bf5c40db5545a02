"""The log of a coordinator's directory on which no nats-server runs: a private one serves a copy of its store.

Rules
-----
* The directory is only read. A server repairs and rewrites what it opens, so it gets a copy, in a directory of its own
  under TMPDIR.
* It listens on loopback, on any free port, to one login that this process has made up.
* Copy and server are removed when the command ends, also by SIGTERM or Ctrl-C; the server ends by SIGKILL as well.
* The agents' consumers are left out: a reader needs none, and a server takes seconds to read thousands of them.
* A server that is started on the directory meanwhile is used in place of the copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from unicrond.events.log.event_log import LogError, LogUnavailable
from unicrond.events.nats.connection import Login
from unicrond.events.nats.server import EmbeddedServer, ServerError

USER = "unicron-replay"
#: A stream's consumers in the server's store.
_CONSUMERS = "obs"
_TERMINATED = 128 + signal.SIGTERM


def store_of(state_dir: Path) -> Path:
    """Return where the embedded server of a coordinator's directory keeps its streams."""
    return state_dir / "nats" / "store"


async def running_url(state_dir: Path) -> str | None:
    """Return the address of the embedded server that runs on the directory; None where none runs."""
    server = EmbeddedServer.beside(state_dir / "nats")
    return server.url if await server.adopt() else None


@asynccontextmanager
async def serve_copy(state_dir: Path) -> AsyncIterator[tuple[str, Login | None]]:
    """Serve a copy, and yield the server's address and login; with None as login, the address of the server which has
    since been started on the directory.

    Raises LogUnavailable, LogError, OSError."""
    store = store_of(state_dir)
    if not store.is_dir():
        raise LogUnavailable(f"{state_dir}: holds no log; give the state_dir of a coordinator, or --nats URL")
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="unicron-replay-") as place:
        await _copy(store, Path(place) / "nats" / "store")
        url = await running_url(state_dir)
        if url is not None:  # the copy may be torn
            yield url, None
            return
        login = Login(user=USER, password=secrets.token_urlsafe(24))
        server = EmbeddedServer(Path(place) / "nats", login=login, dies_with_us=True)
        try:
            await server.start()
            yield server.url, login
        except (ServerError, FileNotFoundError) as error:
            raise LogError(f"{state_dir}: no server runs there, and none can be started on a copy: {error}") from None
        finally:
            with contextlib.suppress(ServerError):
                await server.kill()


def _files(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.is_file() and _CONSUMERS not in path.relative_to(store).parts]


async def _copy(store: Path, to: Path) -> None:
    files = _files(store)
    needed_bytes = sum(path.stat().st_size for path in files)
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if needed_bytes > free_bytes:
        raise LogError(
            f"{store}: a copy takes {needed_bytes >> 20} MiB, and {tempfile.gettempdir()} has {free_bytes >> 20}; "
            "set TMPDIR to a larger volume"
        )
    for path in files:
        target = to / path.relative_to(store)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        await asyncio.sleep(0)  # let Ctrl-C be handled


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind, so that temporary files are removed. It raises here, since a blocked write never returns to
    the loop."""

    def end(*_: object) -> None:
        """Exit with the code of a termination."""
        sys.exit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
