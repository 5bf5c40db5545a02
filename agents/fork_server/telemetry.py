"""How OpenTelemetry's spans of a worker (Megatron-LM's `--otel-enabled`, or its program's own) are found together with
unicrond's spans of incidents and commands: by attributes of the same names (unicrond/core/spans.py).
"""

from __future__ import annotations

from agents.protocol.messages import Launch


def resource_attributes(given: str, launch: Launch) -> str:
    """For OTEL_RESOURCE_ATTRIBUTES, which every SDK reads: those that are given, and the worker's; one that is given
    stays."""
    ours = {"unicron.task": launch.task, "unicron.worker": launch.worker, "unicron.node": launch.node}
    named = {part.partition("=")[0].strip() for part in given.split(",")}
    return ",".join([*filter(None, [given]), *(f"{name}={value}" for name, value in ours.items() if name not in named)])
