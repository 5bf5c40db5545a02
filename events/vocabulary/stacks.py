"""Stacks: where the workers of a group stood when it was given up, as their agents read it before the kill."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta

from unicrond.events.vocabulary.base import Observation, Value
from unicrond.events.vocabulary.field_types import (
    Count,
    Duration,
    Iteration,
    Name,
    Phase,
    Serial,
    Small,
    Text,
    WorkerId,
)
from unicrond.events.vocabulary.phrases import count, seconds

#: The stacks of one process, in characters; the agent cuts whole lines.
STACK_MAX_CHARS = 4096
#: Workers in one event, and different texts in it. What an agent has more is counted in `left_out`.
STACK_WORKERS_MAX = 64
STACK_TEXTS_MAX = 8

#: A line of this process's own (trainer/process/flight.py), or of py-spy.
_FRAME = re.compile(
    r'^ +File "(?P<path>[^"]*)", line (?P<line>\d+), in (?P<function>\S+)$'
    r"|^ +(?P<name>\S.*) \((?P<file>[^()]*):(?P<at>\d+)\)$",
    re.MULTILINE,
)
_LOCKS = ("/threading.py", "/selectors.py", "/queue.py", "<frozen")
_MACHINERY = ("/unicrond/agents/", *_LOCKS)

#: Process groups of one worker that are told, and ranks that one of them names; a group's name.
GROUPS_MAX = 16
RANKS_MAX = 64
GROUP_MAX_CHARS = 96

Ranks: TypeAlias = Annotated[tuple[Small, ...], Meta(max_length=RANKS_MAX)]
StackText: TypeAlias = Annotated[str, Meta(max_length=STACK_MAX_CHARS)]
#: Who read the stack: the worker's own thread, py-spy, the kernel (which knows no line of a program); "": nobody could.
StackReader: TypeAlias = Literal["", "worker", "py-spy", "kernel"]


def cut_stack(text: str, max_chars: int = STACK_MAX_CHARS) -> str:
    """Return the text, or as many of its first lines as stay within `max_chars`."""
    if len(text) <= max_chars:
        return text
    return text[: max_chars - 4].rpartition("\n")[0] + "\n..."


def place_in_program(text: str) -> str:
    """Return the innermost line of the first thread in `text` that is the program's own, "reduce (train.py:62)": not of
    this package's training loop, nor of the interpreter's locks, where there is another. "": the text shows no line."""
    first_thread = text.partition("Thread ")[2].partition("\nThread ")[0]
    matches = _FRAME.finditer(first_thread)
    frames = [(m["function"] or m["name"], m["path"] or m["file"], m["line"] or m["at"]) for m in matches]
    for foreign in (_MACHINERY, _LOCKS, ()):
        for function, path, line in frames:
            if not any(part in path for part in foreign):
                return f"{function} ({path.rpartition('/')[2]}:{line})"[:200]
    return ""


class GroupStanding(Value, frozen=True, kw_only=True):
    """Tell where one rank stands in one of its process groups, by torch's flight recorder.

    `group`: its name, which all members have for it. `entered`, `finished`: the numbers of the last collective that it
    has begun, and that it has ended. `is_p2p`: transfers between two are numbered among them. `receives_from`,
    `sends_to`: the ranks of transfers that it has begun and not ended. `ranks`: the group's, empty where the recorder
    does not say. `is_nccl`: of that library.
    """

    group: Annotated[str, Meta(max_length=GROUP_MAX_CHARS)]
    entered: Count
    finished: Count
    is_nccl: bool = False
    is_p2p: bool = False
    receives_from: Ranks = ()
    sends_to: Ranks = ()
    ranks: Ranks = ()


Standings: TypeAlias = Annotated[tuple[GroupStanding, ...], Meta(max_length=GROUPS_MAX)]


class WorkerStack(Value, frozen=True, kw_only=True):
    """Tell where one worker stood.

    `phase` to `still_us`: by its mark (agents/protocol/marks.py); `section`: what its program says that it is in, for
    `section_us` (hook.section), "": nothing. `collective`: the last that its flight recorder holds, "" where it tells
    none; `standings`: by the same in the process groups of its replica. `stack`: the number of its text in the event,
    from 1; 0: none, and `trouble` says why.
    """

    worker: WorkerId
    phase: Phase = "unknown"
    iteration: Iteration = 0
    collectives_entered: Count = 0
    is_waiting: bool = False
    still_us: Duration = 0
    is_stopped: bool = False
    collective: Text = ""
    reader: StackReader = ""
    stack: Small = 0
    trouble: Text = ""
    section: Text = ""
    section_us: Duration = 0
    standings: Standings = ()

    def sentence(self) -> str:
        """Say it in one sentence."""
        collective = f" {self.collectives_entered}" + (f" ({self.collective})" if self.collective else "")
        place = f", waits in collective{collective}" if self.is_waiting else ""
        process = ", its process is stopped" if self.is_stopped else ""
        section = f", in section {self.section} for {seconds(self.section_us)}" if self.section else ""
        return (
            f"{self.worker} stands in {self.phase} of iteration {self.iteration} for {seconds(self.still_us)}"
            f"{section}{place}{process}"
        )


class StacksTaken(Observation, frozen=True, kw_only=True):
    """The stacks of workers on one node, taken before they were killed or left their group. `generation`: the newest
    that one of them was in. `stacks`: the different texts, the most recent call first; equal ones stand once.
    `left_out`: workers that had no room.
    """

    is_noteworthy: ClassVar[bool] = True

    node: Name
    task: Name
    generation: Serial
    workers: Annotated[tuple[WorkerStack, ...], Meta(max_length=STACK_WORKERS_MAX)]
    stacks: Annotated[tuple[StackText, ...], Meta(max_length=STACK_TEXTS_MAX)] = ()
    left_out: Small = 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        more = f" and {count(self.left_out, 'other', 'others')}" if self.left_out else ""
        return f"stacks on {self.node}: {'; '.join(worker.sentence() for worker in self.workers)}{more}"
