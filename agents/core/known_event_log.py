"""Decides which log an agent accepts as its own. Pure.

Rules
-----
* An agent remembers the entries by which it knows its log (events/log/log_identity.py): the first that the stream held,
  the newest claim of a term, and by that claim when the log's first entry was recorded; its login may read no others.
  And when the stream was made, how long the log was, its newest term, and the last time a person adopted a log by name.
* A log that holds other entries there, that is shorter, or whose terms have gone back is another one: what it says of
  this node is void, and this agent's observations have no place there. The agent takes nothing from it and writes
  nothing to it; its workers train on (event_log_guard.py). A complete restore is the known log.
* A NATS server that came back with an empty store has lost the known log. An agent makes none; it waits, as it does
  before another log.
* A person's order is in the log itself: `unicrond run --new-log` and `unicrond restore` put the time of the order into
  CoordinatorStarted (`adopted_us`), and so does every later coordinator. An order that is younger than the one that the
  agent remembers is carried out, whatever log it remembers: in a stream that was made since, entries may be lost that
  the agent cannot look for. A log that only looks new has no such order.
* An agent that starts on a node without workers and without states has nothing to lose: it takes the log that is there.
* An agent without memory and without workers reads behind the log's end: all that stands there was for others before it
  (`entries_behind`).
"""

from __future__ import annotations

from unicrond.agents.core.state import LogSeen, Remembered
from unicrond.events.log import log_identity
from unicrond.events.log.log_identity import LogPoints


def difference(memory: Remembered, log: LogSeen | None, read_seq: int = 0) -> str:
    """Return in one line how the log differs from the remembered one; "" where it does not, or where nothing is known.

    `log`: None where NATS has none. `read_seq`: the last entry that this agent has read.
    """
    if not memory.log:
        return ""
    if log is None:
        return f"the event log is gone: NATS has none, and this agent knows the one made at {memory.log}"
    if not log.created:
        return ""
    if log.created != memory.log and is_taken(memory, log):
        return f"the event log was made at {log.created}, and a person has taken it since this agent knows its own"
    points = LogPoints(memory.log, max(memory.log_seq, read_seq), memory.log_marks)
    if change := log_identity.difference(points, LogPoints(log.created, log.last_seq, log.marks), "this agent"):
        return change.reason
    if 0 < log.term < memory.fence[0]:
        return f"the event log's newest term is {log.term}, and this agent has obeyed term {memory.fence[0]}"
    return ""


def is_taken(memory: Remembered, log: LogSeen) -> bool:
    """Return whether a person has adopted this log by name since the agent last heard of such an order."""
    return log.adopted_us > memory.log_adopted_us


def entries_behind(memory: Remembered, log: LogSeen) -> int:
    """Return the entry behind which this agent reads its commands in the log; 0: all.

    Without a memory no command before its own NodeJoined is for this agent (`Command.agent_boot`). Workers that live
    without one may still need what stands there.
    """
    if difference(memory, log):
        return 0
    if memory.log or memory.read_seq or memory.workers:
        return memory.read_seq
    return log.last_seq
