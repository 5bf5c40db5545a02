"""A store on a volume of 40 MB that gets full, and has room again.

    unshare -rm python -m tests.unicrond.small_volume DIR

Mounts a tmpfs on DIR (which must be empty), in a mount namespace of its own. Exit code 0: what waited is in the log.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from tests.unicrond.test_log_keeper import Bus, fill_up, stored_ids
from unicrond.events.nats.connection import connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.service.coordinator.event_log_health import LogKeeper

VOLUME_MB = 40


async def heal(directory: Path) -> None:
    server = EmbeddedServer(directory / "nats")
    await server.start()
    connection = await connect(server.url, name="test", timeout_s=10)
    try:
        await create_streams(connection)
        log = NatsEventLog(connection)
        other = directory / "somebody-else"
        with other.open("wb") as file:
            try:
                while True:
                    file.write(bytes(65536))
                    file.flush()
            except OSError:
                pass
        with other.open("r+b") as file:
            file.truncate(other.stat().st_size - 300_000)
        acknowledged, waiting, envelope = await fill_up(log)
        keeper = LogKeeper(log, Bus(), server, restart_after_s=0.05, look_every_s=0.02)
        assert keeper.trouble.startswith(f"the volume of {server.directory} is full, make room there: "), keeper.trouble
        other.unlink()
        assert keeper.trouble and "is full" not in keeper.trouble
        watching = asyncio.create_task(keeper.run())
        await asyncio.wait_for(server.ended(), 15)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await server.start()  # as the daemon does with one that has ended
        await asyncio.wait_for(waiting, 15)
        assert await stored_ids(log) == [*acknowledged, envelope.event_id]
    finally:
        await connection.close()
        await server.kill()


if __name__ == "__main__":
    volume = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={VOLUME_MB}m", "none", str(volume)], check=True)
    asyncio.run(heal(volume))
