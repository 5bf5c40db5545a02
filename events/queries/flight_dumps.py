"""Reads dumps of torch's flight recorders as far as they tell where a rank stands in its process groups. Pure.

Rules
-----
* JSON alone, as `torch._C._distributed_c10d._dump_nccl_trace_json` and `_dump_fr_trace_json` write it. A pickle, which
  torch's own watchdog writes, is never read: to load one runs what it says.
* A dump is bounded, and every value in it is checked; what this version of torch adds is ignored.
* Groups without a name are left out: they are no program's, but made here to reduce over the replicas.
* Where nothing is pending the status of a group counts, which goes by the process's own number of the group. Entries
  say its name; without them the names go by the order in which torch counts groups, where they are such numbers.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from unicrond.events.vocabulary.stacks import GROUP_MAX_CHARS, RANKS_MAX, GroupStanding

#: Torch keeps 2,000 entries of about a kilobyte, unless it is told otherwise.
DUMP_MAX_BYTES = 64 * 1024 * 1024
_NUMBER_MAX = 2**53 - 1
_TRANSFER = re.compile(r"\w+:(?:(send) \d+->(\d+)|(recv) \d+<-(\d+))")


class BadDump(ValueError):
    """The text is no flight recorder's dump in JSON; the message says why."""


class RecordedCollective(msgspec.Struct):
    """A collective in a dump; other fields are ignored, and any may be missing in another version of torch."""

    record_id: int = 0
    pg_id: int = 0
    process_group: tuple[str, ...] = ()
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    is_p2p: bool = False
    profiling_name: str = ""
    state: str | None = ""
    retired: bool = False
    input_sizes: Any = ()
    input_dtypes: Any = ()
    time_created_ns: int = 0

    @property
    def is_over(self) -> bool:
        """Return whether it has ended."""
        return self.retired or self.state == "completed"


class _Group(msgspec.Struct):
    desc: str = ""
    ranks: str = ""


class _Status(msgspec.Struct):
    last_enqueued_collective: int | Annotated[str, Meta(pattern=r"^-?[0-9]{1,18}\Z")] = -1
    last_completed_collective: int | Annotated[str, Meta(pattern=r"^-?[0-9]{1,18}\Z")] = -1


class FlightDump(msgspec.Struct):
    """The dump of one process. `pg_config`: name -> group; `pg_status`: the process's own number of a group -> what it
    has begun and ended last."""

    entries: list[RecordedCollective] = []
    pg_config: dict[str, _Group] = {}
    pg_status: dict[Annotated[str, Meta(pattern=r"^[0-9]{1,9}\Z")], _Status] = {}


def parse(text: str | bytes) -> FlightDump:
    """Return the dump. Raises BadDump."""
    if len(text) > DUMP_MAX_BYTES:
        raise BadDump(f"the dump has {len(text)} bytes, more than the {DUMP_MAX_BYTES} that are read")
    try:
        return msgspec.json.decode(text, type=FlightDump)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadDump(f"no dump of a flight recorder in JSON: {' '.join(str(error).split())}"[:400]) from None


def standings(dump: FlightDump) -> list[GroupStanding]:
    """Return where the process stands in each named group of more than one rank; those with something pending first."""
    names = _names(dump)
    by_group: dict[int, list[RecordedCollective]] = {number: [] for number in names}
    for entry in dump.entries:
        by_group.setdefault(entry.pg_id, []).append(entry)
    places = []
    for number, entries in by_group.items():
        name = names.get(number, "")
        group = dump.pg_config.get(name, _Group())
        ranks = _ranks(group.ranks)
        status = dump.pg_status.get(str(number))
        if name and len(ranks) != 1 and (entries or status is not None):
            title = f"{name} {group.desc}".strip()[:GROUP_MAX_CHARS]
            places.append(_standing(title, ranks, entries, status or _Status()))
    return sorted(places, key=lambda place: (place.entered <= place.finished, place.group))


def _standing(title: str, ranks: tuple[int, ...], entries: list[RecordedCollective], status: _Status) -> GroupStanding:
    collectives = [entry for entry in entries if not entry.is_p2p]
    entered = max([int(status.last_enqueued_collective), *(entry.collective_seq_id for entry in collectives), 0])
    pending = [entry.collective_seq_id for entry in collectives if not entry.is_over]
    transfers = [entry for entry in entries if entry.is_p2p]
    matches = [_TRANSFER.match(entry.profiling_name) for entry in transfers if not entry.is_over]
    peers: dict[str, list[int]] = {"send": [], "recv": []}
    for match in matches:
        if match is not None:
            place = int(match[2] or match[4])
            if place < len(ranks) and ranks[place] not in peers[match[1] or match[3]]:
                peers[match[1] or match[3]].append(ranks[place])
    finished = min(pending) - 1 if pending else entered
    return GroupStanding(
        group=title,
        entered=min(entered, _NUMBER_MAX),
        finished=min(max(0, finished), _NUMBER_MAX),
        is_nccl=any(entry.profiling_name.startswith("nccl:") for entry in entries),
        is_p2p=bool(transfers),
        receives_from=tuple(peers["recv"][:RANKS_MAX]),
        sends_to=tuple(peers["send"][:RANKS_MAX]),
        ranks=ranks if len(ranks) <= RANKS_MAX else (),
    )


def _names(dump: FlightDump) -> dict[int, str]:
    """Return the process's own number of a group -> its name."""
    names = {entry.pg_id: entry.process_group[0] for entry in dump.entries if entry.process_group}
    numbers = sorted(int(number) for number in dump.pg_status)
    if len(numbers) == len(dump.pg_config) and all(name.isdecimal() for name in dump.pg_config):
        sorted_names = dict(zip(numbers, sorted(dump.pg_config, key=int), strict=True))
        if all(sorted_names.get(number) == name for number, name in names.items()):
            return sorted_names
    return names


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...])
    except (msgspec.MsgspecError, ValueError):
        return ()
