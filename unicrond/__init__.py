"""The coordinator of unicrond: pure core (state, fold, decide, planning) and the daemon around it.

`from unicrond import Hook, Local, HuggingFaceTrainer, LightningStrategy` is for training scripts; what is behind it
lives in `unicrond.agents.trainer`, and nothing else here knows it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicrond.agents.trainer.adapters.hugging_face import HuggingFaceTrainer as HuggingFaceTrainer
    from unicrond.agents.trainer.adapters.lightning import LightningStrategy as LightningStrategy
    from unicrond.agents.trainer.loop.hook import Hook as Hook
    from unicrond.agents.trainer.loop.hook import Local as Local

VERSION = "0.1.0"


#: Names for training scripts, and the module of each: it brings torch.
_MODULES = {
    "Hook": "unicrond.agents.trainer.loop.hook",
    "HuggingFaceTrainer": "unicrond.agents.trainer.adapters.hugging_face",
    "LightningStrategy": "unicrond.agents.trainer.adapters.lightning",
    "Local": "unicrond.agents.trainer.loop.hook",
}


def __getattr__(name: str) -> object:
    """Load a name for training scripts when a script asks for it."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
