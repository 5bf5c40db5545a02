"""Reads pickles that others wrote (`.metadata` and `common.pt` of Megatron's checkpoints) without executing anything.

Rules
-----
* No class and no function that a pickle names is looked up, but for those of `_ALLOWED`, which only make containers and
  tensors. Everything else becomes an `InertObject`, which keeps what it is given.
* So a checkpoint of any release of Megatron-LM can be read where that is not installed, and one that was made to harm
  does nothing.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import types
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from unicrond.agents.trainer.states.state import BadState

_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
}


class InertObject:
    """Keep the arguments and the fields of an object whose class is not known here."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        self.arguments = arguments
        self.__dict__.update(fields)

    def __setstate__(self, state: Any) -> None:
        """Keep the fields, as pickle gives them."""
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})


class InertUnpickler(pickle.Unpickler):
    """Read a pickle of plain values, tensors and inert objects."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for that class or function."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _ALLOWED.get((module, name), InertObject)


def load(file: BinaryIO) -> Any:
    """Return what a bare pickle holds. Raises BadState."""
    try:
        return InertUnpickler(file).load()
    except Exception as error:  # pickle names no types
        raise BadState(f"not a pickle that can be read here: {type(error).__name__}: {error}") from None


def load_saved(path: Path) -> Any:
    """Return what torch.save has written. Raises OSError, BadState."""
    reader = types.SimpleNamespace(__name__=__name__, Unpickler=InertUnpickler, load=load)
    try:
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise BadState(f"{path.name}: it is a program (TorchScript), which is not read")
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=reader)
    except (OSError, BadState):
        raise
    except Exception as error:  # torch.load names none
        raise BadState(f"{path.name}: cannot be read: {type(error).__name__}: {error}") from None
