"""A cluster trains while the volume of its head's state gets full: log, archive, keys and all. A worker dies meanwhile;
then there is room again.

    unshare -m python -m tests.integration.full_volume DIR

Mounts a tmpfs within DIR (which must be empty), in a mount namespace of its own. Exit code 0: nothing acknowledged was
lost, no other worker ended, and the fault was healed. Prints what it took, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests.integration.live import Live, live_cluster, seats
from unicrond.ctl.client import ApiError

VOLUME_MB = 128
#: So long it trains with a full volume, before and after the fault.
FULL_S = 12.0
CHUNK_BYTES = 1 << 20


def fill(path: Path) -> None:
    """Write until there is no room, to the last byte."""
    size_bytes = CHUNK_BYTES
    with path.open("ab", buffering=0) as file:
        while size_bytes:
            try:
                file.write(bytes(size_bytes))
            except OSError:
                size_bytes //= 2


async def troubled(live: Live, text: str) -> None:
    """Wait until the head says so."""
    async with asyncio.timeout(120):
        while text not in json.dumps(await asyncio.to_thread(live.client.health)):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.1)


async def drill(directory: Path) -> dict[str, Any]:
    """Run it, where the head's state lies on the small volume."""
    state_dir = directory / "state"
    async with live_cluster(directory, nodes=2, workers=2, keys=True) as live:
        await live.submit()
        before = await live.training(0)
        processes = {name: psutil.Process(pid) for name, (_, pid) in seats(before).items()}
        head, entries = live.dev.coordinator.process, len(live.events())
        others = state_dir / "somebody-else"
        fill(others)
        full_us = time.time_ns() // 1000
        await troubled(live, "is full, make room there")
        told_us = time.time_ns() // 1000
        await asyncio.sleep(FULL_S)
        fill(others)  # what the server has given back
        victim, process = next(iter(processes.items()))
        killed_us = time.time_ns() // 1000
        process.send_signal(signal.SIGKILL)
        await asyncio.sleep(FULL_S)
        try:
            await asyncio.to_thread(live.client.cordon, "node1", drain=False, reason="no room for it")
            raise AssertionError("it was taken")
        except ApiError as error:
            assert error.status == 503, error
        others.unlink()
        room_us = time.time_ns() // 1000
        after = await live.training(1, beyond=5)
        healed_s = time.time() - room_us / 1e6
        assert len(live.events()) > entries and live.dev.coordinator.process is head
        assert after.term == before.term and after.nodes.keys() == before.nodes.keys()
        assert not live.events("NodeLost"), "the head was there, and so were the nodes"
        alive = {name: each.is_running() and each.status() != psutil.STATUS_ZOMBIE for name, each in processes.items()}
        assert alive == {name: name != victim for name in processes}, alive
        lines = live.client.events(before.seq)
        steps = [line.envelope["observed_at_us"] for line in lines if line.type == "StepCommitted"]
        full = [at_us for at_us in steps if told_us < at_us < killed_us]
        assert full, "it trained while nothing could be written"
    return {
        "told_s": round((told_us - full_us) / 1e6, 1),
        "reports of steps while it was full": len(full),
        "healed_s": round(healed_s, 1),
    }


if __name__ == "__main__":
    volume = Path(sys.argv[1]) / "state"
    volume.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={VOLUME_MB}m,mode=700", "none", str(volume)], check=True)
    print(json.dumps(asyncio.run(drill(volume.parent))))
