"""`entry: megatron-lm` in a task file: fields that follow from the flags in `args` are filled in at submission.

Rules
-----
* A field that the flags determine need not be in the file. If it is, it must agree with them.
* Sizes of the model count FLOP, and nothing else: the model is the script's.
"""

from __future__ import annotations

from typing import Any

from unicrond.core.state.field_faults import FieldFault
from unicrond.events.megatron.command_line import ENTRY, BadFlags, CommandLine, TrainingFlags, read_training_flags

_FIELDS = ("tp", "pp", "vpp", "ep", "cp", "etp", "global_batch", "micro_batch", "iterations", "seed")
#: Left out where they are as usual.
_OFTEN_USUAL = {"vpp": 1, "ep": 1, "cp": 1, "etp": 0}
_SIZES = ("layers", "hidden", "heads", "seq", "vocab", "dropout")


def take(data: dict[str, Any]) -> list[FieldFault]:
    """Fill in what the flags say, and return the faults; none for other entries, or where args are no texts."""
    args = data.get("args")
    if data.get("entry") != ENTRY or not isinstance(args, list | tuple):
        return (
            [] if data.get("entry") != ENTRY else [FieldFault(("args",), "are missing; give the script and its flags")]
        )
    if not all(isinstance(word, str) for word in args):
        return []
    try:
        flags = read_training_flags(CommandLine.parse(args))
    except BadFlags as error:
        return [FieldFault(("args",), str(error))]
    etp = data.get("etp")
    if type(etp) is int and flags.shape._replace(etp=etp).plain == flags.shape:
        data["etp"] = flags.etp  # the same in other words
    faults = []
    for part, names in ((data, _FIELDS), (data.setdefault("model", {}), _SIZES)):
        if isinstance(part, dict):
            place = () if part is data else ("model",)
            for name in names:
                value = getattr(flags, name)
                if _OFTEN_USUAL.get(name) == value and name not in part:
                    continue  # a log of an older schema can hold the task as well
                if part.setdefault(name, value) != value:
                    text = f"{part[name]!r}, but the flags in args say {value}; leave it out here"
                    faults.append(FieldFault((*place, name), text))
    optimizer = data.setdefault("optimizer", {})
    if isinstance(optimizer, dict):
        optimizer.setdefault("distributed", flags.distributed)
    return faults


def lines(args: tuple[str, ...]) -> list[str]:
    """Describe for people how a valid command line was understood."""
    flags: TrainingFlags = read_training_flags(CommandLine.parse(args))
    per_replica = flags.shape.workers
    product = " x ".join(f"{name} {size}" for name, size in flags.shape.factors.items())
    return [
        f"script {args[0]}, {flags.iterations} iterations, seed {flags.seed}",
        f"a replica is {product} = {per_replica} worker{'s' if per_replica > 1 else ''}",
        *([f"each stage has {flags.vpp} chunks of the model (vpp)"] if flags.vpp > 1 else []),
        *([f"experts are over {flags.ep} workers of a replica (ep)"] if flags.ep > 1 else []),
        f"global batch {flags.global_batch} in micro-batches of {flags.micro_batch}: "
        f"{flags.global_batch // (flags.micro_batch * flags.shape.data)} to deal, so at most as many replicas",
        f"model: {flags.layers} layers, hidden {flags.hidden}, {flags.heads} heads, sequence {flags.seq}, vocabulary"
        f" {flags.vocab}",
        *flags.notes,
    ]
