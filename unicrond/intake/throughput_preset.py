"""`throughput_model` in a task file: T(x) from the model of Megatron (docs/design/throughput.md).

Rules
-----
* The log never sees it: what is submitted holds the table that follows from it, with the task's own tp, pp,
  global_batch, micro_batch and seq.
* What the task leaves out of `model` and `global_batch` is the preset's. What it gives must agree: an iteration
  must be worth the same FLOP by both, or measured times would be held against another model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from events.guess import guess
from events.vocabulary import TaskSpec
from unicrond.core.field_faults import Fault, faults
from unicrond.core.work import iteration_flop

FIELD = "throughput_model"
#: A task's FLOP per iteration may differ so much from its preset's: models of one size differ in details.
_AGREE = 0.15


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names of throughput/presets.py. `stack`: empty = the GPU's usual one."""

    model: str
    gpu: str
    stack: str = ""


def take(data: dict[str, Any]) -> tuple[Preset | None, list[Fault]]:
    """Take the preset out of a task's `data`, and let it fill in what the task leaves out."""
    if FIELD not in data:
        return None, []
    given = data.pop(FIELD)
    found = list(faults(given, Preset, (FIELD,)))
    if "throughput" in data:
        found.append(Fault((FIELD,), "and throughput are both given; keep one"))
    if found:
        return None, found
    preset = msgspec.convert(given, Preset)
    found = list(_unknown(preset))
    if found:
        return None, found
    from unicrond.throughput.presets import MODELS

    known = MODELS[preset.model]
    if isinstance(model := data.setdefault("model", {}), dict):
        for name in ("layers", "hidden", "heads", "seq", "vocab"):
            model.setdefault(name, getattr(known, name))
    data.setdefault("global_batch", known.batch)
    return preset, []


def fill(spec: TaskSpec, preset: Preset) -> tuple[TaskSpec, list[Fault]]:
    """The task with the table that its preset stands for; or what keeps it from having one."""
    from unicrond.throughput.layouts import job
    from unicrond.throughput.model import table
    from unicrond.throughput.presets import GPUS, MODELS, STACKS

    known = MODELS[preset.model]
    expected, told = known.flops_per_sequence(spec.model.seq) * spec.global_batch, iteration_flop(spec)
    if abs(told - expected) > _AGREE * expected:
        text = f"an iteration of this model is {told:.3g} FLOP, of {preset.model} {expected:.3g}; leave model out"
        return spec, [Fault(("model",), text)]
    try:
        question = job(
            known,
            GPUS[preset.gpu],
            stack=STACKS[preset.stack] if preset.stack else None,
            batch=spec.global_batch,
            seq=spec.model.seq,
            tp=spec.tp,
            pp=spec.pp,
            micro_batch=spec.micro_batch,
        )
        points = table(question, spec.max_workers)
    except ValueError as error:
        return spec, [Fault((FIELD,), str(error))]
    if not points:
        shape = f"tp {spec.tp}, pp {spec.pp} and micro_batch {spec.micro_batch}"
        where = f"on up to {spec.max_workers} {preset.gpu}"
        return spec, [Fault((FIELD,), f"{preset.model} with {shape} fits nowhere {where}; see `unicronctl throughput`")]
    return replace(spec, throughput={str(workers): flops for workers, flops in points.items()}), []


def _unknown(preset: Preset) -> Iterator[Fault]:
    from unicrond.throughput.presets import GPUS, MODELS, STACKS

    for name, presets in (("model", MODELS), ("gpu", GPUS), ("stack", STACKS)):
        value = getattr(preset, name)
        if value not in presets and (value or name != "stack"):
            yield Fault((FIELD, name), f"unknown {value!r}; {guess(value, list(presets))}")
