"""The coordinator of unicrond: pure core (state, fold, decide, planning) and the daemon around it.

`from unicrond import Hook, Local` is for training scripts; what is behind it lives in `unicrond.agents.trainer`, and
nothing else here knows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicrond.agents.trainer.loop.hook import Hook as Hook
    from unicrond.agents.trainer.loop.hook import Local as Local

VERSION = "0.1.0"


def __getattr__(name: str) -> object:
    """Load `Hook` and `Local` when a script asks for them: they bring torch."""
    if name in ("Hook", "Local"):
        from unicrond.agents.trainer.loop import hook

        return getattr(hook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
