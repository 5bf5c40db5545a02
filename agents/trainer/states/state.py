"""The training state as a tree, and the tree as a skeleton plus tensors: for broadcasts and for checkpoints alike.

Rules
-----
* A skeleton is msgpack of plain values, in which a tensor stands as its dtype and shape. The tensors' bytes follow
  in the skeleton's order, in native (little-endian) C layout. No pickle: nothing that arrives is ever executed.
* Restoring checks names, shapes and dtypes of all parameters before it writes the first one.
* Of a tensor that is spread over a replica's workers a tree holds this worker's shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import msgpack  # type: ignore[import-untyped]
import torch

from unicrond.agents.trainer.process.shards import is_spread, reshard, shard_of, spread_state

_TENSOR, _TUPLE = 1, 2
#: Bounds of the learning rate, in an optimizer's groups (Megatron's).
_RATES = ("max_lr", "min_lr")
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
if sys.byteorder != "little":
    raise ImportError("the trainer's state format is little-endian; this machine is big-endian")


class BadState(ValueError):
    """The state does not fit the model, or the bytes are no state."""


class StateRefused(BadState):
    """The state is sound, and the task cannot go on from it: it must end, rather than pass over it."""


def flatten(tree: object) -> tuple[bytes, list[torch.Tensor]]:
    """Return the tree's skeleton and its tensors, in the skeleton's order. Raises BadState on a value it cannot
    hold."""
    tensors: list[torch.Tensor] = []

    def pack(value: object) -> object:
        """Return what msgpack can hold in place of the value."""
        if isinstance(value, torch.Tensor):
            if value.dtype not in _NAMES:
                raise BadState(f"a tensor of dtype {value.dtype} cannot be saved")
            tensors.append(shard_of(value).detach())
            return msgpack.ExtType(_TENSOR, msgpack.packb([_NAMES[value.dtype], list(tensors[-1].shape)]))
        if isinstance(value, tuple):
            return msgpack.ExtType(_TUPLE, msgpack.packb(list(value), default=pack, strict_types=True))
        if isinstance(value, dict):  # an OrderedDict, say: strict_types asks about everything but exact types
            return dict(value)
        raise BadState(f"a value of type {type(value).__name__} cannot be saved: {value!r:.80}")

    return msgpack.packb(tree, default=pack, strict_types=True), tensors


def unflatten(skeleton: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the tree of a skeleton and its tensors; the inverse of `flatten`."""
    remaining = iter(tensors)

    def unpack(code: int, data: bytes) -> object:
        """Return the tensor or the tuple of the extension."""
        if code == _TENSOR:
            return next(remaining)
        if code == _TUPLE:
            return tuple(msgpack.unpackb(data, ext_hook=unpack, strict_map_key=False))
        raise BadState(f"a skeleton with an unknown extension {code}")

    return msgpack.unpackb(skeleton, ext_hook=unpack, strict_map_key=False)


def shapes(skeleton: bytes) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor in the skeleton's order. Raises BadState."""
    kinds: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def unpack(code: int, data: bytes) -> object:
        """Note the tensor of the extension, or look into the tuple."""
        if code == _TENSOR:
            name, shape = msgpack.unpackb(data)
            if name not in _DTYPES or any(type(extent) is not int or extent < 0 for extent in shape):
                raise BadState(f"a skeleton with a tensor of dtype {name!r}, shape {shape!r}")
            kinds.append((_DTYPES[name], tuple(shape)))
            return None
        if code == _TUPLE:
            return msgpack.unpackb(data, ext_hook=unpack, strict_map_key=False)
        raise BadState(f"a skeleton with an unknown extension {code}")

    try:
        msgpack.unpackb(skeleton, ext_hook=unpack, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadState(f"not a skeleton of a state: {error}") from None
    return kinds


def size_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor of that dtype and shape."""
    count = 1
    for extent in shape:
        count *= extent
    return count * int(dtype.itemsize)


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as a flat uint8 tensor (a view where it is contiguous and on the CPU)."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def tensor_of(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor of such bytes; `data` is a flat uint8 tensor that owns its (aligned) memory."""
    return data.view(dtype).reshape(tuple(shape))


class Stateful(Protocol):
    """An object of the program beside model, optimizer and scheduler whose state is saved with theirs."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Continue from that state."""
        ...


class Generators(Protocol):
    """Saves and restores random generators (the module `randomness`)."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state of all generators, as a tree."""
        ...

    def resume(self, states: dict[str, Any], /) -> None:
        """Continue from a snapshot."""
        ...


# --- several optimizers, or schedulers, as one ---------------------------------------------------


class StatefulList:
    """Several optimizers, or several schedulers, as one: `members`, in the order in which the program gave them. A
    state holds one state for each."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = list(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of all optimizers."""
        return [group for member in self.members for group in getattr(member, "param_groups", ())]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all members, in their order."""
        return {"members": [member.state_dict() for member in self.members]}


def members_of(stateful: Any) -> list[Any]:
    """Return the members of a list, or the only one; none of None."""
    if isinstance(stateful, StatefulList):
        return stateful.members
    return [] if stateful is None else [stateful]


def states_in(stateful: Any, state: Any) -> list[Any] | None:
    """Return the state of each member in a state of `stateful`; None where it is of another number of them."""
    if not isinstance(stateful, StatefulList):
        return [] if stateful is None else None if isinstance(state, dict) and set(state) == {"members"} else [state]
    states = state.get("members") if isinstance(state, dict) else None
    return states if isinstance(states, list) and len(states) == len(stateful.members) else None


def as_one(stateful: Any) -> Any:
    """Return what the program gave as one: itself, or a list of several."""
    if not isinstance(stateful, list | tuple):
        return stateful
    return stateful[0] if len(stateful) == 1 else StatefulList(stateful) if stateful else None


# --- all of it ------------------------------------------------------------------------------------


@dataclass(slots=True)
class TrainingState:
    """The objects that make up a worker's state: Megatron's (or plain torch's) model, optimizer and scheduler.

    The optimizer's state has its step count and the loss scale; where the data stands follows from the iteration.
    `layout`: how the tensors lie in the whole, as a tree, for resharding (`resharding.py`); None where
    that is not known. The bounds of the learning rate are the program's, never the state's: a task may go on with
    others. `registered`: what else the program has, by name; the same on all replicas.
    """

    models: Sequence[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    generators: Generators | None = None
    layout: Callable[[], object] = lambda: None
    registered: dict[str, Stateful] = field(default_factory=dict)
    _rates: list[dict[str, Any]] = field(default_factory=list)
    _layout: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rates = [{name: group[name] for name in _RATES if name in group} for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return list(getattr(self.optimizer, "param_groups", ()))

    def capture(self, iteration: int, loss: float) -> dict[str, object]:
        """Return the state after `iteration` (the last committed one) as a tree that aliases the live tensors."""
        if not self._layout:  # asked for once: it does not change, and Megatron takes its time
            self._layout.append(self.layout())
        return {
            "iteration": iteration,
            "loss": loss,
            "layout": self._layout[0],
            "tensors": dict(self._tensors()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "generators": None if self.generators is None else self.generators.snapshot(),
            "registered": {name: stateful.state_dict() for name, stateful in self.registered.items()},
        }

    def restore(self, tree: dict[str, Any]) -> tuple[int, float]:
        """Take over a captured state; returns its iteration and loss. Raises BadState where it does not fit."""
        self.require_fitting(tree)
        tensors = tree["tensors"]
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(tensors[name])
        for optimizer, state in zip(
            members_of(self.optimizer), states_in(self.optimizer, tree["optimizer"]) or (), strict=True
        ):
            _load_optimizer(optimizer, state)
        for group, rates in zip(self._groups(), self._rates, strict=False):
            group.update(rates)
        for scheduler, state in zip(
            members_of(self.scheduler), states_in(self.scheduler, tree["scheduler"]) or (), strict=True
        ):
            if hasattr(scheduler, "num_steps"):  # Megatron's adds what it loads to where it stands
                scheduler.num_steps = 0
            scheduler.load_state_dict(state)
        if self.generators is not None and tree.get("generators") is not None:
            self.generators.resume(tree["generators"])
        registered = tree.get("registered", {})
        for name, stateful in self.registered.items():
            if name in registered:  # a state of before it was registered leaves it as it is
                stateful.load_state_dict(registered[name])
        return int(tree["iteration"]), float(tree["loss"])

    def require_fitting(self, tree: dict[str, Any]) -> None:
        """Raises BadState where the state is of another model."""
        for role, stateful in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            if states_in(stateful, tree[role]) is None:
                raise BadState(f"{role}: this program attaches {len(members_of(stateful))}, the state is of others")
        expected, tensors = dict(self._tensors()), tree["tensors"]
        if expected.keys() != tensors.keys():
            difference = sorted(expected.keys() ^ tensors.keys())
            raise BadState(f"model: the state has other tensors than this model, {difference[:4]} among them")
        for name, tensor in expected.items():
            if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype:
                raise BadState(
                    f"model: {name} is {tuple(tensors[name].shape)} {tensors[name].dtype} in the state,"
                    f" {tuple(tensor.shape)} {tensor.dtype} here"
                )

    def params_digest(self) -> str:
        """Return blake2b (32 hex digits) over the names and bytes of all parameters in name order."""
        digest = blake2b(digest_size=16)
        for name, parameter in sorted(self._parameters()):
            digest.update(name.encode())
            digest.update(memoryview(tensor_bytes(parameter.cpu()).numpy()))
        return digest.hexdigest()

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, model in enumerate(self.models):
            reshard(model)
            for name, parameter in model.named_parameters():
                yield f"{number}.{name}", shard_of(parameter.detach())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._parameters()
        for number, model in enumerate(self.models):
            for name, buffer in model.named_buffers():
                yield f"{number}.{name}", buffer


def _load_optimizer(optimizer: Any, state: Any) -> None:
    # First from the parameters, then from the state: where it has fp32 masters of its own, those are the truth.
    if hasattr(optimizer, "reload_model_params"):
        optimizer.reload_model_params()
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer.load_state_dict(state)
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(map(is_spread, parameters)):
        of_number = dict(zip(numbers, parameters, strict=True))
        entries = state["state"].items()
        try:
            state = {**state, "state": {number: spread_state(entry, of_number[number]) for number, entry in entries}}
        except ValueError as error:
            raise BadState(f"optimizer: {error}") from None
    optimizer.load_state_dict(state)
    # torch casts what it loads to the parameter's dtype: of a 16-bit parameter's float32 averages, bits would be lost.
    for number, parameter in zip(numbers, parameters, strict=True):
        entry = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and name in entry and entry[name].dtype != value.dtype:
                entry[name] = value.to(entry[name].device, copy=True)
