"""What values of the vocabulary are called in sentences (`prose.py`)."""

from __future__ import annotations

from events.vocabulary import ExitCause, RepairNeed, StateSource

CAUSES: dict[ExitCause, str] = {
    "unknown": "",
    "exited": "",
    "signalled": "",
    "core_dumped": ", with a core dump",
    "oom_killed": ", from the kernel's OOM killer",
    "maybe_oom_killed": ", maybe from the kernel's OOM killer",
}


NEEDS: dict[RepairNeed, str] = {
    "": "",
    "reset": " (it needs a reset)",
    "reboot": " (it needs a reboot of the node)",
    "replace": " (it needs to be replaced)",
    "other": " (it needs an action that this version does not know)",
}


SOURCES: dict[StateSource, str] = {
    "own": "itself",
    "replica": "a live replica",
    "memory": "its node's memory",
    "peer": "another node's memory",
    "checkpoint": "storage",
    "init": "the seed",
}
