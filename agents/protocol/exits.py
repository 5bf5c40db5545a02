"""How a worker ends on its own: exit codes that worker and agent agree on, and what is said of an early end."""

from __future__ import annotations

EXIT_NO_AGENT = 69
#: EX_TEMPFAIL: the trainer waited too long for a membership, saved what it had and stopped.
EXIT_NO_MEMBERSHIP = 75
#: What the person is to do whose program ends before its training does.
LEFT_EARLY = "let hook.steps() run to its end, or call hook.stop(reason) first; `iterations` sets the task's length"
