"""Reading a stream in a child process, while its parent decodes and folds.

Rules
-----
* The child reads as every reader does: order checked, interruptions resumed, nothing written to the cluster. It waits
  for a server without end; the caller sets the limit.
* One socket joins the two, the child's stdin. First the parent sends the request, so that no command line and no
  environment shows the login; then the child sends what it reads, or why it cannot. Frames: length, msgpack.
* Neither outlives the other unnoticed: the parent kills its child when it has finished or stops early; the child ends
  when the socket closes, however its parent ended; and for the parent an end before the last entry is an error.
* A slow parent holds the child back, and the child the server: the data in flight is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec

from unicrond.events.log.event_log import LogDamaged, LogError, LogUnavailable
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.log_proof import LogProof
from unicrond.events.nats.stored_message import StoredMessage

#: How much may wait on either side of the socket: some milliseconds of work, so that neither waits for the other.
BUFFER_BYTES = 512 * 1024
_LENGTH_BYTES = 4
#: nats-py imports aiohttp where it finds it, for websockets: a third of this process's start, and for nothing.
_CHILD = f"import sys; sys.modules['aiohttp'] = None; from {__name__} import main; main()"
_ERRORS: tuple[type[LogError], ...] = (LogUnavailable, LogDamaged, LogError)


class ReadRequest(msgspec.Struct):
    """A request to the child: the servers, the login, and the entries to read, `after_seq` + 1 to `until_seq`."""

    servers: list[str]
    login: Login
    after_seq: int
    until_seq: int


class Failure(msgspec.Struct):
    """The child's last message: why it cannot go on. `kind`: which LogError it is, by name."""

    kind: str
    reason: str


_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # a path
_request_decoder = msgspec.msgpack.Decoder(ReadRequest, dec_hook=lambda _, text: Path(text))
_reply_decoder = msgspec.msgpack.Decoder(list[StoredMessage] | Failure)


# --- the caller ----------------------------------------------------------------------------------


@asynccontextmanager
async def read_in_process(
    connection: Connection, after_seq: int, until_seq: int
) -> AsyncIterator[AsyncGenerator[list[StoredMessage], None]]:
    """Start `NatsEventLog.read_stored` in a process of its own, over a connection of its own to the same servers.

    The yielded generator raises what that raises, and LogUnavailable if the process ends too early."""
    parent_end, child_end = socket.socketpair()
    with child_end:
        reader, writer = await asyncio.open_unix_connection(sock=parent_end, limit=BUFFER_BYTES)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-c", _CHILD, __name__),  # the name is for people who look at processes
                stdin=child_end.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # the same code as ours, wherever we are
                start_new_session=True,  # a terminal's Ctrl-C is for us; we end it
            )
        except BaseException:
            writer.close()
            raise
    try:
        writer.write(frame(ReadRequest(connection.servers, connection.login, after_seq, until_seq)))
        yield _batches(reader, after_seq, until_seq)
    finally:
        writer.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # the server forgets its consumer
        await process.wait()


async def _batches(reader: asyncio.StreamReader, seq: int, until_seq: int) -> AsyncGenerator[list[StoredMessage], None]:
    while seq < until_seq:
        try:
            reply = _reply_decoder.decode(await _read_frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise LogUnavailable(
                f"the process that reads the log ended after entry {seq} of {until_seq}; try again"
            ) from None
        if isinstance(reply, Failure):
            raise next(kind for kind in _ERRORS if kind.__name__ == reply.kind)(reply.reason)
        seq = reply[-1].seq
        yield reply


# --- the child -----------------------------------------------------------------------------------


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Receive a request and answer it, or abandon it when the parent has ended."""
    try:
        request = _request_decoder.decode(await _read_frame(reader))
    except asyncio.IncompleteReadError:
        return
    reading = asyncio.create_task(_read(request, writer))
    # The parent sends nothing more: this ends when the parent does.
    listening = asyncio.create_task(reader.read())
    listening.add_done_callback(lambda _: reading.cancel())
    with contextlib.suppress(asyncio.CancelledError, ConnectionError):
        await reading
        writer.close()
        await writer.wait_closed()  # the parent has read everything
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def _read(request: ReadRequest, writer: asyncio.StreamWriter) -> None:
    connection = await connect(request.servers, name="unicron-replay", login=request.login)
    try:
        log = NatsEventLog(connection, proof=LogProof(reader="this replay"))
        async with aclosing(log.read_stored(request.after_seq, until_seq=request.until_seq)) as batches:
            async for batch in batches:
                writer.write(frame(batch))
                await writer.drain()
    except LogError as error:
        kind = next(kind for kind in _ERRORS if isinstance(error, kind))
        writer.write(frame(Failure(kind.__name__, str(error))))
    finally:
        await connection.close()


def frame(message: ReadRequest | list[StoredMessage] | Failure) -> bytes:
    """Encode a message as it goes over the socket."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    return await reader.readexactly(length)


async def _main() -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=sys.stdin.fileno()))
    writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)
    await serve(reader, writer)


def main() -> None:
    """Run the child."""
    logging.getLogger("unicrond.events").setLevel(logging.CRITICAL)  # retries are not news; failures are reported
    gc.disable()  # as unicron-replay does
    asyncio.run(_main())
