"""`entry: megatron-lm` in a task file: what the flags in `args` say is filled in at submission.

Rules
-----
* What the flags say need not stand in the file. What stands there all the same must agree.
* Sizes of the model count FLOP, and nothing else: the model is the script's.
"""

from __future__ import annotations

from typing import Any

from unicrond.core.state.field_faults import FieldFault
from unicrond.events.megatron.command_line import ENTRY, BadFlags, CommandLine, TrainingFlags, read_training_flags

_FIELDS = ("tp", "pp", "vpp", "ep", "global_batch", "micro_batch", "iterations", "seed")
_OFTEN_ONE = ("vpp", "ep")
_SIZES = ("layers", "hidden", "heads", "seq", "vocab", "dropout")


def take(data: dict[str, Any]) -> list[FieldFault]:
    """Fill in what the flags say. All that is wrong; nothing for other entries, or where args are no texts."""
    args = data.get("args")
    if data.get("entry") != ENTRY or not isinstance(args, list | tuple):
        return (
            [] if data.get("entry") != ENTRY else [FieldFault(("args",), "are missing; give the script and its flags")]
        )
    if not all(isinstance(word, str) for word in args):
        return []
    try:
        told = read_training_flags(CommandLine.parse(args))
    except BadFlags as error:
        return [FieldFault(("args",), str(error))]
    found = []
    for part, names in ((data, _FIELDS), (data.setdefault("model", {}), _SIZES)):
        if isinstance(part, dict):
            place = () if part is data else ("model",)
            for name in names:
                value = getattr(told, name)
                if name in _OFTEN_ONE and value == 1 and name not in part:
                    continue  # a log of an older schema can hold the task as well
                if part.setdefault(name, value) != value:
                    text = f"{part[name]!r}, but the flags in args say {value}; leave it out here"
                    found.append(FieldFault((*place, name), text))
    optimizer = data.setdefault("optimizer", {})
    if isinstance(optimizer, dict):
        optimizer.setdefault("distributed", told.distributed)
    return found


def lines(args: tuple[str, ...]) -> list[str]:
    """What was understood of a command line that is right, for people."""
    told: TrainingFlags = read_training_flags(CommandLine.parse(args))
    per_replica = told.tp * told.pp
    return [
        f"script {args[0]}, {told.iterations} iterations, seed {told.seed}",
        f"a replica is tp {told.tp} x pp {told.pp} = {per_replica} worker{'s' if per_replica > 1 else ''}",
        *([f"each stage has {told.vpp} chunks of the model (vpp)"] if told.vpp > 1 else []),
        *([f"experts are over {told.ep} workers of a replica (ep)"] if told.ep > 1 else []),
        f"global batch {told.global_batch} in micro-batches of {told.micro_batch}: "
        f"{told.global_batch // told.micro_batch} to deal, so at most as many replicas",
        f"model: {told.layers} layers, hidden {told.hidden}, {told.heads} heads, sequence {told.seq}, vocabulary"
        f" {told.vocab}",
        *told.notes,
    ]
