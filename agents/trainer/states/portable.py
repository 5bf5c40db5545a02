"""A checkpoint without a layout: one shard, whose tensors are whole and have Megatron's global names. For other
programs (torch's distributed format reads it), and to begin another task from, in whichever layout.

    unicronctl checkpoint export DIR/iteration-00000120 OUT
    unicronctl checkpoint import OUT/iteration-00000120 DIR --task NAME

Rules
-----
* To export is to reshard (`resharding.py`) into a form in which every tensor is whole, so all that holds there holds
  here: every element comes from somewhere; the optimizer's moments and masters go the way of their tensors.
* What a task takes up is always cut anew, also where it has one shard itself: names differ (`WHOLE` in the tree says
  so).
* Nothing is executed that is read; what was there is never replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from unicrond.agents.trainer.states import checkpoint
from unicrond.agents.trainer.states.checkpoint import WriteJob
from unicrond.agents.trainer.states.origins import origin_of
from unicrond.agents.trainer.states.places import name_of, place_of
from unicrond.agents.trainer.states.resharding import SETTINGS, WHOLE, Piece, StateLayout, layout_in, reshard
from unicrond.agents.trainer.states.state import BadState
from unicrond.events.vocabulary.shape import Shape

_KEEP_ALL = 10**9
_STATE = re.compile(r"(.*?)state\.(\d+)$")
_MASTER = re.compile(r"fp32_from_fp16_params\.(\d+)\.(\d+)$")


def whole(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of one replica's shards, without its layout. Raises BadState."""
    layouts = [layout_in(shard) for shard in shards]
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[str, tuple[Piece, ...]] = {}
    for shard, layout in zip(shards, layouts, strict=True):
        for name, parts in layout.tensors.items():
            for part in parts:
                tensors[part.key] = torch.empty(part.whole, dtype=shard["tensors"][name].dtype)
                nowhere = (0,) * len(part.whole)
                pieces[part.key] = (Piece(part.key, part.whole, nowhere, nowhere, part.whole),)
    optimizer, paths = _optimizer(shards, layouts)
    target = {
        "layout": msgspec.to_builtins(StateLayout(1, 1, pieces, paths)),
        "tensors": tensors,
        "optimizer": optimizer,
    }
    return {**reshard(target, shards), WHOLE: True}


def _optimizer(
    shards: Sequence[dict[str, Any]], layouts: Sequence[StateLayout]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the frame of an optimizer's state for whole tensors, and the tensor of each path in it. Each group has the
    tensors that it has in any shard."""
    ahead = {match[1] for layout in layouts for path in layout.optimizer if (match := _STATE.match(path))}
    if len(ahead) > 1:
        raise BadState("optimizer: it is in parts, as of experts over several workers; reshape the task to ep 1 first")
    if len(ahead) != 1 or next(iter(ahead)) not in ("", "optimizer."):
        raise BadState("optimizer: only one of torch's or Megatron's plain ones can be exported")
    (prefix,) = ahead
    groups: list[dict[str, None]] = []
    masters: list[dict[str, None]] = []
    for shard, layout in zip(shards, layouts, strict=True):
        inner = shard["optimizer"]["optimizer"] if prefix else shard["optimizer"]
        for number, group in enumerate(inner["param_groups"]):
            names = (layout.optimizer.get(f"{prefix}state.{place}", "") for place in group["params"])
            _add(groups, number, _keys(layout, names))
        for path in sorted(layout.optimizer, key=_in_order):
            if match := _MASTER.match(path):
                _add(masters, int(match[1]), _keys(layout, [layout.optimizer[path]]))
    numbered = {key: number for number, key in enumerate(key for group in groups for key in group)}
    paths = {f"{prefix}state.{number}": key for key, number in numbered.items()}
    inner = {"state": {}, "param_groups": [{"params": [numbered[key] for key in group]} for group in groups]}
    if not prefix:
        return inner, paths
    paths |= {
        f"fp32_from_fp16_params.{number}.{place}": key
        for number, group in enumerate(masters)
        for place, key in enumerate(group)
    }
    return {"optimizer": inner, "fp32_from_fp16_params": [[None] * len(group) for group in masters]}, paths


def _add(groups: list[dict[str, None]], number: int, keys: Iterator[str]) -> None:
    while len(groups) <= number:
        groups.append({})
    groups[number] |= dict.fromkeys(keys)


def _keys(layout: StateLayout, names: Any) -> Iterator[str]:
    for name in names:
        yield from (part.key for part in layout.tensors.get(name, ()))


def _in_order(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


# --- on storage ------------------------------------------------------------------------------------


def export_to(source: str, directory: str) -> str:
    """Write the checkpoint `source` (DIR/iteration-N) without its layout into `directory`; return where it is then.
    Raises OSError, BadState."""
    manifest, (place, _) = checkpoint.manifest_of(source), checkpoint.split(source)
    shards = [
        checkpoint.load(place, manifest.task, manifest.iteration, shard)[0] for shard in range(len(manifest.shards))
    ]
    return _write(directory, manifest.task, manifest.iteration, {**whole(shards), SETTINGS: settings_of(source)})


def settings_of(source: str) -> dict[str, str]:
    """Return the settings with which the state at this path was made; none where that is not known. Raises OSError,
    BadState."""
    place, iteration = checkpoint.split(source)
    origin = origin_of(place_of(place), iteration)
    return {} if origin is None else origin.settings


def import_to(source: str, directory: str, task: str) -> str:
    """Put an exported checkpoint where the task of that name looks for its own. Raises OSError, BadState."""
    manifest, (place, _) = checkpoint.manifest_of(source), checkpoint.split(source)
    tree, _ = checkpoint.load(place, manifest.task, manifest.iteration, 0)
    if WHOLE not in tree:
        raise BadState(f"{source} is a task's own checkpoint; export it first")
    return _write(directory, task, manifest.iteration, tree)


def require_new(directory: str, iteration: int) -> str:
    """Return the path of the checkpoint after this iteration, which is not there yet. Raises OSError, BadState."""
    place = place_of(directory)
    final = place.path_of(name_of(iteration))
    if iteration in place.iterations():
        raise BadState(f"{final} is there already; give another directory, or remove it")
    return final


def _write(directory: str, task: str, iteration: int, tree: dict[str, Any]) -> str:
    final = require_new(directory, iteration)
    checkpoint.write(job_of(directory, task, iteration), tree)
    return final


def job_of(directory: str, task: str, iteration: int) -> WriteJob:
    """Return the job of writing a portable state."""
    return WriteJob(directory, task, iteration, 0, 0, Shape(), "portable", _KEEP_ALL)
