"""The log read once from its begin: what stands there, how large it is, and whether it holds what it acknowledged."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from typing import Any

from events.envelope import Recorded
from events.nats_log import NatsEventLog
from events.subjects import entry


async def read(log: NatsEventLog, acknowledged: dict[str, dict[str, dict[str, int]]]) -> dict[str, Any]:
    """`acknowledged`: producer -> boot -> number -> the sequence number that was returned."""
    last = await log.last_seq()
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    stands: dict[tuple[str, int, int], int] = {}
    newest: dict[str, tuple[int, int]] = {}
    doubled = out_of_order = 0
    async with aclosing(log.read_stored(0, until_seq=last)) as batches:
        async for batch in batches:
            for stored in batch:
                found = entry(stored.seq, stored.recorded_at_us, stored.subject, stored.body, stored.message_id)
                kind = type(found.envelope.event).__name__ if isinstance(found, Recorded) else "Quarantined"
                counts[kind] += 1
                sizes[kind] += len(stored.body)
                if isinstance(found, Recorded) and found.envelope.producer in acknowledged:
                    one = found.envelope
                    key, place = (one.producer, one.boot, one.number), (one.boot, one.number)
                    doubled += key in stands
                    stands[key] = stored.seq
                    out_of_order += place < newest.get(one.producer, (0, 0))
                    newest[one.producer] = max(place, newest.get(one.producer, (0, 0)))
    missing = elsewhere = total = 0
    for producer, boots in acknowledged.items():
        for boot, numbers in boots.items():
            for number, seq in numbers.items():
                total += 1
                at = stands.get((producer, int(boot), int(number)))
                missing += at is None
                elsewhere += at is not None and at != seq
    return {
        "entries": last,
        "acknowledged": total,
        "missing": missing,
        "under_another_number": elsewhere,
        "doubled": doubled,
        "out_of_order": out_of_order,
        "bytes_by_type": dict(sizes.most_common()),
        "count_by_type": dict(counts.most_common()),
    }
