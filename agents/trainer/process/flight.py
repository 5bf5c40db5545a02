"""Reads what this process is doing, from a thread beside the main one, which may hang: torch's flight recorders (the
last collectives, of gloo's groups and of NCCL's), and where its threads stand.

The recorder keeps them always (TORCH_FR_BUFFER_SIZE, 2000 entries), outside of Python; its JSON is read here, never its
pickle. That of NCCL has only been read
from a double: no test here has GPUs.

Stacks are read in Python alone, which needs the interpreter's lock: a main thread that holds it (in a C extension that
does not give it up) cannot be read so, nor can a stopped process; the agent then asks py-spy (agents/output/stacks.py).
No values and no source lines are read: these may hold secrets, and a file system may hang as well.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from unicrond.agents.protocol.messages import Flight
from unicrond.events.queries.flight_dumps import RecordedCollective, parse, standings
from unicrond.events.queries.worker_queries import COLLECTIVES_MAX, Collective
from unicrond.events.vocabulary.stacks import GROUPS_MAX, STACK_MAX_CHARS, GroupStanding, cut_stack

#: library -> the function of torch._C._distributed_c10d that dumps its recorder; a build without NCCL lacks the second.
_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
_SIZES_CHARS = 120
_NAME_CHARS = 64
_NUMBER_MAX = 2**53 - 1
#: Innermost frames; of other threads than the main one.
_FRAMES_MAX = 40
_OTHER_FRAMES_MAX = 8
_OTHERS_MAX = 6
#: Threads of this package that wait by design.
_AGENT_THREADS = frozenset({"agent-channel", "flight"})


def read_flight(modules: Mapping[str, Any] = sys.modules, now_ns: int | None = None) -> Flight:
    """Return the last collectives: those that have not ended first of all, and of the others the newest; and where the
    process stands in its replica's groups."""
    torch = modules.get("torch._C._distributed_c10d")
    if torch is None:
        return Flight(trouble="torch.distributed is not loaded in this worker")
    now_ns = time.time_ns() if now_ns is None else now_ns
    collectives: list[tuple[int, int, Collective]] = []
    places: list[GroupStanding] = []
    try:
        for library, name in _DUMPS.items():
            dump = getattr(torch, name, None)
            if dump is not None:
                decoded = parse(dump(includeCollectives=True, onlyActive=False))
                places += standings(decoded)
                collectives += [
                    (entry.time_created_ns, entry.record_id, _collective(entry, library, now_ns))
                    for entry in decoded.entries
                ]
    except Exception as error:  # whatever this version of torch does
        return Flight(trouble=f"the flight recorder cannot be read: {type(error).__name__}: {error}"[:400])
    collectives.sort(key=lambda entry: (not entry[2].is_over, *entry[:2]))
    newest = sorted(collectives[-COLLECTIVES_MAX:], key=lambda entry: entry[:2])
    return Flight(collectives=tuple(entry for _, _, entry in newest), standings=tuple(places[:GROUPS_MAX]))


def _collective(entry: RecordedCollective, library: str, now_ns: int) -> Collective:
    name = entry.profiling_name.removeprefix(f"{library}:")
    sizes = " ".join(f"{kind}{size}" for kind, size in zip(entry.input_dtypes, entry.input_sizes, strict=False))
    return Collective(
        library=library,
        group=_count(entry.pg_id),
        number=_count(entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id),
        is_p2p=entry.is_p2p,
        name=name[:_NAME_CHARS],
        state=(entry.state or "")[:_NAME_CHARS],
        is_over=entry.retired or entry.state == "completed",
        sizes=sizes[:_SIZES_CHARS],
        since_us=_count((now_ns - entry.time_created_ns) // 1000),
    )


def _count(number: int) -> int:
    return min(max(0, number), _NUMBER_MAX)


def read_stacks(frames: Mapping[int, FrameType] | None = None) -> str:
    """Return the stacks, the main thread's first, each with the most recent call first, cut to STACK_MAX_CHARS by whole
    lines: a deep main thread leaves the others up to half of that. `frames`: thread -> its innermost frame; None: those
    of now."""
    frames = sys._current_frames() if frames is None else frames
    main = threading.main_thread()
    threads = [thread for thread in threading.enumerate() if thread is not main and thread.name not in _AGENT_THREADS]
    rest = [line for thread in threads[:_OTHERS_MAX] for line in _stack(thread, frames, _OTHER_FRAMES_MAX)]
    if len(threads) > _OTHERS_MAX:
        rest.append(f"and {len(threads) - _OTHERS_MAX} other threads")
    main_text, rest_text = (_text(lines) for lines in (_stack(main, frames, _FRAMES_MAX), rest))
    if not rest_text:
        return cut_stack(main_text)
    room_chars = max(STACK_MAX_CHARS - len(rest_text) - 1, STACK_MAX_CHARS // 2)
    return cut_stack(f"{cut_stack(main_text, room_chars)}\n{rest_text}")


def _text(lines: list[str]) -> str:
    # A file's name, or a thread's, may be no Unicode: a message that cannot be sent would end the channel.
    return "\n".join(lines).encode(errors="replace").decode()


def _stack(thread: threading.Thread, frames: Mapping[int, FrameType], depth: int) -> list[str]:
    frame = frames.get(thread.ident or 0)
    return [] if frame is None else [f"Thread {thread.name} (most recent call first):", *_lines(frame, depth)]


def _lines(frame: FrameType | None, depth: int) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < depth:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
        frame = frame.f_back
    return [*lines, "  ..."] if frame is not None else lines
