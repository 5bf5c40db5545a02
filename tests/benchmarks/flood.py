"""What a node that floods the log costs the others: how soon a killed worker of another node is replaced, and how much
the log grows.

    python -m tests.benchmarks.flood --repetitions 5 --out flood.jsonl

Each repetition kills a worker of a task on two nodes twice: while all is calm, and when a process has just begun to
write with a third node's key, as fast as it can (`valid`: observations of 300 bytes; `junk`: messages of 760 KB, `small
junk`: of 200 KB; `calls`: of JetStream's API, which store nothing, nor do `acks`). Its login ends by the head's fuse
(unicrond/service/trust/fuses.py), and it gets another one for the next repetition.
Measured: until the transition of the killed worker's task is complete in the log; what the log grew by within 10 s of
the flood's begin; what was sent, and for how long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.integration.flooder import ACKNOWLEDGEMENTS, CALLS
from tests.integration.live import Live, live_cluster, seats
from tests.integration.test_flooding_node import NODE, enrol, flooder
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.streams import api
from unicrond.events.trust.logins import Role

SIZES_BYTES = {"valid": 300, "junk": 760_000, "small junk": 200_000, "calls": CALLS, "acks": ACKNOWLEDGEMENTS}


async def size_of(log: Connection) -> tuple[int, int]:
    """Return the log's entries and bytes."""
    state = (await api(log, f"STREAM.INFO.{EVENT_STREAM}", {}))["state"]
    return int(state["last_seq"]), int(state["bytes"])


async def heal(live: Live) -> float:
    """Kill a worker; return the seconds until its task is complete again, by the log."""
    state = await live.training(None)
    _, (_, pid) = next(iter(seats(state).items()))
    start_s = time.time()
    os.kill(pid, signal.SIGKILL)
    await live.training(None)
    ends = [line.recorded_at_us for line in live.client.events(state.seq) if line.type == "TransitionCompleted"]
    return ends[0] / 1e6 - start_s


async def once(live: Live, log: Connection, key: Path, kind: str) -> dict[str, Any]:
    """Measure one repetition."""
    calm_s = await heal(live)
    key = key.with_name(f"{time.time_ns()}.key")
    await enrol(live, key)
    await live.until("it may log in", lambda s: NODE in s.logins)
    await live.training(None)
    (entries, size_bytes), boot = await size_of(log), (await live.dev.state())[0].last_numbers.get(NODE, (0, 0))[0]
    process = await flooder(live, key, SIZES_BYTES[kind])
    await live.until("the flood has begun", lambda s: s.last_numbers.get(NODE, (0, 0))[0] > boot)
    flood_s = time.monotonic()
    flooded_s = await heal(live)
    await asyncio.sleep(max(0.0, flood_s + 10 - time.monotonic()))
    entries_after, size_bytes_after = await size_of(log)
    sent = json.loads((await asyncio.wait_for(process.communicate(), 60))[0])
    return {
        "kind": kind,
        "calm_s": round(calm_s, 3),
        "flooded_s": round(flooded_s, 3),
        "entries": entries_after - entries,
        "grown_bytes": size_bytes_after - size_bytes,
        "sent": sent["sent"],
        "sent_s": round(sent["duration_s"], 2),
    }


async def measure(repetitions: int, out: Path, kinds: Sequence[str]) -> None:
    """Measure these kinds, and print a table."""
    with tempfile.TemporaryDirectory() as directory, out.open("a") as lines:
        async with live_cluster(Path(directory), nodes=2, workers=2, keys=True) as live:
            await live.submit(iterations=10**12, min_workers=2)
            await live.training(None)
            login = Login(key=live.dev.state_dir / "keys" / f"{Role.OPERATOR}.key")
            log = await connect(f"nats://127.0.0.1:{live.dev.nats_port}", name="flood", login=login, timeout_s=10)
            rows = []
            for kind in kinds:
                for _ in range(repetitions):
                    rows.append(await once(live, log, Path(directory) / "flooder.key", kind))
                    print(json.dumps(rows[-1]), file=lines, flush=True)
                    print(json.dumps(rows[-1]), flush=True)
            await log.close()
    for kind in kinds:
        chosen = [row for row in rows if row["kind"] == kind]
        figures = {
            name: [statistics.median(row[name] for row in chosen), max(row[name] for row in chosen)]
            for name in ("calm_s", "flooded_s", "grown_bytes", "sent")
        }
        print(kind, "median, most:", figures)


def main() -> None:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, metavar="N")
    parser.add_argument("--kinds", nargs="+", choices=SIZES_BYTES, default=tuple(SIZES_BYTES))
    parser.add_argument("--out", type=Path, default=Path("flood.jsonl"), metavar="FILE")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.repetitions, arguments.out, arguments.kinds))


if __name__ == "__main__":
    main()
