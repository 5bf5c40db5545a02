"""`unicrond run --config FILE`, and how late its loop is: `python -m tests.soak.coordinator FILE DELAYS`.

DELAYS gets a JSON line each second: the time, the longest delay of the second and all above a millisecond, in ms.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from pathlib import Path

from unicrond.intake.config import load
from unicrond.service.head.daemon import Fatal, serve

_EVERY_S = 0.01


async def look(path: Path) -> None:
    loop = asyncio.get_running_loop()
    delays: list[float] = []
    due_s = loop.time() + _EVERY_S
    next_s = loop.time() + 1
    with path.open("a") as file:
        while True:
            await asyncio.sleep(due_s - loop.time())
            now_s = loop.time()
            delays.append((now_s - due_s) * 1000)
            due_s = now_s + _EVERY_S
            if now_s >= next_s:
                late = [round(delay, 1) for delay in delays if delay > 1]
                told = {"s": time.monotonic(), "max": round(max(delays), 2), "looks": len(delays), "late": late}
                file.write(json.dumps(told) + "\n")
                file.flush()
                delays.clear()
                next_s = now_s + 1


async def main(config: Path, delays: Path) -> None:
    looking = asyncio.create_task(look(delays))
    try:
        await serve(load(config))
    finally:
        looking.cancel()


if __name__ == "__main__":
    import uvloop

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("unicrond").setLevel(logging.INFO)
    try:
        uvloop.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
    except Fatal as error:
        sys.exit(f"unicrond: {error}")
