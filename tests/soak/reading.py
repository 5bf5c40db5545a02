"""The log read once from its begin: what stands there, how large it is, whether it holds what it acknowledged, and when
it took and gave what followed from each fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from unicrond.events.log.subjects import entry
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.vocabulary import MembershipDecided, WorkerExited
from unicrond.events.wire.envelope import RecordedEvent


class Ways:
    """Of each fault of a worker, as seconds of the wall clock: when the log had stored that it ended, when the
    coordinator decided, and when that was stored. `faults`: of worker, tasks and s (monotonic)."""

    def __init__(self, faults: Sequence[dict[str, Any]], wall_s: float) -> None:
        self._faults = {fault["worker"]: fault for fault in faults if fault.get("worker")}
        self._wall_s = wall_s
        self._open: dict[str, dict[str, Any]] = {}

    def see(self, found: RecordedEvent) -> None:
        event, stored_s = found.envelope.event, found.recorded_at_us / 1e6
        if isinstance(event, WorkerExited) and event.worker in self._faults:
            fault = self._faults.pop(event.worker)
            fault["stored_s"] = stored_s - fault["s"] - self._wall_s
            self._open[fault["tasks"][0]] = fault
        elif isinstance(event, MembershipDecided) and event.urgent and event.task in self._open:
            fault = self._open.pop(event.task)
            begin_s = fault["s"] + self._wall_s
            fault |= {"decided_s": found.envelope.observed_at_us / 1e6 - begin_s, "told_s": stored_s - begin_s}


async def read(log: NatsEventLog, acknowledged: dict[str, dict[str, dict[str, int]]], ways: Ways) -> dict[str, Any]:
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
                kind = type(found.envelope.event).__name__ if isinstance(found, RecordedEvent) else "QuarantinedMessage"
                if isinstance(found, RecordedEvent):
                    ways.see(found)
                counts[kind] += 1
                sizes[kind] += len(stored.body)
                if isinstance(found, RecordedEvent) and found.envelope.producer in acknowledged:
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
