"""Exit codes of workers on which worker and agent agree, and the advice about an early end."""

from __future__ import annotations

EXIT_NO_AGENT = 69
#: EX_TEMPFAIL: the trainer waited too long for a membership, saved its state and stopped.
EXIT_NO_MEMBERSHIP = 75
#: The advice to a person whose program ends before its training does.
LEFT_EARLY = "let hook.steps() run to its end, or call hook.stop(reason) first; `iterations` sets the task's length"
