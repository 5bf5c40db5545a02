"""Makes the state of one shard from the shards of another parallel layout (tensor, pipeline).

Rules
-----
* Every state carries its *layout* (`layout.py`): of each of its tensors the *pieces*, boxes of the local tensor that
  are boxes of a global one, which has the same name and shape in every layout; and for each path in the optimizer's
  state the tensor of the model to which what stands there belongs.
* What the optimizer keeps in the shape of a tensor (moments, fp32 masters) is cut as that tensor is. What it keeps as
  a single number (a step count) holds for the whole tensor.
* What belongs to no tensor (iteration, scheduler, the groups' rates, the loss scale, generators of random numbers) is
  the same in all shards, and is taken from the first. Megatron's own generators differ from rank to rank: they stay
  the new rank's own, and are seeded anew by every micro-batch.
* Every element of every tensor must come from somewhere; replicas of the same box (layer norms under tensor
  parallelism) are the same, and the first is taken. What does not fit is BadState, with the tensor's name.

Pure: trees in, a tree out. The shards are read one after the other, so that no more than one has to be in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from unicrond.agents.trainer.states.state import BadState, StateRefused

#: In a state whose tensors are whole and have their global names (`portable.py`).
WHOLE = "whole"
#: In such a state: the settings of the task that it was made with (`training_settings.py`).
SETTINGS = "settings"
#: In an optimizer's state that is as when training begins: no moments, masters as the parameters are.
BEGINS = "begins"

#: Of a group of parameters: what is this worker's own, and what tells groups apart in every layout (Megatron-core's
#: optimizer.py, `param_group_identifier_keys`).
_OF_THE_GROUP = ("params", "is_expert_parallel")
_OF_ALIKE = ("wd_mult", "lr_mult", "is_decoupled_lr", "pre_wd_mult", "pre_lr_mult")

Box = tuple[tuple[int, int], ...]


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A box of a local tensor that is a box of the global tensor `key`.

    `whole`: the global tensor's shape; `at`: where the box begins in it. `within`: where it begins in the local one.
    `shape`: its extents in the local tensor; the global one may have axes before those, of which it takes one step.
    """

    key: str
    whole: tuple[int, ...]
    at: tuple[int, ...]
    within: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Begin and end on each axis of the global tensor."""
        ahead = len(self.whole) - len(self.shape)
        return tuple((at, at + extent) for at, extent in zip(self.at, (1,) * ahead + self.shape, strict=True))

    def view(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """Return the part of the local tensor that is `box` of the global one, which lies inside this piece."""
        ahead = len(self.whole) - len(self.shape)
        places = zip(self.within, self.at[ahead:], box[ahead:], strict=True)
        return tensor[tuple(slice(within + lo - at, within + hi - at) for within, at, (lo, hi) in places)]


class StateLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a shard's tensors lie in the whole. `tensors`: by their name in the state. `optimizer`: the name, by path
    in the optimizer's part of the state."""

    tp: int
    pp: int
    tensors: dict[str, tuple[Piece, ...]]
    optimizer: dict[str, str]


class NoLayout(StateRefused):
    """This layout can never load the state: the state does not tell how its tensors lie in the whole, or this worker's
    model does not, or the wholes differ."""


def layout_in(tree: dict[str, Any]) -> StateLayout:
    """Return the layout that the state carries. Raises BadState."""
    if tree.get("layout") is None:
        raise NoLayout("cannot be resharded: its model or optimizer does not say where its tensors lie in the whole")
    try:
        return msgspec.convert(tree["layout"], StateLayout)
    except msgspec.ValidationError as error:
        raise BadState(f"cannot read its layout: {error}") from None


def reshard(target: dict[str, Any], shards: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the state that a worker is to continue from. `target`: its state as it is, for names, shapes and places;
    `shards`: all shards of one replica of the other layout. Raises BadState."""
    layout = layout_in(target)
    assembly = _Assembly(layout, target["tensors"])
    first: dict[str, Any] | None = None
    for shard in shards:
        source_layout = layout_in(shard)
        if first is None:
            common = {name: part for name, part in shard.items() if name not in ("tensors", "layout", WHOLE, SETTINGS)}
            first = _copied({**common, "optimizer": _without(shard["optimizer"], frozenset(source_layout.optimizer))})
        elif shard["iteration"] != first["iteration"]:
            raise BadState(f"its shards are of iterations {first['iteration']} and {shard['iteration']}")
        for name, tensor in shard["tensors"].items():
            assembly.take("", name, tensor, tensor.shape, source_layout)
        for path, name in source_layout.optimizer.items():
            for role, value in _values(shard["optimizer"], path):
                assembly.take(role, name, value, shard["tensors"][name].shape, source_layout)
    if first is None:
        raise BadState("it has no shards")
    tensors = {name: assembly.tensor("", name) for name in layout.tensors}
    if not first["optimizer"]:  # the model alone (`portable.py`)
        first |= {"optimizer": {**target["optimizer"], BEGINS: True}, "scheduler": target["scheduler"]}
        return {**first, "layout": target["layout"], "tensors": {**target["tensors"], **tensors}, "generators": None}
    return {
        **first,
        "layout": target["layout"],
        # A tensor that is not a parameter and has no place in the whole (a mask, say) stays as the model has just
        # built it.
        "tensors": {name: tensors.get(name, tensor) for name, tensor in target["tensors"].items()},
        "optimizer": _optimizer(target["optimizer"], first["optimizer"], layout, assembly),
        "generators": _generators(target.get("generators"), first.get("generators")),
    }


@dataclass(slots=True)
class _Assembly:
    """The pieces of a tensor that have come so far. `role`: "" for the model's tensors, else what the optimizer calls
    it."""

    layout: StateLayout
    tensors: dict[str, torch.Tensor]
    roles: dict[str, None] = field(default_factory=dict)
    _pieces: dict[str, list[tuple[str, Piece]]] = field(default_factory=dict)
    _tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    _covered: dict[tuple[str, str], dict[tuple[str, Box], int]] = field(default_factory=dict)
    _numbers: dict[tuple[str, str], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, pieces in self.layout.tensors.items():
            for piece in pieces:
                self._pieces.setdefault(piece.key, []).append((name, piece))

    def take(self, role: str, name: str, value: Any, shape: Sequence[int], layout: StateLayout) -> None:
        """Copy what this worker needs of one value of another shard, which belongs to the tensor `name` of `shape`
        there."""
        self.roles.setdefault(role)
        is_number = not isinstance(value, torch.Tensor) or (not value.dim() and len(shape) > 0)
        if not is_number and tuple(value.shape) != tuple(shape):
            shapes = f"{name} is {tuple(shape)}, its optimizer state {tuple(value.shape)}"
            raise NoLayout(f"cannot be resharded: {role}: {shapes}")
        for piece in layout.tensors.get(name, ()):
            for own_name, own_piece in self._pieces.get(piece.key, ()):
                if is_number:
                    self._numbers.setdefault((role, own_name), value)
                    continue
                _require_same(piece, own_piece)
                shared = _intersection(piece.box, own_piece.box)
                if 0 in own_piece.shape:  # of more workers than the tensor has rows, the last have none
                    self._tensors[role, own_name] = torch.empty(self.tensors[own_name].shape, dtype=value.dtype)
                elif shared is not None:
                    self._copy(role, own_name, value, piece, own_piece, shared)

    def _copy(self, role: str, name: str, value: torch.Tensor, piece: Piece, own_piece: Piece, shared: Box) -> None:
        key = (role, name)
        if key not in self._tensors:
            like = self.tensors[name]
            self._tensors[key] = torch.empty(like.shape, dtype=value.dtype)
        covered = self._covered.setdefault(key, {})
        if (piece.key, shared) in covered:
            return
        source = piece.view(value, shared)
        place = own_piece.view(self._tensors[key], shared)
        place.copy_(source.reshape(place.shape))  # one of the two may have an axis of layers more
        covered[piece.key, shared] = source.numel()

    def tensor(self, role: str, name: str) -> torch.Tensor:
        """Return the whole tensor. Raises BadState where some of it is missing."""
        assembled, covered = self._tensors.get((role, name)), self._covered.get((role, name), {})
        if assembled is None or sum(covered.values()) != assembled.numel():
            count = sum(covered.values())
            raise BadState(f"{role or 'model'}: of {name} {count} of {self.tensors[name].numel()} numbers are present")
        return assembled

    def value(self, role: str, name: str) -> Any:
        """Return a tensor, a number that holds for the whole tensor, or None where no shard has it."""
        if (role, name) in self._numbers:
            number = self._numbers[role, name]
            return number.clone() if isinstance(number, torch.Tensor) else number
        return self.tensor(role, name) if (role, name) in self._tensors else None


def _require_same(piece: Piece, own_piece: Piece) -> None:
    if piece.whole != own_piece.whole:
        raise NoLayout(
            f"cannot be resharded: {piece.key} is {piece.whole} as a whole in the state, {own_piece.whole} here"
        )


def _intersection(first: Box, second: Box) -> Box | None:
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return shared if all(begin < end for begin, end in shared) else None


# --- the optimizer's part ------------------------------------------------------------------------


def _values(optimizer: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what stands at the path, by role: the path without its numbers, and the entry's name where it is a dict."""
    state = value_at(optimizer, path)
    family = ".".join(part for part in path.split(".") if not part.isdecimal())
    if isinstance(state, dict):
        yield from ((f"{family}:{key}", value) for key, value in state.items())
    elif state is not None:
        yield family, state


def value_at(tree: Any, path: str) -> Any:
    """Return what stands at the path; None where there is nothing."""
    for part in path.split("."):
        if isinstance(tree, dict):
            tree = tree.get(part, tree.get(int(part)) if part.isdecimal() else None)
        elif isinstance(tree, list | tuple) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def _optimizer(target: Any, source: Any, layout: StateLayout, assembly: _Assembly) -> Any:
    """Return the state with groups and numbers as they were there, and parameters and their state as they are cut
    here."""
    merged = _merged(target, source, "", frozenset(layout.optimizer))
    for path, name in layout.optimizer.items():
        parent, _, last = path.rpartition(".")
        family = ".".join(part for part in path.split(".") if not part.isdecimal())
        place = value_at(merged, parent) if parent else merged
        whole = assembly.value(family, name)
        state = {
            role.partition(":")[2]: value
            for role in assembly.roles
            if role.startswith(f"{family}:") and (value := assembly.value(role, name)) is not None
        }
        if isinstance(place, list):
            place += [None] * (int(last) + 1 - len(place))
        if place is not None and (whole is not None or state):
            place[int(last) if last.isdecimal() else last] = whole if whole is not None else state
    return merged


def _without(tree: Any, paths: frozenset[str], prefix: str = "") -> Any:
    """Return the tree without what stands at the paths."""
    if isinstance(tree, dict):
        inner = {key: f"{prefix}.{key}".strip(".") for key in tree}
        return {key: _without(value, paths, inner[key]) for key, value in tree.items() if inner[key] not in paths}
    if isinstance(tree, list | tuple):
        inside = [(value, f"{prefix}.{number}".strip(".")) for number, value in enumerate(tree)]
        return type(tree)(_without(value, paths, path) for value, path in inside if path not in paths)
    return tree


def _merged(target: Any, source: Any, prefix: str, paths: frozenset[str]) -> Any:
    """Return their values in this worker's structure. `params` are numbers of this worker's parameters."""
    if not prefix and isinstance(target, list) and isinstance(source, dict):
        source = [source] * len(target)  # experts on workers of their own have an optimizer of their own
    elif not prefix and isinstance(target, dict) and isinstance(source, list) and source:
        source = source[0]
    if isinstance(target, dict) and isinstance(source, dict):
        merged = {key: value for key, value in source.items() if key not in target}
        for key, value in target.items():
            path = f"{prefix}.{key}".strip(".")
            if path not in paths:
                is_own = key in _OF_THE_GROUP or key not in source
                merged[key] = value if is_own else _merged(value, source[key], path, paths)
        return merged
    if isinstance(target, list) and isinstance(source, list):
        if any(f"{prefix}.{number}".strip(".") in paths for number in range(len(target))):
            return []
        if target and all(isinstance(group, dict) and _is_told_apart(group) for group in (*target, *source)):
            source = [_like(group, source, number) for number, group in enumerate(target)]
        elif target and all(isinstance(place, list) and not place for place in source):
            source = [[] for _ in target]  # of groups, whose parameters are put there later
        if len(target) != len(source):
            counts = f"{len(source)} entries in the state, {len(target)} here"
            raise NoLayout(f"cannot be resharded: optimizer: {prefix or 'it'} has {counts}")
        inside = zip(target, source, range(len(target)), strict=True)
        return [_merged(inner, entry, f"{prefix}.{number}".strip("."), paths) for inner, entry, number in inside]
    return source


def _is_told_apart(group: dict[str, Any]) -> bool:
    """Return whether the group is one of Megatron's, which differ by their values. torch's own have nothing but their
    place."""
    return "params" in group and any(name in group for name in _OF_ALIKE)


def _like(target: dict[str, Any], groups: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """Return the one of their groups whose rates and decay are this one's: here it may hold experts alone. Raises
    NoLayout."""
    alike = (candidate for candidate in groups if all(candidate.get(name) == target.get(name) for name in _OF_ALIKE))
    match = next(alike, groups[number] if number < len(groups) else None)
    if match is None:
        raise NoLayout(f"cannot be resharded: optimizer: group {number} is none of those in the state")
    return match


def _copied(tree: Any) -> Any:
    """Return a copy, so that the shard's bytes are not needed any more."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(_copied, tree))
    return tree


def _generators(target: Any, source: Any) -> Any:
    if isinstance(target, dict) and isinstance(source, dict) and "megatron" in target:
        return {**source, "megatron": target["megatron"]}
    return source
